"""The same pipeline on a real standalone cluster: executors that do not see the driver's disk, a lake on S3."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.state import TableState
from tailrace.state.status import PipelineStatus
from tests.support.database import PostgresDatabase
from tests.support.runner import RunningPipeline, command
from tests.support.scenario import Scenario
from tests.support.slatedb_bucket import Buckets
from tests.support.spark_cluster import CONF, SparkCluster, standalone_cluster
from tests.support.type_zoo import ZooTraffic, create_zoo

pytestmark = pytest.mark.xdist_group("cluster")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with standalone_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def followed(
    postgres: EmbeddedPostgres, make_database: Callable[[EmbeddedPostgres], PostgresDatabase]
) -> PostgresDatabase:
    return make_database(postgres)


@pytest.fixture
def folder(cluster: SparkCluster, request: pytest.FixtureRequest) -> Path:
    """A folder on the driver's disk."""
    made = cluster.hidden / str(abs(hash(request.node.name)))
    made.mkdir()
    return made


def journal(server: Buckets, name: str) -> dict[str, object]:
    return {"path": f"s3://journal/{name}", "storage_options": server.options}


def execute(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own: delta-rs keeps Python's lock, which the store of this process needs."""
    return subprocess.run(
        command(*map(str, arguments)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )


def verify(scenario: Scenario) -> None:
    result = execute("verify", scenario.file)
    assert result.returncode == 0, result.stdout


def test_a_pipeline_runs_on_executors_that_do_not_see_the_driver_and_survives_their_death(
    cluster: SparkCluster,
    followed: PostgresDatabase,
    folder: Path,
    postgres: EmbeddedPostgres,
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
) -> None:
    with Buckets() as server:
        scenario = Scenario(
            folder,
            followed.dsn,
            name="cluster",
            spark={"master": cluster.url, "conf": CONF},
            source={"copy": {"chunk_bytes": "1 MB"}, "journal": journal(server, "cluster")},
            store={"type": "postgres", "dsn": make_database(postgres).dsn},
            destination={"path": "s3://cluster/lake", "storage_options": server.options},
        ).prepare()
        with followed.connect() as connection:
            create_zoo(connection)
        scenario.sql(
            "CREATE TABLE wide (id int PRIMARY KEY, filler text)",
            "INSERT INTO wide SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, 20000) i",
        )
        ZooTraffic(followed.dsn, seed=1).run(50)
        with scenario.run() as run:
            # In the middle of the copy.
            run.wait_until(lambda _: any("/wide/" in name for name in list(server.objects)))
            cluster.workers[0].kill_executors()
            scenario.catch_up(run)
            # In the middle of a batch.
            before = batches(server)
            scenario.sql("UPDATE wide SET filler = 'short' WHERE id % 3 = 0", "DELETE FROM wide WHERE id % 5 = 0")
            run.wait_until(lambda _: batches(server) > before)
            cluster.workers[1].kill_executors()
            scenario.catch_up(run)
            # Between the PUT of changes and the task that reads them.
            before = pieces(server)
            scenario.sql("UPDATE wide SET filler = 'put' WHERE id % 7 = 0")
            run.wait_until(lambda _: pieces(server) > before)
            for worker in cluster.workers:
                worker.kill_executors()
            ZooTraffic(followed.dsn, seed=2).run(50)
            scenario.catch_up(run)
            scenario.execute("resync", "public.wide")
            run.wait_until(lambda status: is_copied(status, "public.wide", 16000))
            run.terminate()
            assert run.wait() == 0
        verify(scenario)
        assert cluster.ran_everywhere()
        shutil.rmtree(scenario.state)
        scenario.sql("INSERT INTO wide VALUES (0, 'a driver with an empty disk')")
        with RunningPipeline(scenario.file) as elsewhere:
            scenario.catch_up(elsewhere)
            second = execute("run", second_disk(scenario), "--once")
            assert second.returncode == 5, second.stdout
            elsewhere.terminate()
            assert elsewhere.wait() == 0
        verify(scenario)


def is_copied(status: PipelineStatus, name: str, rows: int) -> bool:
    return any(
        table.name == name and table.state is TableState.READY and table.rows_copied == rows for table in status.tables
    )


def batches(server: Buckets) -> int:
    return sum("/_delta_log/" in name for name in list(server.objects))


def pieces(server: Buckets) -> int:
    """How many pieces the journal has put."""
    numbers = [
        int(name.rpartition("/")[2].removesuffix(".seg")) for name in list(server.objects) if name.endswith(".seg")
    ]
    return max(numbers, default=0)


def second_disk(scenario: Scenario) -> Path:
    """The same pipeline with another `state` folder."""
    file = scenario.folder / "second.yaml"
    file.write_text(scenario.file.read_text().replace(str(scenario.state), str(scenario.folder / "second")))
    return file


@pytest.mark.parametrize("unseen", ["destination.path", "source.journal.path"])
def test_a_folder_that_executors_do_not_see_is_named_before_anything_is_written(
    cluster: SparkCluster, followed: PostgresDatabase, folder: Path, unseen: str
) -> None:
    if not cluster.hides:
        pytest.skip("this machine allows no mount namespaces")
    places = {key: cluster.shared / folder.name / key for key in ("destination.path", "source.journal.path")}
    places[unseen] = folder / "local"
    scenario = Scenario(
        folder,
        followed.dsn,
        name="hidden",
        spark={"master": cluster.url, "conf": CONF},
        source={"journal": {"path": str(places["source.journal.path"])}},
        destination={"path": str(places["destination.path"])},
    ).prepare()
    refused = execute("run", scenario.file, "--once")
    assert refused.returncode == 3, refused.stdout
    assert f"does not see {places[unseen]}, which `{unseen}` names" in refused.stdout
    assert not places["destination.path"].exists()
