"""An executor that comes while a pipeline runs and does not see what it must see writes nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.runner import RunningPipeline
from tests.support.scenario import Scenario
from tests.support.spark_cluster import CONF, standalone_cluster

pytestmark = pytest.mark.xdist_group("cluster")


def test_an_executor_that_comes_later_and_does_not_see_the_folders_gets_no_batch(
    tmp_path: Path, postgres: EmbeddedPostgres, make_database: Callable[[EmbeddedPostgres], PostgresDatabase]
) -> None:
    followed = make_database(postgres)
    with standalone_cluster(tmp_path / "cluster", hiding=[False]) as cluster:
        if not cluster.hides:
            pytest.skip("this machine allows no mount namespaces")
        folder = cluster.hidden / "pipeline"
        folder.mkdir()
        scenario = Scenario(
            folder,
            followed.dsn,
            name="late",
            spark={"master": cluster.url, "conf": {**CONF, "spark.scheduler.minRegisteredResourcesRatio": "0.5"}},
        ).prepare()
        tables = [f"t{number}" for number in range(8)]
        scenario.sql(*(f"CREATE TABLE {name} (id int PRIMARY KEY, n int)" for name in tables))
        scenario.sql(*(f"INSERT INTO {name} SELECT i, i FROM generate_series(1, 50) i" for name in tables))
        turns = itertools.cycle(tables)
        with scenario.run() as run:
            scenario.catch_up(run)
            late = cluster.start_worker(True)

            def is_refused() -> bool:
                scenario.sql(f"UPDATE {next(turns)} SET n = n + 1")
                return "does not see" in late.said()

            wait_until(is_refused)
            # Its tasks went to the other executor. Where that one was busy each time, the run has ended and says why.
            code = end(run)
            assert code == 0 or (code == 3 and f"does not see {folder}" in run.log_file.read_text())
        late.kill_executors()
        late.process.kill()
        with scenario.run(once=True) as again:
            assert again.wait() == 0
        assert scenario.differences() == []
        assert not list(folder.rglob(".tailrace-seen-*"))


def end(run: RunningPipeline) -> int:
    with suppress(ProcessLookupError):
        run.terminate()
    return run.wait()
