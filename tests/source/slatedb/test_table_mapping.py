"""Prefixes as tables: how keys and values become columns, and what happens to a row that does not fit."""

from __future__ import annotations

import datetime
import decimal
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tailrace.destination.webhook.format.event import format_of
from tailrace.errors import ConfigError, TableError, UnfitError
from tailrace.model.change import Op
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.slatedb.table_mapping import read_mappings
from tailrace.testing.replay import SourceReplay
from tests.support.slatedb_writing import Writer

msgpack: Any = import_module("msgpack")
LIMIT = Limit(10_000, 64_000_000)


def mapped(**mapping: Any) -> TableOptions:
    """One table `slatedb.t` over the keys that begin with `t:`."""
    return TableOptions.model_validate({"settings": {"slatedb.t": {"mapping": {"prefix": "t:", **mapping}}}})


def rows_of(folder: Path, tables: TableOptions, *puts: tuple[bytes, bytes], table: str = "slatedb.t") -> list[Any]:
    """What the table holds after these puts came through the log."""
    with (
        Writer(folder / "store", tables) as writer,
        SourceReplay(writer.source(folder / "state", tables), LIMIT) as replay,
    ):
        replay.catch_up()
        writer.write(*puts)
        replay.catch_up()
        rows = replay.tables[table].rows.values()
        return [{k: v for k, v in row.items() if k not in ("seq", "create_ts", "expire_ts")} for row in rows]


def test_a_database_without_mapping_is_one_table_of_bytes(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer:
        source = writer.source(tmp_path / "state")
        [table] = source.tables()
        assert str(table.table) == "slatedb.db1"
        assert [column.name for column in table.columns] == ["key", "value", "seq", "create_ts", "expire_ts"]
        assert table.key == ("key",)
    assert rows_of(tmp_path / "two", TableOptions(), (b"\xff", b"\x00"), table="slatedb.db1") == [
        {"key": b"\xff", "value": b"\x00"}
    ]


def test_the_longest_prefix_wins_and_other_keys_go_to_the_default_table(tmp_path: Path) -> None:
    tables = TableOptions.model_validate(
        {
            "settings": {
                "slatedb.outer": {"mapping": {"prefix": "a", "key": "utf8"}},
                "slatedb.inner": {"mapping": {"prefix": "0x6162", "key": "utf8"}},
            }
        }
    )
    with Writer(tmp_path / "store", tables) as writer:
        writer.write((b"ab1", b""), (b"ac1", b""), (b"b", b""))
        writer.flush()
        with SourceReplay(writer.source(tmp_path / "state", tables), LIMIT) as replay:
            replay.catch_up()
            writer.write((b"ab2", b""), (b"ac2", b""), (b"c", b""))
            replay.catch_up()
            assert {name: sorted(table.rows) for name, table in replay.tables.items()} == {
                "slatedb.inner": [("1",), ("2",)],
                "slatedb.outer": [("c1",), ("c2",)],
                "slatedb.db1": [(b"b",), (b"c",)],
            }


def test_fields_of_json_values_become_typed_columns(tmp_path: Path) -> None:
    tables = mapped(
        key={"tenant": "utf8", "id": "int64"},
        separator=":",
        value="json",
        columns={"name": "string", "age": "int64", "price": "decimal(8,2)", "at": "timestamp", "more": "json"},
    )
    value = b'{"name": "\xc3\xa9", "age": 7, "price": 12.50, "at": "2026-01-02T03:04:05Z", "more": {"a": [1]}, "x": 1}'
    assert rows_of(tmp_path, tables, (b"t:eu:-5", value), (b"t:us:9", b"{}")) == [
        {
            "tenant": "eu",
            "id": -5,
            "name": "é",
            "age": 7,
            "price": decimal.Decimal("12.50"),
            "at": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
            "more": '{"a": [1]}',
        },
        {"tenant": "us", "id": 9, "name": None, "age": None, "price": None, "at": None, "more": None},
    ]


def test_many_json_values_are_read_at_once_with_nulls_for_deleted_rows(tmp_path: Path) -> None:
    tables = mapped(key="utf8", value="json", columns={"n": "int64", "f": "float64", "b": "boolean"})
    with Writer(tmp_path / "store", tables) as writer:
        source = writer.source(tmp_path / "state", tables)
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            writer.write((b"t:a", b'{"n": 1,\n "f": 2, "b": true}'), (b"t:b", b'{"n": 2}'))
            writer.write((b"t:b", None), (b"t:c", b' {"f": 0.5, "other": [1, {"n": 5}]} '))
            replay.catch_up()
            rows = {key[0]: (row["n"], row["f"], row["b"]) for key, row in replay.tables["slatedb.t"].rows.items()}
    assert rows == {"a": (1, 2.0, True), "c": (None, 0.5, None)}


def test_messagepack_values_become_columns_or_json_text(tmp_path: Path) -> None:
    packed = msgpack.packb({"n": 5, "raw": b"\x01\x02", "s": "x"})
    tables = mapped(key="utf8", value="msgpack", columns={"n": "int32", "raw": "binary"})
    assert rows_of(tmp_path / "a", tables, (b"t:k", packed)) == [{"key": "k", "n": 5, "raw": b"\x01\x02"}]
    whole = rows_of(tmp_path / "b", mapped(key="utf8", value="msgpack"), (b"t:k", packed))
    assert whole == [{"key": "k", "value": '{"n": 5, "raw": "AQI=", "s": "x"}'}]


@pytest.mark.parametrize(
    ("mapping", "key", "value"),
    [
        ({"value": "utf8"}, b"t:k", b"\xff"),
        ({"value": "json"}, b"t:k", b"{"),
        ({"value": "json", "columns": {"n": "int64"}}, b"t:k", b'{"n": "5"}'),
        ({"value": "json", "columns": {"n": "int64"}}, b"t:k", b'{"n": 1.5}'),
        ({"value": "json", "columns": {"n": "int64"}}, b"t:k", b'{"n": 9223372036854775808}'),
        ({"value": "json", "columns": {"n": "int64"}}, b"t:k", b'{"n": 1}{"n": 2}'),
        ({"value": "json", "columns": {"n": "decimal(4,2)"}}, b"t:k", b'{"n": 123.456}'),
        ({"value": "json", "columns": {"at": "timestamp"}}, b"t:k", b'{"at": "2026-01-01T00:00:00"}'),
        ({"value": "msgpack", "columns": {"n": "int64"}}, b"t:k", b"\xc1"),
        ({"value": "int64"}, b"t:k", b"1234567"),
        ({"key": {"id": "uint32"}}, b"t:abc", b""),
        ({"key": {"a": "utf8", "b": "utf8"}, "separator": "/"}, b"t:alone", b""),
        ({"key": {"a": "int64", "b": "utf8"}, "separator": "/"}, b"t:007/x", b""),
        ({"key": {"a": "uint8", "b": "utf8"}, "separator": "/"}, b"t:256/x", b""),
        ({"key": "utf8"}, b"t:\xff", b""),
    ],
)
def test_a_row_that_does_not_fit_stops_its_table_and_can_be_passed_over(
    mapping: dict[str, Any], key: bytes, value: bytes, tmp_path: Path
) -> None:
    tables = mapped(**mapping)
    with (
        Writer(tmp_path / "store", tables) as writer,
        SourceReplay(writer.source(tmp_path / "state", tables), LIMIT) as replay,
    ):
        replay.catch_up()
        writer.put(key, value)
        writer.put(b"other", b"fine")
        assert replay.plan()
        with pytest.raises(UnfitError) as caught:
            replay.write()
        error = caught.value
        assert error.table == "slatedb.t"
        assert error.raw == (value or key)
        assert str(value or key) not in str(error)
        # The batch is done again with the row passed over, as `errors skip` orders it.
        replay.planned = None
        replay.directives = TableDirectives(skips={"slatedb.t": [str(error.position)]})
        replay.catch_up()
        assert replay.tables["slatedb.t"].rows == {}
        assert list(replay.tables["slatedb.db1"].rows) == [(b"other",)]


def test_operands_without_an_operator_stop_their_table_with_what_to_do(tmp_path: Path) -> None:
    with Writer(tmp_path / "store") as writer, SourceReplay(writer.source(tmp_path / "state"), LIMIT) as replay:
        replay.catch_up()
        writer.merge(b"k", b"x")
        assert replay.plan()
        with pytest.raises(TableError, match="no operator is configured") as caught:
            replay.write()
        assert "keep: changelog" in str(caught.value.fix)


def test_a_changelog_keeps_every_write_and_operand_in_order(tmp_path: Path) -> None:
    tables = mapped(key="utf8", value="utf8", keep="changelog")
    with Writer(tmp_path / "store", tables) as writer:
        writer.put(b"t:before", b"the changelog begins empty")
        writer.flush()
        source = writer.source(tmp_path / "state", tables)
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            writer.put(b"t:k", b"one")
            writer.merge(b"t:k", b"two")
            writer.delete(b"t:k")
            assert replay.plan()
            assert replay.offset is not None
            assert replay.planned is not None
            found = [
                change
                for split in replay.follower.plan(replay.offset, replay.planned)
                for changes in source.read(split)
                for change in changes.batch.to_pylist()
            ]
    assert [(Op(one["op"]), one["row"]["value"]) for one in found] == [
        (Op.INSERT, "one"),
        (Op.MERGE, "two"),
        (Op.DELETE, None),
    ]
    assert source.tables()[0].key == ()


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("cloudevents", ["tailrace.insert", "tailrace.merge", "tailrace.delete"]),
        ("debezium", ["c", "o", "d"]),
        ("rqlite", ["INSERT", "MERGE", "DELETE"]),
    ],
)
def test_operands_of_a_changelog_reach_a_webhook_as_they_are(name: str, operations: list[str], tmp_path: Path) -> None:
    tables = mapped(key="utf8", value="utf8", keep="changelog")
    with Writer(tmp_path / "store", tables) as writer:
        source = writer.source(tmp_path / "state", tables)
        with SourceReplay(source, LIMIT) as replay:
            replay.catch_up()
            writer.put(b"t:k", b"one")
            writer.merge(b"t:k", b"two")
            writer.delete(b"t:k")
            assert replay.plan()
            assert replay.offset is not None
            assert replay.planned is not None
            encoded = [
                json.loads(text)
                for split in replay.follower.plan(replay.offset, replay.planned)
                for changes in source.read(split)
                for text in format_of(name).encode(changes, source="shop").column("event").to_pylist()
            ]
    assert [event.get("op", event.get("type")) for event in encoded] == operations
    [_, operand, _] = [event.get("data", event) for event in encoded]
    assert (operand["after"]["key"], operand["after"]["value"]) == ("k", "two")


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        ({"prefix": "a", "valu": "raw"}, "valu"),
        ({"prefix": "a", "value": "xml"}, "format xml"),
        ({"prefix": "a", "value": "json", "columns": {"n": "int65"}}, "int65"),
        ({"prefix": "a", "value": "raw", "columns": {"n": "int64"}}, "names columns"),
        ({"prefix": "a", "key": {"a": "utf8", "b": "int64"}}, "separator"),
        ({"prefix": "a", "key": {"a": "text"}}, "type text"),
        ({"prefix": "a", "merge": "sum"}, "cannot read numbers"),
        ({"prefix": "a", "merge": "multiply"}, "not a merge operator"),
        ({"prefix": "a", "merge": "nowhere:fold"}, "cannot load"),
        ({"prefix": "a", "key": {"seq": "uint64"}}, "same name"),
        ({"prefix": "0xzz"}, "is wrong"),
    ],
)
def test_a_mapping_that_makes_no_sense_is_refused_by_its_place_in_the_file(mapping: dict[str, Any], said: str) -> None:
    tables = TableOptions.model_validate({"settings": {"slatedb.t": {"mapping": mapping}}})
    with pytest.raises(ConfigError, match=said):
        read_mappings("db1", tables)


def test_an_operator_of_ones_own_is_found_by_its_import_path(tmp_path: Path) -> None:
    tables = mapped(key="utf8", value="utf8", merge=f"{__name__}:longest")
    with (
        Writer(tmp_path / "store", tables) as writer,
        SourceReplay(writer.source(tmp_path / "state", tables), LIMIT) as replay,
    ):
        replay.catch_up()
        for operand in (b"aa", b"bbbb", b"c"):
            writer.merge(b"t:k", operand)
            replay.catch_up()
        assert replay.tables["slatedb.t"].rows[("k",)]["value"] == "bbbb"


def longest(existing: bytes | None, operand: bytes) -> bytes:
    return max(existing or b"", operand, key=len)


def test_rows_can_be_fetched_again_by_key(tmp_path: Path) -> None:
    tables = mapped(key={"a": "uint16", "b": "utf8"}, value="int64", merge="max")
    with Writer(tmp_path / "store", tables) as writer:
        writer.merge(b"t:\0\7x", (5).to_bytes(8, "big"))
        writer.merge(b"t:\0\7x", (3).to_bytes(8, "big"))
        source = writer.source(tmp_path / "state", tables)
        table = source.tables()[0]
        keys = (
            table.arrow.empty_table()
            .select(["a", "b"])
            .from_pylist(
                [{"a": 7, "b": "x"}, {"a": 8, "b": "gone"}], schema=table.arrow.empty_table().select(["a", "b"]).schema
            )
        )
        assert [(row["a"], row["b"], row["value"]) for row in source.refetch(table, keys).to_pylist()] == [(7, "x", 5)]
