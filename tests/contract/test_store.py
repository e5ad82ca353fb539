"""Each place that can keep a pipeline's state passes the suite that every state store must pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.state import SqliteStore, StoreAddress
from tailrace.state.postgres import PostgresStore
from tailrace.testing.store import StoreContract
from tests.support.database import PostgresDatabase


class TestSqlite(StoreContract):
    @pytest.fixture
    def address(self, tmp_path: Path) -> StoreAddress:
        return SqliteStore("shop", tmp_path / "state")


class TestPostgres(StoreContract):
    @pytest.fixture
    def address(self, tmp_path: Path, database: PostgresDatabase) -> StoreAddress:
        return PostgresStore("shop", tmp_path / "state", database.dsn, "the state")
