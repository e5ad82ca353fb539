"""Changes as records of a topic: the key of the row, and Debezium's envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tailrace.destination.webhook.format.debezium import debezium_images, join_envelopes, other_keys
from tailrace.model.change import Changes, Op
from tailrace.model.schema import TableSchema

RecordKey = bytes | None
RecordValue = bytes | None
RecordHeaders = list[tuple[str, str | bytes | None]] | None

EVERY_ROW = b"{}"
"""The key of records that concern all rows of a table: of truncates. It has none of the key's columns."""


@dataclass(frozen=True)
class TopicRecords:
    """Records in the order they are sent. A truncate goes to every partition, by itself."""

    keys: list[RecordKey]
    values: list[RecordValue]
    headers: list[RecordHeaders]
    everywhere: bool = False


def records_of(changes: Changes, source: str) -> Iterator[TopicRecords]:
    """The records of some changes. A delete is followed by a tombstone, so that the key can be compacted away."""
    images = debezium_images(changes)
    if not len(images.place):
        return
    more = f',"schema_version":{changes.table.version}'
    values: list[RecordValue] = join_envelopes(images, ["{"], source, more=more).cast(pa.binary()).to_pylist()
    keys: list[RecordKey] = images.key.cast(pa.binary()).to_pylist()
    headers: list[RecordHeaders] = [None] * len(keys)
    if (found := other_keys(images)) is not None:
        names, others = found[0].to_pylist(), found[1].cast(pa.binary()).to_pylist()
        headers = [[(name, key)] if key is not None else None for name, key in zip(names, others, strict=True)]
    start = 0
    for place in [*np.flatnonzero(images.op == Op.TRUNCATE).tolist(), len(keys)]:
        if place > start:
            part = slice(start, place)
            gone = images.op[part] == Op.DELETE if changes.table.key else np.zeros(place - start, bool)
            yield _with_tombstones(keys[part], values[part], headers[part], np.flatnonzero(gone).tolist())
        if place < len(keys):
            key = EVERY_ROW if changes.table.key else None
            yield TopicRecords([key], [values[place]], [None], everywhere=bool(changes.table.key))
        start = place + 1


def _with_tombstones(
    keys: list[RecordKey], values: list[RecordValue], headers: list[RecordHeaders], deletes: list[int]
) -> TopicRecords:
    for place in reversed(deletes):
        keys.insert(place + 1, keys[place])
        values.insert(place + 1, None)
        headers.insert(place + 1, headers[place])
    return TopicRecords(keys, values, headers)


def restart_value(table: TableSchema) -> bytes:
    """The value of the record that begins a table again, before it is copied: a truncate by a snapshot."""
    about = {"connector": "tailrace", "schema": table.table.schema, "table": table.table.name}
    event = {
        "before": None,
        "after": None,
        "source": {**about, "schema_version": table.version, "position": None, "txId": None, "ts_ms": None}
        | {"snapshot": "first"},
        "op": "t",
        "ts_ms": None,
    }
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
