"""Whether a process has a file open in Turso, and how to keep out of its way.

Turso opens a file in one of two ways. Alone, it locks the whole file. Under `multiprocess_wal`, every process holds a
shared lock on the first byte of `FILE-tshm`, which says how much of the WAL counts. That file stays when the last
process has gone, and the next session under `multiprocess_wal` believes it: frames that were written without it
meanwhile are ignored, and cut off with the WAL when that session is closed. So tailrace opens a file that way only
while an application has it open that way, and makes what is left of it void before it writes without Turso.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.errors import UnavailableError

SHARED = "multiprocess_wal"
"""Turso's name for the way in which several processes open one file."""

_LOCKS = Path("/proc/locks")
_FLOCK = "hhqqi4x"
"""`struct flock`: type, whence, start, length, pid."""


def is_shared(path: Path) -> bool:
    """Whether a process has the file open under `multiprocess_wal` now. Changes nothing."""
    try:
        file = os.open(_index(path), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _first_byte(fcntl.F_WRLCK))
    finally:
        os.close(file)
    kind: int = struct.unpack(_FLOCK, found)[0]
    return kind != fcntl.F_UNLCK


def is_locked_whole(path: Path) -> bool:
    """Whether a Turso connection of its own holds the file.

    Opened under `multiprocess_wal` the file can be read all the same, but what that connection writes never shows. The
    table of locks is looked at because a lock of our own, let go, would take Turso's locks in this process with it.
    """
    if not _LOCKS.exists():
        return False
    inode = str(path.stat().st_ino)
    for line in _LOCKS.read_text().splitlines():
        parts = line.split()
        whole = parts[1:2] == ["POSIX"] and parts[3] == "WRITE" and parts[-2:] == ["0", "EOF"]
        if whole and parts[5].rpartition(":")[2] == inode:
            return True
    return False


def require_not_shared(path: Path) -> None:
    """Raises UnavailableError while the file is open under `multiprocess_wal`: SQLite does not see Turso's locks."""
    if is_shared(path):
        raise _in_use(path)


@contextmanager
def shut_out(path: Path) -> Iterator[None]:
    """For writing without `multiprocess_wal`: sessions under it wait until the block ends, and then read the WAL again.

    Raises UnavailableError while there is one.
    """
    try:
        file = os.open(_index(path), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield  # never opened that way
        return
    try:
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _first_byte(fcntl.F_WRLCK))
        except BlockingIOError:
            raise _in_use(path) from None
        # Void before the first frame is written: a crash in the block must not leave it to be believed.
        os.ftruncate(file, 0)
        yield
    finally:
        os.close(file)


def _index(path: Path) -> Path:
    return path.with_name(path.name + "-tshm")


def _first_byte(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 1, 0)


def _in_use(path: Path) -> UnavailableError:
    return UnavailableError(
        f"{path} is open in Turso under {SHARED}, whose writes other libraries can neither see nor respect",
        fix="close it in the application and try again; a pipeline follows it live with source.type turso",
    )
