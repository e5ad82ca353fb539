"""Looking for changed rows: what is there behind a mark, and is any of it new?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailrace.source.poll.connector import ConnectorSession, Polled, Query
from tailrace.source.poll.horizon import Height, SettledTime
from tailrace.source.poll.known import Hashes
from tailrace.source.poll.mark import START, Keyset, Stretch
from tailrace.source.poll.offset import Sweep
from tailrace.source.poll.version import Scale

HEIGHTS = 8


class ForeignMarkError(ValueError):
    """The mark is no place in the order that the column has now."""


@dataclass(frozen=True)
class ProbeResult:
    """What a look found. `fresh` rows were not given before; `more`: the limit cut it short."""

    sweep: Sweep
    fresh: int
    more: bool
    heights: tuple[Height, ...]


@dataclass(frozen=True)
class Probe:
    """One look at one table, by one of its columns. `seen` are the rows that the last window gave already."""

    session: ConnectorSession
    table: Polled
    by: str
    deleted: bool
    view: SettledTime
    seen: Hashes
    page_rows: int
    limit_rows: int

    def run(self, mark: Keyset, heights: Sequence[Height]) -> ProbeResult | None:
        """What lies behind the mark; None for a column that cannot be followed.

        An idle table costs one page without rows. Only the columns of the order are read, and hashes where rows of
        the last window may come again. Raises ForeignMarkError for a mark of other values than the column has now.
        """
        scale = self.session.scale(self.table, self.by)
        if scale is None:
            return None
        if scale.is_empty:
            # Whatever comes from now on is new, whatever it looks like.
            return ProbeResult(Sweep(START, START, START), 0, False, tuple(heights))
        if mark and not scale.fits(mark[0]):
            raise ForeignMarkError
        after, end = self.view.floor(mark, scale), self.view.end(scale)
        columns = self.table.only(self.table.order(self.by))
        hashed = len(self.seen) > 0
        query = Query(self.table, self.by, Stretch(after, end), columns, self.page_rows, self.deleted, hashed)
        fresh, more, last = 0, False, START
        while True:
            page = self.session.page(query)
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
    """The heights that matter from now on: the last settled one, and the next to be."""
    if scale.timed or scale.latest is None:
        return tuple(heights)
    known = [*heights, (view.now, int(scale.latest))]
    settled = [height for height in known if height[0] < view.settled]
    return (*settled[-1:], *[height for height in known if height[0] >= view.settled][:HEIGHTS])


def _later(after: Keyset, settled: Keyset, scale: Scale) -> Keyset:
    """The settled mark, unless it lies before the place that was read from."""
    if not settled or (after and scale.place(settled[0]) <= scale.place(after[0])):
        return after
    return settled
