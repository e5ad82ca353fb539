"""A table's rows as the cluster has them now, for `tailrace verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, copied_rows
from tailrace.source.rqlite.copy import RqliteCopySplit
from tailrace.source.sqlite.catalog import ROWID
from tailrace.source.sqlite.reader import LAST_ROWID

if TYPE_CHECKING:
    from tailrace.source.rqlite.source import RqliteSource


def read_rows(source: RqliteSource, table: TableSchema) -> RowBatches:
    """The whole table, read as one chunk of a copy."""
    by_key = all(table.column(name).upstream_type != ROWID for name in table.key)
    split = RqliteCopySplit(copies=table, high=LAST_ROWID, by_key=by_key, rows=source.options.copying.chunk_rows)
    return copied_rows(source.read(split))
