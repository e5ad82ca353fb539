"""An Iceberg table as others find it."""

from __future__ import annotations

from typing import Any

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from tailrace.destination.iceberg import position_delete, snapshot
from tailrace.destination.iceberg.catalog import load_table
from tailrace.destination.iceberg.destination import IcebergDestination
from tailrace.destination.lake import key_index
from tailrace.model.schema import TableName

RowDict = dict[str, Any]


def opened(destination: IcebergDestination, table: TableName) -> Table:
    found = load_table(destination, table)
    assert found is not None
    return found


def rows_in(destination: IcebergDestination, table: TableName) -> list[RowDict]:
    """All rows, as PyIceberg reads them; none where there is no table."""
    found = load_table(destination, table)
    return [] if found is None else list(found.scan().to_arrow().to_pylist())


def scanned(destination: IcebergDestination, table: TableName) -> dict[str, list[DataFile]]:
    """The data files that a reader opens, and the delete files of each."""
    return {task.file.file_path: list(task.delete_files) for task in opened(destination, table).scan().plan_files()}


def forget_everything() -> None:
    """Be a new process: nothing about any table is in memory."""
    snapshot.forget_all()
    position_delete.forget_all()
    key_index.forget_all()
