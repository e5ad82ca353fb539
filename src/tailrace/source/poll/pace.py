"""How often a database may be asked."""

from __future__ import annotations

import time


class Pace:
    """At most so many queries a second, evenly spaced; without a bound it never waits."""

    def __init__(self, per_second: float | None) -> None:
        self._gap = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    def wait(self) -> None:
        """Return when the next query may be sent."""
        if not self._gap:
            return
        now = time.monotonic()
        self._next = max(self._next, now) + self._gap
        time.sleep(max(0.0, self._next - self._gap - now))
