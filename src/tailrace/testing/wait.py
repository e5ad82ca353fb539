"""Wait for a condition, with a timeout."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0
"""The default timeout. It only ends a hang; it is no limit on performance, because machines may be busy."""
_POLL_SECONDS = 0.02


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Return as soon as the condition holds. Raises AssertionError if it does not hold within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds:g} seconds"
        time.sleep(_POLL_SECONDS)
