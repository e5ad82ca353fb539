"""Housekeeping of an Iceberg table next to its batches: small files merged, deleted rows left out, files deleted.

Small files are merged once there are `compact.files` of them; one that is larger than all smaller ones together waits
for more, so that a row is written again only a few times. A file is written again without its deleted rows once a tenth
of them is deleted.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tailrace.destination.iceberg import vacuum
from tailrace.destination.iceberg.data_file import rows_per_file
from tailrace.destination.iceberg.option import IcebergCompactOptions, IcebergOptions
from tailrace.destination.iceberg.rewrite import commit_again, write_again
from tailrace.destination.iceberg.snapshot import IcebergSnapshot, TableFile, total_rows
from tailrace.model.schema import TableName

WORN_PART = 0.1
"""The part of a file's rows that may be deleted before it is written again."""
COMMIT_ROWS = 2_000_000
"""How many rows one commit writes again: some seconds of work, which a process that is killed loses."""


def maintain(options: IcebergOptions, table: TableName, *, everything: bool = False) -> str | None:
    """Do the housekeeping that is due. `everything`: merge all small files and leave out all deleted rows.

    Does nothing while another process of this machine does the same.
    """
    snapshot = IcebergSnapshot.load(options, table)
    if snapshot is None:
        return None
    with _alone(snapshot) as is_alone:
        if not is_alone:
            return None
        compact = options.compact or (IcebergCompactOptions() if everything else None)
        done = [_rewrite(options, snapshot, compact, everything=everything) if compact is not None else None]
        if options.vacuum is not None:
            done.append(vacuum.delete_unneeded(options, table, options.vacuum, at_once=everything))
    return "; ".join(filter(None, done)) or None


def _rewrite(
    options: IcebergOptions, snapshot: IcebergSnapshot, compact: IcebergCompactOptions, *, everything: bool
) -> str | None:
    limit = rows_per_file(total_rows(snapshot.files))
    merged = written = 0
    for group in plan(snapshot.files, compact, everything=everything):
        now = IcebergSnapshot.load(options, snapshot.table)
        if now is None:
            break
        # Batches have marked further rows, and may have removed files.
        current = {file.data.data_file.file_path: file for file in now.files}
        wanted = [file for each in group if (file := current.get(each.data.data_file.file_path)) is not None]
        if len(wanted) == 1 and wanted[0].deletes is None:
            continue
        rewrite = write_again(now, wanted, limit)
        if commit_again(options, now, rewrite):
            merged += len(wanted)
            written += len(rewrite.written)
    return f"merged {merged} files into {written}" if merged else None


def plan(files: Sequence[TableFile], compact: IcebergCompactOptions, *, everything: bool) -> list[list[TableFile]]:
    """The files to write again, those together that become one. Pure."""
    least = rows_per_file(0) // 2
    small = [
        file
        for file in files
        if file.alive < least and file.data.data_file.file_size_in_bytes < compact.target_bytes // 2
    ]
    worn = [file for file in files if file.deletes is not None and (everything or _is_worn(file))]
    merging = small if everything else _worth_merging(small)
    if len(small) < (2 if everything else compact.files):
        merging = [file for file in small if file in worn]
    groups = [*_portions(merging), *([file] for file in worn if file not in merging)]
    return [group for group in groups if len(group) > 1 or group[0].deletes is not None]


def _is_worn(file: TableFile) -> bool:
    rows = file.data.data_file.record_count
    return rows - file.alive >= WORN_PART * rows


def _worth_merging(small: Sequence[TableFile]) -> list[TableFile]:
    """The small files without those that are larger than all smaller ones together."""
    ascending = sorted(small, key=lambda file: file.alive)
    smaller = total_rows(ascending)
    while ascending and ascending[-1].alive > (smaller := smaller - ascending[-1].alive):
        ascending.pop()
    chosen = {file.data.data_file.file_path for file in ascending}
    return [file for file in small if file.data.data_file.file_path in chosen]


def _portions(group: Sequence[TableFile]) -> Iterator[list[TableFile]]:
    """A group in parts that one commit can write again."""
    part: list[TableFile] = []
    for file in group:
        if part and total_rows(part) + file.alive > COMMIT_ROWS:
            yield part
            part = []
        part.append(file)
    if part:
        yield part


@contextmanager
def _alone(snapshot: IcebergSnapshot) -> Iterator[bool]:
    """Whether no other process of this machine maintains the table. True where there is no lock."""
    location = snapshot.folder.location.removeprefix("file://")
    if "://" in location or not Path(location).is_dir():
        yield True
        return
    folder = os.open(location, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(folder)
