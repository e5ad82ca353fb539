"""What every destination must do, as tests to inherit.

    class TestMine(DestinationContract):
        @pytest.fixture
        def destination(self, tmp_path): return MyDestination(path=tmp_path)

        def read(self, destination, table): return [...]   # the table's rows as dicts, in any order

A destination with `copy_mode = "own"` passes `ChunkedCopyContract`, one with `stream` passes `StreamedCopyContract`.
`tailrace.testing.fault` has a destination that fails on purpose, to wrap around any other.
"""

from __future__ import annotations

import datetime
import decimal
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from tailrace.destination import Batch, Destination, Stage, Staged, TableBatch, Written
from tailrace.destination.capability import Inspectable
from tailrace.destination.copy import write_batch
from tailrace.errors import MismatchError, SchemaChangedError, TableError
from tailrace.model.change import Changes, Op, pack_unchanged
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import Column, TableName, TableSchema

RowDict = dict[str, Any]


class RowChange(NamedTuple):
    """One change of a test: columns that `row` does not name were left out by the upstream, or are null in a delete."""

    op: Op
    row: RowDict
    ordinal: int = 0


def changes_of(table: TableSchema, *changes: RowChange, commit: int = 1) -> list[Changes]:
    """The changes as one chunk, each a commit of its own unless its ordinal is past 0."""
    if not changes:
        return []
    names = table.arrow.names
    partial = [[c.op in (Op.INSERT, Op.UPDATE) and name not in c.row for name in names] for c in changes]
    steps = [c.ordinal == 0 for c in changes]
    return [
        Changes.build(
            table,
            pa.array([{name: c.row.get(name) for name in names} for c in changes], table.row_type),
            op=np.array([c.op for c in changes], np.int8),
            commit=commit + np.cumsum(steps, dtype=np.int64),
            ordinal=np.array([c.ordinal for c in changes], np.int64),
            committed_at=pa.array([datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)] * len(changes)).cast(
                pa.timestamp("us", "UTC")
            ),
            unchanged=pack_unchanged(np.array(partial, bool)),
        )
    ]


def insert(**row: Any) -> RowChange:
    return RowChange(Op.INSERT, row)


def update(**row: Any) -> RowChange:
    return RowChange(Op.UPDATE, row)


def delete(**key: Any) -> RowChange:
    return RowChange(Op.DELETE, key)


def read(**row: Any) -> RowChange:
    return RowChange(Op.READ, row)


def moved(**row: Any) -> RowChange:
    """The insert half of a changed key; the delete of the old key stands right before it."""
    return RowChange(Op.INSERT, row, 1)


TRUNCATE = RowChange(Op.TRUNCATE, {})
ITEMS = TableSchema(
    TableName("shop", "items"),
    (
        Column("id", pa.int64(), False, number=1),
        Column("name", pa.string(), number=2),
        Column("price", pa.int32(), number=3),
    ),
    ("id",),
)
LOG = TableSchema(TableName("shop", "log"), (Column("line", pa.string(), number=1),), ())
"""A table without a key."""

PLAIN = TableSchema(TableName("shop", "plain"), ITEMS.columns, ("id",))
"""The same under another name: for tests that drop and rename columns a destination may partition by."""


def with_columns(table: TableSchema, *columns: Column) -> TableSchema:
    """The next version of a table, with these columns added."""
    return TableSchema(table.table, (*table.columns, *columns), table.key, table.version + 1)


def altered(table: TableSchema, **columns: Column | None) -> TableSchema:
    """The next version of a table, with other columns in place of the named ones; None drops one."""
    kept = (columns.get(column.name, column) for column in table.columns)
    return TableSchema(table.table, tuple(filter(None, kept)), table.key, table.version + 1)


class ChangeContract:
    """What holds for every destination, however it takes the rows of a copy."""

    stage: Stage

    @pytest.fixture(autouse=True)
    def _stage(self, tmp_path: Path) -> None:
        self.stage = Stage(tmp_path / "staged", "contract")

    def read(self, destination: Destination, table: TableSchema) -> list[RowDict]:
        """The upstream's columns of every row the table holds now; empty when there is no table.

        Of a table without a key also `_tailrace_op` and `_tailrace_position`.
        """
        raise AssertionError("a contract suite must define how its destination is read")

    def rows(self, destination: Destination, table: TableSchema = ITEMS) -> list[RowDict]:
        names = table.arrow.names
        found = [{name: row[name] for name in names} for row in self.read(destination, table)]
        return sorted(found, key=lambda row: str([row[name] for name in table.key or names]))

    def write(
        self, destination: Destination, number: int, *changes: RowChange, table: TableSchema = ITEMS, **more: Any
    ) -> Written:
        return self.deliver(destination, number, table, changes_of(table, *changes), **more)

    def deliver(
        self,
        destination: Destination,
        number: int,
        table: TableSchema,
        chunks: Iterable[Changes],
        end: int | None = 1,
        **more: Any,
    ) -> Written:
        """Write a batch as a pipeline does. Batches of one number are the same one if they have the same `end`."""
        batch = TableBatch(table, Batch("contract", number, end), chunks, stage=self.stage, **more)
        return write_batch(destination, batch)

    def staged(self, destination: Destination, *rows: RowChange, table: TableSchema = ITEMS) -> list[Staged]:
        """Copied rows, stored by a task of their own."""
        return [destination.write_rows(table, changes_of(table, *rows), self.stage)]

    def test_a_batch_is_visible_once_its_write_returns(self, destination: Destination) -> None:
        written = self.write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=None))
        assert self.rows(destination) == [{"id": 1, "name": "a", "price": 1}, {"id": 2, "name": "b", "price": None}]
        assert (written.changes, written.repeated) == (2, False)

    def test_the_same_batch_again_changes_nothing(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        self.write(destination, 1, update(id=1, name="b", price=2))
        again = self.write(destination, 1, update(id=1, name="never", price=0))
        assert again.repeated
        assert self.rows(destination) == [{"id": 1, "name": "b", "price": 2}]

    @pytest.mark.parametrize(("number", "end"), [(4, 1), (5, 2)], ids=["an earlier number", "the same number"])
    def test_a_table_that_is_newer_than_the_state_stops_and_stays_as_it_was(
        self, destination: Destination, number: int, end: int
    ) -> None:
        self.write(destination, 5, insert(id=1, name="a", price=1))
        with pytest.raises(MismatchError, match="the state was put back") as caught:
            self.write(destination, number, delete(id=1), end=end)
        assert caught.value.table == "shop.items"
        assert "tailrace resync FILE shop.items" in (caught.value.fix or "")
        assert self.rows(destination) == [{"id": 1, "name": "a", "price": 1}]

    @pytest.mark.parametrize("known", [LastBatch(2), LastBatch(1, 2)], ids=["an earlier batch", "another batch"])
    def test_a_table_that_is_not_what_the_state_knows_stops_and_stays_as_it_was(
        self, destination: Destination, known: LastBatch
    ) -> None:
        self.write(destination, 1, insert(id=1, name="a", price=1))
        with pytest.raises(MismatchError, match="does not fit the state") as caught:
            self.write(destination, 3, delete(id=1), known=known)
        assert "tailrace retry FILE shop.items" in (caught.value.fix or "")
        assert self.rows(destination) == [{"id": 1, "name": "a", "price": 1}]
        if isinstance(destination, Inspectable):
            last = destination.last_batch(ITEMS.table, "contract")
            assert last is not None
            assert (last.id, last.end) == (1, 1)
            assert destination.last_batch(ITEMS.table, "another") is None
            assert destination.last_batch(LOG.table, "contract") is None

    def test_what_a_write_says_that_the_table_holds_is_what_the_next_one_finds(self, destination: Destination) -> None:
        batches: list[tuple[RowChange, ...]] = [(insert(id=1, name="a", price=1),), (), (delete(id=1),), ()]
        known: LastBatch | None = None
        for number, changes in enumerate(batches):
            batch = TableBatch(
                ITEMS, Batch("contract", number, 7), changes_of(ITEMS, *changes), stage=self.stage, known=known
            )
            known = batch.held_after(write_batch(destination, batch))

    @pytest.mark.parametrize("number", [3, 4, 5])
    def test_a_copy_replaces_a_table_that_is_newer_than_the_state(self, destination: Destination, number: int) -> None:
        self.write(destination, 5, insert(id=9, name="old", price=9))
        known = LastBatch(1, 1)
        for at, more in ((number - 1, {"begins_copy": True}), (number, {"completes_copy": True})):
            batch = TableBatch(
                ITEMS,
                Batch("contract", at, 2),
                staged=self.copied(destination, at),
                stage=self.stage,
                known=known,
                **more,  # type: ignore[arg-type]
            )
            known = batch.held_after(write_batch(destination, batch))
        assert self.ids(destination) == [number - 1, number]
        again = self.write(destination, number, end=2, staged=self.copied(destination, 0), completes_copy=True)
        assert again.repeated
        self.write(destination, number + 1, insert(id=7, name="c", price=3), known=known)
        assert self.ids(destination) == sorted([number - 1, number, 7])

    def test_updates_and_deletes_reach_rows_of_earlier_batches(self, destination: Destination) -> None:
        self.write(destination, 0, *(insert(id=i, name=str(i), price=i) for i in range(100)))
        self.write(destination, 1, *(update(id=i, name="new", price=0) for i in range(0, 100, 2)), delete(id=1))
        changed = {i: {"id": i, "name": "new", "price": 0} for i in range(0, 100, 2)}
        left = {i: {"id": i, "name": str(i), "price": i} for i in range(3, 100, 2)}
        assert {row["id"]: row for row in self.rows(destination)} == {**changed, **left}
        assert len(self.rows(destination)) == 99

    def test_the_last_change_of_a_key_wins_within_a_batch(self, destination: Destination) -> None:
        self.write(
            destination,
            0,
            insert(id=1, name="a", price=1),
            update(id=1, name="b", price=2),
            insert(id=2, name="x", price=3),
            delete(id=2),
        )
        assert self.rows(destination) == [{"id": 1, "name": "b", "price": 2}]

    def test_a_column_that_was_left_out_keeps_its_value(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="toast", price=1), insert(id=2, name="bread", price=1))
        self.write(destination, 1, update(id=1, price=2), update(id=1, price=3), update(id=2, name="rye"))
        assert self.rows(destination) == [{"id": 1, "name": "toast", "price": 3}, {"id": 2, "name": "rye", "price": 1}]

    def test_a_changed_key_carries_along_what_was_left_out(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="one", price=1), insert(id=2, name="two", price=2))
        swap = [(1, 9), (2, 1), (9, 2)]
        steps = [half for old, new in swap for half in (delete(id=old), moved(id=new, price=new))]
        self.write(destination, 1, *steps)
        assert self.rows(destination) == [{"id": 1, "name": "two", "price": 1}, {"id": 2, "name": "one", "price": 2}]

    def test_a_row_the_destination_lacks_is_fetched_again(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        asked: list[RowDict] = []

        def refetch(table: TableSchema, keys: pa.Table) -> pa.Table:
            asked.extend(keys.to_pylist())
            return pa.Table.from_pylist([{"id": 7, "name": "fetched", "price": 70}], table.arrow)

        self.write(destination, 1, update(id=7, price=5), update(id=8, price=5), refetch=refetch)
        assert sorted(row["id"] for row in asked) == [7, 8]
        assert self.rows(destination) == [{"id": 1, "name": "a", "price": 1}, {"id": 7, "name": "fetched", "price": 5}]

    def test_without_a_way_to_fetch_it_the_table_stops_and_stays_as_it_was(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        with pytest.raises(TableError) as caught:
            self.write(destination, 1, update(id=7, price=5))
        assert caught.value.fix
        assert self.rows(destination) == [{"id": 1, "name": "a", "price": 1}]

    def test_a_truncate_takes_what_came_before_it_only(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        self.write(destination, 1, insert(id=2, name="b", price=2), TRUNCATE, insert(id=3, name="c", price=3))
        assert self.rows(destination) == [{"id": 3, "name": "c", "price": 3}]

    def log(self, destination: Destination, table: TableSchema) -> list[tuple[str, Any]]:
        """The operations and first columns of a table without a key, in the order of their positions."""
        found = sorted(self.read(destination, table), key=lambda row: row["_tailrace_position"])
        return [(row["_tailrace_op"], row[table.columns[0].name]) for row in found]

    def test_every_change_of_a_table_without_a_key_is_a_row(self, destination: Destination) -> None:
        written = self.write(destination, 0, insert(line="a"), insert(line="a"), delete(line="a"), table=LOG)
        assert self.log(destination, LOG) == [("insert", "a"), ("insert", "a"), ("delete", "a")]
        assert (written.changes, written.upserts) == (3, 3)

    def test_the_same_batch_of_a_table_without_a_key_adds_no_row_again(self, destination: Destination) -> None:
        self.write(destination, 0, insert(line="a"), table=LOG)
        assert self.write(destination, 0, insert(line="never"), table=LOG).repeated
        self.deliver(destination, 1, LOG, changes_of(LOG, insert(line="a"), commit=9))
        assert self.log(destination, LOG) == [("insert", "a"), ("insert", "a")]

    def test_a_truncate_of_a_table_without_a_key_is_a_row_and_removes_none(self, destination: Destination) -> None:
        self.write(destination, 0, insert(line="a"), table=LOG)
        self.deliver(destination, 1, LOG, changes_of(LOG, TRUNCATE, insert(line="b"), commit=9))
        assert self.log(destination, LOG) == [("insert", "a"), ("truncate", None), ("insert", "b")]

    def test_a_new_column_of_a_table_without_a_key_has_its_initial_value_in_older_rows(
        self, destination: Destination
    ) -> None:
        self.write(destination, 0, insert(line="a"), insert(line="b"), table=LOG)
        wider = with_columns(LOG, Column("size", pa.int64(), number=2, initial=pa.scalar(7)))
        self.deliver(destination, 1, wider, changes_of(wider, insert(line="c", size=9), commit=9))
        assert [row["size"] for row in self.rows(destination, wider)] == [7, 7, 9]

    def test_a_copy_of_a_table_without_a_key_takes_the_place_of_its_log(self, destination: Destination) -> None:
        self.write(destination, 0, insert(line="old"), delete(line="old"), table=LOG)
        staged = self.staged(destination, read(line="copied"), read(line="copied"), table=LOG)
        self.write(destination, 1, table=LOG, staged=staged, begins_copy=True, completes_copy=True)
        assert [row["line"] for row in self.rows(destination, LOG)] == ["copied", "copied"]

    def copied(self, destination: Destination, *ids: int, table: TableSchema = ITEMS) -> list[Staged]:
        return self.staged(destination, *(read(id=number) for number in ids), table=table)

    def ids(self, destination: Destination, table: TableSchema = ITEMS) -> list[int]:
        return sorted(row["id"] for row in self.rows(destination, table))

    def test_a_new_column_is_null_in_old_rows(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        wider = TableSchema(ITEMS.table, (*ITEMS.columns, Column("size", pa.int64(), number=4)), ("id",), 2)
        old = changes_of(ITEMS, insert(id=2, name="b", price=2))
        new = changes_of(wider, insert(id=3, name="c", price=3, size=30), commit=9)
        self.deliver(destination, 1, wider, [*old, *new])
        assert [row["size"] for row in self.rows(destination, wider)] == [None, None, 30]

    def test_a_table_follows_its_schema_without_any_change(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        wider = with_columns(ITEMS, Column("size", pa.int64(), number=4))
        assert not self.write(destination, 1, table=wider).repeated
        assert self.rows(destination, wider) == [{"id": 1, "name": "a", "price": 1, "size": None}]
        assert self.write(destination, 1, table=wider).repeated
        assert not self.write(destination, 2, table=wider).repeated
        assert not self.write(destination, 2, table=wider).repeated

    def test_a_new_column_has_its_initial_value_in_every_older_row(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
        wider = with_columns(ITEMS, Column("size", pa.int64(), number=4, initial=pa.scalar(7)))
        old = changes_of(ITEMS, insert(id=3, name="c", price=3), update(id=2, name="B", price=2))
        new = changes_of(wider, insert(id=4, name="d", price=4, size=40), update(id=3, price=33), commit=9)
        self.deliver(destination, 1, wider, [*old, *new])
        assert [(row["name"], row["price"], row["size"]) for row in self.rows(destination, wider)] == [
            ("a", 1, 7),
            ("B", 2, 7),
            ("c", 33, 7),
            ("d", 4, 40),
        ]

    def test_an_initial_value_comes_without_any_change(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        wider = with_columns(ITEMS, Column("size", pa.int64(), number=4, initial=pa.scalar(7)))
        self.write(destination, 1, table=wider)
        assert self.write(destination, 1, table=wider).repeated
        self.write(destination, 2, update(id=1, name="b"), table=wider)
        assert self.rows(destination, wider) == [{"id": 1, "name": "b", "price": 1, "size": 7}]

    def test_rows_written_after_a_column_was_dropped_do_without_it(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1), table=PLAIN)
        narrower = altered(PLAIN, price=None)
        old = changes_of(PLAIN, insert(id=2, name="b", price=2))
        new = changes_of(narrower, insert(id=3, name="c"), update(id=1, name="A"), commit=9)
        self.deliver(destination, 1, narrower, [*old, *new])
        assert [row["name"] for row in self.rows(destination, narrower)] == ["A", "b", "c"]

    def test_a_column_dropped_and_added_again_is_another_column(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2), table=PLAIN)
        again = altered(PLAIN, name=None, price=Column("price", pa.string(), number=4, initial=pa.scalar("none")))
        new = changes_of(again, insert(id=3, price="3"), commit=9)
        self.deliver(destination, 1, again, [*changes_of(PLAIN, update(id=2, price=22)), *new])
        assert [row["price"] for row in self.rows(destination, again)] == ["none", "none", "3"]
        third = with_columns(again, Column("name", pa.string(), number=5))
        self.write(destination, 2, update(id=3, name="c"), table=third)
        assert [row["name"] for row in self.rows(destination, third)] == [None, None, "c"]

    def test_columns_may_be_renamed_to_each_others_names(self, destination: Destination) -> None:
        table = altered(PLAIN, price=Column("other", pa.string(), number=3))
        self.write(destination, 0, insert(id=1, name="n", other="o"), table=table)
        swapped = altered(
            table, name=Column("other", pa.string(), number=2), other=Column("name", pa.string(), number=3)
        )
        old = changes_of(table, insert(id=2, name="n2", other="o2"))
        new = changes_of(swapped, update(id=1, other="N"), commit=9)
        self.deliver(destination, 1, swapped, [*old, *new])
        assert self.rows(destination, swapped) == [
            {"id": 1, "other": "N", "name": "o"},
            {"id": 2, "other": "n2", "name": "o2"},
        ]

    def test_a_renamed_key_still_finds_its_rows(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
        columns = (Column("number", pa.int64(), False, number=1), *ITEMS.columns[1:])
        renamed = TableSchema(ITEMS.table, columns, ("number",), 2)
        old = changes_of(ITEMS, delete(id=2), insert(id=3, name="c", price=3))
        new = changes_of(renamed, update(number=1, price=10), delete(number=3), commit=9)
        self.deliver(destination, 1, renamed, [*old, *new])
        assert self.rows(destination, renamed) == [{"number": 1, "name": "a", "price": 10}]

    def test_a_type_that_cannot_hold_the_old_values_stops_the_table_and_leaves_it(
        self, destination: Destination
    ) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        other = altered(ITEMS, name=Column("name", pa.int32(), number=2))
        with pytest.raises(SchemaChangedError) as caught:
            self.write(destination, 1, table=other)
        assert caught.value.fix
        assert self.rows(destination) == [{"id": 1, "name": "a", "price": 1}]

    def test_every_value_comes_back_as_it_was(self, destination: Destination) -> None:
        table, rows = values_of_every_type()
        self.write(destination, 0, *(RowChange(Op.INSERT, row) for row in rows), table=table)
        assert self.rows(destination, table) == rows

    def test_tables_of_any_name_are_kept_apart(self, destination: Destination) -> None:
        names = [
            "plain",
            'a"b',
            "a.b",
            "a/b",
            "../items",
            "..",
            "🦆",
            "é" * 31,
            "con",
            "_hidden",
            "a%2Fb",
            "select",
            " ",
        ]
        tables = [TableSchema(TableName("shop", name), ITEMS.columns, ("id",)) for name in names]
        for number, table in enumerate(tables):
            self.write(destination, 0, insert(id=number, name="x", price=0), table=table)
        assert [self.rows(destination, table)[0]["id"] for table in tables] == list(range(len(tables)))

    def test_checking_makes_nothing_and_finds_nothing_wrong(self, destination: Destination) -> None:
        for tables in ([ITEMS], [], None):
            assert not [finding for finding in destination.check(tables) if finding.level == "error"]
        assert self.rows(destination) == []

    def test_housekeeping_changes_no_row(self, destination: Destination) -> None:
        assert destination.maintain(ITEMS.table) is None
        for number in range(5):
            self.write(destination, number, insert(id=number, name="x", price=number))
        before = self.rows(destination)
        destination.maintain(ITEMS.table)
        assert self.rows(destination) == before
        assert self.write(destination, 4, delete(id=0)).repeated

    def test_it_travels_to_another_process(self, destination: Destination) -> None:
        there: Destination = pickle.loads(pickle.dumps(destination))  # noqa: S301
        self.write(there, 0, insert(id=1, name="a", price=1))
        assert self.write(destination, 0, delete(id=1)).repeated
        assert destination.name == there.name
        there.shutdown()


class DestinationContract(ChangeContract):
    """Inherit it, give a `destination` fixture and `read`, and pass. For `copy_mode` `whole`, and `own`."""

    def test_copied_rows_show_with_the_commit_that_names_them_and_not_before(self, destination: Destination) -> None:
        lost = self.staged(destination, read(id=9, name="lost", price=9))
        kept = [
            one for number in (1, 2) for one in self.staged(destination, read(id=number, name="copied", price=number))
        ]
        assert (lost[0].rows, kept[0].rows) == (1, 1)
        assert self.rows(destination) == []
        self.write(destination, 0, staged=kept, begins_copy=True, completes_copy=True)
        assert self.ids(destination) == [1, 2]

    def test_a_row_that_was_copied_twice_is_there_once_as_it_was_copied_last(self, destination: Destination) -> None:
        first = self.staged(destination, read(id=1, name="old", price=1))
        self.write(destination, 0, staged=first, begins_copy=True)
        second = self.staged(destination, read(id=1, name="new", price=1), read(id=2, name="b", price=2))
        self.write(destination, 1, staged=second, completes_copy=True)
        assert self.rows(destination) == [{"id": 1, "name": "new", "price": 1}, {"id": 2, "name": "b", "price": 2}]

    def test_a_copy_in_one_batch_replaces_all_there_was(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        for attempt in range(2):
            staged = self.staged(destination, read(id=2, name="b", price=2))
            written = self.write(destination, 1, staged=staged, begins_copy=True, completes_copy=True)
            assert written.repeated == bool(attempt)
            assert self.rows(destination) == [{"id": 2, "name": "b", "price": 2}]

    def test_a_copy_may_have_columns_of_other_types(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        columns = tuple(replace(each, type=pa.string()) if each.name == "price" else each for each in ITEMS.columns)
        other = replace(ITEMS, columns=columns, version=2)
        staged = self.staged(destination, read(id=1, name="a", price="one"), table=other)
        self.write(destination, 1, table=other, staged=staged, begins_copy=True, completes_copy=True)
        self.write(destination, 2, insert(id=2, name="b", price="two"), table=other)
        assert self.rows(destination, other) == [
            {"id": 1, "name": "a", "price": "one"},
            {"id": 2, "name": "b", "price": "two"},
        ]

    def test_a_copy_of_an_empty_table_leaves_an_empty_table(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=1, name="a", price=1))
        self.write(destination, 1, staged=self.staged(destination), begins_copy=True, completes_copy=True)
        assert self.rows(destination) == []

    def test_a_copy_into_a_table_with_rows_shows_none_before_all(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=9, name="old", price=9))
        self.write(destination, 1, staged=self.copied(destination, 1), begins_copy=True)
        self.write(destination, 2, staged=self.copied(destination, 2, 3))
        assert self.ids(destination) == [9]
        self.write(destination, 3, delete(id=3), staged=self.copied(destination, 4), completes_copy=True)
        assert self.ids(destination) == [1, 2, 4]
        self.write(destination, 4, update(id=1, price=5), insert(id=5, name="e", price=5))
        assert self.ids(destination) == [1, 2, 4, 5]

    def test_a_copy_may_end_with_a_batch_that_copies_nothing(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=9, name="old", price=9))
        self.write(destination, 1, staged=self.copied(destination, 1), begins_copy=True)
        self.write(destination, 2, completes_copy=True)
        assert self.ids(destination) == [1]

    def test_batches_of_a_copy_that_are_repeated_are_there_once(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=9, name="old", price=9))
        for _ in range(2):
            self.write(destination, 1, staged=self.copied(destination, 1), begins_copy=True)
        for _ in range(2):
            self.write(destination, 2, staged=self.copied(destination, 2))
        for attempt in range(2):
            last = self.write(destination, 3, staged=self.copied(destination, 3), completes_copy=True)
            assert last.repeated == bool(attempt)
        assert self.ids(destination) == [1, 2, 3]

    def test_a_copy_that_begins_again_forgets_what_it_copied_before(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=9, name="old", price=9))
        self.write(destination, 1, staged=self.copied(destination, 1), begins_copy=True)
        self.write(destination, 2, staged=self.copied(destination, 2))
        self.write(destination, 3, staged=self.copied(destination, 3), begins_copy=True)
        assert self.ids(destination) == [9]
        self.write(destination, 4, staged=self.copied(destination, 4), completes_copy=True)
        assert self.ids(destination) == [3, 4]

    def test_a_copy_may_bring_another_table_and_span_versions(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=9, name="old", price=9), table=PLAIN)
        first = altered(PLAIN, price=Column("label", pa.string(), number=7))
        second = altered(first, label=Column("tag", pa.string(), number=7), name=None)
        last = with_columns(second, Column("size", pa.int64(), number=8, initial=pa.scalar(4)))
        self.write(
            destination,
            1,
            table=first,
            staged=self.staged(destination, read(id=1, label="x"), table=first),
            begins_copy=True,
        )
        self.write(destination, 2, table=second, staged=self.staged(destination, read(id=2, tag="y"), table=second))
        staged = self.staged(destination, read(id=3, tag="z", size=5), table=last)
        self.write(destination, 3, table=last, staged=staged, completes_copy=True)
        assert self.rows(destination, last) == [
            {"id": 1, "tag": "x", "size": 4},
            {"id": 2, "tag": "y", "size": 4},
            {"id": 3, "tag": "z", "size": 5},
        ]

    def test_housekeeping_leaves_a_copy_that_is_underway_alone(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=9, name="old", price=9))
        self.write(destination, 1, staged=self.copied(destination, 1), begins_copy=True)
        destination.maintain(ITEMS.table)
        self.write(destination, 2, staged=self.copied(destination, 2), completes_copy=True)
        assert self.ids(destination) == [1, 2]


class ChunkedCopyContract(DestinationContract):
    """For `copy_mode = "own"`: besides the above, a first copy shows its rows batch by batch."""

    def test_a_first_copy_shows_its_rows_batch_by_batch(self, destination: Destination) -> None:
        self.write(destination, 0, staged=self.copied(destination, 1), begins_copy=True)
        assert self.ids(destination) == [1]
        self.write(destination, 1, staged=self.copied(destination, 2))
        assert self.ids(destination) == [1, 2]
        self.write(destination, 2, staged=self.copied(destination, 3), completes_copy=True)
        assert self.ids(destination) == [1, 2, 3]

    def test_changes_reach_rows_that_came_with_the_same_batch_of_a_copy(self, destination: Destination) -> None:
        kept = [
            one
            for number in (1, 2, 3)
            for one in self.staged(destination, read(id=number, name="copied", price=number))
        ]
        self.write(destination, 0, update(id=2, price=20), delete(id=3), staged=kept, begins_copy=True)
        assert self.rows(destination) == [
            {"id": 1, "name": "copied", "price": 1},
            {"id": 2, "name": "copied", "price": 20},
        ]

    def test_a_copied_row_that_shows_already_is_replaced(self, destination: Destination) -> None:
        first = self.staged(destination, read(id=1, name="old", price=1))
        self.write(destination, 0, staged=first, begins_copy=True)
        second = self.staged(destination, read(id=1, name="new", price=1), read(id=2, name="b", price=2))
        self.write(destination, 1, staged=second)
        assert self.rows(destination) == [{"id": 1, "name": "new", "price": 1}, {"id": 2, "name": "b", "price": 2}]


class StreamedCopyContract(ChangeContract):
    """For `copy_mode = "stream"`: a copy begins with nothing, and shows its rows batch by batch."""

    def test_a_copy_begins_with_an_empty_table_and_shows_its_rows_batch_by_batch(
        self, destination: Destination
    ) -> None:
        self.write(destination, 0, insert(id=9, name="old", price=9))
        self.write(destination, 1, staged=self.copied(destination, 1), begins_copy=True)
        assert self.ids(destination) == [1]
        self.write(destination, 2, staged=self.copied(destination, 2), completes_copy=True)
        assert self.ids(destination) == [1, 2]

    def test_the_first_batch_of_a_copy_may_be_repeated(self, destination: Destination) -> None:
        self.write(destination, 0, insert(id=9, name="old", price=9))
        for _ in range(2):
            self.write(destination, 1, staged=self.copied(destination, 1), begins_copy=True)
            assert self.ids(destination) == [1]

    def test_a_dropped_table_forgets_its_rows_and_its_batches(self, destination: Destination) -> None:
        self.write(destination, 3, insert(id=1, name="a", price=1))
        destination.drop_table_for_copy(ITEMS)
        destination.drop_table_for_copy(ITEMS)
        assert self.rows(destination) == []
        assert not self.write(destination, 0, insert(id=2, name="b", price=2)).repeated
        assert self.rows(destination) == [{"id": 2, "name": "b", "price": 2}]


def values_of_every_type() -> tuple[TableSchema, list[RowDict]]:
    """A table with a column of each type that sources give, and rows at the edges of each."""
    utc = datetime.UTC
    instants = [datetime.datetime(1, 1, 1, tzinfo=utc), datetime.datetime(2024, 2, 29, 0, 0, 0, 4, utc), None]
    cases: Sequence[tuple[pa.DataType, Iterable[Any]]] = [
        (pa.bool_(), [True, False, None]),
        (pa.int16(), [-(2**15), 2**15 - 1, None]),
        (pa.int32(), [-(2**31), 2**31 - 1, None]),
        (pa.int64(), [-(2**63), 2**63 - 1, None]),
        (pa.float32(), [1.5, -0.25, None]),
        (pa.float64(), [1e308, 5e-324, None]),
        (pa.decimal128(38, 10), [decimal.Decimal("-123456789012345678.0123456789"), decimal.Decimal(0), None]),
        (pa.string(), ["", "ünï 🦆 \"'\\\n", None]),
        (pa.binary(), [b"", b"\x00\xff", None]),
        (pa.date32(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None]),
        (pa.timestamp("us"), [datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999), None]),  # noqa: DTZ001
        (pa.timestamp("us", "UTC"), instants),
        (pa.list_(pa.int32()), [[], [1, None, 3], None]),
        (pa.list_(pa.string()), [["a", None], [""], None]),
    ]  # fmt: skip
    columns = [Column(f"c{index}", kind, number=index + 2) for index, (kind, _) in enumerate(cases)]
    table = TableSchema(TableName("shop", "values"), (Column("id", pa.int64(), False, number=1), *columns), ("id",))
    rows = zip(*(values for _, values in cases), strict=True)
    return table, [
        {"id": index, **dict(zip((c.name for c in columns), row, strict=True))} for index, row in enumerate(rows)
    ]
