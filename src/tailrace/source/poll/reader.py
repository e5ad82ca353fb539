"""A table's rows as the polled database has them now, for `tailrace verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, with_exact
from tailrace.source.poll.connector import Polled, Query
from tailrace.source.poll.keyset import Stretch
from tailrace.source.poll.split import pages

if TYPE_CHECKING:
    from tailrace.source.poll.source import PollSource


def read_rows(source: PollSource, table: TableSchema) -> RowBatches:
    """The rows of the table, page by page, without those that are marked as deleted."""
    settings = source.context.tables.settings_of(str(table.table))
    soft = settings.deletes.soft if settings.deletes is not None else None
    query = Query(Polled(table, None, soft=soft), None, Stretch(), table, source.options.page_rows)
    with source.connector().open() as session:
        for page in pages(session, query):
            yield with_exact(page.rows, page.exact)
