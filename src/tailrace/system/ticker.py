"""Something that is done again and again beside the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Ticker:
    """Calls `act` every so many seconds, in a thread of its own, until the `with` block ends.

    What `act` raises ends it, and is raised by the next `check`.
    """

    def __init__(self, act: Callable[[], None], seconds: float) -> None:
        self._act = act
        self._seconds = seconds
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def check(self) -> None:
        """Raises what ended the ticking, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._seconds):
                self._act()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self._failure = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
