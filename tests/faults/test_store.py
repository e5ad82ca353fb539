"""A state store that is away for a while: the pipeline waits for it, and nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tailrace.demo.server import EmbeddedPostgres
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.runner import RunningPipeline
from tests.support.scenario import Scenario


def test_a_state_database_that_goes_away_is_waited_for(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario], tmp_path: Path
) -> None:
    with EmbeddedPostgres(tmp_path / "server", fast=False) as server:
        scenario = make_scenario(database.dsn, store={"type": "postgres", "dsn": server.dsn()})
        scenario.sql("CREATE TABLE keyed (id int PRIMARY KEY, v int)", "CREATE TABLE bag (v int)")
        with scenario.run() as run:
            scenario.catch_up(run)
            before = planners(run)
            assert before
            server.stop()
            scenario.sql("INSERT INTO keyed SELECT i, 0 FROM generate_series(1, 100) i", "INSERT INTO bag VALUES (1)")
            # The process that asks the store between batches has noticed, and was ended with the query.
            wait_until(lambda: before.isdisjoint(planners(run)))
            server.start()
            scenario.catch_up(run)
            assert scenario.differences() == []
            run.terminate()
            assert run.wait() == 0
    assert scenario.doubled() == []


def planners(run: RunningPipeline) -> set[int]:
    """The processes that plan the batches: one for each start of the query."""
    return set(run.processes(b"python_streaming_source_runner"))
