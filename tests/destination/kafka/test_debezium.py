"""Records are those that Debezium 3.6 made of the same changes (`bench/peer/debezium_events.py` wrote the file)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.destination.kafka.record import EVERY_ROW, records_of
from tailrace.model.change import Changes, Op
from tailrace.model.schema import Column, TableName, TableSchema

FILE = Path(__file__).parents[2] / "fixtures" / "debezium-3.6.jsonl"
DEBEZIUM = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]
TABLE = TableSchema(
    TableName("public", "items"),
    (Column("id", pa.int32(), False), Column("name", pa.string()), Column("price", pa.float64())),
    ("id",),
)
A, B, LATER, MOVED, NULLS = (1, "a", 1.5), (2, "b", 2.5), (2, "b", 3.5), (3, "b", 3.5), (4, None, None)
CHANGES: list[tuple[Op, Any, Any]] = [
    (Op.READ, A, None),
    (Op.INSERT, B, None),
    (Op.UPDATE, LATER, B),
    (Op.DELETE, LATER, LATER),
    (Op.INSERT, MOVED, None),
    (Op.DELETE, A, A),
    (Op.TRUNCATE, (None, None, None), None),
    (Op.INSERT, NULLS, None),
]


def test_keys_values_tombstones_and_headers_are_those_of_debezium() -> None:
    ours = [
        {"key": _read(key), "value": _read(value), "headers": {name: _read(text) for name, text in headers or []}}
        for part in records_of(_changes(), "peer")
        for key, value, headers in zip(part.keys, part.values, part.headers, strict=True)
    ]
    assert [_comparable(record) for record in ours] == [_comparable(record) for record in DEBEZIUM]
    for mine, theirs in zip(ours, DEBEZIUM, strict=True):
        if mine["value"] is not None:
            shared = mine["value"]["source"].keys() & theirs["value"]["source"].keys()
            assert shared == {"connector", "name", "schema", "table", "txId", "ts_ms", "snapshot"}
            assert mine["value"].keys() <= theirs["value"].keys()


def _changes() -> Changes:
    names = TABLE.row_type.names
    rows, befores = (
        [None if row is None else dict(zip(names, row, strict=True)) for row in side]
        for side in ([row for _, row, _ in CHANGES], [before for _, _, before in CHANGES])
    )
    return Changes.build(
        TABLE,
        pa.array(rows, TABLE.row_type),
        op=np.array([op for op, _, _ in CHANGES], np.int8),
        # Both halves of the changed key are one commit.
        commit=np.array([0, 1, 2, 3, 3, 4, 5, 6], np.int64),
        ordinal=np.array([0, 0, 0, 0, 1, 0, 0, 0], np.int64),
        before=pa.array(befores, TABLE.row_type),
    )


def _read(text: Any) -> Any:
    return None if text is None else json.loads(text)


def _comparable(record: dict[str, Any]) -> tuple[Any, ...]:
    """A record without its source and times; Debezium's truncate has no key, which a compacted topic refuses."""
    value = record["value"]
    image = value and {name: value[name] for name in ("before", "after", "op")}
    key = None if record["key"] == json.loads(EVERY_ROW) else record["key"]
    return key, image, record["headers"]
