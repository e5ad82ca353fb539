from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tailrace.system import phase as module
from tailrace.system.phase import phase, take


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    take()
    yield clock
    take()


def test_an_inner_phase_is_not_the_outer_ones_time(clock: Clock) -> None:
    with phase("write", outermost=True):
        clock.now += 1
        with phase("commit"):
            clock.now += 10
        clock.now += 100
    assert take() == {"write": 101.0, "commit": 10.0}
    assert take() == {}


def test_a_phase_that_is_inside_none_is_not_counted(clock: Clock) -> None:
    with phase("commit"):
        clock.now += 1
    assert take() == {}


def test_a_phase_that_fails_is_counted_and_over(clock: Clock) -> None:
    @phase("write", outermost=True)
    def fail() -> None:
        clock.now += 1
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    with phase("commit"):
        clock.now += 1
    assert take() == {"write": 1.0}


def test_other_threads_count_for_themselves_and_add_up(clock: Clock) -> None:
    def decode() -> None:
        with phase("commit"):  # that this thread is inside none does not depend on the others
            clock.now += 1
        with phase("decode", outermost=True):
            clock.now += 10

    with phase("wait", outermost=True):
        for _ in range(2):
            thread = threading.Thread(target=decode)
            thread.start()
            thread.join()
    assert take() == {"wait": 22.0, "decode": 20.0}
