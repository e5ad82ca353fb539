"""Which tables there are to follow, checked every few seconds while a pipeline runs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from tailrace.errors import UnavailableError

DISCOVERY_SECONDS = 2.0
"""How long a result is used before the upstream is asked again."""
DISCOVERY_TIMES = 100
"""And at least so many times the CPU time that the last result took, if that was long: there are many tables."""
LONG_SECONDS = 0.02


class Discovery(ABC):
    """The tables that the upstream had when it was last asked."""

    def __init__(self) -> None:
        self._refreshed_at: float | None = None
        self._took_seconds = 0.0

    def refresh(self, *, at_once: bool = False) -> None:
        """Ask the upstream again, at most every few seconds. If it does not answer, the last result stays.

        With `at_once`, and on the first call, the result is at least as new as the call, and an upstream that does not
        answer raises UnavailableError.
        """
        at_once = at_once or self._refreshed_at is None
        long = self._took_seconds if self._took_seconds > LONG_SECONDS else 0.0
        lasts = max(DISCOVERY_SECONDS, long * DISCOVERY_TIMES)
        if not at_once and self._refreshed_at is not None and time.monotonic() - self._refreshed_at < lasts:
            return
        began = time.thread_time()
        try:
            self._look(at_once=at_once)
        except UnavailableError:
            if at_once:
                raise
        self._took_seconds = time.thread_time() - began
        self._refreshed_at = time.monotonic()

    @abstractmethod
    def _look(self, *, at_once: bool) -> None:
        """Ask the upstream. Without `at_once` a few cheap queries are enough while nothing changed."""
