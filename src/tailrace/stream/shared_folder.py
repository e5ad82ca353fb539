"""Folders that the driver shares with its executors: on a cluster every machine must see them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tailrace.destination import Destination, EventDestination
from tailrace.errors import Finding
from tailrace.source.source import Source
from tailrace.stream.spark_master import is_local


def shared_folders(source: Source, destination: Destination, staged: Path) -> dict[str, Path]:
    """The folders that tasks read or write and that others must see, by the key of the file that names them."""
    folders = {**source.shared_folders(), **destination.shared_folders()}
    if type(destination).write_rows in (Destination.write_rows, EventDestination.write_rows):
        folders["state"] = staged
    return folders


def shared_folder_findings(folders: Mapping[str, Path], master: str) -> list[Finding]:
    """A warning for each folder that executors on other machines must see. Pure."""
    if is_local(master):
        return []
    return [
        Finding(
            "warning", key, f"every executor must see {path}, and executors of {master} may be other machines", fix(key)
        )
        for key, path in sorted(folders.items())
    ]


def fix(key: str) -> str:
    """What to set a key to that names a folder which executors do not see."""
    shared = "a folder that is mounted at the same path on every machine"
    return f"set `{key}` to " + (f"object storage such as s3://bucket/path, or {shared}" if key in _OBJECTS else shared)


_OBJECTS = frozenset({"source.journal.path", "destination.path"})
"""Keys that may name object storage. The `path` of an SQLite file is `destination.path (SQLite)`."""
