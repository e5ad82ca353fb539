"""Changes as rows for people who use Spark directly; the streams themselves are under tests/live."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tailrace.destination.parquet.destination import ParquetDestination
from tailrace.errors import ConfigError, SchemaChangedError
from tailrace.model.change import START, Changes, Op, Position, pack_unchanged, position_texts
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.tape.source import ChangelogSource
from tailrace.stream.change_stream import StreamRequest, fitted, json_rows, typed_rows
from tailrace.testing.destination import ITEMS, changes_of, insert
from tests.support.changelog_writing import write_events

TABLE = TableSchema(TableName("public", "t"), (Column("id", pa.int64()), Column("v", pa.string())), ("id",))


def changes() -> Changes:
    row = pa.array([{"id": 1, "v": "a"}, {"id": 1, "v": None}, {"id": 1, "v": None}, {"id": None, "v": None}])
    before = pa.array([None, None, {"id": 1, "v": "a"}, None], TABLE.row_type)
    return Changes.build(
        TABLE,
        row.cast(TABLE.row_type),
        op=np.array([Op.INSERT, Op.UPDATE, Op.DELETE, Op.TRUNCATE], np.int8),
        commit=np.array([255, 256, 2**62, 2**62 + 1], np.int64),
        unchanged=pack_unchanged(np.array([[False, False], [False, True], [False, False], [False, False]])),
        before=before,
    )


def test_positions_are_written_as_the_model_writes_them() -> None:
    given = changes()
    commit, ordinal = given.numpy("commit"), given.numpy("ordinal")
    pairs = zip(commit.tolist(), ordinal.tolist(), strict=True)
    assert position_texts(commit, ordinal).to_pylist() == [str(Position(*pair)) for pair in pairs]


def test_a_typed_row_names_the_columns_the_log_left_out() -> None:
    layout = pa.schema(
        [
            *TABLE.row_type,
            pa.field("_tailrace_op", pa.string()),
            pa.field("_tailrace_position", pa.string()),
            pa.field("_tailrace_txn", pa.int64()),
            pa.field("_tailrace_committed_at", pa.timestamp("us", "UTC")),
            pa.field("_tailrace_unchanged", pa.list_(pa.string())),
            pa.field("_tailrace_exact", pa.string()),
        ]
    )
    rows = typed_rows(changes(), layout).to_pylist()
    assert [row["_tailrace_op"] for row in rows] == ["insert", "update", "delete", "truncate"]
    assert [row["_tailrace_unchanged"] for row in rows] == [None, ["v"], None, None]


def test_a_change_as_json_has_key_before_and_after() -> None:
    insert, update, delete, truncate = json_rows(changes()).to_pylist()
    assert (insert["op"], json.loads(insert["after"]), insert["before"]) == ("insert", {"id": 1, "v": "a"}, None)
    assert json.loads(update["after"]) == {"id": 1}
    assert (json.loads(delete["before"]), delete["after"]) == ({"id": 1, "v": "a"}, None)
    assert (truncate["key"], truncate["before"], truncate["after"]) == (None, None, None)
    assert {json.loads(row["key"])["id"] for row in (insert, update, delete)} == {1}


def test_a_change_that_does_not_fit_the_columns_of_a_stream_is_not_fixed_by_a_resync() -> None:
    opened = TableSchema(TABLE.table, (Column("id", pa.int64()), Column("v", pa.int32())), ("id",))
    with pytest.raises(SchemaChangedError, match="does not fit column v") as raised:
        fitted(changes(), opened)
    assert "load the stream again" in str(raised.value)
    assert "resync" not in str(raised.value)


def test_a_stream_cannot_move_the_place_of_the_pipeline_itself(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text("name: shop\nsource: {type: sqlite, path: shop.db}\ndestination: {type: delta, path: lake}\n")
    with pytest.raises(ConfigError, match="the pipeline itself uses the reader name"):
        StreamRequest.of({"config": str(file), "reader": "pipeline"})


def test_a_misspelt_option_of_a_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="a stream has no option tabel; did you mean table"):
        StreamRequest.of({"config": "shop.yaml", "tabel": "public.orders"})


def test_a_stream_of_a_tape_begins_where_it_is_told_and_any_other_says_that_it_cannot(tmp_path: Path) -> None:
    changes = str(tmp_path / "changes")
    for day in (1, 2):
        write_events(ParquetDestination(path=changes), day, changes_of(ITEMS, insert(id=day), commit=10 * day))
    tape, shop = tmp_path / "tape.yaml", tmp_path / "shop.yaml"
    section = f"{{type: tape, path: {changes}}}"
    tape.write_text(f"name: t\nsource: {section}\ndestination: {{type: delta, path: lake}}\n")
    shop.write_text("name: s\nsource: {type: sqlite, path: app.db}\ndestination: {type: delta, path: lake}\n")
    request = StreamRequest.of({"config": str(tape), "table": "shop.items", "from": "2"})
    assert isinstance(request.source, ChangelogSource)
    assert request.table is not None
    read = request.source.read_log(request.table, START, request.source.head())
    assert [row["id"] for changed in read for row in changed.row.to_pylist()] == [2]
    with pytest.raises(ConfigError, match="cannot begin anywhere"):
        StreamRequest.of({"config": str(shop), "from": "2"})
    with pytest.raises(ConfigError, match="must be the number of a batch"):
        StreamRequest.of({"config": str(tape), "from": "soon"})
