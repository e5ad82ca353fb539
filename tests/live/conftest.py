"""A pipeline's folder beside a fresh database, and the one Spark session of tests that need it in their own process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tailrace.stream.spark_session import build_session
from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario

_numbers = itertools.count(1)


@pytest.fixture
def make_scenario(tmp_path: Path) -> Callable[..., Scenario]:
    """`make_scenario(dsn, **options)` is a pipeline of its own name from that database."""

    def make(dsn: str, **options: Any) -> Scenario:
        name = f"live_{next(_numbers)}"
        return Scenario(tmp_path / name, dsn, name=name, **options).prepare()

    return make


@pytest.fixture
def scenario(database: PostgresDatabase, make_scenario: Callable[..., Scenario]) -> Scenario:
    """A pipeline from a fresh, empty database."""
    return make_scenario(database.dsn)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session that all tests of this process share: starting one takes seconds."""
    session = build_session("tests", "local[2]", {})
    yield session
    session.stop()
