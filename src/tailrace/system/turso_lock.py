"""Detect whether a process has a file open in Turso, and keep Turso and SQLite from corrupting each other's writes.

Turso opens a file in one of two ways. By default it locks the whole file. Under `multiprocess_wal`, every process holds
a shared lock on the first byte of `FILE-tshm`, which records how much of the WAL is valid. That file stays when the
last process has ended, and the next session under `multiprocess_wal` trusts it: frames that were written in the
meantime without it are ignored, and removed with the WAL when that session is closed. So tailrace opens a file under
`multiprocess_wal` only while an application has it open in that way, and empties a leftover `FILE-tshm` before it
writes without Turso.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.errors import UnavailableError
from tailrace.system.file_lock import is_locked
from tailrace.system.side_file import open_side_file

SHARED = "multiprocess_wal"
"""Turso's name for the mode in which several processes open one file."""

_LOCKS = Path("/proc/locks")
_FLOCK = "hhqqi4x"
"""`struct flock`: type, whence, start, length, pid."""


def server_lock(path: Path) -> Path:
    """The file whose lock a sync server holds while it serves the file and shuts Turso out of it."""
    return path.with_name(path.name + "-sync.lock")


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
    return kind == fcntl.F_RDLCK or (kind == fcntl.F_WRLCK and not is_locked(server_lock(path)))


def is_locked_whole(path: Path) -> bool:
    """Whether a Turso connection has the whole file locked.

    The file could still be read under `multiprocess_wal`, but changes by that connection would never be visible. This
    reads the system's table of locks instead of trying a lock: releasing our own lock would also release the locks
    that Turso holds in this process.
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
    """Raise UnavailableError if the file is open under `multiprocess_wal`: SQLite does not see Turso's locks."""
    if is_shared(path):
        raise _in_use(path)


@contextmanager
def shut_out(path: Path, *, creates: bool = False) -> Iterator[None]:
    """Lock out sessions under `multiprocess_wal` during the block, for writing without it.

    A session that is opened meanwhile waits and then fails; one that is opened later reads the WAL again. Raises
    UnavailableError if such a session is open already. While a sync server serves the file, it does that for everyone.
    A file that was never opened under `multiprocess_wal` has nothing to lock; with `creates`, as for every file of
    Turso's, `FILE-tshm` is made for that. It stays: otherwise two sessions could make one each.
    """
    try:
        file = os.open(_index(path), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if not creates:
            yield
            return
        file = open_side_file(_index(path), path)
    try:
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _first_byte(fcntl.F_WRLCK))
        except BlockingIOError:
            if not is_locked(server_lock(path)):
                raise _in_use(path) from None
        else:
            # Empty it before the first frame is written: after a crash in the block no session may trust it.
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
        f"{path} is open in Turso under {SHARED}, whose locks and writes other libraries cannot see",
        fix="close it in the application and try again; to follow it while it is open, use source.type turso",
    )
