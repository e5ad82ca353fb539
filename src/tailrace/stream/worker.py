"""Keep the Python workers of a pipeline fast, small in memory, and quiet when they end."""

from __future__ import annotations

import gc
import sys
from functools import cache

import pyarrow as pa


@cache
def freeze_imports() -> None:
    """Exempt everything loaded so far from garbage collection. Every task calls it; only the first call has an effect.

    A worker collects garbage after each task, before it takes the next one. Without this it would visit a hundred
    thousand objects of imported modules each time and free none of them.
    """
    gc.collect()
    gc.freeze()


def give_back_memory() -> None:
    """Return the memory of a large batch to the system. Called between the steps of a task; cheap for small batches."""
    pa.default_memory_pool().release_unused()


def leave_quietly() -> None:
    """Make a reader's process end without a traceback. A query may be stopped while its reader sends an answer. Then
    the connection is closed, and PySpark's attempt to report that to the other side would fail with a traceback on the
    terminal."""
    if isinstance(sys.exception(), (EOFError, ConnectionError)):
        sys.excepthook = lambda *_: None
