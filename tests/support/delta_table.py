"""A Delta table as others find it, and the ways in which it and its writer can be disturbed between batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from tailrace.destination.delta import commit, data_file, deletion_vector, key_index, log, object_folder, upsert
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.lake import key_index as lake_keys
from tailrace.model.schema import TableName, TableSchema

RowDict = dict[str, Any]


def queried(table: DeltaTable | str) -> list[RowDict]:
    """All rows, by a query of delta-rs: it reads deletion vectors, which its other ways refuse."""
    handle = DeltaTable(table) if isinstance(table, str) else table
    return list(pa.table(QueryBuilder().register("it", handle).execute("SELECT * FROM it").read_all()).to_pylist())


def read_back(destination: DeltaDestination, table: TableSchema) -> list[RowDict]:
    """The rows that are not deleted, as `tailrace verify` reads them."""
    found = destination.read_table(table)
    assert found is not None
    return [row for batch in found.rows for row in batch.select(table.arrow.names).to_pylist()]


def snapshot_of(destination: DeltaDestination, table: TableName) -> DeltaSnapshot:
    found = DeltaSnapshot.load(destination.place(table), str(table))
    assert found is not None
    return found


def forget_everything() -> None:
    """Be a new process: nothing about any table is in memory."""
    log._known.clear()
    log._synced.clear()
    object_folder._kept.clear()
    lake_keys.forget_all()
    deletion_vector._kept.clear()
    deletion_vector._kept_bytes = 0


def stored_keys(place: TablePath) -> list[str]:
    return sorted(path.name for path in key_index.key_folder(place).glob("*.keys"))


@contextmanager
def small_measures(*, file_rows: int = 3, checkpoint_interval: int = 3) -> Iterator[None]:
    """Within the block a few rows are a large file, whose keys are stored, and a few commits are a long log."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(upsert, "CHEAP_ROWS", 2)
        patch.setattr(lake_keys, "STORED_ROWS", 1)
        patch.setattr(data_file, "LEAST_ROWS", file_rows)
        patch.setattr(data_file, "LEAST_MARKED_ROWS", file_rows)
        patch.setattr(commit, "CHECKPOINT_INTERVAL", checkpoint_interval)
        yield
