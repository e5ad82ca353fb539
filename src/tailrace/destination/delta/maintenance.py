"""Housekeeping of a Delta table between batches: small files merged, vectors folded, unneeded files deleted.

A table whose rows are marked (merge on read) stays fast to read by two rules. Small files are merged once there are
`compact.files` of them. A file is rewritten without its deleted rows once a tenth of them is deleted, or once the
vectors that were written for it add up to its own size: from then on the vectors cost more than the file.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from tailrace.destination import copy
from tailrace.destination.delta import deletion_vector
from tailrace.destination.delta.commit import ConflictError, TableChange, commit
from tailrace.destination.delta.data_file import DataFile, FileWriter, read_columns, rows_per_file, total_rows
from tailrace.destination.delta.key_index import key_folder, key_name
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.option import CompactOptions, Updates, VacuumOptions
from tailrace.destination.delta.projection import AS_IS
from tailrace.destination.delta.table_folder import VECTORS, TablePath
from tailrace.system import failpoint

MOST_DEAD_BYTES = 10 << 30
"""When unneeded files take more space than this, they are deleted once an hour old, before the disk is full."""
WORN_PART = 0.1
"""The part of a file's rows that may be deleted before it is rewritten."""
ONE_CALL_ROWS = 2_000_000
"""How many rows one call rewrites: some seconds at most, as the next batch of the table waits for it."""

_HOUR = 3600.0
_LOOK_SECONDS = 300.0
_NOTE = "vacuum.json"
_FULL = "full.json"
_UNUSED = "vectors.json"
_looked: dict[str, float] = {}


def maintain(
    place: TablePath,
    table: str,
    compact: CompactOptions | None,
    vacuum: VacuumOptions | None,
    updates: Updates = "auto",
    *,
    everything: bool = False,
) -> str | None:
    """Do the housekeeping that is due. Cheap when nothing is: it only looks at the log.

    `everything`: merge all small files and fold all vectors now, however few there are.
    """
    done: list[str | None] = []
    if compact is not None and (snapshot := DeltaSnapshot.load(place, table)) is not None:
        done.append(_rewrite(snapshot, compact, updates, everything=everything))
    if (snapshot := DeltaSnapshot.load(place, table)) is not None:
        done.append(_vacuum(snapshot, snapshot.files(), vacuum) if vacuum else None)
        _collect(snapshot, now=time.time())
    return "; ".join(filter(None, done)) or None


def _rewrite(snapshot: DeltaSnapshot, compact: CompactOptions, updates: Updates, *, everything: bool) -> str | None:
    """Write the living rows of small and worn files to other files. No row changes."""
    files = snapshot.files()
    marks = snapshot.has_vectors and updates != "copy_on_write"
    limit = rows_per_file(total_rows(files), marks=marks)
    # A file that is small by this measure may still be full: the bytes of wide rows can compress well.
    full = set(json.loads(snapshot.place.noted(_FULL) or "[]"))
    worn = [file for file in files if _is_worn(file, at_all=everything or not marks)]
    small = [
        file
        for file in files
        if file.alive < limit // 2 and file.size < compact.target_bytes // 2 and file.path not in full
    ]
    if len(small) < (2 if everything else compact.files):
        small = []
    groups: dict[tuple[tuple[str, str | None], ...], list[DataFile]] = {}
    for file in _affordable([*worn, *(one for one in small if one not in worn)], everything=everything):
        groups.setdefault(tuple(file.partition.items()), []).append(file)
    kinds = {name: snapshot.schema.field(name).type for name in snapshot.partition_by}
    merged: list[DataFile] = []
    written: list[DataFile] = []
    for group in groups.values():
        if len(group) < 2 and group[0].vector is None:
            continue
        with FileWriter(snapshot.place, snapshot.schema, snapshot.partition_by, limit) as writer:
            for file in sorted(group, key=lambda one: one.path):
                for rows in _living(snapshot.place, file, kinds):
                    writer.write(AS_IS.read(rows, snapshot.schema))
        merged += group
        written += writer.written
        full |= {file.path for file in writer.written[:-1]}
    if not merged:
        return None
    snapshot.place.sync()
    failpoint.reach("delta.before_compact")
    try:
        # No row changes: readers that follow the table's changes can skip this commit.
        change = TableChange(
            snapshot.schema,
            snapshot.partition_by,
            written,
            merged,
            has_vectors=snapshot.has_vectors,
            changes_rows=False,
        )
        commit(snapshot.place, snapshot.table, snapshot, change, None)
    except ConflictError:
        # A batch committed in between. A vacuum deletes the files just written, and the next call tries again.
        return None
    there = {file.path for file in (*files, *written)}
    snapshot.place.note(_FULL, json.dumps(sorted(full & there)))
    return f"merged {len(merged)} files into {len(written)}"


def _is_worn(file: DataFile, *, at_all: bool) -> bool:
    if file.vector is None:
        return False
    return at_all or file.dead >= WORN_PART * file.rows or file.vector_bytes >= file.size


def _affordable(files: Iterable[DataFile], *, everything: bool) -> list[DataFile]:
    """The files for one call: the first, and more while they are few rows. The rest follows in the next calls."""
    chosen: list[DataFile] = []
    rows = 0
    for file in files:
        if chosen and rows + file.alive > ONE_CALL_ROWS and not everything:
            break
        chosen.append(file)
        rows += file.alive
    return chosen


def _living(place: TablePath, file: DataFile, kinds: dict[str, pa.DataType]) -> Iterable[pa.Table]:
    """The rows of a file that are not marked as deleted."""
    alive = np.ones(file.rows, bool)
    if file.vector is not None:
        alive[deletion_vector.numbers(deletion_vector.read(place, file.vector, place.table))] = False
    start = 0
    for rows in read_columns(place, file, None, kinds):
        here = alive[start : start + rows.num_rows]
        start += rows.num_rows
        yield rows if here.all() else rows.filter(pa.array(here))


def _collect(snapshot: DeltaSnapshot, now: float) -> None:
    """Delete vectors that no reader needs any more, and key files of data files that are gone.

    A vector is deleted an hour after it was first seen unused: a reader may have opened the version that uses it.
    """
    place = snapshot.place
    if not snapshot.has_vectors or now - _looked.get(f"{place.uri}/{VECTORS}", 0.0) < _LOOK_SECONDS:
        return
    _looked[f"{place.uri}/{VECTORS}"] = now
    files = snapshot.files()
    used = {Path(name).name for file in files if file.vector is not None and (name := file.vector.file) is not None}
    before: dict[str, float] = json.loads(place.noted(_UNUSED) or "{}")
    unused = {name: before.get(name, now) for name in place.names(VECTORS) if name not in used}
    gone = [name for name, since in unused.items() if now - since >= _HOUR]
    place.delete([f"{VECTORS}/{name}" for name in gone])
    if unused or before:
        place.note(_UNUSED, json.dumps({name: since for name, since in unused.items() if name not in gone}))
    wanted = {key_name(file) for file in files}
    for path in key_folder(place).glob("*"):
        if path.name not in wanted:
            with suppress(FileNotFoundError):
                path.unlink()


def _vacuum(snapshot: DeltaSnapshot, files: list[DataFile], vacuum: VacuumOptions) -> str | None:
    place, now = snapshot.place, time.time()
    retention = max(vacuum.retention, _HOUR)
    if now - _last_vacuum(snapshot) < vacuum.every:
        if time.monotonic() - _looked.get(place.uri, -_LOOK_SECONDS) < _LOOK_SECONDS:
            return None
        _looked[place.uri] = time.monotonic()
        if place.dead_bytes(sum(file.size for file in files)) <= MOST_DEAD_BYTES:
            return None
        retention = _HOUR
    held = copy.last_held(place)
    if held is not None and now - held < max(vacuum.retention, _HOUR):
        # No version lists the files of an unfinished copy. A copy that no batch continues is not waited for any longer.
        return None
    # At least one hour: a running batch has written files that no table version lists yet. delta-rs counts in whole
    # hours; a file may be kept longer than configured, never shorter.
    gone = _opened(place).vacuum(
        retention_hours=math.ceil(retention / _HOUR), dry_run=False, enforce_retention_duration=False, full=True
    )
    place.note(_NOTE, json.dumps({"at": now}))
    return f"deleted {len(gone)} files" if gone else None


def _last_vacuum(snapshot: DeltaSnapshot) -> float:
    """When the table was last vacuumed, or else created. Stored with the table: a runner may last only one batch."""
    noted = snapshot.place.noted(_NOTE)
    if noted is not None:
        return float(json.loads(noted)["at"])
    return float(snapshot.metadata.get("createdTime") or 0) / 1000


def _opened(place: TablePath) -> DeltaTable:
    return DeltaTable(place.uri, storage_options=dict(place.options) or None)
