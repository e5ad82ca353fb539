"""Retry delays with exponential backoff, and a wait that can be interrupted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

LOOK_SECONDS = 0.05
"""How often a wait checks whether it should stop."""


@dataclass(frozen=True)
class Backoff:
    """The delays between retries: `steps` after the first failures, then each `factor` times the one before.

    No delay is longer than `longest_seconds`. `spread` is the jitter: the fraction by which a delay may be longer or
    shorter.
    """

    steps: tuple[float, ...]
    longest_seconds: float = math.inf
    factor: float = 1.0
    spread: float = 0.0

    def delay(self, attempts: int, chance: float = 0.5) -> float:
        """Seconds to wait after this number of failed attempts (at least 1). `chance`, from 0 to 1, sets the jitter."""
        step = self.steps[min(attempts, len(self.steps)) - 1]
        try:
            pause = step * self.factor ** max(attempts - len(self.steps), 0)
        except OverflowError:
            pause = self.longest_seconds
        return min(
            min(pause, self.longest_seconds) * (1 - self.spread + 2 * self.spread * chance), self.longest_seconds
        )


def wait(seconds: float, should_stop: Callable[[], bool]) -> bool:
    """Wait for `seconds` and return True, or return False as soon as `should_stop()` is true."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if should_stop():
            return False
        time.sleep(min(left, LOOK_SECONDS))
    return True
