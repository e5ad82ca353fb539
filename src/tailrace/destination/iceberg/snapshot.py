"""An Iceberg table at one snapshot: its columns, its files, and the last batch of each pipeline in it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntry, ManifestFile
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata

from tailrace.destination.iceberg import position_delete
from tailrace.destination.iceberg.catalog import load_table
from tailrace.destination.iceberg.column import TableColumns
from tailrace.destination.iceberg.data_file import TableFolder
from tailrace.destination.iceberg.option import IcebergOptions
from tailrace.errors import TableError
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema

MARK = "Kept by tailrace. Others may optimize it but must not change its rows."
COMMENT = "comment"
COLUMNS = "tailrace.columns"
"""The table property that records the upstream's columns, with the numbers by which a renamed one is known again."""
_BATCH = "tailrace.batch."
_CACHED_ENTRIES = 200_000
"""How many files of all tables a process remembers from manifests, which never change."""


def batch_property(pipeline: str) -> str:
    """The table property that holds the last batch of a pipeline."""
    return f"{_BATCH}{pipeline}"


@dataclass(frozen=True)
class TableFile:
    """A data file and, where some of its rows are deleted, the file that says which."""

    data: ManifestEntry
    deletes: ManifestEntry | None = None

    @property
    def alive(self) -> int:
        deleted = self.deletes.data_file.record_count if self.deletes is not None else 0
        return self.data.data_file.record_count - deleted


@dataclass(frozen=True)
class ListedManifest:
    """A manifest and its files that are still in the table."""

    manifest: ManifestFile
    entries: Sequence[ManifestEntry]


@dataclass(frozen=True)
class IcebergSnapshot:
    """A table as it was loaded."""

    handle: Table
    table: TableName

    @classmethod
    def load(cls, options: IcebergOptions, table: TableName) -> IcebergSnapshot | None:
        """The table now, None if there is none. Raises TableError for one that tailrace did not make."""
        handle = load_table(options, table)
        if handle is None:
            return None
        found = cls(handle, table)
        found.require_own()
        return found

    def require_own(self) -> None:
        """Raise TableError unless tailrace made the table and can write it."""
        if problem := self.problem():
            raise TableError(
                problem, table=str(self.table), fix="drop or rename that one, or choose another warehouse or catalog"
            )

    def problem(self) -> str | None:
        """Why tailrace cannot write the table; None if it can."""
        metadata = self.metadata
        if metadata.properties.get(COMMENT) != MARK or COLUMNS not in metadata.properties:
            return f"the Iceberg table {self.table} was not made by tailrace"
        if metadata.format_version != 2:
            return f"another program gave the Iceberg table {self.table} format version {metadata.format_version}"
        if not metadata.spec().is_unpartitioned():
            return f"another program partitioned the Iceberg table {self.table}"
        return None

    @property
    def metadata(self) -> TableMetadata:
        return self.handle.metadata

    @property
    def folder(self) -> TableFolder:
        return TableFolder(self.handle.io, self.metadata.location.rstrip("/"))

    @property
    def version(self) -> int:
        """Grows with every snapshot, also when older ones are no longer listed."""
        return self.metadata.next_sequence_number() - 1

    def last_batch(self, pipeline: str) -> LastBatch | None:
        """The last batch of a pipeline in the table."""
        text = self.metadata.properties.get(batch_property(pipeline))
        if text is None:
            return None
        last = LastBatch.parse(text)
        return LastBatch(last.id, last.end, self.version)

    @cached_property
    def columns(self) -> TableColumns:
        kept = TableSchema.from_json(self.metadata.properties[COLUMNS])
        return TableColumns(kept, self.metadata.schema())

    @cached_property
    def manifests(self) -> list[ListedManifest]:
        current = self.metadata.current_snapshot()
        if current is None:
            return []
        io = self.handle.io
        return [ListedManifest(each, live_entries(io, each)) for each in current.manifests(io)]

    @cached_property
    def files(self) -> list[TableFile]:
        """The data files, each with its deleted rows. Raises TableError for deletes of another program."""
        deletes: dict[str, ManifestEntry] = {}
        for listed in self.manifests:
            if listed.manifest.content != ManifestContent.DELETES:
                continue
            for entry in listed.entries:
                target = position_delete.target_of(entry.data_file)
                if target is None or target in deletes:
                    raise TableError(
                        f"another program deleted rows of the Iceberg table {self.table}",
                        table=str(self.table),
                        fix=f"tailrace resync FILE {self.table}, and let no one else change its rows",
                    )
                deletes[target] = entry
        return [
            TableFile(entry, deletes.get(entry.data_file.file_path))
            for listed in self.manifests
            if listed.manifest.content == ManifestContent.DATA
            for entry in listed.entries
        ]


def total_rows(files: Sequence[TableFile]) -> int:
    return sum(file.alive for file in files)


def mean_row_bytes(files: Sequence[TableFile]) -> int:
    """The approximate memory that one row of these files takes."""
    size = sum(file.data.data_file.file_size_in_bytes for file in files)
    return 3 * size // max(total_rows(files), 1)


def key_bounds(file: DataFile, field_id: int) -> tuple[int | None, int | None]:
    """The bounds of a column that holds whole numbers, dates or times."""
    found = [(bounds or {}).get(field_id) for bounds in (file.lower_bounds, file.upper_bounds)]
    low, high = (None if each is None else int.from_bytes(each, "little", signed=True) for each in found)
    return low, high


_kept: OrderedDict[str, tuple[ManifestEntry, ...]] = OrderedDict()
_kept_entries = 0
_lock = threading.Lock()


def live_entries(io: FileIO, manifest: ManifestFile) -> tuple[ManifestEntry, ...]:
    """The files of a manifest that are in the table."""
    global _kept_entries
    path = manifest.manifest_path
    with _lock:
        if path in _kept:
            _kept.move_to_end(path)
            return _kept[path]
    found = tuple(manifest.fetch_manifest_entry(io, discard_deleted=True))
    with _lock:
        if path not in _kept:
            _kept[path] = found
            _kept_entries += len(found)
            while _kept_entries > _CACHED_ENTRIES and len(_kept) > 1:
                _, gone = _kept.popitem(last=False)
                _kept_entries -= len(gone)
    return found


def forget_all() -> None:
    """Remember no manifest, as in a new process."""
    global _kept_entries
    with _lock:
        _kept.clear()
        _kept_entries = 0


def warehouse_folder(options: IcebergOptions) -> Path | None:
    """The folder of all tables, on a local disk."""
    return Path(options.warehouse.removeprefix("file://")) if options.is_local else None
