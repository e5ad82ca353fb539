"""The rows that the SQLite file holds of a table, for `tailrace verify`."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailrace.destination.metadata import DELETED_AT
from tailrace.destination.replica.sql_name import listed, quote
from tailrace.destination.sqlite.bookkeeping import bookkeeping
from tailrace.destination.sqlite.column import note_nan
from tailrace.destination.sqlite.evolution import RULES
from tailrace.destination.sqlite.name import file_name
from tailrace.destination.sqlite.replica_file import foreign_content
from tailrace.destination.sqlite.value import declared, encode, nan_mask
from tailrace.errors import PreflightError
from tailrace.model.change import EXACT
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, TableRows
from tailrace.system import turso_lock

_READ_ROWS = 50_000
_STORED = {"INTEGER": pa.int64(), "REAL": pa.float64(), "TEXT": pa.string(), "BLOB": pa.binary()}


def read_rows(path: Path, table: TableSchema) -> TableRows:
    """The rows of the table that are not marked as deleted; none where there is no file.

    Raises PreflightError for a file that tailrace did not make.
    """
    kept = _as_in_file(path, table)
    types = {column.name: _STORED[declared(column.type)] for column in kept.columns}
    names = [*types, EXACT]

    def shape(batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays: list[pa.Array[Any]] = []
        exact = batch.column(EXACT).to_pylist()
        for column in kept.columns:
            values = batch.column(column.name)
            if (nan := nan_mask(values)) is not None:
                note_nan(exact, nan, column.name)
            plain = encode(values, column.type, column.name, str(table.table))
            arrays.append(pa.array(plain, types[column.name], mask=nan))
        return pa.RecordBatch.from_arrays([*arrays, pa.array(exact, pa.string())], names)

    def rows() -> RowBatches:
        with closing(_opened(path)) as file:
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

    return TableRows(rows() if _has_file(path) else iter(()), shape)


def _as_in_file(path: Path, table: TableSchema) -> TableSchema:
    """The table with the types it has in the file, which stay wider where the upstream's became narrower."""
    kept = RULES.as_kept(table)
    if not _has_file(path):
        return kept
    with closing(_opened(path)) as file:
        now = bookkeeping(file).kept(table.table)
    followed = kept if now is None else RULES.plan(now, table).kept
    return replace(kept, columns=tuple(followed.column(column.name) for column in kept.columns))


def _has_file(path: Path) -> bool:
    """Whether there is a file to read; an empty file does not count."""
    if problem := foreign_content(path):
        raise PreflightError(problem, fix="set destination.path to the file that the pipeline writes")
    return path.exists() and path.stat().st_size > 0


def _opened(path: Path) -> sqlite3.Connection:
    turso_lock.require_not_shared(path)
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
