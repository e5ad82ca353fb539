# ruff: noqa: S608 - every name in the SQL here is quoted
"""Replay the tape's operations as SQL on another database, or on the same one to undo them.

The application's own triggers are dropped while operations run, because their effects are on the tape already.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from tailrace.capture.change import CapturedChange, Commit, Delete, Insert, Operation, RecordRow, Schema, Update
from tailrace.capture.layout import TableShape, quoted, read_table_shape
from tailrace.capture.record import Value
from tailrace.capture.schema_change import SQL, column_names, is_own_trigger
from tailrace.errors import LostError, SchemaChangedError, TableError


class TapeReplay:
    """Runs operations in order, in the caller's transaction. Call `finish` before the commit.

    Updates write only the columns that changed. Raises TableError if the row of an operation does not exist, and
    SchemaChangedError if its table does not match: then this database is not in the state that the tape expects, and
    the caller must roll back.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._shapes: dict[str, TableShape] = {}
        self._triggers: dict[str, str] = {}
        for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_schema").fetchall():
            if kind == "trigger" and not is_own_trigger(kind, name):
                self._triggers[name] = sql
                connection.execute(f"DROP TRIGGER {quoted(name)}")

    def replay(self, change: CapturedChange) -> None:
        """Apply one change of the tape."""
        self.run(change.into_apply())

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
        """Create the application's triggers again."""
        for sql in self._triggers.values():
            self._connection.execute(sql)

    def _shape(self, table: str, row: RecordRow) -> TableShape:
        if table not in self._shapes:
            self._shapes[table] = read_table_shape(self._connection, table)
        shape = self._shapes[table]
        if len(row) > len(shape.fields):
            raise SchemaChangedError(
                f"a row has {len(row)} values, but the table has {len(shape.fields)} columns",
                fix="the replica must start from a copy of the database as it was at the tape's beginning",
                table=table,
            )
        return shape

    def _insert(self, shape: TableShape, rowid: int, row: RecordRow) -> None:
        names = [shape.rowid, *(quoted(field.name) for field in shape.fields[: len(row)])]
        holders, values = bind((rowid, *row))
        self._execute(
            shape.table,
            f"INSERT INTO {quoted(shape.table)} ({', '.join(names)}) VALUES ({', '.join(holders)})",
            values,
        )

    def _update(self, shape: TableShape, rowid: int, row: RecordRow, changed: tuple[bool, ...] | None) -> None:
        chosen = [place for place in range(len(row)) if changed is None or changed[place]]
        if not chosen:
            return
        holders, values = bind(tuple(row[place] for place in chosen))
        sets = ", ".join(
            f"{quoted(shape.fields[place].name)} = {holder}" for place, holder in zip(chosen, holders, strict=True)
        )
        self._execute(shape.table, f"UPDATE {quoted(shape.table)} SET {sets} WHERE {shape.rowid} = ?", [*values, rowid])

    def _execute(self, table: str, sql: str, values: list[Any]) -> None:
        try:
            count = self._connection.execute(sql, values).rowcount
        except sqlite3.IntegrityError:
            # Leave out SQLite's message: it usually names columns only, but that of a CHECK may contain anything.
            raise _mismatch("a row cannot be written: it violates a constraint", table) from None
        if count != 1:
            raise _mismatch("the row of a change does not exist", table)

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
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise  # a full disk or a lock says nothing about the schema
            raise SchemaChangedError(
                f"a schema change cannot be applied here: {error}",
                fix=_advise(error),
                table=str(entry[2]),
            ) from None


def _advise(error: sqlite3.OperationalError) -> str:
    if str(error).endswith("already exists"):
        return (
            "this database has what the tape creates: give the last change that it contains (--from CHANGE_ID), start "
            "from a new file, or merge the tape into what is there (--merge)"
        )
    return "Turso does not record RENAME on the tape; after one, start again from a new copy"


def bind(values: tuple[Value, ...]) -> tuple[list[str], list[Any]]:
    """Placeholders and the values to bind. Text that is not UTF-8 cannot be bound as text, so its bytes are cast."""
    holders, bound = [], list[Any]()
    for value in values:
        if isinstance(value, str) and any("\udc80" <= letter <= "\udcff" for letter in value):
            holders.append("CAST(? AS TEXT)")
            bound.append(value.encode("utf-8", "surrogateescape"))
        else:
            holders.append("?")
            bound.append(value)
    return holders, bound


def _mismatch(message: str, table: str) -> TableError:
    return TableError(
        f"{message}: this database is not in the state that the tape expects",
        fix="start again from a new copy; make sure that nothing else writes to this database",
        table=table,
    )


# Schema changes: applied to another database, or undone.


def alter(
    connection: sqlite3.Connection, before: RecordRow | None, after: RecordRow | None, statement: str | None
) -> None:
    """Bring one table, index or view from `before` to `after`, inside the caller's transaction.

    `statement` is the SQL that made the change in the captured database. Raises SchemaChangedError if the statements
    that are needed here cannot be derived.
    """
    if after is None:
        assert before is not None
        connection.execute(f"DROP {_keyword(before)} IF EXISTS {quoted(str(before[1]))}")
    elif before is None:
        # Indexes of constraints have no SQL: creating their table creates them.
        if after[SQL] is not None:
            connection.execute(str(after[SQL]))
    else:
        if statement is not None:
            connection.execute(statement)
        else:
            _derive(connection, before, after)
        _settle(connection, after)


def require_revertible(before: RecordRow | None, after: RecordRow | None) -> None:
    """Raise LostError for DDL that removed values: the tape holds the schema, not the rows that were dropped with it.

    `before` and `after` are the images of the change in its original direction.
    """
    if before is None or before[0] != "table":
        return
    if after is None:
        raise _irreversible(f"the rows of {before[1]!s} were dropped with the table")
    if len(column_names(str(after[SQL]))) < len(column_names(str(before[SQL]))):
        raise _irreversible(f"a column of {before[1]!s} was dropped with its values")


def _irreversible(what: str) -> LostError:
    return LostError(f"this schema change cannot be undone: {what}", fix="restore the file from a backup")


def _keyword(entry: RecordRow) -> str:
    kind = str(entry[0])
    if kind not in ("table", "index", "view"):
        raise SchemaChangedError(f"a schema entry has the unknown kind {kind!r}")
    return kind.upper()


def _derive(connection: sqlite3.Connection, before: RecordRow, after: RecordRow) -> None:
    """Run the ALTER statements between two versions of a table; an index, view or trigger is created again."""
    name = quoted(str(after[1]))
    if before[0] != "table":
        connection.execute(f"DROP {_keyword(before)} IF EXISTS {quoted(str(before[1]))}")
        connection.execute(str(after[SQL]))
        return
    if before[1] != after[1]:
        connection.execute(f"ALTER TABLE {quoted(str(before[1]))} RENAME TO {name}")
    old, new = column_names(str(before[SQL])), column_names(str(after[SQL]))
    if len(old) == len(new):
        for was, becomes in zip(old, new, strict=True):
            if was != becomes:
                connection.execute(f"ALTER TABLE {name} RENAME COLUMN {quoted(was)} TO {quoted(becomes)}")
    elif new[: len(old)] == old:
        # ADD COLUMN only makes the stored SQL longer. Writing that SQL directly gives exactly the same text.
        _write_sql(connection, after)
    elif not set(new) - set(old):
        for column in old:
            if column not in new:
                connection.execute(f"ALTER TABLE {name} DROP COLUMN {quoted(column)}")
    else:
        raise SchemaChangedError(
            "columns were added and dropped in one step; the statements for that are not known", table=name
        )


def _settle(connection: sqlite3.Connection, after: RecordRow) -> None:
    """Give the schema entry exactly the SQL that it has on the tape, provided that it has the same columns."""
    sql = "SELECT sql FROM sqlite_schema WHERE type = ? AND name = ?"
    found = connection.execute(sql, (after[0], after[1])).fetchone()
    if found is None:
        raise SchemaChangedError(f"{after[1]!s} does not exist after its change", table=str(after[1]))
    if found[0] != after[SQL]:
        if after[0] == "table" and column_names(found[0]) != column_names(str(after[SQL])):
            raise SchemaChangedError("the table's columns differ from those on the tape", table=str(after[1]))
        _write_sql(connection, after)


def _write_sql(connection: sqlite3.Connection, after: RecordRow) -> None:
    version = connection.execute("PRAGMA schema_version").fetchone()[0]
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_schema SET sql = ? WHERE type = ? AND name = ?", (after[SQL], after[0], after[1]))
    connection.execute(f"PRAGMA schema_version = {version + 1}")
    connection.execute("PRAGMA writable_schema = RESET")
