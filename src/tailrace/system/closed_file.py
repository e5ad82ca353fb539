"""Reads an SQLite or Turso file that no process has open, and changes neither its bytes nor the files next to it.

Turso: after a checkpoint the WAL is empty, and the file alone is read, without a lock. An application that was killed
leaves frames in its WAL: only opening the file for writing would checkpoint them, so a copy of both is read instead.

SQLite: a connection that may only read makes the WAL and its index next to a closed file, and leaves them there, where
the application may not be able to write them. So such a file is opened for writing, and SQLite removes both again.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from tailrace.errors import UnavailableError
from tailrace.system import turso_lock

_CLOCK_TICK_NS = 50_000_000
"""Two writes within one tick of the file system's clock may have the same time."""


class _Content(NamedTuple):
    """What changes when a file is written."""

    inode: int
    size: int
    modified_ns: int


class _Pair(NamedTuple):
    file: _Content
    wal: _Content | None


_copies: dict[tuple[int, Path], tuple[_Pair, tempfile.TemporaryDirectory[str]]] = {}
"""One copy per file and process, for as long as the file stays as it is."""


@contextmanager
def opened_by_sqlite(path: Path, *, timeout_seconds: float) -> Iterator[sqlite3.Connection]:
    """A connection for reading, next to applications that have the file open in SQLite, and when there are none.

    Raises UnavailableError as `opened` does, for a file that an application left in the middle of its work.
    """
    path = path.resolve()
    wal, has_index = _wal(path), path.with_name(path.name + "-shm").exists()
    if not has_index and wal.exists():
        # Without the index of its WAL the file is Turso's, or a copy.
        if turso_lock.is_locked_whole(path):
            raise UnavailableError(f"{path} is open in Turso", fix="close it in the application and try again")
        with opened(path) as connection:
            yield connection
        return
    is_closed = not has_index and _is_in_wal_mode(path)
    how = "rw" if is_closed and os.access(path, os.W_OK) and os.access(path.parent, os.W_OK) else "ro"
    with closing(_connect(path, f"mode={how}", timeout_seconds)) as connection:
        yield connection


def _is_in_wal_mode(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(20)[18:] == b"\x02\x02"


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection. Raises UnavailableError when the file was written meanwhile: then read it again."""
    path = path.resolve()
    before = _look(path)
    if before.wal is not None and before.wal.size:
        with closing(_connect(_copy(path, before), "mode=ro")) as connection:
            yield connection
        return
    with closing(_connect(path, "mode=ro&immutable=1")) as connection:
        try:
            yield connection
        except sqlite3.Error as error:
            _require_unwritten(path, before, error)
            raise
        _require_unwritten(path, before)


def _connect(path: Path, how: str, timeout_seconds: float = 5.0) -> sqlite3.Connection:
    uri = f"{path.as_uri()}?{how}"
    return sqlite3.connect(uri, uri=True, timeout=timeout_seconds, isolation_level=None, check_same_thread=False)


def _copy(path: Path, content: _Pair) -> Path:
    key = os.getpid(), path
    known = _copies.get(key)
    if known is not None and known[0] == content:
        return Path(known[1].name) / path.name
    folder = tempfile.TemporaryDirectory(prefix="tailrace-")
    target = Path(folder.name) / path.name
    shutil.copyfile(path, target)
    shutil.copyfile(_wal(path), _wal(target))
    if _look(path) != content or turso_lock.is_locked_whole(path) or turso_lock.is_shared(path):
        folder.cleanup()
        raise _written(path)
    if known is not None:
        known[1].cleanup()
    _copies[key] = content, folder
    return target


def _look(path: Path) -> _Pair:
    wal = _wal(path)
    return _Pair(_content(path), _content(wal) if wal.exists() else None)


def _content(path: Path) -> _Content:
    while True:
        found = path.stat()
        if not 0 <= time.time_ns() - found.st_mtime_ns < _CLOCK_TICK_NS:
            return _Content(found.st_ino, found.st_size, found.st_mtime_ns)
        time.sleep(_CLOCK_TICK_NS / 1e9)


def _require_unwritten(path: Path, before: _Pair, cause: Exception | None = None) -> None:
    """If only the WAL has grown, what was read is still valid: the file without the WAL."""
    if _look(path).file != before.file:
        raise _written(path) from cause


def _written(path: Path) -> UnavailableError:
    return UnavailableError(f"{path} was written while it was read as a closed file; it is read again")


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")
