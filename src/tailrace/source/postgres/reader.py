"""A table's current rows in the database, for `tailrace verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, with_exact
from tailrace.source.postgres.connection import of_table
from tailrace.source.postgres.copy_query import Converter, select_list
from tailrace.source.postgres.row_session import row_session

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource


def read_rows(source: PostgresSource, table: TableSchema) -> RowBatches:
    """The rows that the publication shows of the table."""
    published = source.discover()[int(table.upstream_id)]
    converter = Converter(table)
    where = f" WHERE {published.row_filter}" if published.row_filter else ""
    place = sql.Identifier(table.table.schema, table.table.name).as_string()
    with of_table(str(table.table)), row_session(source.dsn, f"verifying {table.table}") as session:
        found = session.ask(f"SELECT relkind::text FROM pg_class WHERE oid = {int(table.upstream_id)}")  # noqa: S608
        # A partitioned table includes its partitions, but tables that inherit from one are published on their own.
        only = "" if found == [("p",)] else "ONLY "
        columns = select_list(table, binary=session.has_binary).as_string()
        query = f"SELECT {columns} FROM {only}{place}{where}"  # noqa: S608 - the catalog's own
        for batch in session.read(query, table.columns):
            yield with_exact(*converter.convert(batch))
