"""The rows a destination keeps, read back as a whole for a comparison.

`kept_rows` is chosen by the class of the destination; other packages register theirs:
`kept_rows.register(MyDestination)`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import singledispatch
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.delta.column import delta_type, to_delta
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.log import reaching
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.evolution import is_wider
from tailrace.destination.metadata import DELETED_AT
from tailrace.destination.sqlite import bookkeeping
from tailrace.destination.sqlite.column import as_kept, note_nan
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.destination.sqlite.evolution import plan
from tailrace.destination.sqlite.name import file_name, listed, quote
from tailrace.destination.sqlite.replica_file import foreign_content
from tailrace.destination.sqlite.value import declared, encode, nan_mask
from tailrace.errors import PreflightError
from tailrace.model.change import EXACT
from tailrace.model.schema import TableSchema
from tailrace.system import turso_lock
from tailrace.verify.source import RowBatches

_READ_ROWS = 50_000


@dataclass(frozen=True)
class DestinationRows:
    """A destination's rows of one table, and what it makes of a source's rows: the same columns in its own types."""

    rows: RowBatches
    shape: Callable[[pa.RecordBatch], pa.RecordBatch]


def keeps_changes(destination: object, table: TableSchema) -> bool:
    """Whether the rows a destination keeps of a table are its changes, of which none is to equal a row upstream."""
    return not table.key or (isinstance(destination, DeltaDestination) and destination.keeps_history(table))


@singledispatch
def destination_rows(destination: object, table: TableSchema) -> DestinationRows:
    """What a destination keeps of a table. Only for one of a class that is registered."""
    raise NotImplementedError(type(destination).__name__)


@destination_rows.register
def _(destination: DeltaDestination, table: TableSchema) -> DestinationRows:
    from deltalake import DeltaTable
    from pyarrow.dataset import ParquetReadOptions

    place = destination.place(table.table)
    options = dict(place.options) or None
    types = {column.name: delta_type(column.type) for column in table.columns}
    rows: RowBatches = iter(())
    with reaching(place, str(table.table)):
        if DeltaTable.is_deltatable(place.uri, storage_options=options):
            dataset = DeltaTable(place.uri, storage_options=options).to_pyarrow_dataset(
                # As Spark writes them; nanoseconds hold no year before 1677 or after 2262.
                parquet_read_options=ParquetReadOptions(coerce_int96_timestamp_unit="us")
            )
            # A type that became narrower upstream stayed as it was; as the narrower one, values would look alike.
            types |= {f.name: f.type for f in dataset.schema if f.name in types and is_wider(f.type, types[f.name])}
            rows = _reached(_delta_rows(dataset, types), place, str(table.table))

    def shape(batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [to_delta(batch.column(name), kind, name, str(table.table)) for name, kind in types.items()]
        return pa.RecordBatch.from_arrays([*arrays, batch.column(EXACT)], [*types, EXACT])

    return DestinationRows(rows, shape)


def _reached(rows: RowBatches, place: TablePath, table: str) -> RowBatches:
    with reaching(place, table):
        yield from rows


def _delta_rows(dataset: Any, columns: Mapping[str, pa.DataType]) -> RowBatches:
    for batch in dataset.to_batches(batch_size=_READ_ROWS, batch_readahead=2, fragment_readahead=1):
        alive = batch
        if DELETED_AT in batch.schema.names:
            alive = batch.filter(pc.is_null(batch.column(DELETED_AT)))
        names = [*columns, EXACT]
        types = [*columns.values(), pa.string()]
        arrays = [
            alive.column(name).cast(kind) if name in alive.schema.names else pa.nulls(alive.num_rows, kind)
            for name, kind in zip(names, types, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, names)


_STORED = {"INTEGER": pa.int64(), "REAL": pa.float64(), "TEXT": pa.string(), "BLOB": pa.binary()}


@destination_rows.register
def _(destination: SqliteDestination, table: TableSchema) -> DestinationRows:
    kept = _as_in_file(destination, table)
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
        with closing(_opened(destination)) as file:
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

    return DestinationRows(rows() if _has_file(destination) else iter(()), shape)


def _as_in_file(destination: SqliteDestination, table: TableSchema) -> TableSchema:
    """The table with the types the file keeps it in, which are wider than its own where those became narrower."""
    kept = as_kept(table)
    if not _has_file(destination):
        return kept
    with closing(_opened(destination)) as file:
        now = bookkeeping.kept(file, table.table)
    followed = kept if now is None else plan(now, table).kept
    return replace(kept, columns=tuple(followed.column(column.name) for column in kept.columns))


def _has_file(destination: SqliteDestination) -> bool:
    """Whether there is a file to read; an empty one is none. Raises PreflightError for a file of somebody else."""
    path = Path(destination.path)
    if problem := foreign_content(path):
        raise PreflightError(problem, fix="set destination.path to the file that the pipeline writes")
    return path.exists() and path.stat().st_size > 0


def _opened(destination: SqliteDestination) -> sqlite3.Connection:
    turso_lock.require_not_shared(Path(destination.path))
    return sqlite3.connect(f"{Path(destination.path).absolute().as_uri()}?mode=ro", uri=True)
