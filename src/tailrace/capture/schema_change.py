"""DDL as changes of sqlite_schema: the differences between two readings of it, in an order that can be replayed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tailrace.capture.layout import DELETE, INSERT, UPDATE, CaptureConnection, is_internal, own_tables, read_table_shape
from tailrace.capture.record import Value, encode

SQL = 4
"""The index of `sql` in a row of sqlite_schema: type, name, tbl_name, rootpage, sql."""

TRIGGER_PREFIX = "tailrace:"

SchemaRow = tuple[Value, ...]
_TABLES_FIRST = {"table": 0, "view": 1, "index": 2, "trigger": 3}


@dataclass(frozen=True)
class SchemaChange:
    """One row of sqlite_schema that was added (`before` is None), removed (`after` is None) or changed."""

    id: int
    before: SchemaRow | None
    after: SchemaRow | None
    statement: str | None = None

    @property
    def type(self) -> int:
        return INSERT if self.before is None else DELETE if self.after is None else UPDATE

    @property
    def updates(self) -> bytes | None:
        """The `updates` record of an update: only `sql` changed, and its value is the statement that changed it."""
        if self.type != UPDATE or self.statement is None:
            return None
        return encode((0, 0, 0, 0, 1, None, None, None, None, self.statement))


def read_schema(connection: CaptureConnection) -> dict[int, SchemaRow]:
    """The tables, indexes, views and triggers of the application, by their rowid in sqlite_schema."""
    own = own_tables(connection)
    sql = "SELECT rowid, type, name, tbl_name, rootpage, sql FROM sqlite_schema WHERE sql IS NOT NULL"
    return {
        int(rowid): tuple(entry)
        for rowid, *entry in connection.execute(sql).fetchall()
        if not (is_internal(entry[1]) or entry[2] in own or is_own_trigger(entry[0], entry[1]))
    }


def is_own_trigger(kind: str, name: str) -> bool:
    return kind == "trigger" and name.startswith(TRIGGER_PREFIX)


def compare(
    before: Mapping[int, SchemaRow], after: Mapping[int, SchemaRow], statement: str | None = None
) -> list[SchemaChange]:
    """The differences of two schemas: first what was removed (tables last), then changed, then added (tables first)."""
    common = before.keys() & after.keys()
    # If a rowid was freed and reused for another object, that is a drop and a create.
    same = {key for key in common if before[key][0] == after[key][0] and _related(before[key], after[key])}
    gone = [SchemaChange(key, before[key], None) for key in before.keys() - same]
    changed = [
        SchemaChange(key, before[key], after[key], statement)
        for key in sorted(same)
        if _differ(before[key], after[key])
    ]
    come = [SchemaChange(key, None, after[key]) for key in after.keys() - same]
    return [*_ordered(gone)[::-1], *changed, *_ordered(come)]


def _related(before: SchemaRow, after: SchemaRow) -> bool:
    return before[1] == after[1] or before[3] == after[3] != 0


def _differ(before: SchemaRow, after: SchemaRow) -> bool:
    # Ignore the root page: SQLite may move it, which is not a schema change.
    return (before[1], before[2], before[SQL]) != (after[1], after[2], after[SQL])


def _ordered(changes: Iterable[SchemaChange]) -> list[SchemaChange]:
    def rank(change: SchemaChange) -> tuple[int, int]:
        entry = change.after or change.before
        assert entry is not None
        return _TABLES_FIRST[str(entry[0])], change.id

    return sorted(changes, key=rank)


def column_names(sql: str) -> list[str]:
    """The stored columns of the table that this CREATE TABLE statement creates."""
    scratch = sqlite3.connect(":memory:")
    try:
        scratch.execute(sql)
        name = scratch.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchone()[0]
        return [field.name for field in read_table_shape(scratch, name).fields]
    finally:
        scratch.close()
