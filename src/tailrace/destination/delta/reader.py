"""The rows that a Delta table holds, for `tailrace verify`."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder

from tailrace.destination.delta.column import delta_type, to_delta
from tailrace.destination.delta.store_error import reaching
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.delta.version import IS_CURRENT
from tailrace.destination.evolution import is_wider
from tailrace.destination.metadata import DELETED_AT
from tailrace.model.change import EXACT
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, TableRows

_READ_ROWS = 50_000


def read_rows(place: TablePath, table: TableSchema) -> TableRows:
    """The rows of the newest version of the table that are not marked as deleted; none where there is no table.

    Of a table with a history, the current ones.
    """
    options = dict(place.options) or None
    types = {column.name: delta_type(column.type) for column in table.columns}
    rows: RowBatches = iter(())
    with reaching(place, str(table.table)):
        if DeltaTable.is_deltatable(place.uri, storage_options=options):
            handle = DeltaTable(place.uri, storage_options=options)
            columns = pa.schema(handle.schema().to_arrow())
            # A type that became narrower upstream stayed wide here; if cast, different values could look equal.
            types |= {f.name: f.type for f in columns if f.name in types and is_wider(f.type, types[f.name])}
            rows = _reached(_read(scan(handle), types), place, str(table.table))

    def shape(batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = [to_delta(batch.column(name), kind, name, str(table.table)) for name, kind in types.items()]
        return pa.RecordBatch.from_arrays([*arrays, batch.column(EXACT)], [*types, EXACT])

    return TableRows(rows, shape)


def _reached(rows: RowBatches, place: TablePath, table: str) -> RowBatches:
    with reaching(place, table):
        yield from rows


def scan(handle: DeltaTable) -> RowBatches:
    """All rows, by an engine that did not write them."""
    if "deletionVectors" in (handle.protocol().reader_features or []):
        # Datasets refuse deletion vectors.
        query = QueryBuilder().register("it", handle).execute("SELECT * FROM it")
        # Its texts are views, which not everything takes.
        schema = pa.schema(handle.schema().to_arrow())
        return (pa.record_batch(batch).cast(schema) for batch in query)
    from pyarrow.dataset import ParquetReadOptions  # loads pandas, which no process that writes a lake needs

    dataset = handle.to_pyarrow_dataset(
        # As Spark writes them; nanoseconds hold no year before 1677 or after 2262.
        parquet_read_options=ParquetReadOptions(coerce_int96_timestamp_unit="us")
    )
    return iter(dataset.to_batches(batch_size=_READ_ROWS, batch_readahead=2, fragment_readahead=1))


def _read(batches: RowBatches, columns: Mapping[str, pa.DataType]) -> RowBatches:
    names = [*columns, EXACT]
    types = [*columns.values(), pa.string()]
    for batch in batches:
        # Cast before rows are left out: queries give texts as views, of which Arrow cannot take some.
        arrays = [
            batch.column(name).cast(kind) if name in batch.schema.names else pa.nulls(batch.num_rows, kind)
            for name, kind in zip(names, types, strict=True)
        ]
        found = pa.RecordBatch.from_arrays(arrays, names)
        if DELETED_AT in batch.schema.names:
            found = found.filter(pc.is_null(batch.column(DELETED_AT)))
        elif IS_CURRENT in batch.schema.names:
            found = found.filter(batch.column(IS_CURRENT))
        yield found
