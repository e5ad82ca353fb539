"""Keep the Python workers of a pipeline fast, small in memory, and quiet when they end."""

from __future__ import annotations

import gc
import os
import sys
from functools import cache

import pyarrow as pa

MODULES_VARIABLE = "TAILRACE_WORKER_MODULES"
"""The modules of the pipeline's parts, with commas: what its tasks import."""
UMASK_VARIABLE = "TAILRACE_UMASK"
"""The umask of the pipeline, in octal. Spark's own files are private, but what a task writes, a lake above all, gets
the modes that it would get if the pipeline itself wrote it."""


@cache
def begin() -> None:
    """Prepare this process for the tasks of a pipeline. Every task calls it; only the first call has an effect."""
    if mask := os.environ.get(UMASK_VARIABLE):
        os.umask(int(mask, 8))
    _freeze_imports()


def _freeze_imports() -> None:
    """Exempt everything loaded so far from garbage collection.

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
