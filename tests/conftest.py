"""Servers and databases for every test that asks for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, settings

from tailrace.demo.server import EmbeddedPostgres
from tests.support.database import PostgresDatabase

settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")

_numbers = itertools.count(1)


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
