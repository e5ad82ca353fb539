"""What keeps the Python workers of a pipeline quick and small."""

from __future__ import annotations

import gc
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
