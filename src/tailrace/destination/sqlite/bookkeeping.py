"""What the file records about its own tables: `_tailrace_table`, `_tailrace_batch` and `_tailrace_copy`.

The table `_tailrace_batch` of older files has no column for the end of the batch until it is written.
"""

from __future__ import annotations

import sqlite3

from tailrace.destination.replica.bookkeeping import Bookkeeping
from tailrace.destination.sqlite.name import file_name
from tailrace.model.schema import TableName


def bookkeeping(connection: sqlite3.Connection) -> Bookkeeping:
    def is_taken(table: TableName) -> bool:
        found = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ? COLLATE NOCASE", (file_name(table),))
        return found.fetchone() is not None

    return Bookkeeping(
        run=lambda sql, values: connection.execute(sql, values).fetchall(),
        place="_tailrace_{}".format,
        key=file_name,
        unique=file_name,
        is_taken=is_taken,
        holder="the file",
    )


def create(connection: sqlite3.Connection) -> None:
    bookkeeping(connection).create(name_type="TEXT PRIMARY KEY COLLATE NOCASE")


def bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Add the column that older files lack."""
    columns = connection.execute("SELECT count(*) FROM pragma_table_info('_tailrace_batch')").fetchone()[0]
    if columns < 4:
        connection.execute("ALTER TABLE _tailrace_batch ADD COLUMN ending INTEGER")
