"""Where a run with `--once` ends: what is written to all the time would keep it from ever ending."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Place = TypeVar("Place", bound=tuple[int, int] | int)


def bounded(head: Place, goal: Place | None, copied: Iterable[Place | None]) -> Place:
    """How far to read a log that ends at `head`: no further than the goal, or than what tables were `copied` at."""
    if goal is None:
        return head
    for at in copied:
        goal = goal if at is None else max(goal, at)
    return min(head, goal)
