"""The rows that the DuckDB file holds of a table, for `tailrace verify`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from tailrace.destination.duckdb.name import file_name
from tailrace.destination.duckdb.replica import RULES, DuckDbDatabase
from tailrace.destination.duckdb.replica_file import bookkeeping, opened, reaching
from tailrace.destination.duckdb.value import encode, unheld
from tailrace.destination.metadata import DELETED_AT
from tailrace.destination.replica.comparable_row import comparable_rows, comparable_schema
from tailrace.destination.replica.sql_name import listed
from tailrace.model.change import EXACT
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, TableRows

_READ_ROWS = 50_000


def read_rows(path: Path, table: TableSchema, timeout_seconds: float) -> TableRows:
    """The rows of the table that are not marked as deleted; none where there is no file.

    Raises PreflightError for a file that tailrace did not make.
    """
    kept = _as_in_file(path, table, timeout_seconds)

    return TableRows(
        _rows(path, kept, timeout_seconds) if path.exists() else iter(()),
        lambda batch: comparable_rows(batch, kept, encode, unheld),
    )


def _rows(path: Path, kept: TableSchema, timeout_seconds: float) -> RowBatches:
    names = kept.arrow.names
    schema = comparable_schema(kept)
    with reaching(path, str(kept.table)), opened(path, timeout_seconds, read_only=True) as connection:
        if bookkeeping(connection).kept(kept.table) is None:
            return
        place = DuckDbDatabase(connection).sql(file_name(kept.table))
        present = connection.sql(f"SELECT * FROM {place} LIMIT 0").columns  # noqa: S608 - names quoted
        exact = EXACT if EXACT in present else f"NULL::VARCHAR AS {EXACT}"
        alive = f" WHERE {DELETED_AT} IS NULL" if DELETED_AT in present else ""
        rows = connection.sql(f"SELECT {listed(names)}, {exact} FROM {place}{alive}")  # noqa: S608 - names quoted
        for batch in rows.to_arrow_reader(_READ_ROWS):
            yield pa.RecordBatch.from_arrays(
                [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)], schema=schema
            )


def _as_in_file(path: Path, table: TableSchema, timeout_seconds: float) -> TableSchema:
    """The table with the types it has in the file, which stay wider where the upstream's became narrower."""
    kept = RULES.as_kept(table)
    if not path.exists():
        return kept
    with reaching(path, str(table.table)), opened(path, timeout_seconds, read_only=True) as connection:
        now = bookkeeping(connection).kept(table.table)
    followed = kept if now is None else RULES.plan(now, table).kept
    return replace(kept, columns=tuple(followed.column(column.name) for column in kept.columns))
