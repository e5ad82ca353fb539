"""A database with two tables, and a source that receives one of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.source.postgres.source import PostgresSource
from tests.support.database import PostgresDatabase
from tests.support.postgres_receiving import Session, make_received


@pytest.fixture
def session(database: PostgresDatabase) -> Iterator[Session]:
    """A session on a fresh database with the tables `t` and `other`."""
    with closing(database.connect()) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        connection.execute("CREATE TABLE other (v text)")
        yield connection


@pytest.fixture
def source(database: PostgresDatabase, session: Session, tmp_path: Path) -> PostgresSource:
    """A prepared source of `t` alone. Nothing but the test writes to the server: it has no heartbeat."""
    return make_received(database, tmp_path)
