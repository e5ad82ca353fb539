"""Waiting on a condition, with an end to it."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_SECONDS = 300.0
"""How long anything is waited for. It ends a hang and says nothing of how long a thing may take: machines are busy."""
_POLL_SECONDS = 0.02


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    """Return as soon as the condition holds. AssertionError when it does not within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds:g} seconds"
        time.sleep(_POLL_SECONDS)
