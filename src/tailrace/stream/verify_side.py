"""Reading whole tables back, for a comparison: the rows of a source, and those of a destination in its own types.

`source_rows` and `kept_rows` are chosen by the class of what they read; other packages register theirs:
`source_rows.register(MySource)`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.layout import delta_type, to_delta
from tailrace.destination.delta.path import Place
from tailrace.destination.part import DELETED_AT, EXACT
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.destination.sqlite.layout import as_kept
from tailrace.destination.sqlite.name import file_name, listed, quote
from tailrace.destination.sqlite.value import declared, encode
from tailrace.errors import ConfigError
from tailrace.schema import TableSchema
from tailrace.source.poll.connector import Polled, Query, SourceConnector
from tailrace.source.poll.mark import Stretch
from tailrace.source.poll.option import FILE_SCHEME
from tailrace.source.poll.source import PollSource
from tailrace.source.poll.split import pages
from tailrace.source.poll.sqlite import SqliteConnector
from tailrace.source.postgres.connection import bulk
from tailrace.source.postgres.mapping import Converter, select_list
from tailrace.source.postgres.source import PostgresSource
from tailrace.source.sqlite.source import SqliteSource

Rows = Iterator[pa.RecordBatch]
"""A table's columns, then EXACT: the values that their column's type cannot hold."""


@dataclass(frozen=True)
class Kept:
    """A destination's rows of one table, and what it makes of a source's rows: the same columns in its own types."""

    rows: Rows
    shape: Callable[[pa.RecordBatch], pa.RecordBatch]


@singledispatch
def source_rows(source: object, table: TableSchema) -> Rows:
    """The rows of a table as its upstream has them now. Raises ConfigError for a source that cannot be read so."""
    raise ConfigError(
        f"a source of type {type(source).__name__} cannot be read as a whole, so that nothing can be compared",
        fix="verify a pipeline with a source of type postgres, sqlite or poll",
    )


@source_rows.register
def _(source: PostgresSource, table: TableSchema) -> Rows:
    published = source.discover()[int(table.upstream_id)]
    converter = Converter(table)
    where = f" WHERE {published.row_filter}" if published.row_filter else ""
    place = sql.Identifier(table.table.schema, table.table.name).as_string()
    with bulk(source.dsn, f"verifying {table.table}") as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT {select_list(table).as_string()} FROM {place}{where}")  # noqa: S608 - the catalog's own
        for batch in cursor.fetch_record_batch():
            yield _with_exact(*converter.convert(batch))


@source_rows.register
def _(source: PollSource, table: TableSchema) -> Rows:
    settings = source.tables_wanted.settings_of(str(table.table))
    soft = settings.deletes.soft if settings.deletes is not None else None
    return connector_rows(source.connector(), Polled(table, None, soft=soft), source.page_rows)


@source_rows.register
def _(source: SqliteSource, table: TableSchema) -> Rows:
    if source.library != "sqlite":
        raise ConfigError("a Turso file is not read by SQLite's library", fix="verify a copy of it, of type sqlite")
    return connector_rows(SqliteConnector(FILE_SCHEME + source.path), Polled(table, None), source.chunk_rows)


def connector_rows(connector: SourceConnector, table: Polled, page_rows: int) -> Rows:
    """The rows of a table that can be queried, in the order of its key."""
    with connector.open() as session:
        for page in pages(session, Query(table, None, Stretch(), table.schema, page_rows)):
            yield _with_exact(page.rows, page.exact)


def _with_exact(rows: pa.StructArray, exact: pa.Array[Any] | None) -> pa.RecordBatch:
    texts = pa.nulls(len(rows), pa.string()) if exact is None else exact
    return pa.RecordBatch.from_struct_array(rows).append_column(EXACT, texts)


@singledispatch
def kept_rows(destination: object, table: TableSchema) -> Kept:
    """What a destination keeps of a table. Raises ConfigError for one whose rows cannot be read back."""
    raise ConfigError(
        f"a destination of type {type(destination).__name__} cannot be read back, so that nothing can be compared",
        fix="verify a pipeline with a destination of type delta or sqlite",
    )


@kept_rows.register
def _(destination: DeltaDestination, table: TableSchema) -> Kept:
    def shape(batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [
            to_delta(batch.column(column.name), delta_type(column.type), column.name, str(table.table))
            for column in table.columns
        ]
        return pa.RecordBatch.from_arrays([*arrays, batch.column(EXACT)], [*(c.name for c in table.columns), EXACT])

    return Kept(_delta_rows(destination, table), shape)


def _delta_rows(destination: DeltaDestination, table: TableSchema) -> Rows:
    from deltalake import DeltaTable

    place = Place.of(destination.path, table.table, destination.storage_options)
    options = dict(destination.storage_options) or None
    if not DeltaTable.is_deltatable(place.uri, storage_options=options):
        return
    dataset = DeltaTable(place.uri, storage_options=options).to_pyarrow_dataset()
    for batch in dataset.to_batches():
        alive = batch
        if DELETED_AT in batch.schema.names:
            alive = batch.filter(pc.is_null(batch.column(DELETED_AT)))
        names = [*(column.name for column in table.columns), EXACT]
        types = [*(delta_type(column.type) for column in table.columns), pa.string()]
        arrays = [
            alive.column(name).cast(kind) if name in alive.schema.names else pa.nulls(alive.num_rows, kind)
            for name, kind in zip(names, types, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, names)


_STORED = {"INTEGER": pa.int64(), "REAL": pa.float64(), "TEXT": pa.string(), "BLOB": pa.binary()}
_READ_ROWS = 50_000


@kept_rows.register
def _(destination: SqliteDestination, table: TableSchema) -> Kept:
    kept = as_kept(table)
    types = {column.name: _STORED[declared(column.type)] for column in kept.columns}
    names = [*types, EXACT]

    def shape(batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [
            pa.array(encode(batch.column(column.name), column.type, column.name, str(table.table)), types[column.name])
            for column in kept.columns
        ]
        return pa.RecordBatch.from_arrays([*arrays, batch.column(EXACT)], names)

    def rows() -> Rows:
        with closing(sqlite3.connect(f"{Path(destination.path).absolute().as_uri()}?mode=ro", uri=True)) as file:
            place = quote(file_name(table.table))
            found = {row[1] for row in file.execute(f"PRAGMA table_info({place})")}
            if not found:
                return
            wanted = listed(types) + (f", {quote(EXACT)}" if EXACT in found else ", NULL")
            alive = f" WHERE {quote(DELETED_AT)} IS NULL" if DELETED_AT in found else ""
            cursor = file.execute(f"SELECT {wanted} FROM {place}{alive}")  # noqa: S608 - names quoted
            while some := cursor.fetchmany(_READ_ROWS):
                columns = zip(zip(*some, strict=True), [*types.values(), pa.string()], strict=True)
                yield pa.RecordBatch.from_arrays([pa.array(values, kind) for values, kind in columns], names)

    return Kept(rows() if Path(destination.path).exists() else iter(()), shape)
