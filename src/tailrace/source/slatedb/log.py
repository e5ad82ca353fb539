"""The log as the driver sees it: where it ends, and how much of it makes a batch."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from tailrace.source import Limit
from tailrace.source.slatedb.offset import WalPoint
from tailrace.source.slatedb.store import CollectedError, SlateDbDatabase
from tailrace.source.slatedb.wal import FileSummary, find_tail, read_files


class WalLog(Protocol):
    """WAL files where they are, or where they are kept."""

    def tail(self, after: int) -> int:
        """The last file there is, from `after` on. Raises CollectedError when the next one is gone."""
        ...

    def summary(self, number: int) -> FileSummary:
        """What a file holds. Raises CollectedError when it is gone."""
        ...

    def hold(self, after: int) -> None:
        """From now on nothing behind `after` may be forgotten, as far as that is ours to say."""
        ...

    def release(self) -> None:
        """What was held may be forgotten as it is read."""
        ...

    def stop(self) -> None: ...


class RemoteLog:
    """WAL files read in place. Few are looked into on the driver: the last one of each batch."""

    def __init__(self, database: SlateDbDatabase) -> None:
        self._database = database
        self.summary = lru_cache(maxsize=256)(self._summary)

    def tail(self, after: int) -> int:
        return find_tail(self._database, after)

    def _summary(self, number: int) -> FileSummary:
        [rows] = read_files(self._database, number, number)
        return FileSummary.of(rows)

    def hold(self, after: int) -> None:
        """SlateDB's garbage collector asks nobody."""

    def release(self) -> None:
        """Nothing is held."""

    def stop(self) -> None:
        """Nothing is open between calls."""


_REMEMBERED = 64
_FENCES = 16
"""How many files are passed over at once as long as only empty ones were seen."""


class Measure:
    """How large a WAL file is, on average of those that were looked into: it decides how many make a batch."""

    def __init__(self) -> None:
        self._files = 0
        self._rows = 0
        self._bytes = 0

    def add(self, summary: FileSummary) -> None:
        if summary.rows:
            self._files += 1
            self._rows += summary.rows
            self._bytes += summary.bytes
        if self._files >= _REMEMBERED:
            # What was long ago counts less and less.
            self._files, self._rows, self._bytes = self._files // 2, self._rows // 2, self._bytes // 2

    @property
    def is_unknown(self) -> bool:
        return self._files == 0

    @property
    def file_bytes(self) -> int:
        return max(1, self._bytes // max(1, self._files))

    def files_within(self, limit: Limit) -> int:
        """At least one: a batch must make progress."""
        if self.is_unknown:
            return _FENCES
        rows = max(1, self._rows // self._files)
        return max(1, min(limit.rows // rows, limit.bytes // self.file_bytes))


def wal_point_at(log: WalLog, measure: Measure, after: WalPoint, wal: int) -> WalPoint:
    """The place behind a file. Files without rows are passed over backwards, at most to `after`."""
    for number in range(wal, after.wal, -1):
        summary = log.summary(number)
        measure.add(summary)
        if summary.rows:
            return WalPoint(wal, max(after.seq, summary.last_seq))
    return WalPoint(wal, after.seq)


def oldest_at(log: WalLog, after: int, upto: int) -> int | None:
    """When the first row behind `after` was written, in milliseconds; None when there is none, or it is gone.

    Fence files hold no time, and are looked behind.
    """
    for number in range(after + 1, min(upto, after + _FENCES) + 1):
        try:
            created = log.summary(number).create_ts
        except CollectedError:
            return None
        if created:
            return created
    return None


def wal_point_before(log: WalLog, seq: int, near: int) -> WalPoint:
    """A place from which everything behind `seq` can be read, found backwards from the file `near`.

    Raises CollectedError when that lies behind what is left of the log.
    """
    lost, high, step = 0, near + 1, 1
    while high - lost > 1:
        number = max(lost + 1, high - step)
        try:
            summary = log.summary(number)
        except CollectedError:
            lost, step = number, max(1, (high - number) // 2)
            continue
        if summary.rows and summary.last_seq <= seq:
            return WalPoint(number, seq)
        high = number
        step = step * 2 if not lost else max(1, (high - lost) // 2)
    if lost:
        raise CollectedError(f"SlateDB deleted WAL file {lost}, which is still needed")
    return WalPoint(0, seq)
