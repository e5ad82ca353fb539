"""The rows that the database holds of a table, for `tailrace verify`."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from tailrace.destination.metadata import DELETED_AT
from tailrace.destination.postgres.option import PostgresDestinationOptions
from tailrace.destination.postgres.replica import PostgresDatabase, rules
from tailrace.destination.postgres.session import opened, reaching
from tailrace.destination.postgres.value import encode, unheld
from tailrace.destination.replica.arrow_table import ArrowLayout, ArrowTable
from tailrace.destination.replica.comparable_row import comparable_rows, comparable_schema
from tailrace.model.change import EXACT
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, TableRows


def read_rows(options: PostgresDestinationOptions, table: TableSchema) -> TableRows:
    """The rows of the table that are not marked as deleted; none where there is no table."""
    kept, now = _as_there(options, table)

    return TableRows(
        _rows(options, kept, now) if now is not None else iter(()),
        lambda batch: comparable_rows(batch, kept, encode, unheld),
    )


def _rows(options: PostgresDestinationOptions, kept: TableSchema, now: TableSchema) -> RowBatches:
    names = kept.arrow.names
    schema = comparable_schema(kept)
    with reaching(options, str(kept.table)), opened(options) as session:
        database = PostgresDatabase(session)
        layout = ArrowLayout(kept, metadata=False, keeps_deleted=False)
        there = ArrowTable(database, database.name(kept.table, shadow=False), now, layout)
        present = session.ask(f"SELECT * FROM {there.place} LIMIT 0").column_names  # noqa: S608 - names quoted
        exact = EXACT if EXACT in present else f"NULL::text AS {EXACT}"
        alive = f" WHERE {DELETED_AT} IS NULL" if DELETED_AT in present else ""
        query = f"SELECT {there.selected('t', names)}, {exact} FROM {there.place} AS t{alive}"  # noqa: S608
        for batch in session.stream(query):
            arrays = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _as_there(options: PostgresDestinationOptions, table: TableSchema) -> tuple[TableSchema, TableSchema | None]:
    """The table with the types it has there, which stay wider where the upstream's became narrower; and all it has."""
    following = rules(native=options.native_types)
    kept = following.as_kept(table)
    with reaching(options, str(table.table)), opened(options) as session:
        now = session.bookkeeping().kept(table.table) if session.has_book() else None
    if now is None:
        return kept, None
    followed = following.plan(now, table).kept
    return replace(kept, columns=tuple(followed.column(column.name) for column in kept.columns)), now
