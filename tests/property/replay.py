"""The table one gets by replaying changes one by one: what collapse and every destination are measured against."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from tailrace.change import Changes, Op, pack_unchanged
from tailrace.schema import Column, TableName, TableSchema

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
