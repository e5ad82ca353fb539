"""Call a function at a fixed interval in a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Ticker:
    """Calls `act` every `seconds`, in its own thread, until the `with` block ends.

    An exception from `act` ends the calls; the next `check` raises it.
    """

    def __init__(self, act: Callable[[], None], seconds: float) -> None:
        self._act = act
        self._seconds = seconds
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def check(self) -> None:
        """Raise the exception that ended the calls, if there was one."""
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
