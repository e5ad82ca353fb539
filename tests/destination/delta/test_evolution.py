"""How a Delta table follows its upstream's columns, beyond what every destination must do."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.destination import Batch, TableBatch
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.errors import SchemaChangedError, TableError
from tailrace.model.change import Changes
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.system.failpoint import VARIABLE, FailpointError
from tailrace.testing.destination import (
    ITEMS,
    TRUNCATE,
    altered,
    changes_of,
    delete,
    insert,
    update,
    with_columns,
)
from tests.support.destination_writing import write

SIZE = Column("size", pa.int64(), number=4)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def table_at(lake: Path) -> DeltaTable:
    return DeltaTable(str(lake / "shop/items"))


def rows_at(lake: Path, key: str = "id") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table_at(lake).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: str(row[key]))


def test_a_schema_change_without_rows_is_one_commit_with_its_batch_and_none_when_it_is_done(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    files = table_at(lake).file_uris()
    wider = with_columns(ITEMS, SIZE)
    write(destination, 1, table=wider)
    assert (table_at(lake).version(), table_at(lake).transaction_version("tailrace/p")) == (1, 1)
    assert table_at(lake).file_uris() == files
    write(destination, 2, table=wider)
    assert table_at(lake).version() == 1
    full = with_columns(wider, Column("color", pa.string(), number=5, initial=pa.scalar("red")))
    write(destination, 3, table=full)
    assert (table_at(lake).version(), table_at(lake).transaction_version("tailrace/p")) == (2, 3)
    assert rows_at(lake) == [{"id": 1, "name": "a", "price": 1, "size": None, "color": "red"}]


def test_a_new_column_and_its_rows_are_one_commit_where_every_file_is_rewritten(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    write(
        destination,
        1,
        update(id=1, name="b"),
        insert(id=2, name=None, price=2, size=2),
        table=with_columns(ITEMS, SIZE),
    )
    assert table_at(lake).version() == 1
    assert [(row["name"], row["size"]) for row in rows_at(lake)] == [("b", None), (None, 2)]


def test_a_batch_that_dies_before_its_commit_leaves_neither_columns_nor_rows_and_is_written_whole_again(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.items": ["name"]})
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    wider = with_columns(ITEMS, SIZE, Column("at", pa.timestamp("us"), number=5))
    changes = [update(id=2, name="b", price=3, size=1, at=None)]
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "delta.before_log_entry:raise")
        with pytest.raises(FailpointError):
            write(destination, 1, *changes, table=wider)
    assert [(row["price"], "size" in row) for row in rows_at(lake)] == [(1, False), (2, False)]
    assert not write(destination, 1, *changes, table=wider).repeated
    assert table_at(lake).version() == 1
    assert [(row["price"], row["size"]) for row in rows_at(lake)] == [(1, None), (3, 1)]


def test_a_table_that_is_not_there_is_not_made_by_a_schema_alone(lake: Path) -> None:
    write(DeltaDestination(path=str(lake)), 0, table=ITEMS)
    assert not (lake / "shop/items").exists()


def test_a_renaming_and_the_rows_that_come_with_it_are_one_commit(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    renamed = altered(ITEMS, name=Column("title", pa.string(), number=2))
    write(destination, 1, delete(id=2), insert(id=3, title="c", price=3), table=renamed)
    assert table_at(lake).version() == 1
    assert [row["title"] for row in rows_at(lake)] == ["a", "c"]


def test_a_column_renamed_to_the_name_of_a_dropped_one_takes_its_place(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    write(destination, 1, table=(narrower := altered(ITEMS, name=None)))
    assert rows_at(lake) == [{"id": 1, "name": "a", "price": 1}]
    renamed = altered(narrower, price=Column("name", pa.int32(), number=3))
    write(destination, 2, insert(id=2, name=2), table=renamed)
    assert rows_at(lake) == [{"id": 1, "name": 1}, {"id": 2, "name": 2}]


def test_names_that_differ_only_in_case_are_one_name_to_delta(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    other = altered(ITEMS, name=Column("NAME", pa.string(), number=9))
    write(destination, 1, insert(id=2, NAME="b", price=2), table=other)
    assert rows_at(lake) == [{"id": 1, "price": 1, "NAME": None}, {"id": 2, "price": 2, "NAME": "b"}]


def test_a_dropped_or_renamed_partition_column_stops_the_table_and_says_what_to_do(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.items": ["name"]})
    write(destination, 0, insert(id=1, name="a", price=1))
    for after in (altered(ITEMS, name=None), altered(ITEMS, name=Column("title", pa.string(), number=2))):
        with pytest.raises(TableError, match="partitioned by name") as caught:
            write(destination, 1, insert(id=2, price=2), table=after)
        assert "tailrace resync FILE shop.items" in (caught.value.fix or "")
        with pytest.raises(TableError, match="partitioned by name"):
            destination.write_rows(after, [])
    assert rows_at(lake) == [{"id": 1, "name": "a", "price": 1}]


def test_a_partition_column_may_be_added_again_or_widened(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.items": ["price"]})
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    wider = altered(ITEMS, price=Column("price", pa.int64(), number=3))
    write(destination, 1, insert(id=3, name="c", price=2**40), table=wider)
    assert [row["price"] for row in rows_at(lake)] == [1, 2, 2**40]
    again = altered(wider, price=Column("price", pa.string(), number=7, initial=pa.scalar("low")))
    write(destination, 2, update(id=3, price="high"), table=again)
    assert [row["price"] for row in rows_at(lake)] == ["low", "low", "high"]


def with_exact(changes: list[Changes], *texts: str | None) -> list[Changes]:
    batch = changes[0].batch
    at = batch.schema.get_field_index("exact")
    return [Changes(changes[0].table, batch.set_column(at, batch.schema.field(at), pa.array(texts, pa.string())))]


def test_values_that_do_not_fit_follow_their_column_to_its_new_name_and_go_with_it(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    odd = changes_of(ITEMS, insert(id=1, name="a", price=None), insert(id=2, name="b", price=None))
    text = '{"price": "99999999999"}'
    destination.write_changes(TableBatch(ITEMS, Batch("p", 0), with_exact(odd, text, text)))
    renamed = altered(ITEMS, price=Column("cost", pa.int32(), number=3))
    late = with_exact(changes_of(ITEMS, insert(id=3, name="c", price=None)), text)
    new = changes_of(renamed, update(id=2, name="B"), commit=9)
    destination.write_changes(TableBatch(renamed, Batch("p", 1), [*late, *new]))
    assert [row["_tailrace_exact"] for row in rows_at(lake)] == ['{"cost": "99999999999"}'] * 3
    again = altered(renamed, cost=Column("cost", pa.int32(), number=8))
    write(destination, 2, table=again)
    assert [row["_tailrace_exact"] for row in rows_at(lake)] == [None] * 3


def test_a_key_whose_columns_swap_names_or_grow_still_finds_its_rows(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    a, b = Column("a", pa.int32(), False, number=1), Column("b", pa.int32(), False, number=2)
    name = Column("name", pa.string(), number=3)
    table = TableSchema(TableName("shop", "items"), (a, b, name), ("a", "b"))
    write(destination, 0, insert(a=1, b=2, name="x"), insert(a=2, b=1, name="y"), table=table)
    write(destination, 1, update(a=1, b=2, name="X"), table=table)
    swapped = TableSchema(table.table, (replace(a, name="b"), replace(b, name="a"), name), ("a", "b"), 2)
    write(destination, 2, update(a=2, b=1, name="XX"), table=swapped)
    assert {(row["a"], row["b"]): row["name"] for row in rows_at(lake, "a")} == {(2, 1): "XX", (1, 2): "y"}
    exact = pa.decimal128(20, 0)
    grown = TableSchema(table.table, tuple(replace(c, type=exact) for c in swapped.columns[:2]), ("a", "b"), 3)
    write(destination, 3, delete(a=Decimal(1), b=Decimal(2)), table=with_columns(grown, name))
    assert [(row["a"], row["name"]) for row in rows_at(lake, "a")] == [(2, "XX")]


def test_a_type_that_becomes_narrower_upstream_stays_as_it_is(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    narrower = altered(ITEMS, price=Column("price", pa.int16(), number=3))
    write(destination, 1, update(id=1, name="b"), insert(id=2, name="c", price=2), table=narrower)
    assert pa.schema(table_at(lake).schema().to_arrow()).field("price").type == pa.int32()
    assert [row["price"] for row in rows_at(lake)] == [1, 2]


def test_rows_that_are_kept_though_deleted_get_initial_values_too(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), deletes="soft", metadata=True)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2), delete(id=2))
    write(destination, 1, table=with_columns(ITEMS, replace(SIZE, initial=pa.scalar(7))))
    assert [(row["size"], row["_tailrace_op"]) for row in rows_at(lake)] == [(7, "insert"), (7, "delete")]


def test_a_log_takes_back_exactly_what_it_holds_across_a_new_column(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    log = TableSchema(ITEMS.table, ITEMS.columns, ())
    write(destination, 0, insert(id=1, name="a", price=1), table=log)
    wider = with_columns(log, replace(SIZE, initial=pa.scalar(7)))
    old = changes_of(log, delete(id=1, name="a", price=1), insert(id=2, name="b", price=2), commit=5)
    new = changes_of(wider, delete(id=2, name="b", price=2, size=7), commit=9)
    destination.write_changes(TableBatch(wider, Batch("p", 1), [*old, *new]))
    assert [(row["id"], row["_tailrace_op"], row["size"]) for row in rows_at(lake, "_tailrace_position")] == [
        (1, "insert", 7),
        (1, "delete", 7),
        (2, "insert", 7),
        (2, "delete", 7),
    ]


def test_a_change_of_type_that_loses_something_stops_the_table_before_anything_is_written(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    other = altered(with_columns(ITEMS, SIZE), price=Column("price", pa.date32(), number=3))
    with pytest.raises(SchemaChangedError, match="price") as caught:
        write(destination, 1, table=other)
    assert caught.value.fix == "tailrace resync FILE shop.items"
    assert table_at(lake).version() == 0


def test_a_truncate_and_a_new_column_leave_an_empty_table_with_it(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    write(destination, 1, TRUNCATE, table=with_columns(ITEMS, SIZE))
    assert table_at(lake).version() == 1
    assert table_at(lake).to_pyarrow_table().schema.names == ["id", "name", "price", "size"]
    assert rows_at(lake) == []


def test_a_key_that_takes_the_name_of_another_column_is_sought_by_its_own_bounds(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    one, two = Column("id", pa.int64(), False, number=1), Column("n", pa.int64(), number=2)
    table = TableSchema(ITEMS.table, (one, two), ("id",))
    write(destination, 0, insert(id=1, n=1000), table=table)
    swapped = TableSchema(ITEMS.table, (replace(one, name="n"), replace(two, name="id")), ("n",), 2)
    write(destination, 1, update(n=1, id=2000), table=swapped)
    assert rows_at(lake, "n") == [{"n": 1, "id": 2000}]
