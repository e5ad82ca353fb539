"""The table one gets by replaying changes one by one: what collapse and every destination are measured against."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from tailrace.destination import Batch, Destination, TableBatch
from tailrace.model.change import Changes, Op, pack_unchanged
from tailrace.model.schema import Column, TableName, TableSchema

Key = tuple[Any, ...]
Row = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """One change: its row image, and the columns it left out."""

    op: Op
    row: Row
    left_out: frozenset[str] = frozenset()
    follows: bool = False  # the insert half of a changed key: in the commit of the delete before it


@dataclass
class Upstream:
    """A table that is changed at random; it knows every row, so it also says what the log leaves out."""

    table: TableSchema
    rows: dict[Key, Row] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @property
    def others(self) -> list[str]:
        return [column.name for column in self.table.columns if column.name not in self.table.key]

    def upsert(self, key: Key, values: Row, left_out: frozenset[str]) -> None:
        names = dict(zip(self.table.key, key, strict=True))
        if key not in self.rows:
            self.rows[key] = {**values, **names}
            self.events.append(Event(Op.INSERT, self.rows[key]))
            return
        kept = {name: self.rows[key][name] for name in left_out}
        self.rows[key] = {**values, **kept, **names}
        sent = {name: None if name in left_out else value for name, value in self.rows[key].items()}
        self.events.append(Event(Op.UPDATE, sent, left_out))

    def delete(self, key: Key) -> None:
        if self.rows.pop(key, None) is not None:
            self.events.append(Event(Op.DELETE, self._only(key)))

    def move(self, old: Key, new: Key, values: Row, left_out: frozenset[str]) -> None:
        if old not in self.rows or new in self.rows:
            return
        before = self.rows.pop(old)
        kept = {name: before[name] for name in left_out}
        self.rows[new] = {**values, **kept, **dict(zip(self.table.key, new, strict=True))}
        sent = {name: None if name in left_out else value for name, value in self.rows[new].items()}
        self.events += [Event(Op.DELETE, self._only(old)), Event(Op.INSERT, sent, left_out, follows=True)]

    def truncate(self) -> None:
        self.rows.clear()
        self.events.append(Event(Op.TRUNCATE, dict.fromkeys(self.table.arrow.names)))

    def _only(self, key: Key) -> Row:
        return {**dict.fromkeys(self.others), **dict(zip(self.table.key, key, strict=True))}


def as_changes(table: TableSchema, events: list[Event], size: int, first_commit: int = 1) -> list[Changes]:
    """The events as changes, cut into chunks of `size`."""
    commit, ordinal = first_commit, 0
    places: list[tuple[int, int]] = []
    for event in events:
        commit, ordinal = (commit, ordinal + 1) if event.follows else (commit + 1, 0)
        places.append((commit, ordinal))
    names = table.arrow.names
    result: list[Changes] = []
    for start in range(0, len(events), size):
        part, at = events[start : start + size], places[start : start + size]
        result.append(
            Changes.build(
                table,
                pa.array([event.row for event in part], table.row_type),
                op=np.array([event.op for event in part], np.int8),
                commit=np.array([commit for commit, _ in at], np.int64),
                ordinal=np.array([ordinal for _, ordinal in at], np.int64),
                unchanged=pack_unchanged(np.array([[name in event.left_out for name in names] for event in part])),
            )
        )
    return result


def table_of(*key_types: pa.DataType) -> TableSchema:
    """A table with such a key and three more columns."""
    keys = tuple(Column(f"k{index}", kind, False, number=index + 1) for index, kind in enumerate(key_types))
    others = (Column("a", pa.int32()), Column("b", pa.string()), Column("c", pa.timestamp("us")))
    columns = (others[0], *keys, *others[1:])
    return TableSchema(TableName("public", "t"), columns, tuple(column.name for column in keys))


VALUES = st.fixed_dictionaries(
    {
        "a": st.none() | st.integers(-5, 5),
        "b": st.none() | st.text("xyé", max_size=3),
        "c": st.none() | st.datetimes(),
    }
)
LEFT_OUT = st.frozensets(st.sampled_from(["a", "b", "c"]))


@st.composite
def histories(draw: st.DrawFn, table: TableSchema, keys: list[Key], cuts: int = 1) -> list[list[Event]]:
    """What happened to a table in `cuts` batches."""
    upstream = Upstream(table)
    batches: list[list[Event]] = []
    some_key = st.sampled_from(keys)
    for _ in range(cuts):
        upstream.events = []
        for _ in range(draw(st.integers(0, 14))):
            action = draw(st.sampled_from("uuuuddmmmst"))
            if action == "u":
                upstream.upsert(draw(some_key), draw(VALUES), draw(LEFT_OUT))
            elif action == "d":
                upstream.delete(draw(some_key))
            elif action == "m":
                upstream.move(draw(some_key), draw(some_key), draw(VALUES), draw(LEFT_OUT))
            elif action == "s":
                one, two, spare = keys[0], keys[1], keys[2]
                for old, new in ((one, spare), (two, one), (spare, two)):
                    upstream.move(old, new, draw(VALUES), draw(LEFT_OUT))
            elif draw(st.integers(0, 3)) == 0:
                upstream.truncate()
        batches.append(upstream.events)
    return batches


def replay(table: TableSchema, events: list[Event], rows: dict[Key, Row]) -> dict[Key, Row]:
    """Apply the events one by one to what was there, taking columns left out from the row of before."""
    rows = dict(rows)
    moved: Row = {}
    for event in events:
        key = tuple(event.row[name] for name in table.key)
        if event.op is Op.TRUNCATE:
            rows.clear()
        elif event.op is Op.DELETE:
            moved = rows.pop(key, {})
        else:
            old = moved if event.follows else rows.get(key, {})
            rows[key] = {name: old[name] if name in event.left_out else event.row[name] for name in event.row}
    return rows


@dataclass(frozen=True)
class Step:
    """What happened to a table at one version."""

    table: TableSchema
    events: list[Event]


WIDER = {pa.int16(): pa.int32(), pa.int32(): pa.int64()}
NAMES = ["a", "b", "c", "d"]
SHIFTING = TableSchema(
    TableName("public", "t"),
    (
        Column("p", pa.int32(), number=1),
        Column("k0", pa.int64(), False, number=2),
        Column("a", pa.int16(), number=3),
        Column("b", pa.string(), number=4),
    ),
    ("k0",),
)
"""Its columns come and go, but for the first, which a destination may partition by."""


def migrate(rows: dict[Key, Row], old: TableSchema, new: TableSchema) -> dict[Key, Row]:
    """The rows as they are once the table has its new columns: those added since hold their initial value."""
    names = {column.number: column.name for column in old.columns}
    initial = {column.number: column.initial.as_py() if column.initial else None for column in new.columns}
    return {
        key: {
            column.name: row[names[column.number]] if column.number in names else initial[column.number]
            for column in new.columns
        }
        for key, row in rows.items()
    }


def replay_steps(steps: list[Step], table: TableSchema, rows: dict[Key, Row]) -> dict[Key, Row]:
    """Apply the steps one by one to the rows of a table that had the columns of `table`."""
    for step in steps:
        rows = replay(step.table, step.events, migrate(rows, table, step.table))
        table = step.table
    return rows


def step_changes(steps: list[Step], size: int, first_commit: int = 1) -> list[Changes]:
    """The steps as changes, cut into chunks of `size` that hold one version each."""
    result: list[Changes] = []
    for step in steps:
        result += as_changes(step.table, step.events, size, first_commit)
        first_commit += len(step.events) + 1
    return result


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    return st.none() | (st.text("xyé", max_size=3) if kind == pa.string() else st.integers(-5, 5))


@st.composite
def alterations(draw: st.DrawFn, table: TableSchema) -> TableSchema:
    """The next version of a table."""
    columns = list(table.columns)
    movable = [at for at, column in enumerate(columns) if column.name not in (*table.key, "p")]
    action = draw(st.sampled_from(["add", "drop", "add again", "rename", "swap", "widen", "rename key"]))
    if action == "add again" and movable:
        name = columns.pop(draw(st.sampled_from(movable))).name
        free, action = [name], "add"
    else:
        free = [name for name in NAMES if name not in table.arrow.names]
    if action == "add" and free:
        kind = draw(st.sampled_from([pa.int16(), pa.int32(), pa.string()]))
        initial = draw(values_of(kind))
        number = 100 + table.version
        scalar = None if initial is None else pa.scalar(initial, kind)
        columns.append(Column(draw(st.sampled_from(free)), kind, number=number, initial=scalar))
    elif action == "drop" and movable:
        columns.pop(draw(st.sampled_from(movable)))
    elif action == "rename" and movable and free:
        at = draw(st.sampled_from(movable))
        columns[at] = replace(columns[at], name=draw(st.sampled_from(free)))
    elif action == "swap" and len(movable) > 1:
        one, two = draw(st.permutations(movable))[:2]
        names = columns[one].name, columns[two].name
        columns[one], columns[two] = replace(columns[one], name=names[1]), replace(columns[two], name=names[0])
    elif action == "widen":
        for at in movable:
            columns[at] = replace(columns[at], type=WIDER.get(columns[at].type, columns[at].type))
    key = table.key
    if action == "rename key":
        key = ("k1",) if table.key == ("k0",) else ("k0",)
        columns = [replace(column, name=key[0]) if column.name in table.key else column for column in columns]
    return TableSchema(table.table, tuple(columns), key, table.version + 1)


@st.composite
def shifting_histories(draw: st.DrawFn, cuts: int) -> list[list[Step]]:
    """What happened to a table whose columns change too, in `cuts` batches; each ends at its last step's version."""
    upstream = Upstream(SHIFTING)
    some_key = st.sampled_from([(1,), (2,), (3,), (4,)])
    batches: list[list[Step]] = []
    for _ in range(cuts):
        upstream.events = []
        steps = [Step(upstream.table, upstream.events)]
        for _ in range(draw(st.integers(0, 12))):
            values = st.fixed_dictionaries({c.name: values_of(c.type) for c in upstream.table.columns})
            left_out = st.frozensets(st.sampled_from(upstream.others))
            action = draw(st.sampled_from("uuuudmmtaaa"))
            if action == "u":
                upstream.upsert(draw(some_key), draw(values), draw(left_out))
            elif action == "d":
                upstream.delete(draw(some_key))
            elif action == "m":
                upstream.move(draw(some_key), draw(some_key), draw(values), draw(left_out))
            elif action == "t" and draw(st.integers(0, 3)) == 0:
                upstream.truncate()
            elif action == "a":
                table = draw(alterations(upstream.table))
                upstream.rows, upstream.events = migrate(upstream.rows, upstream.table, table), []
                upstream.table = table
                steps.append(Step(table, upstream.events))
        batches.append(steps)
    return batches


def delivered(
    destination: Destination, batches: Iterable[list[Step]]
) -> Iterator[tuple[TableSchema, list[Changes], dict[Key, Row]]]:
    """Each batch written, and once more as after a crash: the table after it, its changes, and the rows there are."""
    table, expected = SHIFTING, dict[Key, Row]()
    for number, steps in enumerate(batches):
        expected = replay_steps(steps, table, expected)
        table = steps[-1].table
        changes = step_changes(steps, 5, first_commit=100 * number)
        for _ in range(2):
            destination.write_changes(TableBatch(table, Batch("p", number), changes))
        yield table, changes, expected


UTC = datetime.UTC
KINDS: dict[str, tuple[tuple[pa.DataType, ...], list[Key]]] = {
    "int64": ((pa.int64(),), [(1,), (2,), (3,), (2**62,)]),
    "dense int64": ((pa.int64(),), [(1,), (2,), (3,), (4,)]),
    "int16": ((pa.int16(),), [(-1,), (2,), (3,)]),
    "uint64": ((pa.uint64(),), [(1,), (2**64 - 1,), (3,)]),
    "bool and int": ((pa.bool_(), pa.int32()), [(True, 1), (False, 1), (True, 2)]),
    "text": ((pa.string(),), [("",), ("a",), ("ab",), ("é",)]),
    "large text": ((pa.large_string(),), [("",), ("a",), ("1",)]),
    "two texts": ((pa.string(), pa.string()), [("a", "bc"), ("ab", "c"), ("", "abc"), ("1:a", "")]),
    "decimal": ((pa.decimal128(10, 2),), [(decimal.Decimal("1.10"),), (decimal.Decimal("-1"),), (decimal.Decimal(0),)]),
    "wide decimal": (
        (pa.decimal256(50, 0),),
        [(decimal.Decimal(10**40),), (decimal.Decimal(1),), (decimal.Decimal(2),)],
    ),
    "date": ((pa.date32(),), [(datetime.date(2020, 1, day),) for day in (1, 2, 3)]),
    "instant": ((pa.timestamp("us", "UTC"),), [(datetime.datetime(2020, 1, 1, 0, 0, 0, us, UTC),) for us in (1, 2, 3)]),
    "clock": ((pa.timestamp("us"),), [(datetime.datetime(1, 1, 1, 0, 0, 0, us),) for us in (1, 2, 3)]),  # noqa: DTZ001
    "time": ((pa.time64("us"),), [(datetime.time(1, 1, 1, us),) for us in (1, 2, 3)]),
    "binary": ((pa.binary(),), [(b"",), (b"\x00",), (b"\xff",)]),
    "float": ((pa.float64(),), [(1.5,), (float("inf"),), (-2.0,)]),
}
