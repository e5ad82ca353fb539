"""How tables of a SQLite replica follow their upstream's columns, beyond what every destination must do."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.errors import SchemaChangedError, TableError
from tailrace.model.schema import Column, TableSchema
from tailrace.testing.destination import ITEMS, altered, changes_of, insert, read, update
from tests.support.destination_writing import write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replica.db"


def query(path: Path, statement: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def rows_at(path: Path) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute('SELECT * FROM "shop.items" ORDER BY 1')]


def test_a_table_that_gets_or_loses_its_key_stops_until_it_is_copied_again(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    keyless = replace(ITEMS, key=(), version=2)
    with pytest.raises(SchemaChangedError, match="now has none"):
        write(destination, 1, insert(id=2, name="b", price=2), table=keyless)
    staged = destination.write_rows(keyless, changes_of(keyless, read(id=1, name="a", price=1)))
    write(destination, 1, table=keyless, staged=[staged], begins_copy=True, completes_copy=True)
    with pytest.raises(SchemaChangedError, match="now has a key"):
        write(destination, 2, insert(id=2, name="b", price=2))


def test_a_dropped_column_stays_and_is_null_in_rows_written_from_then_on(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    write(destination, 1, insert(id=3, name="c"), update(id=2, name="B"), table=altered(ITEMS, price=None))
    assert [(row["name"], row["price"]) for row in rows_at(path)] == [("a", 1), ("B", None), ("c", None)]


def with_price(kind: pa.DataType, version: int) -> TableSchema:
    return replace(altered(ITEMS, price=Column("price", kind, number=3)), version=version)


@pytest.mark.parametrize(
    ("kinds", "values"),
    [
        ([pa.int64(), pa.int16()], [1, 1]),
        ([pa.float64(), pa.int32()], [1.0, 1.0]),
        ([pa.decimal128(10, 0), pa.decimal128(12, 2), pa.decimal256(50, 3)], ["1", "1.00", "1.000"]),
        ([pa.decimal128(13, 3), pa.decimal128(10, 1), pa.int32()], ["1.000", "1.000", "1.000"]),
    ],
)
def test_a_type_is_widened_where_nothing_is_lost_and_stays_when_it_becomes_narrower(
    path: Path, kinds: list[pa.DataType], values: list[Any]
) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=0, name="a", price=1))
    for number, (kind, value) in enumerate(zip(kinds, values, strict=True), start=1):
        write(destination, number, insert(id=number, name="n", price=1), table=with_price(kind, number + 1))
        assert {row["price"] for row in rows_at(path)} == {value}


@pytest.mark.parametrize("kind", [pa.float32(), pa.decimal128(9, 0), pa.uint32(), pa.timestamp("us"), pa.bool_()])
def test_a_type_that_could_lose_a_value_stops_the_table(path: Path, kind: pa.DataType) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    with pytest.raises(SchemaChangedError, match="price"):
        write(destination, 1, table=with_price(kind, 2))
    assert rows_at(path) == [{"id": 1, "name": "a", "price": 1}]


def test_a_changed_key_rebuilds_the_table(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=1))
    named = replace(ITEMS, key=("name",), version=2)
    write(destination, 1, update(name="a", id=7, price=1), table=named)
    assert [(row["id"], row["name"]) for row in rows_at(path)] == [(2, "b"), (7, "a")]
    with pytest.raises(TableError, match="UNIQUE"):
        write(destination, 2, table=replace(named, key=("price",), version=3))
    assert len(rows_at(path)) == 2


def test_what_people_add_to_a_table_outlives_renames_rebuilds_and_copies(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute('CREATE INDEX by_name ON "shop.items" (name)')
        connection.execute('CREATE INDEX by_price ON "shop.items" (price)')
        connection.execute('CREATE VIEW names AS SELECT name FROM "shop.items"')
    write(destination, 1, table=with_price(pa.float64(), 2))
    renamed = altered(with_price(pa.float64(), 2), price=Column("cost", pa.float64(), number=3))
    write(destination, 2, table=renamed)
    staged = destination.write_rows(renamed, changes_of(renamed, read(id=2, name="b", cost=2.0)))
    write(destination, 3, table=renamed, staged=[staged], begins_copy=True, completes_copy=True)
    assert query(path, "SELECT name FROM names") == [("b",)]
    assert query(path, "SELECT name FROM sqlite_schema WHERE name LIKE 'by_%' ORDER BY 1") == [
        ("by_name",),
        ("by_price",),
    ]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


def test_an_index_that_forbids_what_the_upstream_allows_stops_the_table_and_no_row_goes(path: Path) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute('CREATE UNIQUE INDEX by_name ON "shop.items" (name)')
    with pytest.raises(TableError, match="UNIQUE"):
        write(destination, 1, insert(id=2, name="a", price=2))
    assert [row["id"] for row in rows_at(path)] == [1]


@pytest.mark.parametrize("taken", [False, True], ids=["added", "rebuilt"])
def test_an_added_column_with_initial_value_nan_has_nan_as_exact_text_in_older_rows(path: Path, taken: bool) -> None:
    destination = SqliteDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    nan = pa.scalar(float("nan"), pa.float64())
    column = Column("price" if taken else "share", pa.float64(), number=9, initial=nan)
    numbered = replace(ITEMS, columns=tuple(replace(c, number=at) for at, c in enumerate(ITEMS.columns, 1)))
    write(destination, 1, table=numbered)
    kept = [c for c in numbered.columns if c.name != column.name]
    write(destination, 2, table=replace(numbered, columns=(*kept, column), version=3))
    [row] = rows_at(path)
    assert (row[column.name], row["_tailrace_exact"]) == (None, f'{{"{column.name}": "NaN"}}')
