"""The rows that an Iceberg table holds, for `tailrace verify`: read by PyIceberg, which did not write them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.iceberg.catalog import reaching
from tailrace.destination.iceberg.column import RULES, encode
from tailrace.destination.iceberg.option import IcebergOptions
from tailrace.destination.iceberg.snapshot import IcebergSnapshot
from tailrace.destination.metadata import DELETED_AT
from tailrace.destination.replica.comparable_row import comparable_rows, comparable_schema
from tailrace.model.change import EXACT
from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, TableRows


def read_rows(options: IcebergOptions, table: TableSchema) -> TableRows:
    """The rows of the newest snapshot that are not marked as deleted; none where there is no table."""
    with reaching(options, str(table.table)):
        snapshot = IcebergSnapshot.load(options, table.table)
    kept = RULES.as_kept(table)
    rows: RowBatches = iter(())
    if snapshot is not None:
        # A type that became narrower upstream stayed wide here; if cast, different values could look equal.
        followed = RULES.plan(snapshot.columns.kept, table).kept
        kept = TableSchema(table.table, tuple(followed.column(each.name) for each in kept.columns), kept.key)
        rows = _rows(options, snapshot, kept)
    return TableRows(rows, lambda batch: comparable_rows(batch, kept, encode, lambda values: None))


def _rows(options: IcebergOptions, snapshot: IcebergSnapshot, kept: TableSchema) -> RowBatches:
    schema = comparable_schema(kept)
    own = snapshot.columns.own
    present = set(snapshot.columns.types)
    names = [*(name for name in kept.arrow.names if name in present), *(n for n in (EXACT, DELETED_AT) if n in own)]
    with reaching(options, str(kept.table)):
        scan = snapshot.handle.scan(selected_fields=tuple(names))
        for batch in scan.to_arrow_batch_reader():
            found = batch
            if DELETED_AT in own:
                found = found.filter(pc.is_null(found.column(DELETED_AT)))
            arrays = [
                found.column(field.name).cast(field.type)
                if field.name in found.schema.names
                else pa.nulls(found.num_rows, field.type)
                for field in schema
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)
