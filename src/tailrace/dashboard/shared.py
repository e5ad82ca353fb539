"""What several ask for at the same time is made once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_KEPT_SECONDS = 60.0


@dataclass
class _Reading:
    begun: float
    seconds: float
    task: asyncio.Task[Any]

    def is_over(self, now: float, seconds: float) -> bool:
        return self.task.done() and now - self.begun >= seconds


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
            known = _Reading(now, seconds, asyncio.create_task(asyncio.to_thread(make)))
            self._readings[key] = known
        # A client that goes away must not end what the others wait for.
        value: T = await asyncio.shield(known.task)
        return value

    def _forget(self, now: float) -> None:
        for key in [key for key, each in self._readings.items() if each.is_over(now, _KEPT_SECONDS)]:
            del self._readings[key]
