"""Commands that run until a signal ends them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def until_signal() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second has its usual effect."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before: dict[int, Any] = {}

    def receive_signal(number: int, frame: FrameType | None) -> None:
        stop.set()
        for one, handler in before.items():
            signal.signal(one, handler)

    before.update({number: signal.signal(number, receive_signal) for number in numbers})
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
