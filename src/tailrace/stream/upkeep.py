"""Housekeeping of tables in a thread of the worker process, so that no batch waits for it.

Spark keeps its Python workers for many batches. Each of them has one such thread at most, which runs while there is
something to do, does one table after the other, and has a lower priority than the batches. It dies with its process,
at any moment: what a destination does in `maintain` must allow that.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

import pyarrow as pa

from tailrace.errors import TailraceError

_log = logging.getLogger(__name__)

NICENESS = 5
"""How much lower the thread's priority is. Not the lowest: a batch of the same process must wait whenever the thread
holds Python's lock, and on a busy machine a thread with the lowest priority would hold it for long."""

Job = Callable[[], object]


class Upkeep:
    """Does jobs in the background, one at a time. Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[str, Job] = {}
        self._current: str | None = None
        self._thread: threading.Thread | None = None

    def submit(self, table: str, job: Job) -> bool:
        """Do the housekeeping of a table soon. Returns at once; False if that of the table waits or is under way."""
        with self._changed:
            if table in self._waiting or table == self._current:
                return False
            self._waiting[table] = job
            if self._thread is None:
                # A daemon: the end of the process does not wait for it.
                self._thread = threading.Thread(target=self._work, name="upkeep", daemon=True)
                self._thread.start()
            return True

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until there is nothing more to do; False if the time was not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_seconds)

    def _work(self) -> None:
        _lower_priority()
        while True:
            with self._changed:
                self._current = next(iter(self._waiting), None)
                if self._current is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                table, job = self._current, self._waiting.pop(self._current)
            try:
                do(table, job)
            except Exception as error:  # noqa: BLE001 - its text may hold values of rows
                _log.warning("housekeeping of %s: unexpected %s", table, type(error).__name__)


def do(table: str, job: Job) -> None:
    """Do the housekeeping of a table. Its batch is committed: an error must neither stop the table nor repeat it."""
    try:
        job()
    except TailraceError as error:
        _log.warning("housekeeping of %s: %s", table, error.message)
    except pa.ArrowException as error:
        # Its text may hold values of rows.
        _log.warning("housekeeping of %s: %s", table, type(error).__name__)


def _lower_priority() -> None:
    """Of this thread alone: Linux gives each thread a priority of its own. Elsewhere, or if refused, it stays."""
    with suppress(OSError):
        thread = threading.get_native_id()
        if thread != os.getpid():
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


BACKGROUND = Upkeep()
"""The one of this process."""
