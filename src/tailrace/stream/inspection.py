"""Checks source and destination again while the pipeline runs, in a thread: neither may answer for a long time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from tailrace.errors import Finding, TailraceError, problems

NOTICE_SECONDS = 10.0
"""How often the source is asked what it leaves out."""
NOTICE_TIMES = 100
"""And not before so many times the CPU time that the last answer took: with thousands of tables that is long."""
_POLL_SECONDS = 0.1
END_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Inspection:
    """Runs `check` when a table is to be retried, and `look` at its beginning and every few seconds.

    `look` returns what the source leaves out, `note` takes it. A check that cannot be made finds nothing: the retry
    itself shows what is wrong.
    """

    def __init__(
        self,
        check: Callable[[], Sequence[Finding]],
        look: Callable[[], Sequence[Finding]],
        note: Callable[[Sequence[Finding]], None],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._check = check
        self._look = look
        self._note = note
        self._clock = clock
        self._wanted = threading.Event()
        self._ended = threading.Event()
        self._found: tuple[datetime, Mapping[str, Finding]] | None = None
        self._thread = threading.Thread(target=self._run, name="tailrace-inspection", daemon=True)

    def problems_since(self, at: datetime) -> Mapping[str, Finding] | None:
        """By table, the errors of a check that began at this time or later. None: there is none yet, and it is made."""
        found = self._found
        if found is not None and found[0] >= at:
            return found[1]
        self._wanted.set()
        return None

    def _run(self) -> None:
        due = time.monotonic() + NOTICE_SECONDS
        while not self._ended.is_set():
            if self._wanted.is_set():
                self._wanted.clear()
                self._inspect()
            if time.monotonic() >= due:
                used = time.thread_time()
                self.look_again()
                due = time.monotonic() + max(NOTICE_SECONDS, NOTICE_TIMES * (time.thread_time() - used))
            self._ended.wait(_POLL_SECONDS)

    def _inspect(self) -> None:
        began, found = self._clock(), dict[str, Finding]()
        try:
            found = problems(self._check())
        except TailraceError as error:
            _log.info("the check before a retry failed: %s", error.message)
        self._found = (began, found)

    def look_again(self) -> None:
        """Note what the source leaves out now."""
        try:
            self._note(self._look())
        except TailraceError as error:
            _log.debug("what the source leaves out cannot be read now: %s", error.message)

    def __enter__(self) -> Self:
        self.look_again()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        # No longer than this: a server that does not answer must not hold up the end of the run.
        self._thread.join(END_SECONDS)
