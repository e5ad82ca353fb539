"""Pauses between attempts, and waits that end early."""

from __future__ import annotations

import threading
import time

import pytest

from tailrace.system.backoff import Backoff, wait


def test_pauses_follow_their_steps_and_then_grow_by_a_factor_up_to_the_longest() -> None:
    assert [Backoff((0.1, 0.2, 0.5)).delay(attempts) for attempts in (1, 2, 3, 4, 9_999)] == [0.1, 0.2, 0.5, 0.5, 0.5]
    growing = Backoff((3.0,), 20.0, factor=2)
    assert [growing.delay(attempts) for attempts in range(1, 6)] == [3.0, 6.0, 12.0, 20.0, 20.0]


@pytest.mark.parametrize("attempts", [1_025, 10**6, 10**12])
def test_no_number_of_attempts_is_too_large(attempts: int) -> None:
    assert Backoff((1.0,), 60.0, factor=2.0).delay(attempts) == 60.0
    assert Backoff((0.001,), 60.0, factor=1.5).delay(attempts) == 60.0


def test_chance_changes_a_pause_by_its_spread_and_never_beyond_the_longest() -> None:
    spread = Backoff((8.0,), 9.0, factor=2.0, spread=0.25)
    assert [spread.delay(1, chance) for chance in (0.0, 0.5, 1.0)] == [6.0, 8.0, 9.0]


def test_a_wait_ends_early_when_it_is_asked_to_stop() -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    before = time.monotonic()
    assert not wait(600.0, stop.is_set)
    assert time.monotonic() - before < 300
    assert wait(0.01, lambda: False)
