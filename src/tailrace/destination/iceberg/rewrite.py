"""Writes some data files of a table again without their deleted rows, while batches go on.

Rows that a batch deletes in the old files meanwhile are marked in the new ones. If it removes one of the old files, its
commit counts, and the new files are in no snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyiceberg.manifest import DataFile

from tailrace.destination.iceberg import position_delete
from tailrace.destination.iceberg.commit import IcebergChange, IcebergConflictError, commit
from tailrace.destination.iceberg.data_file import DataFileWriter, read_columns, wanted_columns
from tailrace.destination.iceberg.merge import keyed_file
from tailrace.destination.iceberg.option import IcebergOptions
from tailrace.destination.iceberg.snapshot import IcebergSnapshot, TableFile
from tailrace.destination.lake import key_index
from tailrace.destination.lake.key_index import Indexes
from tailrace.destination.lake.row_bitmap import Rows, bitmap, numbers
from tailrace.system import failpoint

_TRIES = 5


@dataclass
class FileRewrite:
    """Files that were written again. `starts` says where the rows of each source begin among all rows written."""

    sources: Sequence[TableFile]
    written: list[DataFile]
    dead: list[Rows] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def moved(self, at: int, rows: Indexes) -> Indexes:
        """Where rows of a source are among all rows written."""
        return self.starts[at] + rows - np.searchsorted(numbers(self.dead[at]), rows)


def write_again(snapshot: IcebergSnapshot, sources: Sequence[TableFile], most_rows: int) -> FileRewrite:
    """Write the living rows of these files to new ones, in their order, and index their keys."""
    columns, folder = snapshot.columns, snapshot.folder
    wanted = wanted_columns(columns, [*columns.types])
    found = FileRewrite(sources, [])
    start = 0
    for file in sources:
        entry = file.deletes
        found.dead.append(Rows() if entry is None else position_delete.read_deletes(folder, entry.data_file))
        found.starts.append(start)
        start += file.alive

    def alive() -> Iterator[pa.Table]:
        for file, rows in zip(sources, found.dead, strict=True):
            dead = np.zeros(file.data.data_file.record_count, bool)
            dead[numbers(rows)] = True
            at = 0
            for piece in read_columns(folder, file.data.data_file.file_path, wanted):
                here = ~dead[at : at + piece.num_rows]
                at += piece.num_rows
                kept = piece if here.all() else piece.filter(pa.array(here))
                if kept.num_rows:
                    yield kept

    found.written = DataFileWriter(folder, columns).write(alive(), most_rows)
    if columns.kept.key:
        for written in found.written:
            # The next batch need not do it.
            key_index.keys_of(
                keyed_file(folder, str(snapshot.table), written, columns, columns.kept.key), is_stored=True
            )
    return found


def commit_again(options: IcebergOptions, snapshot: IcebergSnapshot, rewrite: FileRewrite) -> bool:
    """Put the new files in place of the old ones. False if a batch removed one of those, or never let it through."""
    now: IcebergSnapshot | None = snapshot
    for _ in range(_TRIES):
        if now is None or now.columns != snapshot.columns:
            return False
        current = {file.data.data_file.file_path: file for file in now.files}
        files = [current.get(each.data.data_file.file_path) for each in rewrite.sources]
        if not all(files):
            return False
        present = [file for file in files if file is not None]
        removes = [entry for file in present for entry in (file.data, file.deletes) if entry is not None]
        adds = [*rewrite.written, *_marked_since(now, rewrite, present)]
        failpoint.reach("iceberg.before_rewrite_commit")
        try:
            commit(now, IcebergChange(adds, removes, changes_rows=False), None, options.snapshots)
        except IcebergConflictError:
            now = IcebergSnapshot.load(options, snapshot.table)
        else:
            return True
    return False


def _marked_since(now: IcebergSnapshot, rewrite: FileRewrite, files: Sequence[TableFile]) -> list[DataFile]:
    """The deletes in the new files of rows that batches deleted in the old ones while those were written again."""
    found: list[Indexes] = []
    for at, (file, dead) in enumerate(zip(files, rewrite.dead, strict=True)):
        if file.deletes is not None:
            later = position_delete.read_deletes(now.folder, file.deletes.data_file) - dead
            if later:
                found.append(rewrite.moved(at, numbers(later)))
    if not found:
        return []
    rows = np.sort(np.concatenate(found))
    ends = np.cumsum([0, *(each.record_count for each in rewrite.written)])
    adds: list[DataFile] = []
    for at, written in enumerate(rewrite.written):
        here = rows[np.searchsorted(rows, ends[at]) : np.searchsorted(rows, ends[at + 1])] - ends[at]
        if len(here):
            adds.append(position_delete.write_deletes(now.folder, written.file_path, bitmap(here)))
    return adds
