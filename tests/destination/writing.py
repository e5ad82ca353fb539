"""Batches for destinations that keep tables, and a table whose key is an array."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tailrace.destination import Batch
from tailrace.schema import Column, TableName, TableSchema
from tailrace.testing.destination import ITEMS, Change, changes_of

TREE = TableSchema(
    TableName("shop", "tree"),
    (Column("path", pa.list_(pa.int32()), False, number=1), Column("name", pa.string(), number=2)),
    ("path",),
)


def write(destination: Any, number: int, *changes: Change, table: TableSchema = ITEMS, **more: Any) -> Any:
    return destination.write_changes(table, changes_of(table, *changes), Batch("p", number), **more)
