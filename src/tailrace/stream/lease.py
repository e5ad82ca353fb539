"""Keeps a runner's lease for as long as it lives, whatever its main thread waits for."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

from tailrace.errors import OwnedError, UnavailableError
from tailrace.state import StateStore


class LeaseRenewal:
    """Renews the lease three times while it would last, from `with` to its end, in a thread of its own.

    When a later run has begun, it ends by itself: the runner hears of that from its own next write.
    """

    def __init__(self, store: StateStore, seconds: float) -> None:
        self._store = store
        self._pause_seconds = seconds / 3
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def _renew(self) -> None:
        with suppress(OwnedError):
            while not self._ended.wait(self._pause_seconds):
                with suppress(UnavailableError):
                    self._store.renew_lease()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
