"""What a manifest says about a data file: sizes, counts, and the bounds of its columns in Iceberg's binary form.

PyIceberg makes bounds of Python values, of which there is none for a date before year 1 or after 9999.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import StatsAggregator
from pyiceberg.types import (
    DateType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
    TimeType,
)

TEXT_LENGTH = 16
"""How many characters of a text a bound has."""
_WIDTHS: dict[type[IcebergType], int] = {
    IntegerType: 4,
    DateType: 4,
    LongType: 8,
    TimeType: 8,
    TimestampType: 8,
    TimestamptzType: 8,
}
_OTHERS = (FloatType, DoubleType, StringType)


def statistics(metadata: pq.FileMetaData, fields: Sequence[NestedField]) -> dict[str, Any]:
    """The statistics of a file with these columns, as the arguments of a `DataFile`.

    Nested columns have none, and decimals, booleans and bytes no bounds.
    """
    # A nested column may have the path that another one has as its name.
    columns = [metadata.schema.column(at) for at in range(metadata.num_columns)]
    leaves = {column.path: at for at, column in enumerate(columns) if column.max_definition_level == 1}
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    found: dict[str, Any] = {
        "record_count": metadata.num_rows,
        "column_sizes": {},
        "value_counts": {},
        "null_value_counts": {},
        "nan_value_counts": {},
        "lower_bounds": {},
        "upper_bounds": {},
        "split_offsets": sorted(_start(group) for group in groups),
    }
    for field in fields:
        at = leaves.get(field.name)
        if at is None or not isinstance(field.field_type, PrimitiveType):
            continue
        chunks = [group.column(at) for group in groups]
        number = field.field_id
        found["column_sizes"][number] = sum(chunk.total_compressed_size for chunk in chunks)
        found["value_counts"][number] = sum(chunk.num_values for chunk in chunks)
        given = [chunk.statistics for chunk in chunks]
        if any(one is None for one in given):
            continue
        if all(one.has_null_count for one in given):
            found["null_value_counts"][number] = sum(one.null_count for one in given)
        low, high = _bounds(field.field_type, given)
        if low is not None and high is not None:
            found["lower_bounds"][number], found["upper_bounds"][number] = low, high
    return found


def _start(group: pq.RowGroupMetaData) -> int:
    first = group.column(0)
    return int(first.dictionary_page_offset if first.has_dictionary_page else first.data_page_offset)


def _bounds(kind: IcebergType, given: Sequence[pq.Statistics]) -> tuple[bytes | None, bytes | None]:
    held = [one for one in given if one.has_min_max]
    if not held or any(not one.has_min_max and one.num_values for one in given):
        return None, None
    if (width := _WIDTHS.get(type(kind))) is not None:
        low, high = min(one.min_raw for one in held), max(one.max_raw for one in held)
        return low.to_bytes(width, "little", signed=True), high.to_bytes(width, "little", signed=True)
    if not isinstance(kind, _OTHERS):
        return None, None
    length = TEXT_LENGTH if isinstance(kind, StringType) else None
    aggregate = StatsAggregator(kind, held[0].physical_type, length)
    for one in held:
        aggregate.update_min(one.min)
        aggregate.update_max(one.max)
    return aggregate.min_as_bytes(), aggregate.max_as_bytes()
