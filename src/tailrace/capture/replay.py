# ruff: noqa: S608 - every name in the SQL here is quoted
"""Operations of the tape as SQL on another database, or on the same one to undo them.

The application's own triggers are set aside while operations run: what they did is on the tape already.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from tailrace.capture.change import Commit, Delete, Insert, Operation, RecordRow, Schema, Update
from tailrace.capture.layout import TableShape, quoted, read_table_shape
from tailrace.capture.record import Value
from tailrace.capture.schema_change import SQL, column_names, is_own_trigger
from tailrace.errors import LostError, SchemaChangedError, TableError


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
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise  # a full disk or a lock says nothing about the schema
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


# Changes of the schema, made again or undone on another database.


def alter(
    connection: sqlite3.Connection, before: RecordRow | None, after: RecordRow | None, statement: str | None
) -> None:
    """Bring one table, index or view from `before` to `after`, inside the caller's transaction.

    `statement` is the one that did it on the other side. Raises SchemaChangedError where what it takes is not known.
    """
    if after is None:
        assert before is not None
        connection.execute(f"DROP {_keyword(before)} IF EXISTS {quoted(str(before[1]))}")
    elif before is None:
        # Indexes of constraints have no SQL: they come with their table.
        if after[SQL] is not None:
            connection.execute(str(after[SQL]))
    else:
        if statement is not None:
            connection.execute(statement)
        else:
            _derive(connection, before, after)
        _settle(connection, after)


def require_revertible(before: RecordRow | None, after: RecordRow | None) -> None:
    """Raises LostError for DDL that took values with it: the tape holds the schema, not what was in it.

    `before` and `after` are those of the change as it was made.
    """
    if before is None or before[0] != "table":
        return
    if after is None:
        raise _gone(f"the rows of {before[1]!s} went with the table")
    if len(column_names(str(after[SQL]))) < len(column_names(str(before[SQL]))):
        raise _gone(f"values went with a column of {before[1]!s}")


def _gone(what: str) -> LostError:
    return LostError(f"this change of the schema cannot be undone: {what}", fix="restore the file from a copy")


def _keyword(entry: RecordRow) -> str:
    kind = str(entry[0])
    if kind not in ("table", "index", "view"):
        raise SchemaChangedError(f"a schema entry of unknown kind {kind!r}")
    return kind.upper()


def _derive(connection: sqlite3.Connection, before: RecordRow, after: RecordRow) -> None:
    """The ALTER statements between two versions of a table; anything else is made anew."""
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
        # ADD COLUMN is no more than a longer text, and this way it is the very same one.
        _write_sql(connection, after)
    elif not set(new) - set(old):
        for column in old:
            if column not in new:
                connection.execute(f"ALTER TABLE {name} DROP COLUMN {quoted(column)}")
    else:
        raise SchemaChangedError(
            "columns came and went at once; the way from one to the other is not known", table=name
        )


def _settle(connection: sqlite3.Connection, after: RecordRow) -> None:
    """Give the entry the very text it has on the other side, if the same columns stand in it."""
    sql = "SELECT sql FROM sqlite_schema WHERE type = ? AND name = ?"
    found = connection.execute(sql, (after[0], after[1])).fetchone()
    if found is None:
        raise SchemaChangedError(f"{after[1]!s} is not there after its change", table=str(after[1]))
    if found[0] != after[SQL]:
        if after[0] == "table" and column_names(found[0]) != column_names(str(after[SQL])):
            raise SchemaChangedError("the table has other columns here than on the tape", table=str(after[1]))
        _write_sql(connection, after)


def _write_sql(connection: sqlite3.Connection, after: RecordRow) -> None:
    version = connection.execute("PRAGMA schema_version").fetchone()[0]
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_schema SET sql = ? WHERE type = ? AND name = ?", (after[SQL], after[0], after[1]))
    connection.execute(f"PRAGMA schema_version = {version + 1}")
    connection.execute("PRAGMA writable_schema = RESET")
