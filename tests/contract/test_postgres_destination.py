"""The Postgres destination passes the suite that every destination must pass, in each of its forms."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from tailrace.destination import Destination
from tailrace.destination.postgres.destination import PostgresDestination
from tailrace.model.schema import TableSchema
from tailrace.option.value import Dsn
from tailrace.testing.destination import ChunkedCopyContract
from tests.support.database import PostgresDatabase


class TestPostgres(ChunkedCopyContract):
    @pytest.fixture
    def destination(self, database: PostgresDatabase) -> Destination:
        return PostgresDestination(dsn=Dsn(database.dsn))

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, PostgresDestination)
        name = sql.Identifier(table.table.schema, table.table.name)
        with psycopg.connect(destination.dsn.reveal(), row_factory=dict_row) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            try:
                rows = connection.execute(sql.SQL("SELECT * FROM {}").format(name)).fetchall()
            except psycopg.errors.UndefinedTable:
                return []
        return [row for row in rows if row.get("_tailrace_deleted_at") is None]


class TestPostgresWithEveryColumn(TestPostgres):
    @pytest.fixture
    def destination(self, database: PostgresDatabase) -> Destination:
        return PostgresDestination(dsn=Dsn(database.dsn), deletes="soft", metadata=True)
