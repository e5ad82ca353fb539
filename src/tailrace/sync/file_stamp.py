"""Tells whether an SQLite file was written, without opening it."""

from __future__ import annotations

import os
import time
from pathlib import Path

LOOK_SECONDS = 0.2
"""How often to look at a file; much longer than a tick of the file system's clock."""

FileStamp = tuple[int, ...]


def read_stamp(path: Path) -> FileStamp | None:
    """What a write to the file or its log changes. None if it was written so lately that the next write may not."""
    found: list[os.stat_result] = []
    for file in (path, Path(f"{path}-wal")):
        try:
            found.append(file.stat())
        except FileNotFoundError:
            continue
    if any(abs(time.time() - one.st_mtime) < LOOK_SECONDS for one in found):
        return None
    return tuple(number for one in found for number in (one.st_ino, one.st_mtime_ns, one.st_size))
