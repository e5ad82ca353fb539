"""A table's current rows in the database, for `tailrace verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psycopg import sql

from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, with_exact
from tailrace.source.postgres.bulk import bulk
from tailrace.source.postgres.connection import of_table
from tailrace.source.postgres.copy_query import Converter, select_list

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource


def read_rows(source: PostgresSource, table: TableSchema) -> RowBatches:
    """The rows that the publication shows of the table."""
    published = source.discover()[int(table.upstream_id)]
    converter = Converter(table)
    where = f" WHERE {published.row_filter}" if published.row_filter else ""
    place = sql.Identifier(table.table.schema, table.table.name).as_string()
    with (
        of_table(str(table.table)),
        bulk(source.dsn, f"verifying {table.table}") as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(f"SELECT relkind::text FROM pg_class WHERE oid = {int(table.upstream_id)}")  # noqa: S608
        # A partitioned table includes its partitions, but tables that inherit from one are published on their own.
        only = "" if cursor.fetchone() == ("p",) else "ONLY "
        columns = select_list(table).as_string()
        cursor.execute(f"SELECT {columns} FROM {only}{place}{where}")  # noqa: S608 - the catalog's own
        for batch in cursor.fetch_batches():
            yield with_exact(*converter.convert(batch))
