"""A table's rows as the file has them now, for `tailrace verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, copied_rows
from tailrace.source.sqlite.copy import SqliteCopySplit

if TYPE_CHECKING:
    from tailrace.source.sqlite.source import SqliteSource

LAST_ROWID = (1 << 63) - 1


def read_rows(source: SqliteSource, table: TableSchema) -> RowBatches:
    """The whole table, read as one chunk of a copy."""
    return copied_rows(source.read(SqliteCopySplit(copies=table, high=LAST_ROWID)))
