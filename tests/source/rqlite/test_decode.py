"""What events become: recorded ones, and those that stretch the types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import TableError, UnfitError
from tailrace.model.change import START, Changes, Op
from tailrace.model.schema import TableSchema
from tailrace.source.rqlite import catalog
from tailrace.source.rqlite.decode import decode, read_lines
from tailrace.source.sqlite.catalog import describe

RECORDED = Path(__file__).parent / "recorded"
ITEMS = "CREATE TABLE t (id INTEGER PRIMARY KEY, n TEXT, v REAL, b BLOB, k INTEGER)"


def recorded(name: str, table: str) -> list[dict[str, Any]]:
    """The events of a table, as the journal has them but for duplicates."""
    found: list[dict[str, Any]] = []
    for line in (RECORDED / name).read_text().splitlines():
        request = json.loads(line)
        index = ordinal = 0
        for entry in json.loads(request["body"])["payload"] if request["code"] == 200 else []:
            if entry["index"]:
                index, ordinal = entry["index"], 0
            for event in entry["events"]:
                if event["table"] == table:
                    found.append({"index": index, "ordinal": ordinal, "at": entry["commit_timestamp"], **event})
                ordinal += 2
    return found


def decoded(sql: str, *events: dict[str, Any], rowids: bool = False) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(table_of(sql, rowids=rowids), *events).batch.to_pylist()
    return found


def table_of(sql: str, *, rowids: bool = False) -> TableSchema:
    return catalog.begin(None, describe(sql), "svc", START, rowids=rowids)


def read(table: TableSchema, *events: dict[str, Any]) -> Changes:
    lines = [json.dumps({"index": 9, "ordinal": 2 * at, "at": 1, **event}) for at, event in enumerate(events)]
    return decode(table, read_lines("\n".join(lines).encode()))


def insert(**row: Any) -> dict[str, Any]:
    return {"op": "INSERT", "table": "t", "new_row_id": 1, "after": row}


def test_recorded_requests_decode_to_the_rows_they_describe() -> None:
    changes = decoded(ITEMS, *recorded("single-node.jsonl", "t")[:9])
    first, second, *_ = changes
    assert first["row"] == {"id": 1, "n": "a", "v": 1.5, "b": b"\x00\xff", "k": None}
    assert first["before"] is None
    assert first["committed_at"].isoformat() == "2026-11-15T18:13:43.540000+00:00"
    # 2.0 was sent as 2.
    assert second["row"] == {"id": 2, "n": "b", "v": 2.0, "b": None, "k": None}
    assert [(Op(one["op"]).name, one["row"]["id"], one["commit"], one["ordinal"]) for one in changes] == [
        ("INSERT", 1, 4, 0),
        ("INSERT", 2, 5, 0),
        ("INSERT", 3, 5, 2),
        ("UPDATE", 1, 6, 0),
        ("DELETE", 1, 7, 0),
        ("INSERT", 10, 7, 1),
        ("INSERT", 20, 8, 0),
        ("UPDATE", 20, 8, 2),
        ("DELETE", 20, 8, 4),
        ("INSERT", 30, 9, 0),
    ]


def test_a_rowid_of_zero_is_left_out_and_known_nonetheless() -> None:
    (zero,) = [one for one in recorded("single-node.jsonl", "t") if one.get("after", {}).get("n") == "zero"]
    assert "new_row_id" not in zero
    (change,) = decoded(ITEMS, zero)
    assert change["row"]["id"] == 0


def test_integers_of_64_bits_are_exact() -> None:
    sql = "CREATE TABLE tx (k TEXT PRIMARY KEY, v INTEGER, bigi INTEGER)"
    (change,) = decoded(sql, recorded("single-node.jsonl", "tx")[0])
    assert change["row"] == {"k": "k1", "v": 1, "bigi": 9007199254740993}


def test_values_that_do_not_fit_their_type_are_null_and_kept_as_exact_text() -> None:
    sql = "CREATE TABLE t (id INTEGER PRIMARY KEY, i INTEGER, r REAL, n NUMERIC, s TEXT, b BLOB, u)"
    rows = [
        {"id": 1, "i": 1, "r": 3, "n": 2**60 + 1, "s": "x", "b": "AP8=", "u": "y"},
        {"id": 1, "i": 1.5, "r": 10**20, "n": 10**20, "s": "x", "b": "not base64!", "u": 7},
        {"id": 1, "i": "text", "r": "text", "n": 1.25, "s": None, "b": None, "u": None},
    ]
    one, two, three = decoded(sql, *(insert(**row) for row in rows))
    assert one["row"] == {"id": 1, "i": 1, "r": 3.0, "n": None, "s": "x", "b": b"\x00\xff", "u": "y"}
    assert json.loads(one["exact"]) == {"n": str(2**60 + 1)}
    assert two["row"] == {"id": 1, "i": None, "r": 1e20, "n": 1e20, "s": "x", "b": None, "u": None}
    assert json.loads(two["exact"]) == {"i": "1.5", "b": "not base64!", "u": "7"}
    assert three["row"] == {"id": 1, "i": None, "r": None, "n": 1.25, "s": None, "b": None, "u": None}
    assert json.loads(three["exact"]) == {"i": "text", "r": "text"}


def test_a_changed_key_becomes_a_delete_and_an_insert() -> None:
    sql = "CREATE TABLE t (a TEXT, b INTEGER, v TEXT, PRIMARY KEY (a, b)) WITHOUT ROWID"
    before, after = {"a": "x", "b": 1, "v": "old"}, {"a": "x", "b": 2, "v": "new"}
    same = {"a": "x", "b": 2, "v": "newer"}
    changes = decoded(
        sql,
        {"op": "UPDATE", "table": "t", "before": before, "after": after},
        {"op": "UPDATE", "table": "t", "before": after, "after": same},
    )
    assert [(Op(one["op"]).name, one["ordinal"], one["row"], one["before"]) for one in changes] == [
        ("DELETE", 0, before, before),
        ("INSERT", 1, after, None),
        ("UPDATE", 2, same, after),
    ]


def test_a_delete_by_rowid_needs_no_image() -> None:
    (change,) = decoded(ITEMS, {"op": "DELETE", "table": "t", "old_row_id": 7})
    assert Op(change["op"]) is Op.DELETE
    assert change["row"] == {"id": 7, "n": None, "v": None, "b": None, "k": None}
    assert change["before"] is None


def test_a_table_without_a_key_is_keyed_by_its_rowid() -> None:
    table = table_of("CREATE TABLE t (v TEXT)")
    assert table.key == ("_rowid",)
    changes = read(
        table,
        {"op": "UPDATE", "table": "t", "old_row_id": 1, "new_row_id": 5, "before": {"v": "a"}, "after": {"v": "b"}},
    )
    assert [(one["op"], one["row"]) for one in changes.batch.to_pylist()] == [
        (Op.DELETE, {"_rowid": 1, "v": "a"}),
        (Op.INSERT, {"_rowid": 5, "v": "b"}),
    ]


def test_rowids_are_shown_where_they_are_wanted() -> None:
    sql = "CREATE TABLE t (k TEXT PRIMARY KEY, rowid TEXT)"
    (change,) = decoded(
        sql, {"op": "INSERT", "table": "t", "new_row_id": 4, "after": {"k": "a", "rowid": "b"}}, rowids=True
    )
    assert change["row"] == {"k": "a", "rowid": "b", "_rowid": 4}
    assert table_of(ITEMS, rowids=True) == table_of(ITEMS)


def test_an_event_with_other_columns_is_refused_with_its_line() -> None:
    with pytest.raises(TableError, match="columns are not those") as caught:
        decoded(ITEMS, insert(id=1, n="a", v=1, b=None, k=None), insert(id=1, n="secret"))
    assert caught.value.position == f"{9:016x}{2:016x}"
    assert b"secret" in (caught.value.raw or b"")
    assert "secret" not in str(caught.value)


def test_a_null_key_is_refused() -> None:
    with pytest.raises(UnfitError, match="the key column k is null"):
        decoded("CREATE TABLE t (k TEXT PRIMARY KEY)", insert(k=None))


def test_columns_are_inferred_from_their_values_and_only_ever_widened() -> None:
    first = catalog.infer(None, "svc", "t", {"a": "i", "b": "n", "c": "fi", "d": "is"})
    assert first.key == ("rowid",)
    kinds = {column.name: str(column.type) for column in first.columns}
    assert kinds == {"rowid": "int64", "a": "int64", "b": "string", "c": "double", "d": "string"}
    second = catalog.infer(first, "svc", "t", {"a": "f", "c": "i", "d": "i", "rowid": "s"})
    assert {c.name: (str(c.type), c.number) for c in second.columns} == {
        "_rowid": ("int64", 0),
        "a": ("double", 1),
        "c": ("double", 3),
        "d": ("string", 4),
        "rowid": ("string", 5),
    }
    row = read(second, insert(a=1, c=2.5, d=3.5, rowid="x")).row[0].as_py()
    assert row == {"_rowid": 1, "a": 1.0, "c": 2.5, "d": "3.5", "rowid": "x"}
    assert pa.types.is_string(second.column("d").type)
