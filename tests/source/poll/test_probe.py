"""Up to which time a reading of the database's clock is settled."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tailrace.errors import UnfitError
from tailrace.source.poll.connector import Clock
from tailrace.source.poll.probe import SECOND_US, SettledClock
from tailrace.source.poll.version_column import DAY_US, Scale, VersionKind, require_iso

NOON = int(datetime(2026, 11, 15, 12, 0, 0, 300_000, UTC).timestamp() * 1e6)
S = SECOND_US


class Watch:
    """Our own clock, set by hand."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def test_nothing_is_settled_past_the_oldest_open_transaction() -> None:
    view = SettledClock(0).read(Clock(NOON, NOON - 90 * S, known=True))
    assert view.settled == NOON - 90 * S
    assert view.rewound is None


def test_where_transactions_are_not_seen_a_minute_is_looked_back() -> None:
    assert SettledClock(None).read(Clock(NOON, NOON, known=False)).settled == NOON - 60 * S


def test_a_prepared_transaction_holds_what_was_settled_before_it_was_seen() -> None:
    horizon = SettledClock(0)
    horizon.read(Clock(NOON, NOON - 5 * S, known=True))
    held = horizon.read(Clock(NOON + 60 * S, NOON + 60 * S, known=True, prepared=frozenset({"77"})))
    assert held.settled == NOON - 5 * S
    later = horizon.read(Clock(NOON + 120 * S, NOON + 120 * S, known=True, prepared=frozenset({"77"})))
    assert later.settled == NOON - 5 * S
    assert horizon.read(Clock(NOON + 180 * S, NOON + 180 * S, known=True)).settled == NOON + 180 * S


def test_a_clock_that_was_set_back_is_read_again_from_where_it_may_have_landed() -> None:
    watch = Watch()
    horizon = SettledClock(0, monotonic=watch)
    horizon.read(Clock(NOON, NOON, known=True))
    watch.ns = 10 * 10**9
    # Ten seconds went by, and the clock is a minute before the last reading.
    view = horizon.read(Clock(NOON - 60 * S, NOON - 60 * S, known=True))
    assert view.rewound is not None
    assert view.rewound <= NOON - 70 * S
    scale = Scale(VersionKind.INSTANT)
    assert view.floor((scale.at(NOON), "5"), scale) == (scale.at(view.rewound),)
    assert view.floor((scale.at(NOON - 100 * S),), scale) == (scale.at(NOON - 100 * S),)


def test_a_clock_step_too_small_to_go_below_the_last_reading_is_noticed_too() -> None:
    watch = Watch()
    horizon = SettledClock(0, monotonic=watch)
    horizon.read(Clock(NOON, NOON, known=True))
    watch.ns = 30 * 10**9
    assert horizon.read(Clock(NOON + 20 * S, NOON + 20 * S, known=True)).rewound is not None


def test_a_clock_set_back_between_two_runs_is_noticed() -> None:
    future = 4_000_000_000 * S
    assert SettledClock(0, (future, NOON)).read(Clock(NOON, NOON, known=True)).rewound is not None


@pytest.mark.parametrize(
    ("scale", "at", "after"),
    [
        (Scale(VersionKind.INSTANT), "2026-11-15 12:00:00.300000+00:00", "2026-11-15 12:00:00.300001+00:00"),
        (Scale(VersionKind.INSTANT, S), "2026-11-15 12:00:00+00:00", "2026-11-15 12:00:01+00:00"),
        (Scale(VersionKind.LOCAL, 1, "Europe/Berlin"), "2026-11-15 13:00:00.300000", "2026-11-15 13:00:00.300001"),
        (Scale(VersionKind.DAY, DAY_US, "Pacific/Auckland"), "2026-11-16", "2026-11-17"),
        (Scale(VersionKind.TEXT, latest="2026-11-15 12:00:00"), "2026-11-15 12:00:00", "2026-11-15 12:00:01"),
        (
            Scale(VersionKind.TEXT, latest="2026-11-15T12:00:00.123Z"),
            "2026-11-15T12:00:00.300Z",
            "2026-11-15T12:00:00.301Z",
        ),
        (Scale(VersionKind.TEXT, latest="2026-11-15"), "2026-11-15", "2026-11-16"),
    ],
)
def test_a_moment_is_written_as_its_column_writes_it(scale: Scale, at: str, after: str) -> None:
    assert scale.at(NOON) == at
    assert scale.after(NOON) == after
    assert scale.place(at) < scale.place(after)


def test_text_whose_order_is_not_that_of_time_is_refused() -> None:
    assert require_iso("2026-11-15T12:00:00Z", "t", "c")
    for text in ("15/11/2026", "2026-11-15 12:00:00+02:00", "yesterday"):
        with pytest.raises(UnfitError):
            require_iso(text, "t", "c")


def test_a_time_that_its_column_rounds_up_is_not_taken_for_the_future() -> None:
    late = NOON + 400_000  # 12:00:00.7, which a column of seconds holds as 12:00:01
    view = SettledClock(0).read(Clock(late, late, known=True))
    assert view.end(Scale(VersionKind.INSTANT, S)) == ("2026-11-15 12:00:02+00:00",)
    assert view.end(Scale(VersionKind.INSTANT)) == ("2026-11-15 12:00:00.700001+00:00",)
    assert view.end(Scale(VersionKind.DAY, DAY_US)) == ("2026-11-16",)
