"""Servers, databases and pipelines for every test that asks for them, and the markers of each test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tailrace.demo.server import EmbeddedPostgres
from tests.support.database import PostgresDatabase

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.kafka_broker import KafkaBroker
    from tests.support.scenario import Scenario

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

_numbers = itertools.count(1)

# What `make test-fast` leaves out, by folder or file; the longest path counts. `server` comes with the fixtures, too.
MARKERS = {
    "dashboard/browser": "slow",
    "demo/test_server.py": "server",
    "demo/test_workload.py": "server",
    "faults": "spark",
    "faults/test_power.py": "",
    "faults/test_restore.py": "server",
    "faults/test_rqlite_receiver.py": "slow",
    "faults/test_webhook_sender.py": "slow",
    "live": "spark",
    "property/test_rqlite.py": "slow",
    "stream/test_java.py": "spark",
    "test_package.py": "slow",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="give property tests a quarter of their examples")
    parser.addoption("--fuzz-seconds", type=float, help="how long tests/fuzz runs random sequences; default: a minute")
    parser.addoption("--fuzz-seed", type=int, default=1, help="the seed of the first sequence; the next ones count on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        for test in {item.function for item in items if isinstance(item, pytest.Function)}:
            _quarter_examples(test)
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        places = [str(place) for place in (path, *path.parents)]
        if marker := next((MARKERS[place] for place in places if place in MARKERS), ""):
            item.add_marker(marker)
        if "postgres_server" in getattr(item, "fixturenames", ()):
            item.add_marker("server")
        if "kafka" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")


def _quarter_examples(test: Any) -> None:
    # Hypothesis has no public way to change the number that a test itself asks for.
    if isinstance(own := getattr(test, "_hypothesis_internal_use_settings", None), settings):
        test._hypothesis_internal_use_settings = settings(own, max_examples=max(1, own.max_examples // 4))


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], EmbeddedPostgres]]:
    """`postgres_server(16)` is the session's running server of that version, started when first asked for."""
    servers: dict[int, EmbeddedPostgres] = {}
    with ExitStack() as running:

        def serve(version: int) -> EmbeddedPostgres:
            if version not in servers:
                data_dir = tmp_path_factory.mktemp(f"postgres-{version}") / "data"
                servers[version] = running.enter_context(EmbeddedPostgres(data_dir, version=version))
            return servers[version]

        yield serve


@pytest.fixture(scope="session")
def postgres(postgres_server: Callable[[int], EmbeddedPostgres]) -> EmbeddedPostgres:
    """The session's PostgreSQL 18. A test that restarts or breaks a server starts one of its own instead."""
    return postgres_server(18)


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """The session's Kafka. A test that restarts or breaks a broker starts one of its own instead."""
    from tests.support.kafka_broker import KafkaBroker

    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


@pytest.fixture
def make_database() -> Iterator[Callable[[EmbeddedPostgres], PostgresDatabase]]:
    """`make_database(server)` is a fresh database there, dropped after the test with its slots."""
    with ExitStack() as made:

        def make(server: EmbeddedPostgres) -> PostgresDatabase:
            return made.enter_context(PostgresDatabase(server, f"test_{next(_numbers)}"))

        yield make


@pytest.fixture
def database(
    postgres: EmbeddedPostgres, make_database: Callable[[EmbeddedPostgres], PostgresDatabase]
) -> PostgresDatabase:
    """A fresh database on the session's PostgreSQL 18."""
    return make_database(postgres)


@pytest.fixture
def make_scenario(tmp_path: Path) -> Callable[..., Scenario]:
    """`make_scenario(dsn, **options)` is a pipeline of its own name from that database."""
    from tests.support.scenario import Scenario

    def make(dsn: str, **options: Any) -> Scenario:
        name = f"scene_{next(_numbers)}"
        return Scenario(tmp_path / name, dsn, name=name, **options).prepare()

    return make


@pytest.fixture
def scenario(database: PostgresDatabase, make_scenario: Callable[..., Scenario]) -> Scenario:
    """A pipeline from a fresh, empty database."""
    return make_scenario(database.dsn)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session that all tests of this process share: starting one takes seconds."""
    from tailrace.stream.spark_session import build_session

    session = build_session("tests", "local[2]", {})
    yield session
    session.stop()
