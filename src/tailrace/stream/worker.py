"""What happens once in every Python worker process."""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_imports() -> None:
    """Spare what is loaded by now from garbage collection. Called by every task; only the first call does something.

    A worker collects its garbage after each task before it takes the next one, and walks through a hundred thousand
    objects of imported modules to find none.
    """
    gc.collect()
    gc.freeze()
