"""When a table is polled next, and when its full diff is due."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tailrace.option.table import FullDiffOptions
from tailrace.source.poll.schedule import PollSchedule

FAR = 1e9


def waits(schedule: PollSchedule, *, fresh: bool) -> float:
    """How long it will be, after a poll that found something or not, until the next one."""
    began = time.monotonic()
    schedule.polled("t", began=began, fresh=fresh)
    turn = schedule._turn("t")
    assert began + turn.wait <= turn.next <= time.monotonic() + turn.wait
    return turn.wait


def test_a_busy_table_is_polled_fast_and_an_idle_one_ever_slower(tmp_path: Path) -> None:
    schedule = PollSchedule(tmp_path / "schedule.json", 1.0, 30.0)
    assert schedule.is_due("t", None)
    found = [waits(schedule, fresh=False) for _ in range(8)]
    assert found == [1, 2, 4, 8, 16, 30, 30, 30]
    assert not schedule.is_due("t", None)
    assert waits(schedule, fresh=True) == 1
    assert waits(schedule, fresh=False) == 2


def test_a_poll_that_was_cut_short_goes_on_at_once(tmp_path: Path) -> None:
    schedule = PollSchedule(tmp_path / "schedule.json", 1.0, 30.0)
    schedule.polled("t", began=time.monotonic(), fresh=True, whole=False)
    assert schedule.is_due("t", None)
    assert not schedule.is_diff_due("t", FullDiffOptions(every_cycles=1))


def test_cycles_add_up_over_runs_to_a_full_diff(tmp_path: Path) -> None:
    every = FullDiffOptions(every_cycles=3)
    for run in range(3):
        schedule = PollSchedule(tmp_path / "schedule.json", 1.0, 30.0)
        assert not schedule.is_diff_due("t", every)
        schedule.polled("t", began=0.0, fresh=False)
        schedule.save()
        assert schedule.is_diff_due("t", every) == (run == 2)
    schedule.diffed("t")
    assert not PollSchedule(tmp_path / "schedule.json", 1.0, 30.0).is_diff_due("t", every)


def test_a_diff_by_the_clock_is_due_when_its_time_has_come(tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(f'{{"t": {{"polls": 0, "diffed": {time.time() - 7200}}}}}')
    schedule = PollSchedule(file, 1.0, 30.0)
    assert schedule.is_diff_due("t", FullDiffOptions(every=3600.0))
    assert not schedule.is_diff_due("t", FullDiffOptions(every=FAR))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"t": 5}', '{"t": {"polls": "x"}}'])
def test_a_file_that_cannot_be_read_costs_a_delay_and_nothing_else(text: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(text)
    assert PollSchedule(file, 1.0, 30.0).is_due("t", None)
