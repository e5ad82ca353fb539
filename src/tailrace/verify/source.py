"""The rows of a source as they are now, read back as a whole for a comparison.

`source_rows` is chosen by the class of the source; other packages register theirs: `source_rows.register(MySource)`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from functools import singledispatch
from typing import Any, cast

import pyarrow as pa
from psycopg import sql

from tailrace.model.change import EXACT, Changes
from tailrace.model.schema import TableSchema
from tailrace.source.poll.connector import Polled, Query
from tailrace.source.poll.keyset import Stretch
from tailrace.source.poll.source import PollSource
from tailrace.source.poll.split import pages
from tailrace.source.postgres.connection import bulk
from tailrace.source.postgres.copy_query import Converter, select_list
from tailrace.source.postgres.source import PostgresSource
from tailrace.source.rqlite import copy as rqlite_copy
from tailrace.source.rqlite.source import RqliteSource
from tailrace.source.slatedb import copy as slatedb_copy
from tailrace.source.slatedb.follower import read_clock
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.source.sqlite import copy as sqlite_copy
from tailrace.source.sqlite.catalog import ROWID
from tailrace.source.sqlite.source import SqliteSource

RowBatches = Iterator[pa.RecordBatch]
"""A table's columns, then EXACT: the values that their column's type cannot hold."""

_LAST_ROWID = (1 << 63) - 1


@singledispatch
def source_rows(source: object, table: TableSchema) -> RowBatches:
    """The rows of a table as its upstream has them now, some at a time. Nothing upstream or in the state changes.

    Only for a source of a class that is registered.
    """
    raise NotImplementedError(type(source).__name__)


@source_rows.register
def _(source: PostgresSource, table: TableSchema) -> RowBatches:
    published = source.discover()[int(table.upstream_id)]
    converter = Converter(table)
    where = f" WHERE {published.row_filter}" if published.row_filter else ""
    place = sql.Identifier(table.table.schema, table.table.name).as_string()
    with bulk(source.dsn, f"verifying {table.table}") as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT relkind::text FROM pg_class WHERE oid = {int(table.upstream_id)}")  # noqa: S608
        # A partitioned table is all its partitions, but tables that inherit from one are published by themselves.
        only = "" if cursor.fetchone() == ("p",) else "ONLY "
        columns = select_list(table).as_string()
        cursor.execute(f"SELECT {columns} FROM {only}{place}{where}")  # noqa: S608 - the catalog's own
        for batch in cursor.fetch_record_batch():
            yield _with_exact(*converter.convert(batch))


@source_rows.register
def _(source: PollSource, table: TableSchema) -> RowBatches:
    settings = source.context.tables.settings_of(str(table.table))
    soft = settings.deletes.soft if settings.deletes is not None else None
    query = Query(Polled(table, None, soft=soft), None, Stretch(), table, source.options.page_rows)
    with source.connector().open() as session:
        for page in pages(session, query):
            yield _with_exact(page.rows, page.exact)


@source_rows.register
def _(source: SqliteSource, table: TableSchema) -> RowBatches:
    return _copied(source.read(sqlite_copy.SqliteCopySplit(copies=table, high=_LAST_ROWID)))


@source_rows.register
def _(source: RqliteSource, table: TableSchema) -> RowBatches:
    by_key = all(table.column(name).upstream_type != ROWID for name in table.key)
    split = rqlite_copy.RqliteCopySplit(
        copies=table, high=_LAST_ROWID, by_key=by_key, rows=source.options.copying.chunk_rows
    )
    return _copied(source.read(split))


@source_rows.register
def _(source: SlateDbSource, table: TableSchema) -> RowBatches:
    # What will expire is noted while rows are read: for a reader of our own, and forgotten with it.
    reader = source.for_reader(f"verify-{uuid.uuid4().hex}")
    low, high = slatedb_copy.range_of(reader.rule(table), (), 0)
    latest = cast(str, None)  # not a checkpoint, but what is durable now
    split = slatedb_copy.SlateDbCopySplit(copies=table, checkpoint=latest, low=low, high=high, clock=read_clock())
    try:
        yield from _copied(reader.read(split))
    finally:
        reader.reset()


def _copied(read: Iterable[Changes]) -> RowBatches:
    for changes in read:
        yield _with_exact(changes.row, changes.batch.column("exact"))


def _with_exact(rows: pa.StructArray, exact: pa.Array[Any] | None) -> pa.RecordBatch:
    texts = pa.nulls(len(rows), pa.string()) if exact is None else exact
    return pa.RecordBatch.from_struct_array(rows).append_column(EXACT, texts)
