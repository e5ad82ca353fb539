"""Deletes the files of a table that no one needs any more. Each kind has its rule, and each is kept for an hour.

data files     that no version of the log lists: once they are older than `vacuum.retention`, every `vacuum.every`; all
               that are an hour old, where they take more than `MOST_DEAD_BYTES`. A file that a commit of the last
               hour removed is kept, however old it is. While a copy is held back, nothing is deleted: no version lists
               its files yet.
vectors        that the newest version does not use: an hour after that was first seen. Vacuums of others do not know
               this folder.
key files      of data files that are gone, and unfinished ones: once they are an hour old. See `lake/key_cache.py`.
drafts         that a killed process left in the log and among the notes: once they are an hour old.

The hour is for readers that have opened a version, and for files that a batch has written and not committed yet. On one
machine a batch may take longer than that: its lock says that it is still running.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

from tailrace.destination import copy
from tailrace.destination.delta.data_file import DataFile
from tailrace.destination.delta.key_index import key_folder, key_name
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.option import VacuumOptions
from tailrace.destination.delta.table_folder import LOG, OWN, VECTORS, TablePath
from tailrace.destination.delta.table_lock import between_batches
from tailrace.destination.lake import key_cache
from tailrace.system import failpoint

MOST_DEAD_BYTES = 10 << 30
"""When unneeded files take more space than this, they are deleted once an hour old, before the disk is full."""

_HOUR = 3600.0
_LOOK_SECONDS = 300.0
_NOTE = "vacuum.json"
_UNUSED = "vectors.json"
_ENTRY = re.compile(r"\d{20}\.json")
_DRAFT = re.compile(r"\.?[\w.-]+\.[0-9a-f]{32}")
_UsedBy = Callable[[Iterable[DataFile]], set[str]]
_looked: dict[str, float] = {}


def delete_unneeded(snapshot: DeltaSnapshot, options: VacuumOptions | None, *, at_once: bool = False) -> str | None:
    """Delete what may be deleted, if it is time to look; `at_once`: look in any case. Returns what was done."""
    now = time.time()
    done = _vacuum(snapshot, options, now, at_once=at_once) if options is not None else None
    if at_once or _is_time(f"{snapshot.place.uri}/{VECTORS}"):
        _collect_vectors(snapshot, now)
        _collect_key_files(snapshot, now)
        _collect_drafts(snapshot.place, now)
    return done


def _is_time(subject: str) -> bool:
    """Whether this process has not looked at it for some minutes."""
    now = time.monotonic()
    if now - _looked.get(subject, -_LOOK_SECONDS) < _LOOK_SECONDS:
        return False
    _looked[subject] = now
    return True


# -- data files --------------------------------------------------------------------------------------------


def _vacuum(snapshot: DeltaSnapshot, options: VacuumOptions, now: float, *, at_once: bool) -> str | None:
    place = snapshot.place
    retention = max(options.retention, _HOUR)
    if not at_once and now - _last_vacuum(snapshot) < options.every:
        if not _is_time(place.uri) or place.dead_bytes(sum(one.size for one in snapshot.files())) <= MOST_DEAD_BYTES:
            return None
        retention = _HOUR
    held = copy.last_held(place)
    if held is not None and now - held < max(options.retention, _HOUR):
        # A copy that no batch continues is not waited for any longer.
        return None
    old = [name for name, written in place.data_files().items() if written < now - retention]
    gone = _not_used(snapshot, old, _paths)
    if gone:
        removed = _removed_since(place, now - _HOUR)
        gone = [name for name in gone if name not in removed]
        failpoint.reach("delta.before_vacuum")
        place.delete(gone)
    place.note(_NOTE, json.dumps({"at": now}))
    return f"deleted {len(gone)} files" if gone else None


def _last_vacuum(snapshot: DeltaSnapshot) -> float:
    """When the table was last vacuumed, or else created. Stored with the table: a runner may last only one batch."""
    noted = snapshot.place.noted(_NOTE)
    if noted is not None:
        return float(json.loads(noted)["at"])
    return float(snapshot.metadata.get("createdTime") or 0) / 1000


def _removed_since(place: TablePath, when: float) -> set[str]:
    """The data files that commits since then removed. Checkpoints do not name them for that long."""
    found: set[str] = set()
    for name, written in place.entries(LOG).items():
        if written >= when and _ENTRY.fullmatch(name):
            lines = (place.read(f"{LOG}/{name}") or b"").splitlines()
            found |= {unquote(json.loads(line)["remove"]["path"]) for line in lines if line.startswith(b'{"remove"')}
    return found


def _paths(files: Iterable[DataFile]) -> set[str]:
    return {unquote(file.path) for file in files}


def _not_used(snapshot: DeltaSnapshot, names: list[str], used_by: _UsedBy) -> list[str]:
    """Those of the names that the newest version does not use, and that no batch of this machine is about to use."""
    if not set(names) - used_by(snapshot.files()):
        return []
    with between_batches(snapshot.place) as is_held:
        newest = DeltaSnapshot.load(snapshot.place, snapshot.table)
    if newest is None or not is_held:
        return []
    used = used_by(newest.files())
    return [name for name in names if name not in used]


# -- what is tailrace's own --------------------------------------------------------------------------------


def _collect_vectors(snapshot: DeltaSnapshot, now: float) -> None:
    place = snapshot.place
    if not snapshot.has_vectors:
        return
    used = _vectors(snapshot.files())
    before: dict[str, float] = json.loads(place.noted(_UNUSED) or "{}")
    unused = {name: before.get(name, now) for name in place.names(VECTORS) if name not in used}
    gone = set(_not_used(snapshot, [name for name, since in unused.items() if now - since >= _HOUR], _vectors))
    failpoint.reach("delta.before_collect")
    place.delete([f"{VECTORS}/{name}" for name in gone])
    kept = {name: since for name, since in unused.items() if name not in gone}
    if kept != before:
        place.note(_UNUSED, json.dumps(kept))


def _vectors(files: Iterable[DataFile]) -> set[str]:
    """The names of the files in our own folder that hold the vectors of these data files."""
    found: set[str] = set()
    for file in files:
        # Another program may have put a vector outside of the table, where nothing is deleted.
        with suppress(ValueError):
            if file.vector is not None and (name := file.vector.file) is not None:
                found.add(Path(name).name)
    return found


def _collect_key_files(snapshot: DeltaSnapshot, now: float) -> None:
    """A file that is not an hour old may be that of a data file which is about to be committed, or not complete."""
    wanted = {key_name(file) for file in snapshot.files()}
    for path in key_folder(snapshot.place).glob("*"):
        if path.name not in wanted:
            _delete_old(path, now)
        elif not snapshot.place.is_local:
            # A process that has mapped it long ago does not open it again.
            key_cache.note_use(path)


def _collect_drafts(place: TablePath, now: float) -> None:
    if not place.is_local:
        return
    for folder in (LOG, OWN):
        for path in Path(place.base, folder).glob("*"):
            if _DRAFT.fullmatch(path.name):
                _delete_old(path, now)


def _delete_old(path: Path, now: float) -> None:
    with suppress(FileNotFoundError):
        if now - path.stat().st_mtime >= _HOUR:
            path.unlink()
