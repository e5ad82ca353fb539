"""File locks, which the operating system releases when their process dies, for whatever reason.

`is_locked` takes a shared lock for an instant, so that two processes that check at once do not report each other as the
holder. `try_lock` retries for a moment, because another process may just be checking.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_ATTEMPTS = 5
_PAUSE_SECONDS = 0.05


def try_lock(file: int) -> bool:
    """Take the lock on an open file until the file is closed; False if another process holds it."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_SECONDS)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False


def is_current(file: int, path: Path) -> bool:
    """Whether an open file is still the one at this path. A lock on a removed file locks out no other process."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock on this file now. Changes nothing and needs no write permission."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
