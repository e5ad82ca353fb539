"""A lake that is full, out of reach or written to by others: batches wait or are done again, and all is the same."""

from __future__ import annotations

import resource
import signal
from contextlib import suppress
from pathlib import Path

from deltalake import DeltaTable

from tailrace.state.status import PipelineStatus
from tailrace.testing.wait import wait_until
from tests.support.process import send
from tests.support.runner import RunningPipeline
from tests.support.scenario import Scenario

PAUSE = "delta.before_commit"


def test_a_lake_that_is_full_or_away_is_waited_for_and_another_writer_does_no_harm(scenario: Scenario) -> None:
    scenario.sql(
        "CREATE TABLE keyed (id int PRIMARY KEY, v int)",
        "CREATE TABLE bag (v int)",
        "INSERT INTO keyed SELECT i, 0 FROM generate_series(1, 100) i",
    )
    run = scenario.run(failpoints=f"{PAUSE}:pause!once")
    mark = run.marks / PAUSE
    mark.parent.mkdir()
    mark.touch()  # while it is there, the failpoint rests
    with run:
        scenario.catch_up(run)

        write_during_a_commit(scenario, run, mark)

        limit_files(run, 0)
        scenario.sql("UPDATE keyed SET v = 2", "INSERT INTO bag SELECT generate_series(1, 100)")
        run.wait_until(waits_for_the_lake)
        limit_files(run, resource.RLIM_INFINITY)
        scenario.catch_up(run)

        lake, away = scenario.lake, scenario.folder / "away"
        lake.rename(away)
        lake.write_text("where a volume should be")
        scenario.sql("UPDATE keyed SET v = 3", "INSERT INTO bag SELECT generate_series(1, 100)")
        run.wait_until(waits_for_the_lake)
        lake.unlink()
        away.rename(lake)
        scenario.catch_up(run)
        assert scenario.differences() == []
    assert scenario.doubled() == []


def waits_for_the_lake(status: PipelineStatus) -> bool:
    source = status.source
    return source is not None and source.gear == "waiting" and "lake" in (source.error or "")


def write_during_a_commit(scenario: Scenario, run: RunningPipeline, mark: Path) -> None:
    """Let another writer commit between the reading and the commit of a batch."""
    mark.unlink()
    scenario.sql("UPDATE keyed SET v = 1")
    wait_until(lambda: bool(run.paused()))
    other = DeltaTable(str(scenario.lake / "public" / "keyed"))
    before = other.version()
    other.delete("id = 100")
    other.update_incremental()
    assert other.version() > before
    send(run.paused(), signal.SIGCONT)
    scenario.sql("DELETE FROM keyed WHERE id = 100")
    scenario.catch_up(run)
    assert scenario.differences() == []


def limit_files(run: RunningPipeline, size: int) -> None:
    """Let the processes that write the lake make no file larger than this: the disk is full for them alone."""

    def limited() -> bool:
        # A worker that was forked meanwhile has what its parent had; look until none is left.
        left = [pid for pid in run.processes(b"worker_daemon\0pyspark.worker") if _limit(pid) != size]
        for pid in left:
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return not left

    wait_until(limited)


def _limit(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return resource.prlimit(pid, resource.RLIMIT_FSIZE)[0]
    return None
