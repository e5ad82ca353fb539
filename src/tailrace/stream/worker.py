"""What keeps the Python workers of a pipeline quick, small and quiet."""

from __future__ import annotations

import gc
import sys
from functools import cache

import pyarrow as pa


@cache
def freeze_imports() -> None:
    """Spare what is loaded by now from garbage collection. Called by every task; only the first call does something.

    A worker collects its garbage after each task before it takes the next one, and walks through a hundred thousand
    objects of imported modules to find none.
    """
    gc.collect()
    gc.freeze()


def give_back_memory() -> None:
    """Return to the system what a large batch needed. Called between the steps of a task; costs little when small."""
    pa.default_memory_pool().release_unused()


def leave_quietly() -> None:
    """For the end of a reader's process. A query may be stopped within an answer of its reader: the connection is lost
    then, nobody is left to be told of it, and PySpark's attempt to do so would end in a traceback on the terminal."""
    if isinstance(sys.exception(), (EOFError, ConnectionError)):
        sys.excepthook = lambda *_: None
