"""When a table is polled next, when its next full diff is due, and how queries are spaced."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tailrace.option.table import FullDiffOptions
from tailrace.system.status_file import read_file, write_file

# How often a database may be queried.


class QuerySpacing:
    """Limits queries per second, evenly spaced; without a limit it never waits. Threads may share one."""

    def __init__(self, per_second: float | None) -> None:
        self._gap = 1.0 / per_second if per_second else 0.0
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when the next query may be sent."""
        if not self._gap:
            return
        with self._lock:
            now = time.monotonic()
            turn = max(self._next, now)
            self._next = turn + self._gap
        time.sleep(turn - now)


@lru_cache(maxsize=64)
def spacing_of(dsn: str, per_second: float | None) -> QuerySpacing:
    """The pace of a database in this process: all its sessions, consecutive or concurrent, share it."""
    return QuerySpacing(per_second)


SAVE_SECONDS = 5.0


@dataclass
class Turn:
    """The schedule of one table. `polls` and `diffed` (seconds since 1970) count from its last full diff or copy."""

    polls: int = 0
    diffed: float = 0.0
    wait: float = 0.0
    next: float = 0.0
    idle_since: float = 0.0
    whole_since: float = 0.0


class PollSchedule:
    """Polls of a busy table follow each other fast; each that finds nothing doubles the wait.

    The counts are kept in a file, so that short runs add up to a full diff. Losing the file delays a diff and loses no
    row.
    """

    def __init__(self, file: Path, busy_seconds: float, idle_seconds: float) -> None:
        self._file = file
        self._busy, self._idle = busy_seconds, max(busy_seconds, idle_seconds)
        self._turns: dict[str, Turn] = {}
        self._saved = time.monotonic()
        with suppress(ValueError, KeyError, TypeError):
            raw = read_file(file)
            self._turns = {each: Turn(int(one["polls"]), float(one["diffed"])) for each, one in raw.items()}

    def _turn(self, table: str) -> Turn:
        return self._turns.setdefault(table, Turn(diffed=time.time()))

    def is_due(self, table: str, since: float | None) -> bool:
        """Whether it is time to poll. With `since` (monotonic clock): whether it was not found idle since then."""
        turn = self._turn(table)
        return time.monotonic() >= turn.next if since is None else turn.idle_since < since

    def seconds_until_due(self, tables: Iterable[str]) -> float:
        """How long until the first of the tables is to be polled; infinite without tables."""
        first = min((self._turn(table).next for table in tables), default=math.inf)
        return max(0.0, first - time.monotonic())

    def is_idle(self, table: str, since: float) -> bool:
        """Whether a poll that began since then found nothing, or a later one brought what changed meanwhile."""
        return self._turn(table).idle_since >= since

    def polled(self, table: str, *, began: float, fresh: bool, whole: bool = True) -> None:
        """Record a poll, and whether it found `fresh` rows. If it was not `whole`, the next one follows at once."""
        turn = self._turn(table)
        turn.polls += whole
        turn.wait = self._busy if fresh else min(max(turn.wait * 2, self._busy), self._idle)
        turn.next = time.monotonic() + turn.wait if whole else 0.0
        # A table that is written to all the time is never found idle.
        turn.idle_since = max(turn.idle_since, turn.whole_since if whole else 0.0) if fresh else began
        turn.whole_since = began if whole else turn.whole_since
        if time.monotonic() - self._saved > SAVE_SECONDS:
            self.save()

    def is_diff_due(self, table: str, wanted: FullDiffOptions | None) -> bool:
        if wanted is None:
            return False
        turn = self._turn(table)
        by_count = wanted.every_cycles is not None and turn.polls >= wanted.every_cycles
        return by_count or (wanted.every is not None and time.time() - turn.diffed >= wanted.every)

    def diffed(self, table: str) -> None:
        turn = self._turn(table)
        turn.polls, turn.diffed = 0, time.time()
        self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        counts = {each: {"polls": turn.polls, "diffed": turn.diffed} for each, turn in self._turns.items()}
        write_file(self._file, counts)
