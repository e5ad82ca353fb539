"""The other side's rows in the types of a replica, for `tailrace verify`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from tailrace.destination.replica.unheld_value import UnheldMask, note_unheld
from tailrace.model.change import EXACT
from tailrace.model.schema import TableSchema

Encode = Callable[[Any, pa.DataType, str, str], Any]
"""Values as a kept type, for a column of a table; raises UnfitError for one that it cannot hold."""


def comparable_schema(kept: TableSchema) -> pa.Schema:
    """The columns of a table in its kept types, and EXACT."""
    return pa.schema([*((column.name, column.type) for column in kept.columns), (EXACT, pa.string())])


def comparable_rows(
    batch: pa.RecordBatch, kept: TableSchema, encode: Encode, unheld: Callable[[Any], UnheldMask | None]
) -> pa.RecordBatch:
    """The rows of a batch as the replica would keep them."""
    arrays: list[pa.Array[Any]] = []
    exact: Any = batch.column(EXACT)
    for column in kept.columns:
        values = encode(batch.column(column.name), column.type, column.name, str(kept.table))
        if (mask := unheld(values)) is not None:
            values, exact = note_unheld(values, mask, exact, column.name, kept)
        arrays.append(values)
    if isinstance(exact, pa.ChunkedArray):
        exact = exact.combine_chunks()
    return pa.RecordBatch.from_arrays([*arrays, exact], schema=comparable_schema(kept))
