"""Looks for changed rows: which rows come after a mark, and whether any of them is new."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailrace.source.poll.connector import Clock, ConnectorSession, Polled, Query
from tailrace.source.poll.key_snapshot import Hashes
from tailrace.source.poll.keyset import START, Keyset, Stretch
from tailrace.source.poll.offset import Sweep
from tailrace.source.poll.version_column import Scale, VersionKind

HEIGHTS = 8


class ForeignMarkError(ValueError):
    """The mark does not fit the current order of the column."""


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe. `fresh` rows were not emitted before; `more`: the limit was reached."""

    sweep: Sweep
    fresh: int
    more: bool
    heights: tuple[Height, ...]


@dataclass(frozen=True)
class Probe:
    """One probe of one table, by one of its columns. `seen` are the rows that the last window already emitted."""

    session: ConnectorSession
    table: Polled
    by: str
    deleted: bool
    view: SettledTime
    seen: Hashes
    page_rows: int
    limit_rows: int

    def run(self, mark: Keyset, heights: Sequence[Height]) -> ProbeResult | None:
        """The rows after the mark; None for a column that cannot be followed.

        An idle table costs one page without rows. Only the columns of the order are read, and hashes where rows of the
        last window may appear again. Raises ForeignMarkError for a mark of other values than the column has now.
        """
        scale = self.session.scale(self.table, self.by)
        if scale is None:
            return None
        if scale.is_empty:
            # Every row that appears from now on is new, whatever its value.
            return ProbeResult(Sweep(START, START, START), 0, False, tuple(heights))
        if mark and not scale.fits(mark[0]):
            raise ForeignMarkError
        after, end = self.view.floor(mark, scale), self.view.end(scale)
        columns = self.table.only(self.table.order(self.by))
        hashed = len(self.seen) > 0
        query = Query(self.table, self.by, Stretch(after, end), columns, self.page_rows, self.deleted, hashed)
        fresh, more, last = 0, False, START
        while True:
            page = self.session.select(query)
            given = 0 if page.hashes is None else int(np.isin(page.hashes, self.seen).sum())
            fresh += len(page) - given
            if len(page) < self.page_rows:
                break
            assert page.last is not None
            last = page.last
            if fresh >= self.limit_rows:
                more = True
                break
            query = replace(query, stretch=Stretch(last, end))
        heights = _grown(heights, scale, self.view)
        settled = _later(after, self.view.settled_mark(scale, heights), scale)
        if more and settled and scale.place(last[0]) < scale.place(settled[0]):
            settled = last
        return ProbeResult(Sweep(after, settled, last if more else end), fresh, more, heights)


def _grown(heights: Sequence[Height], scale: Scale, view: SettledTime) -> tuple[Height, ...]:
    """The heights still needed: the last settled one, and those not yet settled."""
    if scale.timed or scale.latest is None:
        return tuple(heights)
    known = [*heights, (view.now, int(scale.latest))]
    settled = [height for height in known if height[0] < view.settled]
    return (*settled[-1:], *[height for height in known if height[0] >= view.settled][:HEIGHTS])


def _later(after: Keyset, settled: Keyset, scale: Scale) -> Keyset:
    """The settled mark, unless it is before the mark that was read from."""
    if not settled or (after and scale.place(settled[0]) <= scale.place(after[0])):
        return after
    return settled


# Up to which time a database is settled: no row with an older time can still appear.
#
# A transaction stamps its rows when it begins and shows them when it commits. So nothing is settled past the start of
# the oldest open transaction, and, where transactions cannot be seen, only what is older than `look_back`. A clock that
# was set back stamps new rows with times that were already settled: those are read again.

Height = tuple[int, int]
"""The time of a probe (database's time, microseconds) and the highest number its version column had."""

SECOND_US = 1_000_000
LOOK_BACK_US = {True: SECOND_US, False: 60 * SECOND_US}
"""The default `look_back`, by whether open transactions are seen. One second also covers small clock differences and
applications that write times with less precision than the column."""
STEP_US = SECOND_US // 2
"""A clock that lags this much behind the expected time was set back."""
DRIFT = 1e-4
AWAY_US = 3600 * SECOND_US
"""How far back rows are read again when a clock was set back while no process was running."""
PREPARED_US = 24 * AWAY_US
"""How long a prepared transaction may have been open when it is first seen by a new process."""


@dataclass(frozen=True)
class SettledTime:
    """One reading of the clock. Rows older than `settled` are final; rows from `rewound` on are to be read again."""

    now: int
    settled: int
    rewound: int | None

    def floor(self, mark: Keyset, scale: Scale) -> Keyset:
        """Where to continue: the mark, or further back after a clock was set back."""
        if self.rewound is None or not scale.timed or not mark:
            return mark
        back = scale.at(self.rewound)
        return (back,) if scale.place(back) < scale.place(mark[0]) else mark

    def settled_mark(self, scale: Scale, heights: Sequence[Height]) -> Keyset:
        """Rows before this mark are final."""
        if scale.timed:
            return (scale.at(self.settled),)
        return max(((value,) for moment, value in heights if moment < self.settled), default=START)

    def end(self, scale: Scale) -> Keyset | None:
        """Rows from here on are not read: a time in the future must not move the watermark past now."""
        if not scale.timed:
            return None
        # A time that its column rounds up may be the next tick; a date is truncated, not rounded.
        rounded = 0 if scale.kind is VersionKind.DAY else scale.tick // 2
        return (scale.after(self.now + rounded),)


class SettledClock:
    """Remembers earlier readings as needed. `last` is the database's time and ours when an earlier process read it."""

    def __init__(
        self, look_back_us: int | None, last: tuple[int, int] = (0, 0), monotonic: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._look_back = look_back_us
        self._last = last
        self._monotonic = monotonic
        self._seen: tuple[int, int] | None = None
        self._oldest: int | None = None
        self._held: dict[str, int] = {}

    def read(self, clock: Clock) -> SettledTime:
        """Interpret the clock. Called before rows are read, for every poll."""
        look_back = LOOK_BACK_US[clock.known] if self._look_back is None else self._look_back
        rewound = self._rewound(clock.now)
        if rewound is not None:
            rewound -= look_back
        before = self._oldest if self._oldest is not None else (self._last[0] or clock.now - PREPARED_US)
        # It began before it was first seen as prepared, but not before the oldest transaction of the reading before
        # that.
        self._held = {one: self._held.get(one, before) for one in clock.prepared}
        oldest = min([clock.oldest, clock.now, *self._held.values()])
        self._seen = (clock.now, self._monotonic() // 1000)
        self._oldest = oldest
        return SettledTime(clock.now, oldest - look_back, rewound)

    def _rewound(self, now: int) -> int | None:
        if self._seen is not None:
            elapsed = self._monotonic() // 1000 - self._seen[1]
            # The clock that was set back may have stamped rows right after the last reading.
            return now - elapsed - STEP_US if self._seen[0] + elapsed - now > STEP_US + elapsed * DRIFT else None
        database, own = self._last
        if not database:
            return None
        elapsed = max(time.time_ns() // 1000 - own, 0)
        if database + elapsed - now > STEP_US + elapsed * DRIFT:
            return now - max(elapsed, AWAY_US)
        return None
