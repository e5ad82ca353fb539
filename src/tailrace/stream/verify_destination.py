"""The rows a destination keeps, read back as a whole for a comparison.

`kept_rows` is chosen by the class of the destination; other packages register theirs:
`kept_rows.register(MyDestination)`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import singledispatch
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.change import EXACT
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.layout import delta_type, to_delta
from tailrace.destination.delta.path import Place
from tailrace.destination.part import DELETED_AT
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.destination.sqlite.layout import as_kept
from tailrace.destination.sqlite.name import file_name, listed, quote
from tailrace.destination.sqlite.value import declared, encode
from tailrace.errors import ConfigError
from tailrace.schema import TableSchema
from tailrace.stream.verify_source import Rows

_READ_ROWS = 50_000


@dataclass(frozen=True)
class Kept:
    """A destination's rows of one table, and what it makes of a source's rows: the same columns in its own types."""

    rows: Rows
    shape: Callable[[pa.RecordBatch], pa.RecordBatch]


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
    for batch in dataset.to_batches(batch_size=_READ_ROWS, batch_readahead=2, fragment_readahead=1):
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
