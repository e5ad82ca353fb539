"""What `tailrace demo` shows where there is no terminal to draw on: a line every few seconds that people can follow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tailrace.cli.text import say
from tailrace.model.quantity_text import format_count, format_seconds
from tailrace.state import TableState
from tailrace.state.record import ChangeCounts
from tailrace.state.status import PipelineStatus

_COPY_SECONDS = 2.0
_FOLLOW_SECONDS = 3.0
_QUIET_SECONDS = 15.0
"""How long nothing may change before a line says that nothing did."""
_BAR_WIDTH = 24
_SHOWN_RATES = 16
_STEPS = "▁▂▃▄▅▆▇█"


class StoryView:
    """A line for how far the copy is, one when it is done, then one now and then for what changed since the last."""

    def __init__(
        self,
        write: Callable[[str], None] = say,
        *,
        is_continued: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_continued`: another view has shown what came before, so that nothing is said of a copy that is done."""
        self._write = write
        self._is_continued = is_continued
        self._clock = clock
        self._began = clock()
        self._next = float("-inf")
        self._last = (float("-inf"), "")
        self._copied: bool | None = None
        self._counts = ChangeCounts()
        self._rates: deque[int] = deque(maxlen=_SHOWN_RATES)

    def show(self, status: PipelineStatus) -> None:
        for text in _errors(status):
            self._line("error", text)
        if not status.tables:
            return
        is_copied = all(table.state is TableState.READY for table in status.tables)
        if is_copied and not self._copied:
            tables = format_count(len(status.tables), "table")
            rows = f"{sum(table.rows_copied for table in status.tables):,} rows in {tables}"
            if self._copied is None and not self._is_continued:
                self._line("continuing", f"{rows} were copied before")
            elif self._copied is not None:
                self._line("copied", f"{rows}; from now on every change follows")
            self._counts, self._next = _counts(status), self._clock() + _FOLLOW_SECONDS
        elif self._clock() >= self._next:
            self._next = self._clock() + (_FOLLOW_SECONDS if self._copied else _COPY_SECONDS)
            if self._copied:
                self._follow(status)
            else:
                self._copy(status)
        self._copied = self._copied or is_copied

    def note(self, text: str) -> None:
        say(text, err=True)

    def _copy(self, status: PipelineStatus) -> None:
        done = sum(table.rows_copied for table in status.tables)
        # The totals are the upstream's estimates.
        total = max(done, sum(table.rows_total or table.rows_copied for table in status.tables))
        if total:
            filled = _BAR_WIDTH * done // total
            self._line("copying", f"{'█' * filled}{'░' * (_BAR_WIDTH - filled)} {done:,} of ~{total:,} rows")

    def _follow(self, status: PipelineStatus) -> None:
        now, before = _counts(status), self._counts
        if now == before and self._clock() - self._last[0] < _QUIET_SECONDS:
            return
        self._counts = now
        inserts, updates, deletes = (
            max(0, getattr(now, kind) - getattr(before, kind)) for kind in ("inserts", "updates", "deletes")
        )
        self._rates.append(inserts + updates + deletes)
        most = max(*self._rates, 1)
        drawn = "".join(_STEPS[(len(_STEPS) - 1) * rate // most] for rate in self._rates)
        lag = status.lag_seconds
        behind = "" if lag is None else "  level with the shop" if lag == 0 else f"  {format_seconds(lag)} behind"
        self._line("following", f"{f'+{inserts:,} ~{updates:,} -{deletes:,}':<20} {drawn:<{_SHOWN_RATES}}{behind}")

    def _line(self, what: str, text: str) -> None:
        if text != self._last[1]:
            self._last = (self._clock(), text)
            self._write(f"{self._clock() - self._began:>5.0f} s  {what:<10} {text}".rstrip())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _errors(status: PipelineStatus) -> list[str]:
    waiting = [status.source.error] if status.source and status.source.error else []
    return [*(f"{table.name}: {table.reason}" for table in status.errored), *waiting]


def _counts(status: PipelineStatus) -> ChangeCounts:
    return sum((table.counts for table in status.tables), ChangeCounts())
