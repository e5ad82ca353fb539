"""Batches for destinations that keep tables, a table whose key is an array, and a disk that is full."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from tailrace.destination import Batch, TableBatch, chunking
from tailrace.model.change import Changes
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.testing.destination import ITEMS, RowChange, changes_of

TREE = TableSchema(
    TableName("shop", "tree"),
    (Column("path", pa.list_(pa.int32()), False, number=1), Column("name", pa.string(), number=2)),
    ("path",),
)


def write(destination: Any, number: int, *changes: RowChange, table: TableSchema = ITEMS, **more: Any) -> Any:
    return destination.write_changes(TableBatch(table, Batch("p", number), changes_of(table, *changes), **more))


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Within the block no file can grow beyond this size: as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def parts_of(size: int) -> Iterator[None]:
    """Within the block a batch is written in parts of this many bytes: as if it were larger than memory."""
    before, chunking.PART_BYTES = chunking.PART_BYTES, size
    try:
        yield
    finally:
        chunking.PART_BYTES = before


def with_exact(changes: list[Changes], texts: list[str | None]) -> list[Changes]:
    """The changes with these texts of values that do not fit."""
    batch = changes[0].batch
    at = batch.schema.get_field_index("exact")
    return [Changes(changes[0].table, batch.set_column(at, batch.schema.field(at), pa.array(texts, pa.string())))]
