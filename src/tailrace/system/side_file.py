"""Files that lie next to another one and hold its content: the same users may read and write them, and no others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_side_file(path: Path, owner: Path) -> int:
    """Open a file for reading and writing; made, if it is missing, with the owner and the mode of another one."""
    like = owner.stat()
    mode = like.st_mode & 0o666
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # If another program makes it first, this is that program's.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    with suppress(PermissionError):
        os.fchown(file, like.st_uid, like.st_gid)
        os.fchmod(file, mode)
    return file


def make_side_file(path: Path, owner: Path) -> None:
    """Make the file, empty, if it is missing."""
    os.close(open_side_file(path, owner))
