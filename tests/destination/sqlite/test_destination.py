"""What the SQLite destination does beyond the contract: names, values, its own columns, other users of the file."""

from __future__ import annotations

import datetime
import decimal
import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.pipeline import from_dict
from tailrace.config.registry import open_destination
from tailrace.destination import Batch, TableBatch, chunking
from tailrace.destination.replica.sql_name import fold_ascii
from tailrace.destination.sqlite import destination as sqlite
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.destination.sqlite.name import file_name, is_reserved
from tailrace.destination.sqlite.option import SqliteDestinationOptions
from tailrace.destination.sqlite.value import encode, kept_type
from tailrace.errors import (
    DamagedError,
    OwnedError,
    PreflightError,
    TableError,
    UnavailableError,
    UnfitError,
)
from tailrace.model.change import Changes, Op, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.testing.destination import (
    ITEMS,
    TRUNCATE,
    RowChange,
    altered,
    changes_of,
    delete,
    insert,
    moved,
    read,
    update,
    with_columns,
)
from tests.support.destination_writing import files_of_at_most, with_exact, write

COMMITTED = "2024-01-01T00:00:00.000000Z"
LOG = TableSchema(TableName("shop", "log"), (Column("line", pa.string()),), ())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replica.db"


def query(path: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def rows_at(path: Path, table: TableSchema = ITEMS) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        found = connection.execute(f'SELECT * FROM "{file_name(table.table)}" ORDER BY 1')
        return [dict(row) for row in found]


def test_a_pipeline_file_names_it_with_a_type_and_a_path() -> None:
    source = {"type": "postgres", "dsn": "host=a"}
    config = from_dict({"name": "p", "source": source, "destination": {"type": "sqlite", "path": "replica.db"}})
    assert type(config.destination) is SqliteDestinationOptions
    assert open_destination(config) == SqliteDestination(path=Path.cwd() / "replica.db")


def test_tables_of_the_schema_main_have_their_own_name_and_others_their_schema_too() -> None:
    names = [("main", "items"), ("shop", "items"), ("main", "a.b"), ("a", "b"), ("main", "sqlite_x"), ("sqlite_s", "t")]
    assert [file_name(TableName(*name)) for name in names] == [
        "items",
        "shop.items",
        'main."a.b"',
        "a.b",
        "main.sqlite_x",
        '"sqlite_s".t',
    ]


NAMES = st.text('ab."', min_size=1, max_size=3) | st.sampled_from(["main", "sqlite_a", "_tailrace_batch", "SQLITE_a"])


@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES))
def test_no_two_tables_share_a_name_and_none_has_one_that_is_reserved(
    one: tuple[str, str], two: tuple[str, str]
) -> None:
    names = [file_name(TableName(*name)) for name in (one, two)]
    assert (names[0] == names[1]) == (one == two)
    assert not any(map(is_reserved, names))


def test_tables_that_differ_only_in_case_are_refused_together_and_never_mixed(path: Path) -> None:
    destination = SqliteDestination(path=path)
    twin = TableSchema(TableName("shop", "ITEMS"), ITEMS.columns, ("id",))
    assert [finding.level for finding in destination.check([ITEMS, twin])] == ["ok", "ok", "error"]
    write(destination, 0, insert(id=1, name="a", price=1))
    with pytest.raises(TableError, match=r"taken in the file by the upstream's table shop\.items"):
        write(destination, 0, insert(id=2, name="b", price=2), table=twin)
    assert [row["id"] for row in rows_at(path)] == [1]
    assert fold_ascii("Ä") == "Ä"


VALUES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.bool_(), True, 1),
    (pa.uint64(), 2**64 - 1, "18446744073709551615"),
    (pa.float32(), 0.5, 0.5),
    (pa.float64(), float("-inf"), float("-inf")),
    (pa.decimal128(38, 10), decimal.Decimal("0.0000000001"), "0.0000000001"),
    (pa.decimal128(38, 10), decimal.Decimal(0), "0.0000000000"),
    (pa.decimal256(50, 0), decimal.Decimal(-(10**40)), "-1" + "0" * 40),
    (pa.large_string(), "a\x00é", "a\x00é"),
    (pa.binary(2), b"\x00\xff", b"\x00\xff"),
    (pa.date32(), datetime.date(2024, 2, 29), "2024-02-29"),
    (pa.date32(), -800_000, "-0221-09-04"),
    (pa.date32(), 2_000_000_000, "+5477784-01-06"),
    (pa.timestamp("us"), -62_167_219_200_000_001, "-0001-12-31T23:59:59.999999"),
    (pa.timestamp("us", "UTC"), 253_402_300_800_000_000, "+10000-01-01T00:00:00.000000Z"),
    (pa.timestamp("ms", "Europe/Paris"), 0, "1970-01-01T00:00:00.000Z"),
    (pa.timestamp("ns"), 1, "1970-01-01T00:00:00.000000001"),
    (pa.time64("us"), datetime.time(1, 2, 3, 4), "01:02:03.000004"),
    (pa.duration("s"), 90, 90),
    (pa.list_(pa.float64()), [1.5, float("nan"), float("-inf"), None], '[1.5,"NaN","-Infinity",null]'),
    (pa.list_(pa.list_(pa.int8())), [[1], None, []], "[[1],null,[]]"),
    (pa.large_list(pa.decimal128(5, 2)), [decimal.Decimal("1.50")], '["1.50"]'),
    (pa.struct({"a": pa.string(), "b": pa.binary()}), {"a": 'x"\n\\', "b": b"\xff"}, '{"a":"x\\"\\n\\\\","b":"ff"}'),
    (pa.map_(pa.string(), pa.int64()), [("k", 1), ("l", None)], '[["k",1],["l",null]]'),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "kept"), VALUES)
def test_a_value_is_kept_in_one_exact_form(kind: pa.DataType, value: Any, kept: Any) -> None:
    raw = isinstance(value, int) and pa.types.is_temporal(kind)
    storage = pa.int32() if pa.types.is_date(kind) else pa.int64()
    array = pa.array([value, None], storage).cast(kind) if raw else pa.array([value, None], kind)
    assert encode(array, kept_type(kind), "c", "t") == [kept, None]
    assert encode(pa.chunked_array([array, array]).slice(1, 2), kept_type(kind), "c", "t") == [None, kept]
    assert encode(pa.chunked_array([], kind), kept_type(kind), "c", "t") == []


def test_metadata_columns_describe_the_last_change_of_each_row(path: Path) -> None:
    destination = SqliteDestination(path=path, metadata=True)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    write(destination, 1, update(id=1, name="c", price=1))
    first, second = rows_at(path)
    assert (first["_tailrace_op"], second["_tailrace_op"]) == ("update", "insert")
    assert first["_tailrace_committed_at"] == COMMITTED
    assert second["_tailrace_position"] == str(Position(3, 0))


def test_a_soft_delete_keeps_the_row_and_says_when_until_it_is_inserted_again(path: Path) -> None:
    destination = SqliteDestination(path=path, deletes="soft")
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2), delete(id=2))
    written = write(destination, 1, delete(id=1), delete(id=77))
    assert (written.upserts, written.deletes) == (0, 1)
    assert [(row["id"], row["name"], row["_tailrace_deleted_at"]) for row in rows_at(path)] == [
        (1, "a", COMMITTED),
        (2, "b", COMMITTED),
    ]
    write(destination, 2, insert(id=1, name="again", price=3))
    assert rows_at(path)[0] == {"id": 1, "name": "again", "price": 3, "_tailrace_deleted_at": None}


def test_a_soft_truncate_marks_every_row_that_was_alive(path: Path) -> None:
    destination = SqliteDestination(path=path, deletes="soft", metadata=True)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    write(destination, 1, TRUNCATE, insert(id=2, name="new", price=3))
    assert [(row["name"], row["_tailrace_op"], row["_tailrace_deleted_at"]) for row in rows_at(path)] == [
        ("a", "truncate", COMMITTED),
        ("new", "insert", None),
    ]


def test_columns_of_an_option_that_was_switched_off_are_null_in_rows_from_then_on(path: Path) -> None:
    write(SqliteDestination(path=path, metadata=True), 0, insert(id=1, name="a", price=1))
    write(SqliteDestination(path=path), 1, update(id=1, name="b"))
    assert rows_at(path)[0]["_tailrace_op"] is None


def test_a_table_without_a_key_is_a_log_of_its_changes(path: Path) -> None:
    destination = SqliteDestination(path=path)
    staged = destination.write_rows(LOG, changes_of(LOG, read(line="copied")))
    write(destination, 0, table=LOG, staged=[staged], begins_copy=True)
    write(destination, 1, insert(line="x"), delete(line="x"), TRUNCATE, insert(line="x"), table=LOG)
    assert write(destination, 1, insert(line="x"), table=LOG).repeated
    assert query(path, 'SELECT line, _tailrace_op FROM "shop.log" ORDER BY rowid') == [
        ("copied", "read"),
        ("x", "insert"),
        ("x", "delete"),
        (None, "truncate"),
        ("x", "insert"),
    ]
    assert all(len(position) == 32 for (position,) in query(path, 'SELECT _tailrace_position FROM "shop.log"'))


def test_values_that_do_not_fit_bring_their_own_column_and_follow_their_row(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    assert "_tailrace_exact" not in rows_at(path)[0]
    big = '{"price": "99999999999"}'
    odd = with_exact(changes_of(ITEMS, insert(id=2, name="b", price=None)), [big])
    destination.write_changes(TableBatch(ITEMS, Batch("p", 1), odd))
    write(destination, 2, update(id=2, name="renamed"))
    write(destination, 3, delete(id=2), moved(id=3, name="moved"))
    assert [(row["id"], row["_tailrace_exact"]) for row in rows_at(path)] == [(1, None), (3, big)]
    renamed = altered(ITEMS, price=Column("cost", pa.int32(), number=3))
    write(destination, 4, table=renamed)
    assert [row["_tailrace_exact"] for row in rows_at(path)] == [None, '{"cost": "99999999999"}']
    write(destination, 5, update(id=3, cost=5), table=renamed)
    assert [row["_tailrace_exact"] for row in rows_at(path)] == [None, None]


def test_nan_is_null_in_its_column_and_text_in_the_exact_column(path: Path) -> None:
    destination = SqliteDestination(path=path)
    table = with_columns(ITEMS, Column("x", pa.float64(), number=4), Column("y", pa.float32(), number=5))
    nan = float("nan")
    odd = changes_of(table, read(id=1, name="a", price=None, x=nan, y=nan), read(id=2, name="b", price=1, x=1.0, y=2.0))
    staged = destination.write_rows(table, with_exact(odd, ['{"price": "9e99"}', None]))
    write(destination, 0, table=table, staged=[staged], begins_copy=True)
    first, second = rows_at(path)
    assert (first["x"], first["y"]) == (None, None)
    assert json.loads(first["_tailrace_exact"]) == {"price": "9e99", "x": "NaN", "y": "NaN"}
    assert (second["x"], second["_tailrace_exact"]) == (1.0, None)


@pytest.mark.parametrize(
    "keys",
    [
        pa.array(["b", "a"]).dictionary_encode(),
        pa.array(["b", "a"], pa.large_string()),
        pa.array([b"b", b"a"], pa.binary(1)),
    ],
)
def test_a_key_is_found_again_however_arrow_lays_it_out(path: Path, keys: pa.Array[Any]) -> None:
    table = TableSchema(ITEMS.table, (Column("id", keys.type, False, number=1), ITEMS.columns[1]), ("id",))
    destination = SqliteDestination(path=path)
    for number, names in enumerate((["old", "old"], ["new b", "new a"])):
        row = pa.StructArray.from_arrays([keys, pa.array(names)], fields=list(table.row_type))
        destination.write_changes(
            TableBatch(table, Batch("p", number), [Changes.build(table, row, op=Op.INSERT, commit=1)])
        )
    assert [row["name"] for row in rows_at(path)] == ["new a", "new b"]


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_key_that_could_not_be_found_again_stops_the_table(path: Path, value: float | None) -> None:
    table = TableSchema(ITEMS.table, (Column("id", pa.float64(), number=1),), ("id",))
    with pytest.raises(UnfitError, match="key column id"):
        write(SqliteDestination(path=path), 0, insert(id=value), table=table)


def test_a_writer_waits_for_another_one_and_gives_up_in_time(path: Path) -> None:
    write(SqliteDestination(path=path), 0, insert(id=1, name="a", price=1))
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match="locked") as caught:
            write(SqliteDestination(path=path, lock_timeout=0.05), 1, delete(id=1))
        assert caught.value.fix
        waiting = threading.Thread(target=write, args=(SqliteDestination(path=path), 1, delete(id=1)))
        waiting.start()
        assert [row["id"] for row in rows_at(path)] == [1]
        other.execute("COMMIT")
        waiting.join()
    assert rows_at(path) == []


def test_a_reader_in_the_middle_of_its_query_neither_waits_nor_holds_up_the_writer(path: Path) -> None:
    destination = SqliteDestination(path=path, lock_timeout=5)
    write(destination, 0, insert(id=1, name="a", price=1))
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        before = reader.execute('SELECT * FROM "shop.items"').fetchall()
        staged = destination.write_rows(ITEMS, changes_of(ITEMS, read(id=2, name="b", price=2)))
        write(destination, 1, staged=[staged], begins_copy=True, completes_copy=True)
        assert reader.execute('SELECT * FROM "shop.items"').fetchall() == before
        reader.execute("COMMIT")
        assert reader.execute('SELECT id FROM "shop.items"').fetchall() == [(2,)]


@pytest.mark.parametrize("later", [[], [2]])
def test_a_runner_that_was_overtaken_is_fenced(path: Path, later: list[int]) -> None:
    destination, other = SqliteDestination(path=path), SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))

    def overtaken() -> Iterator[Changes]:
        for number in [1, *later]:
            write(other, number, insert(id=9, name="other", price=number))
        yield from changes_of(ITEMS, insert(id=5, name="stale", price=5))

    with pytest.raises(OwnedError, match="batch 1"):
        destination.write_changes(TableBatch(ITEMS, Batch("p", 1), overtaken()))
    assert [row["id"] for row in rows_at(path)] == [1, 9]


def test_pipelines_count_their_batches_apart(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 7, insert(id=1, name="a", price=1))
    written = destination.write_changes(TableBatch(ITEMS, Batch("q", 0), changes_of(ITEMS, delete(id=1))))
    assert not written.repeated
    assert rows_at(path) == []


def test_files_of_other_programs_are_refused_and_left_alone(path: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE items (id)")
    text = tmp_path / "notes.txt"
    text.write_text("mine")
    for foreign in (path, text, tmp_path):
        destination = SqliteDestination(path=foreign)
        (finding,) = destination.check([ITEMS])
        assert finding.level == "error"
        assert finding.fix
        with pytest.raises(PreflightError):
            write(destination, 0, insert(id=2, name="b", price=2))
    assert query(path, "SELECT name FROM sqlite_schema") == [("items",)]
    assert text.read_text() == "mine"


def test_a_table_that_a_user_created_in_the_replica_is_left_alone(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(line="x"), table=LOG)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute('CREATE TABLE "shop.items" (mine)')
    with pytest.raises(TableError, match="tailrace did not make"):
        write(destination, 0, insert(id=2, name="b", price=2))
    assert rows_at(path) == []


def test_checking_finds_what_would_go_wrong_and_creates_nothing(path: Path) -> None:
    destination = SqliteDestination(path=path.parent / "new" / "replica.db")
    odd = TableSchema(
        TableName("shop", "odd"),
        (
            Column("id", pa.int64()),
            Column("ID", pa.month_day_nano_interval()),
            Column("_tailrace_op", pa.string()),
        ),
        ("id",),
    )
    findings = destination.check([ITEMS, odd, LOG])
    assert [finding.level for finding in findings] == ["ok", "ok", "error", "error", "error", "warning"]
    assert all(finding.fix for finding in findings if finding.level == "error")
    assert list(path.parent.iterdir()) == []
    path.write_bytes(b"")
    assert SqliteDestination(path=path).check([])[0].level == "ok"
    assert SqliteDestination(path=path / "below").check([])[0].level == "error"


def test_a_damaged_file_is_not_taken_for_a_busy_one(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, *(insert(id=number, name="x" * 100, price=1) for number in range(500)))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(DamagedError):
        write(destination, 1, *(update(id=number, name="y") for number in range(500)))


def test_a_disk_that_takes_no_more_is_unavailable_and_nothing_is_half_written(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    many = [insert(id=number, name="x" * 1000, price=0) for number in range(2, 500)]
    with files_of_at_most(100_000):
        with pytest.raises(UnavailableError):
            write(destination, 1, *many)
        with pytest.raises(UnavailableError):
            destination.write_rows(ITEMS, changes_of(ITEMS, *(RowChange(Op.READ, one.row) for one in many)))
    assert [row["id"] for row in rows_at(path)] == [1]
    assert list((path.parent / "replica.db-staged").iterdir()) == []
    write(destination, 1, *many)
    assert len(rows_at(path)) == 499


def test_staged_files_go_with_their_batch_or_after_a_day(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = SqliteDestination(path=path)
    folder = path.parent / "replica.db-staged"
    staged = [destination.write_rows(ITEMS, changes_of(ITEMS, read(id=1, name="a", price=1)))]
    write(destination, 0, staged=staged, begins_copy=True)
    assert list(folder.iterdir()) == []
    destination.write_rows(ITEMS, changes_of(ITEMS, read(id=2, name="b", price=2)))
    assert destination.maintain(ITEMS.table) is None
    monkeypatch.setattr("tailrace.destination.staging.ABANDONED_SECONDS", -1.0)
    assert destination.maintain(ITEMS.table) == "deleted 1 abandoned files"
    with pytest.raises(TableError, match="no longer in") as caught:
        write(destination, 1, staged=staged)
    assert caught.value.fix == "tailrace resync FILE shop.items, and let no one else clean that folder"


def test_a_large_write_ahead_log_is_cut_between_batches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = SqliteDestination(path=path)
    with closing(sqlite3.connect(path.parent / "replica.db")):
        write(destination, 0, insert(id=1, name="a", price=1))
    monkeypatch.setattr(sqlite, "LARGE_WAL_BYTES", 1)
    with closing(sqlite3.connect(path)) as reader:
        reader.execute('SELECT * FROM "shop.items"').fetchall()
        write(destination, 1, insert(id=2, name="b", price=2))
        assert (destination.maintain(ITEMS.table) or "").startswith("cut a write-ahead log")
    assert len(rows_at(path)) == 2


def test_a_batch_larger_than_memory_is_one_transaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "PART_BYTES", 1)
    destination = SqliteDestination(path=path)
    ids = np.arange(1000)
    chunks = [
        Changes.build(
            ITEMS,
            pa.StructArray.from_arrays(
                [pa.array(ids), pa.array(["x"] * 1000), pa.array(np.full(1000, part, np.int32))],
                fields=list(ITEMS.row_type),
            ),
            op=Op.INSERT if part == 0 else Op.UPDATE,
            commit=part + 1,
        )
        for part in range(5)
    ]

    def breaking() -> Iterator[Changes]:
        yield from chunks
        raise UnavailableError("the upstream is gone")

    with pytest.raises(UnavailableError, match="upstream"):
        destination.write_changes(TableBatch(ITEMS, Batch("p", 0), breaking()))
    assert query(path, "SELECT name FROM sqlite_schema WHERE name = 'shop.items'") == []
    assert destination.write_changes(TableBatch(ITEMS, Batch("p", 0), chunks)).changes == 5000
    assert {row["price"] for row in rows_at(path)} == {4}
