"""A runner that was paused while another took over: what it does when it wakes has no effect."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.testing.database import Database
from tailrace.testing.runner import Run, descendants
from tailrace.testing.scenario import Scenario
from tailrace.testing.wait import wait_until


def paused_processes(run: Run) -> list[int]:
    stats = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in descendants(run.pid)}
    return [pid for pid, state in stats.items() if state == "T"]


@pytest.mark.timeout(400)
def test_a_stale_runner_is_fenced_when_it_commits(database: Database, make_scenario: Callable[..., Scenario]) -> None:
    scenario = make_scenario(database.dsn)
    scenario.sql(
        "CREATE TABLE keyed (id int PRIMARY KEY, v int)",
        "CREATE TABLE keyless (v int)",
        "INSERT INTO keyed SELECT i, 0 FROM generate_series(1, 100) i",
    )
    assert scenario.run_once() == 0
    scenario.sql("UPDATE keyed SET v = v + 1", "INSERT INTO keyless SELECT generate_series(1, 100)")

    with scenario.run(failpoints="delta.before_commit:pause!once") as first:
        wait_until(lambda: bool(first.acted()) and bool(paused_processes(first)), 90)
        worker = paused_processes(first)
        os.kill(first.pid, signal.SIGSTOP)
        # What a lease that ran out looks like: the lock is there to be taken although its holder lives.
        (scenario.state / "runner.lock").unlink()
        with scenario.run() as second:
            scenario.sql("UPDATE keyed SET v = v + 1", "INSERT INTO keyless SELECT generate_series(1, 100)")
            scenario.catch_up(second)
            for pid in [*worker, first.pid]:
                os.kill(pid, signal.SIGCONT)
            assert first.wait() == 5
            assert "another runner" in first.log_tail() or "may not write any more" in first.log_tail()
            scenario.sql("DELETE FROM keyed WHERE id <= 10")
            scenario.catch_up(second)
            assert scenario.differences() == []
    assert scenario.doubled() == []
