"""A SQLite file that is gone, and rows that are unusual: nothing is passed over."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.destination import Batch, TableBatch, chunking
from tailrace.destination.sqlite import replica_file
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.destination.sqlite.name import file_name
from tailrace.errors import TableError, UnavailableError
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import ITEMS, changes_of, delete, insert, read, update
from tests.support.destination_writing import TREE, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replica.db"


def rows_at(path: Path, table: TableSchema = ITEMS) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        found = connection.execute(f'SELECT * FROM "{file_name(table.table)}" ORDER BY 1')
        return [dict(row) for row in found]


def test_a_table_that_was_written_before_and_is_gone_is_not_recreated_without_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "place" / "replica.db"
    destination = SqliteDestination(path=path)
    table = replace(ITEMS, upstream_id="7")
    write(destination, 0, insert(id=1, name="a", price=1), table=table)
    path.parent.rename(tmp_path / "unmounted")
    later = Batch("p", 1)
    changes = changes_of(table, insert(id=2, name="b", price=2))
    with pytest.raises(TableError, match="missing from"):
        destination.write_changes(TableBatch(table, later, changes, is_known=True))
    staged = destination.write_rows(table, changes_of(table, read(id=3, name="c", price=3)))
    destination.write_changes(
        TableBatch(table, later, staged=[staged], is_known=True, begins_copy=True, completes_copy=True)
    )
    assert [row["id"] for row in rows_at(path)] == [3]


def test_a_key_that_is_an_array_finds_its_rows(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, *(insert(path=path, name="old") for path in ([1], [1, 2], [12])), table=TREE)
    write(destination, 1, update(path=[1, 2], name="new"), delete(path=[12]), table=TREE)
    found = [(json.loads(row["path"]), row["name"]) for row in rows_at(path, TREE)]
    assert sorted(found) == [([1], "old"), ([1, 2], "new")]


def test_changes_that_left_values_out_are_the_same_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, *(insert(id=number, name=str(number), price=1) for number in range(100)))
    monkeypatch.setattr(chunking, "PART_BYTES", 10 * chunking.ROW_BYTES)
    assert write(destination, 1, *(update(id=number, price=2) for number in range(100))).changes == 100
    assert rows_at(path) == [{"id": number, "name": str(number), "price": 2} for number in range(100)]


def test_a_value_that_does_not_fit_keeps_its_text_when_its_row_is_read_again_upstream(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))

    def refetch(table: TableSchema, keys: pa.Table) -> pa.Table:
        rows = pa.Table.from_pylist([{"id": key, "name": "fetched", "price": None} for key in (8, 7)], table.arrow)
        return rows.append_column("_tailrace_exact", pa.array([None, '{"price": "99999999999"}'], pa.string()))

    write(destination, 1, update(id=7, name="new"), update(id=8, price=8), refetch=refetch)
    _, seven, eight = rows_at(path)
    assert (seven["name"], json.loads(seven["_tailrace_exact"])) == ("new", {"price": "99999999999"})
    assert (eight["name"], eight["price"], eight["_tailrace_exact"]) == ("fetched", 8, None)


def copied(destination: SqliteDestination, number: int) -> None:
    rows = [read(id=each, name=f"{each} " * 50, price=each) for each in range(500)]
    staged = destination.write_rows(ITEMS, changes_of(ITEMS, *rows))
    write(destination, number, staged=[staged], begins_copy=True, completes_copy=True)


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


def test_a_disk_that_is_full_once_the_rows_are_there_does_not_cost_the_index_that_people_added(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = SqliteDestination(path=tmp_path / "twin.db")
    copied(twin, 0)
    [(pages,)] = query(tmp_path / "twin.db", "PRAGMA page_count")
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute('CREATE INDEX by_name ON "shop.items" (name)')
    with monkeypatch.context() as full:
        full.setattr(replica_file, "_SETTINGS", (*replica_file._SETTINGS, f"PRAGMA max_page_count = {pages + 4}"))
        with pytest.raises(UnavailableError, match="full"):
            copied(destination, 1)
    assert [row["id"] for row in rows_at(path)] == [1]
    copied(destination, 1)
    assert len(rows_at(path)) == 500
    assert query(path, "SELECT name FROM sqlite_schema WHERE name = 'by_name'") == [("by_name",)]


def test_an_index_on_a_column_that_is_gone_goes_with_it_and_no_other_one_does(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    with closing(sqlite3.connect(path)) as connection:
        connection.create_function("shout", 1, str.upper, deterministic=True)
        connection.execute('CREATE INDEX "no such column: by_price" ON "shop.items" (price)')
        connection.execute('CREATE INDEX "no such column: by_shout" ON "shop.items" (shout(name))')
    less = replace(ITEMS, columns=tuple(column for column in ITEMS.columns if column.name != "price"))
    with pytest.raises(TableError, match="no such function"):
        write(destination, 1, table=less, begins_copy=True, completes_copy=True)
    query(path, 'DROP INDEX "no such column: by_shout"')
    write(destination, 1, table=less, begins_copy=True, completes_copy=True)
    assert query(path, "SELECT name FROM sqlite_schema WHERE name LIKE '%by_%'") == []


def test_a_transaction_that_sqlite_ended_by_itself_is_not_taken_for_one_that_was_committed(path: Path) -> None:
    with (
        pytest.raises(UnavailableError, match="ended the transaction"),
        replica_file.reaching(path, "shop.items"),
        replica_file.opened(path, 1.0) as connection,
        replica_file.transaction(connection),
    ):
        connection.execute("ROLLBACK")
