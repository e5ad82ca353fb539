"""Locks that keep a batch and the maintenance of the same table out of each other's way, on one machine.

The commit protocol alone makes every order of commits right. But a batch that finds another commit where its own should
be is applied a second time. So maintenance commits between batches: a batch holds a shared lock while it is written,
and maintenance takes the exclusive one for the milliseconds of its commit. Where there is no such lock, in an object
store or on a file system without locks, conflicts are settled by the protocol.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.destination.delta.table_folder import LOG, TablePath

_BATCH = LOG
_MAINTENANCE = ""
"""The folders whose locks these are: the log's, and the table's own. A lock leaves nothing behind in them."""
BATCH_WAIT_SECONDS = 2.0
"""How long a batch waits for a commit of maintenance. A process that is stopped in one must not stop batches, too."""
COMMIT_WAIT_SECONDS = 600.0
"""How long a commit of maintenance waits for a batch to end."""
_PAUSE_SECONDS = 0.002


@contextmanager
def writing_batch(place: TablePath) -> Iterator[None]:
    """Held while a batch is applied to a table. Batches do not exclude each other."""
    with _locked(place, _BATCH, fcntl.LOCK_SH, BATCH_WAIT_SECONDS):
        yield


@contextmanager
def between_batches(place: TablePath) -> Iterator[bool]:
    """Held for a moment in which no batch of this machine is applied to the table. False if a batch did not end."""
    with _locked(place, _BATCH, fcntl.LOCK_EX, COMMIT_WAIT_SECONDS) as is_held:
        yield is_held


@contextmanager
def maintaining(place: TablePath, wait_seconds: float = 0.0) -> Iterator[bool]:
    """Held while a process of this machine maintains a table. False if another one does, and did all this time."""
    with _locked(place, _MAINTENANCE, fcntl.LOCK_EX, wait_seconds) as is_held:
        yield is_held


@contextmanager
def _locked(place: TablePath, folder: str, kind: int, wait_seconds: float) -> Iterator[bool]:
    """True with the lock, or where there can be none; False when another thread or process kept it all this time."""
    file = _opened(place, folder)
    if file is None:
        yield True
        return
    try:
        yield _acquire(file, kind, wait_seconds)
    finally:
        os.close(file)


def _opened(place: TablePath, folder: str) -> int | None:
    if not place.is_local:
        return None
    try:
        return os.open(Path(place.base, folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        # There is no table yet, and so nothing to keep out; any other problem is the batch's own to report.
        return None


def _acquire(file: int, kind: int, wait_seconds: float) -> bool:
    until = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(_PAUSE_SECONDS)
        except OSError:
            return True
        else:
            return True
