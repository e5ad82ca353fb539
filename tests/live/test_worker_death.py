"""Workers of a cluster die at chosen steps of a copy and of batches: all is there afterwards, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.system.failpoint import DIRECTORY_VARIABLE, VARIABLE
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario
from tests.support.slatedb_bucket import BucketProcess, serving
from tests.support.spark_cluster import CONF, SparkCluster, standalone_cluster

pytestmark = pytest.mark.xdist_group("cluster")

STEPS = [
    "stream.staged",  # copied rows are in the lake, and the driver does not know yet
    "journal.before_read",  # a piece is in the object store, and was not read
    "delta.before_commit",  # the files of a batch are in the lake, and no version lists them
    "stream.written",  # a table is committed, and the batch is not
]


@pytest.fixture
def server() -> Iterator[BucketProcess]:
    with serving() as process:
        yield process


def test_a_worker_dies_in_a_copy_before_it_reads_a_piece_and_in_the_middle_of_a_batch(
    tmp_path: Path,
    server: BucketProcess,
    postgres: EmbeddedPostgres,
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
) -> None:
    followed = make_database(postgres)
    with standalone_cluster(tmp_path / "cluster") as cluster:
        folder, marks = cluster.hidden / "pipeline", cluster.shared / "marks"
        folder.mkdir()
        marks.mkdir(mode=0o777)
        orders = {
            f"spark.executorEnv.{VARIABLE}": ",".join(f"{step}:kill!once" for step in STEPS),
            f"spark.executorEnv.{DIRECTORY_VARIABLE}": str(marks),
        }
        scenario = Scenario(
            folder,
            followed.dsn,
            name="death",
            spark={"master": cluster.url, "conf": {**CONF, **orders}},
            source={"journal": {"path": "s3://journal/death", "storage_options": server.options}},
            store={"type": "postgres", "dsn": make_database(postgres).dsn},
            destination={"path": "s3://lake/death", "storage_options": server.options, "updates": "merge_on_read"},
        ).prepare()
        scenario.sql(
            "CREATE TABLE wide (id int PRIMARY KEY, filler text)",
            "INSERT INTO wide SELECT i, md5(i::text) FROM generate_series(1, 3000) i",
            "CREATE TABLE log (line text)",
        )
        with scenario.run() as run:
            dead = 0
            while dead < len(STEPS):
                scenario.sql(
                    "UPDATE wide SET filler = filler || 'x' WHERE id % 7 = 0",
                    "DELETE FROM wide WHERE id = (SELECT min(id) FROM wide)",
                    "INSERT INTO log SELECT 'line ' || count(*) FROM log",
                )
                wait_until(lambda before=dead: len(list(marks.iterdir())) > before)  # type: ignore[misc]
                dead = replaced(cluster, marks)
            scenario.catch_up(run)
            run.terminate()
            assert run.wait() == 0
        assert {mark.name for mark in marks.iterdir()} == set(STEPS)
        scenario.execute("verify")


def replaced(cluster: SparkCluster, marks: Path) -> int:
    """Start a worker for each that died. Returns how many have died so far."""
    dead = len(list(marks.iterdir()))
    wait_until(lambda: sum(worker.process.poll() is not None for worker in cluster.workers) >= dead)
    while len(cluster.workers) < dead + 2:
        cluster.start_worker(True)
    return dead
