"""Deletes the files of a table that no listed snapshot needs.

A file is deleted by the first look that comes `vacuum.retention` after the first one that found it unneeded, and not
before it is as old as that itself: readers may still have an older snapshot open, and a batch writes its files before
its commit names them. Where there is no way to list files, nothing is deleted.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs as arrow_fs
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import ManifestFile

from tailrace.destination.iceberg.merge import OWN_FOLDER, key_folder, key_name
from tailrace.destination.iceberg.option import IcebergOptions, IcebergVacuumOptions
from tailrace.destination.iceberg.snapshot import IcebergSnapshot, live_entries
from tailrace.model.schema import TableName
from tailrace.system import atomic_file, failpoint
from tailrace.system.cache_folder import cache_folder

_HOUR = 3600.0
_NOTE = "unneeded.json"


def delete_unneeded(
    options: IcebergOptions, table: TableName, vacuuming: IcebergVacuumOptions, *, at_once: bool = False
) -> str | None:
    """Delete what may be deleted, if it is time to look; `at_once`: look in any case. Returns what was done."""
    snapshot = IcebergSnapshot.load(options, table)
    if snapshot is None:
        return None
    note = _note_of(snapshot)
    noted = _noted(note)
    now = time.time()
    if not at_once and now - float(noted.get("at", 0.0)) < vacuuming.every:
        return None
    _collect_key_files(snapshot, now)
    written = _files_of(snapshot)
    # After the listing: what a batch has committed since is needed, and what it writes from now on is not listed.
    newest = IcebergSnapshot.load(options, table)
    if newest is None or newest.metadata.table_uuid != snapshot.metadata.table_uuid:
        return None
    needed = needed_files(newest)
    before: dict[str, float] = noted.get("unneeded", {})
    unneeded = {path: before.get(path, now) for path in written if path not in needed}
    old = now - vacuuming.retention
    gone = [path for path, since in unneeded.items() if since <= old and written[path] <= old]
    failpoint.reach("iceberg.before_vacuum")
    for path in gone:
        with suppress(FileNotFoundError):
            newest.handle.io.delete(path)
    kept = {path: since for path, since in unneeded.items() if path not in gone}
    atomic_file.make_folder(note.parent)
    atomic_file.replace_text(note, json.dumps({"at": now, "unneeded": kept}))
    return f"deleted {len(gone)} files" if gone else None


def needed_files(snapshot: IcebergSnapshot) -> set[str]:
    """The paths of all files that the listed snapshots and the table's metadata name."""
    metadata, io = snapshot.metadata, snapshot.handle.io
    found = {snapshot.handle.metadata_location, *(entry.metadata_file for entry in metadata.metadata_log)}
    found |= {each.statistics_path for each in (*metadata.statistics, *metadata.partition_statistics)}
    manifests: dict[str, ManifestFile] = {}
    for each in metadata.snapshots:
        found.add(each.manifest_list)
        manifests |= {manifest.manifest_path: manifest for manifest in each.manifests(io)}
    for path, manifest in manifests.items():
        found.add(path)
        found |= {entry.data_file.file_path for entry in live_entries(io, manifest)}
    return found


def _files_of(snapshot: IcebergSnapshot) -> dict[str, float]:
    """The table's files by their paths, as manifests name them, and when each was written."""
    io = snapshot.handle.io
    if not isinstance(io, PyArrowFileIO):
        return {}
    location = snapshot.folder.location
    parts = urlsplit(location)
    files = io.fs_by_scheme(parts.scheme or "file", parts.netloc)
    base = location if not parts.scheme else f"{parts.netloc}{parts.path}" if parts.netloc else parts.path
    found: dict[str, float] = {}
    for folder in ("data", "metadata"):
        selector = arrow_fs.FileSelector(f"{base}/{folder}", allow_not_found=True)
        for info in files.get_file_info(selector):
            if info.type == arrow_fs.FileType.File:
                found[f"{location}/{folder}/{info.base_name}"] = (info.mtime_ns or 0) / 1e9
    return found


def _collect_key_files(snapshot: IcebergSnapshot, now: float) -> None:
    """A file that is not an hour old may be that of a data file which is about to be committed, or not complete."""
    wanted = {key_name(file.data.data_file.file_path) for file in snapshot.files}
    for path in key_folder(snapshot.folder).glob("*"):
        with suppress(FileNotFoundError):
            if path.name not in wanted and now - path.stat().st_mtime >= _HOUR:
                path.unlink()


def _note_of(snapshot: IcebergSnapshot) -> Path:
    location = snapshot.folder.location.removeprefix("file://")
    if "://" not in location:
        return Path(location, OWN_FOLDER, _NOTE)
    return cache_folder() / "iceberg" / hashlib.sha256(location.encode()).hexdigest()[:32] / _NOTE


def _noted(note: Path) -> dict[str, Any]:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
