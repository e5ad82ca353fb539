"""Locks on files, which the system lets go of when their process dies, however it dies.

Whoever only looks shares the lock for an instant, so that two who look do not take each other for a holder; whoever
wants it tries for a moment, since somebody may just be looking.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_ATTEMPTS = 5
_PAUSE_SECONDS = 0.05


def try_lock(file: int) -> bool:
    """Take the lock on an open file, until it is closed; False while another process has it."""
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
    """Whether an open file is the one at this path. The lock on one that was removed keeps no one out."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def is_locked(path: Path) -> bool:
    """Whether some process has the lock on this file now. Changes nothing and needs no right to write."""
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
