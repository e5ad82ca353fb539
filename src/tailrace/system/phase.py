"""Where the time of a batch goes: seconds of work by phase, counted in the process that does the work.

Phases nest, and the time of an inner one is not the outer one's. Counting begins with a phase that is `outermost`: what
the same code does elsewhere, such as a commit of the housekeeping, is not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class _Open(threading.local):
    """The phases this thread is in: the name of each, and since when its own time runs."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []


_open = _Open()
_spent: dict[str, float] = {}
_lock = threading.Lock()


@contextmanager
def phase(name: str, *, outermost: bool = False) -> Iterator[None]:
    """Count the block as `name`, if it is inside another phase or may be the `outermost` one."""
    phases = _open.phases
    if not phases and not outermost:
        yield
        return
    began = time.perf_counter()
    if phases:
        _add(phases[-1], began)
    phases.append((name, began))
    try:
        yield
    finally:
        ended = time.perf_counter()
        _add(phases.pop(), ended)
        if phases:
            phases[-1] = (phases[-1][0], ended)


def take() -> Mapping[str, float]:
    """The seconds of this process since the last call, by phase."""
    global _spent
    with _lock:
        taken, _spent = _spent, {}
    return taken


def _add(entered: tuple[str, float], now: float) -> None:
    name, since = entered
    with _lock:
        _spent[name] = _spent.get(name, 0.0) + now - since
