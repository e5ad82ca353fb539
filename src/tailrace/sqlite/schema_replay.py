"""Changes of the schema, made again or undone on another database."""

from __future__ import annotations

import sqlite3

from tailrace.errors import LostError, SchemaChangedError
from tailrace.sqlite.change import RecordRow
from tailrace.sqlite.layout import quoted
from tailrace.sqlite.schema_change import SQL, column_names


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
