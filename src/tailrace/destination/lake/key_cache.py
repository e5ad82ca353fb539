"""The key files that this machine stores for tables in object stores, and how their space is bounded.

Maintenance of a table deletes those of its data files that are gone, but only on the machine where it runs. Tables move
between machines, are dropped, or belong to pipelines that are gone. So what no process used for a week is deleted here,
and beyond a bound what was used least lately: a key file only saves time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tailrace.system.cache_folder import cache_folder

UNUSED_SECONDS = 7 * 86_400.0
MOST_BYTES = 16 << 30
MOST_OF_DISK = 0.1
"""The bound: so many bytes, or this part of the disk if that is less."""
_HOUR = 3600.0
_DAY = 86_400.0
_swept_at = float("-inf")


def folder_for(uri: str) -> Path:
    """Where the key files of a table in an object store are. Raises OSError for a user without a cache folder."""
    return _root() / hashlib.sha256(uri.encode()).hexdigest()[:32]


def note_use(file: Path) -> None:
    """Note that a key file is in use. Cheap when that was noted lately."""
    with suppress(OSError):
        if time.time() - file.stat().st_mtime > _DAY:
            os.utime(file)


def sweep_if_due() -> None:
    """Delete what is too old or too much, once an hour. Called by each process that stores key files."""
    global _swept_at
    if time.monotonic() - _swept_at >= _HOUR:
        _swept_at = time.monotonic()
        sweep()


def sweep() -> None:
    """Delete what is too old or too much. Safe next to other processes that use these files."""
    root, now = _root(), time.time()
    with suppress(OSError):
        room = min(MOST_BYTES, int(shutil.disk_usage(root).total * MOST_OF_DISK))
        # The one used last comes first.
        for used_at, size, file in sorted(_files(root), reverse=True):
            room -= size
            is_draft = file.suffix == ".tmp"
            if room < 0 or now - used_at > (_HOUR if is_draft else UNUSED_SECONDS):
                file.unlink(missing_ok=True)
        for folder in root.iterdir():
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _files(root: Path) -> Iterator[tuple[float, int, Path]]:
    for file in root.glob("*/*"):
        with suppress(FileNotFoundError):
            status = file.stat()
            yield status.st_mtime, status.st_size, file


def _root() -> Path:
    return cache_folder() / "keys"
