# ruff: noqa: S608 - every name in the SQL here is quoted
"""Operations of the tape as SQL on another database, or on the same one to undo them.

The application's own triggers are set aside while operations run: what they did is on the tape already.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from tailrace.errors import SchemaChangedError, TableError
from tailrace.sqlite.change import Commit, Delete, Insert, Operation, RecordRow, Schema, Update
from tailrace.sqlite.layout import TableShape, quoted, read_table_shape
from tailrace.sqlite.record import Value
from tailrace.sqlite.schema_change import is_own_trigger
from tailrace.sqlite.schema_replay import alter


class TapeReplay:
    """Runs operations in the caller's transaction, in order. `finish` must follow before it commits.

    Updates write only the columns that changed. Raises TableError if a row that an operation is about is not there,
    SchemaChangedError if its table does not fit: then the databases are not what they were taken for, and nothing
    of the transaction may stay.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._shapes: dict[str, TableShape] = {}
        self._triggers: dict[str, str] = {}
        for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_schema").fetchall():
            if kind == "trigger" and not is_own_trigger(kind, name):
                self._triggers[name] = sql
                connection.execute(f"DROP TRIGGER {quoted(name)}")

    def run(self, operation: Operation) -> None:
        match operation:
            case Insert(table, rowid, row):
                self._insert(self._shape(table, row), rowid, row)
            case Update(table, rowid, row, changed):
                self._update(self._shape(table, row), rowid, row, changed)
            case Delete(table, rowid):
                shape = self._shape(table, ())
                self._execute(table, f"DELETE FROM {quoted(table)} WHERE {shape.rowid} = ?", [rowid])
            case Schema(before, after, statement):
                self._shapes.clear()
                self._change_schema(before, after, statement)
            case Commit():
                pass

    def finish(self) -> None:
        """Put the triggers back."""
        for sql in self._triggers.values():
            self._connection.execute(sql)

    def _shape(self, table: str, row: RecordRow) -> TableShape:
        if table not in self._shapes:
            self._shapes[table] = read_table_shape(self._connection, table)
        shape = self._shapes[table]
        if len(row) > len(shape.fields):
            raise SchemaChangedError(
                f"a row of {len(row)} values for a table of {len(shape.fields)} columns",
                fix="the replica must start from a copy of the database as it was at the tape's beginning",
                table=table,
            )
        return shape

    def _insert(self, shape: TableShape, rowid: int, row: RecordRow) -> None:
        names = [shape.rowid, *(quoted(field.name) for field in shape.fields[: len(row)])]
        holders, values = _bind((rowid, *row))
        self._execute(
            shape.table,
            f"INSERT INTO {quoted(shape.table)} ({', '.join(names)}) VALUES ({', '.join(holders)})",
            values,
        )

    def _update(self, shape: TableShape, rowid: int, row: RecordRow, changed: tuple[bool, ...] | None) -> None:
        chosen = [place for place in range(len(row)) if changed is None or changed[place]]
        if not chosen:
            return
        holders, values = _bind(tuple(row[place] for place in chosen))
        sets = ", ".join(
            f"{quoted(shape.fields[place].name)} = {holder}" for place, holder in zip(chosen, holders, strict=True)
        )
        self._execute(shape.table, f"UPDATE {quoted(shape.table)} SET {sets} WHERE {shape.rowid} = ?", [*values, rowid])

    def _execute(self, table: str, sql: str, values: list[Any]) -> None:
        try:
            count = self._connection.execute(sql, values).rowcount
        except sqlite3.IntegrityError:
            # SQLite's message names columns only, but a CHECK may quote anything.
            raise _astray("a row cannot be written: it meets a constraint", table) from None
        if count != 1:
            raise _astray("the row of a change is not there", table)

    def _change_schema(self, before: RecordRow | None, after: RecordRow | None, statement: str | None) -> None:
        entry = after or before
        assert entry is not None
        if entry[0] == "trigger":
            if before is not None:
                self._triggers.pop(str(before[1]), None)
            if after is not None:
                self._triggers[str(after[1])] = str(after[4])
            return
        try:
            alter(self._connection, before, after, statement)
        except sqlite3.OperationalError as error:
            raise SchemaChangedError(
                f"a change of the schema cannot be made here: {error}",
                fix="Turso leaves RENAME off the tape; after one, start again from a fresh copy",
                table=str(entry[2]),
            ) from None


def _bind(values: tuple[Value, ...]) -> tuple[list[str], list[Any]]:
    """Placeholders and what to bind. Text that is not UTF-8 cannot be bound as text; its bytes are cast."""
    holders, bound = [], list[Any]()
    for value in values:
        if isinstance(value, str) and any("\udc80" <= letter <= "\udcff" for letter in value):
            holders.append("CAST(? AS TEXT)")
            bound.append(value.encode("utf-8", "surrogateescape"))
        else:
            holders.append("?")
            bound.append(value)
    return holders, bound


def _astray(message: str, table: str) -> TableError:
    return TableError(
        f"{message}: this database is not where the tape takes it to be",
        fix="was it written to by others? start again from a fresh copy",
        table=table,
    )
