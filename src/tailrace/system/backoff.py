"""How long to wait before something that failed is tried again, and the waiting itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

LOOK_SECONDS = 0.05
"""How often a wait looks whether it is to end."""


@dataclass(frozen=True)
class Backoff:
    """The pauses after the first failures, one step each; then each is `factor` times the one before.

    No pause is longer than `longest_seconds`. `spread` is by what share, up or down, chance changes a pause.
    """

    steps: tuple[float, ...]
    longest_seconds: float = math.inf
    factor: float = 1.0
    spread: float = 0.0

    def delay(self, attempts: int, chance: float = 0.5) -> float:
        """Seconds to wait after so many failed attempts, one or more. `chance` is from 0 to 1."""
        step = self.steps[min(attempts, len(self.steps)) - 1]
        try:
            pause = step * self.factor ** max(attempts - len(self.steps), 0)
        except OverflowError:
            pause = self.longest_seconds
        return min(
            min(pause, self.longest_seconds) * (1 - self.spread + 2 * self.spread * chance), self.longest_seconds
        )


def wait(seconds: float, should_stop: Callable[[], bool]) -> bool:
    """Wait so long, or until `should_stop` is true: then False."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if should_stop():
            return False
        time.sleep(min(left, LOOK_SECONDS))
    return True
