"""The rows of a table as a source or a destination holds them now: what `tailrace verify` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from tailrace.model.change import EXACT, Changes
from tailrace.model.schema import TableSchema

RowBatches = Iterator[pa.RecordBatch]
"""A table's columns, then EXACT: the values that their column's type cannot hold."""


def _as_it_is(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


@dataclass(frozen=True)
class TableRows:
    """The rows of one table, read once, and `shape`: another side's rows in the columns and types of these."""

    rows: RowBatches
    shape: Callable[[pa.RecordBatch], pa.RecordBatch] = _as_it_is


@runtime_checkable
class Readable(Protocol):
    """A source or destination whose tables can be read as a whole."""

    def read_table(self, table: TableSchema) -> TableRows | None:
        """The table's rows as they are now; nothing upstream, at the destination or in the state changes.

        None where what it holds of the table are changes, which no row of the other side is meant to equal. Called by
        `tailrace verify`, once for each table.
        """
        ...


def copied_rows(chunks: Iterable[Changes]) -> RowBatches:
    """The rows of a copy."""
    for changes in chunks:
        yield with_exact(changes.row, changes.batch.column("exact"))


def with_exact(rows: pa.StructArray, exact: pa.Array[Any] | None) -> pa.RecordBatch:
    """Rows with their column EXACT, which is null where every value fits."""
    texts = pa.nulls(len(rows), pa.string()) if exact is None else exact
    return pa.RecordBatch.from_struct_array(rows).append_column(EXACT, texts)
