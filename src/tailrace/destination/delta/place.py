"""Where a table of the lake is: a folder on a disk, or one in an object store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tailrace.destination.delta.local_folder import LocalFolder
from tailrace.destination.delta.object_folder import ObjectFolder
from tailrace.destination.delta.table_folder import TablePath, folder_of
from tailrace.model.schema import TableName


def place_of(root: str, table: TableName, options: Mapping[str, str]) -> TablePath:
    """A table's folder below the root of the lake. `options` are delta-rs's storage options, for an object store."""
    if "://" in root and not root.startswith("file://"):
        return ObjectFolder(f"{root.rstrip('/')}/{folder_of(table)}", options=options, table=str(table))
    base = Path(root.removeprefix("file://")).absolute() / folder_of(table)
    return LocalFolder.at(base, str(table))
