"""The same pipeline on a real standalone cluster: a master and two workers, each a process of its own."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pyspark
import pytest

from tailrace.stream.java import java_home
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.rqlite_following import free_port
from tests.support.scenario import Scenario
from tests.support.type_zoo import ZooTraffic, create_zoo

MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
CONF = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "300s",
    # Tasks are spread over both workers although one of them could do it all.
    "spark.locality.wait": "0",
}


def listening(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[Path]]]:
    """The master's URL and the folders in which the workers keep what their executors print."""
    home = Path(pyspark.__file__).parent
    port = free_port()
    folders = [tmp_path / f"worker-{number}" for number in (1, 2)]
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    if found := java_home():
        environment["JAVA_HOME"] = found
    environment.pop("SPARK_MASTER_HOST", None)

    with ExitStack() as running, (tmp_path / "cluster.log").open("wb") as log:

        def start(*arguments: str) -> None:
            process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), *arguments],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            running.callback(process.wait)
            running.callback(process.kill)

        start(MASTER, "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0")
        wait_until(lambda: listening(port))
        for folder in folders:
            url = f"spark://127.0.0.1:{port}"
            start(WORKER, "--host", "127.0.0.1", "--cores", "1", "--memory", "600m", "--webui-port", "0",
                  "--work-dir", str(folder), url)  # fmt: skip
        said = tmp_path / "cluster.log"
        wait_until(lambda: said.read_text().count("Successfully registered with master") >= 2)
        yield f"spark://127.0.0.1:{port}", folders


def test_a_pipeline_runs_on_two_workers(
    cluster: tuple[str, list[Path]], database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    master, folders = cluster
    scenario = make_scenario(
        database.dsn, spark={"master": master, "conf": CONF}, source={"copy": {"chunk_bytes": "1 MB"}}
    )
    with database.connect() as conn:
        create_zoo(conn)
    scenario.sql(
        "CREATE TABLE wide (id int PRIMARY KEY, filler text)",
        "INSERT INTO wide SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, 6000) i",
    )
    ZooTraffic(database.dsn, seed=1).run(50)
    with scenario.run() as run:
        scenario.catch_up(run)
        assert scenario.differences() == []
        ZooTraffic(database.dsn, seed=2).run(50)
        scenario.sql("UPDATE wide SET filler = 'short' WHERE id % 3 = 0", "DELETE FROM wide WHERE id % 5 = 0")
        scenario.catch_up(run)
        run.terminate()
        assert run.wait() == 0
    assert scenario.differences() == []
    assert scenario.doubled() == []
    for folder in folders:
        said = "".join(path.read_text(errors="replace") for path in folder.rglob("stderr"))
        assert re.search(r"Finished task \d", said) or "Running task" in said, f"no task ran in {folder}"
