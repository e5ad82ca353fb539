"""Housekeeping of a Delta table between batches: small files merged, unneeded ones deleted."""

from __future__ import annotations

import json
import math
import time

from tailrace.destination import copy
from tailrace.destination.delta.data_file import DataFile, FileWriter, read_columns, rows_per_file, total_rows
from tailrace.destination.delta.log import ConflictError, DeltaSnapshot, commit
from tailrace.destination.delta.option import CompactOptions, VacuumOptions
from tailrace.destination.delta.projection import AS_IS
from tailrace.destination.delta.table_folder import TablePath

MOST_DEAD_BYTES = 10 << 30
"""When unneeded files take more space than this, they are deleted once an hour old, before the disk is full."""

_HOUR = 3600.0
_LOOK_SECONDS = 300.0
_NOTE = "vacuum.json"
_FULL = "full.json"
_looked: dict[str, float] = {}


def maintain(place: TablePath, table: str, compact: CompactOptions | None, vacuum: VacuumOptions | None) -> str | None:
    """Do the housekeeping that is due. Cheap when nothing is: it only reads the log."""
    snapshot = DeltaSnapshot.load(place, table)
    if snapshot is None:
        return None
    files = snapshot.files()
    done = [
        _compact(snapshot, files, compact) if compact else None,
        _vacuum(snapshot, files, vacuum) if vacuum else None,
    ]
    return "; ".join(filter(None, done)) or None


def _compact(snapshot: DeltaSnapshot, files: list[DataFile], compact: CompactOptions) -> str | None:
    limit = rows_per_file(total_rows(files))
    # A file that is small by this measure may still be full: the bytes of wide rows can compress well.
    full = set(json.loads(snapshot.place.noted(_FULL) or "[]"))
    small = [
        file
        for file in files
        if file.rows < limit // 2 and file.size < compact.target_bytes // 2 and file.path not in full
    ]
    if len(small) < compact.files:
        return None
    groups: dict[tuple[tuple[str, str | None], ...], list[DataFile]] = {}
    for file in small:
        groups.setdefault(tuple(file.partition.items()), []).append(file)
    kinds = {name: snapshot.schema.field(name).type for name in snapshot.partition_by}
    merged: list[DataFile] = []
    written: list[DataFile] = []
    for group in groups.values():
        if len(group) < 2:
            continue
        with FileWriter(snapshot.place, snapshot.schema, snapshot.partition_by, limit) as writer:
            for file in sorted(group, key=lambda one: one.path):
                for rows in read_columns(snapshot.place, file, None, kinds):
                    writer.write(AS_IS.read(rows, snapshot.schema))
        merged += group
        written += writer.written
        full |= {file.path for file in writer.written[:-1]}
    if not merged:
        return None
    snapshot.place.sync()
    try:
        # No row changes: readers that follow the table's changes can skip this commit.
        commit(
            snapshot.place,
            snapshot.table,
            snapshot,
            snapshot.schema,
            snapshot.partition_by,
            [file.add(data_change=False) for file in written],
            [file.remove(data_change=False) for file in merged],
            None,
        )
    except ConflictError:
        # A batch committed in between. A vacuum deletes the files just written, and the next call tries again.
        return None
    there = {file.path for file in (*files, *written)}
    snapshot.place.note(_FULL, json.dumps(sorted(full & there)))
    return f"merged {len(merged)} files into {len(written)}"


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
    gone = snapshot.handle.vacuum(
        retention_hours=math.ceil(retention / _HOUR), dry_run=False, enforce_retention_duration=False, full=True
    )
    place.note(_NOTE, json.dumps({"at": now}))
    return f"deleted {len(gone)} files" if gone else None


def _last_vacuum(snapshot: DeltaSnapshot) -> float:
    """When the table was last vacuumed, or else created. Stored with the table: a runner may last only one batch."""
    noted = snapshot.place.noted(_NOTE)
    if noted is not None:
        return float(json.loads(noted)["at"])
    return (snapshot.handle.metadata().created_time or 0) / 1000
