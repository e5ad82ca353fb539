"""Which tables there are to follow, looked up now and then while a pipeline runs."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

from tailrace.errors import UnavailableError

DISCOVERY_SECONDS = 2.0
"""How long what was found is believed."""


class Discovery(ABC):
    """What the upstream showed when it was last looked at."""

    def __init__(self) -> None:
        self._looked: float | None = None

    def refresh(self, *, at_once: bool = False) -> None:
        """Look again, at most every few seconds. An upstream that does not answer leaves things as they are.

        With `at_once`, and the first time, what is seen is at least as new as the call. Raises UnavailableError then.
        """
        at_once = at_once or self._looked is None
        if not at_once and self._looked is not None and time.monotonic() - self._looked < DISCOVERY_SECONDS:
            return
        try:
            self._look(at_once=at_once)
        except UnavailableError:
            if at_once:
                raise
        self._looked = time.monotonic()

    @abstractmethod
    def _look(self, *, at_once: bool) -> None:
        """Ask the upstream. Without `at_once` a few cheap questions will do where nothing changed."""
