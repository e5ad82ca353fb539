"""What several ask for at the same time is made once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_KEPT_SECONDS = 60.0
_PAUSES = 5
"""A value that takes long to make is kept so many times as long, so that making it takes a part of the time only."""
_LONGEST_PAUSE = 10.0


@dataclass
class _Reading:
    begun: float
    task: asyncio.Task[Any]
    took: float = 0.0

    def is_over(self, now: float, seconds: float) -> bool:
        return self.task.done() and now - self.begun >= max(seconds, min(_PAUSES * self.took, _LONGEST_PAUSE))


class SharedReadings:
    """Values by a key, each made in a thread at most once in some seconds. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._readings: dict[str, _Reading] = {}

    async def get(self, key: str, make: Callable[[], T], seconds: float) -> T:
        """What `make` gives, or gave to another within the last `seconds`. An error of it is shared as well."""
        now = self._clock()
        known = self._readings.get(key)
        if known is None or known.is_over(now, seconds):
            self._forget(now)
            known = self._readings[key] = self._begin(make, now)
        # A client that goes away must not end what the others wait for.
        value: T = await asyncio.shield(known.task)
        return value

    def _begin(self, make: Callable[[], T], now: float) -> _Reading:
        reading = _Reading(now, asyncio.create_task(asyncio.to_thread(make)))

        def note(task: asyncio.Task[Any]) -> None:
            reading.took = self._clock() - now

        reading.task.add_done_callback(note)
        return reading

    def _forget(self, now: float) -> None:
        for key in [key for key, each in self._readings.items() if each.is_over(now, _KEPT_SECONDS)]:
            del self._readings[key]
