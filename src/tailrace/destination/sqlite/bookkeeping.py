"""What the file records about its own tables.

_tailrace_table    each table: the upstream's name, and every column with type and number, dropped ones included
_tailrace_batch    the last batch of each pipeline in each table, and what identifies the offset at which it ends;
                   files of before have no column for the latter until they are written
_tailrace_copy     copies that wait for their end: the table that holds what was copied so far
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from tailrace.destination import Batch
from tailrace.destination.sqlite.name import file_name
from tailrace.errors import TableError
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema

_SCHEMA = (
    "CREATE TABLE _tailrace_table (name TEXT PRIMARY KEY COLLATE NOCASE, upstream TEXT NOT NULL, kept TEXT NOT NULL)",
    "CREATE TABLE _tailrace_batch (pipeline TEXT, name TEXT, batch INTEGER NOT NULL, ending INTEGER,"
    " PRIMARY KEY (pipeline, name))",
    "CREATE TABLE _tailrace_copy (name TEXT PRIMARY KEY, pipeline TEXT NOT NULL, kept TEXT NOT NULL)",
)
SHADOW = "_tailrace copy of "
"""The prefix of a table that will replace another one."""


@dataclass(frozen=True)
class Copy:
    """A copy under way into a table that holds rows. `kept` has the columns of its shadow."""

    pipeline: str
    kept: TableSchema


def make(connection: sqlite3.Connection) -> None:
    for statement in _SCHEMA:
        connection.execute(statement)


def last_batch(connection: sqlite3.Connection, pipeline: str, table: TableName) -> LastBatch | None:
    """The pipeline's last batch that the table holds."""
    found = connection.execute(
        "SELECT * FROM _tailrace_batch WHERE pipeline = ? AND name = ?", (pipeline, file_name(table))
    ).fetchone()
    return LastBatch(*found[2:]) if found else None


def put_batch(connection: sqlite3.Connection, batch: Batch, table: TableName) -> None:
    columns = connection.execute("SELECT count(*) FROM pragma_table_info('_tailrace_batch')").fetchone()[0]
    if columns < 4:
        connection.execute("ALTER TABLE _tailrace_batch ADD COLUMN ending INTEGER")
    connection.execute(
        "INSERT OR REPLACE INTO _tailrace_batch VALUES (?, ?, ?, ?)",
        (batch.pipeline, file_name(table), batch.id, batch.end),
    )


def kept(connection: sqlite3.Connection, table: TableName) -> TableSchema | None:
    """The columns the table has in the file; None when it is not there.

    Raises TableError when its name is taken, by a table that tailrace did not make or one that differs in case.
    """
    name = file_name(table)
    found = connection.execute("SELECT upstream, kept FROM _tailrace_table WHERE name = ?", (name,)).fetchone()
    if found and found[0] == str(table):
        return TableSchema.from_json(found[1])
    taken = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ? COLLATE NOCASE", (name,)).fetchone()
    if found or taken:
        owner = f"by the upstream's table {found[0]}" if found else "by something that tailrace did not make"
        raise TableError(
            f"the name {name} is taken in the file {owner}",
            table=str(table),
            fix="rename or drop that one, or keep this table in another file",
        )
    return None


def put_kept(connection: sqlite3.Connection, columns: TableSchema) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO _tailrace_table VALUES (?, ?, ?)",
        (file_name(columns.table), str(columns.table), columns.to_json()),
    )


def copy(connection: sqlite3.Connection, table: TableName) -> Copy | None:
    found = connection.execute(
        "SELECT pipeline, kept FROM _tailrace_copy WHERE name = ?", (file_name(table),)
    ).fetchone()
    return Copy(found[0], TableSchema.from_json(found[1])) if found else None


def put_copy(connection: sqlite3.Connection, pipeline: str, columns: TableSchema) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO _tailrace_copy VALUES (?, ?, ?)",
        (file_name(columns.table), pipeline, columns.to_json()),
    )


def forget_copy(connection: sqlite3.Connection, table: TableName) -> None:
    connection.execute("DELETE FROM _tailrace_copy WHERE name = ?", (file_name(table),))
