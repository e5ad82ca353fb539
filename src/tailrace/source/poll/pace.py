"""How often a database may be asked."""

from __future__ import annotations

import threading
import time
from functools import lru_cache


class QuerySpacing:
    """At most so many queries a second, evenly spaced; without a bound it never waits. Threads may share one."""

    def __init__(self, per_second: float | None) -> None:
        self._gap = 1.0 / per_second if per_second else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when the next query may be sent."""
        if not self._gap:
            return
        with self._lock:
            now = time.monotonic()
            turn = max(self._next, now)
            self._next = turn + self._gap
        time.sleep(turn - now)


@lru_cache(maxsize=64)
def spacing_of(dsn: str, per_second: float | None) -> QuerySpacing:
    """The one pace of a database in this process: sessions that follow each other, or are open at once, share it."""
    return QuerySpacing(per_second)
