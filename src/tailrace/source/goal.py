"""Where a run with `--once` ends: what is written to all the time would keep it from ever ending."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

LogPoint = TypeVar("LogPoint", bound=tuple[int, int] | int)


def bounded(head: LogPoint, goal: LogPoint | None, copied: Iterable[LogPoint]) -> LogPoint:
    """How far to read a log that ends at `head`: no further than the goal, or than what tables were `copied` at."""
    return head if goal is None else min(head, max([goal, *copied]))
