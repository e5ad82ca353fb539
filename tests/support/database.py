"""One database on a private server."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import sql

from tailrace.demo.server import EmbeddedPostgres
from tailrace.testing.wait import PATIENCE_SECONDS


@dataclass(frozen=True)
class PostgresDatabase:
    """A database that exists while the `with` block runs. It is dropped with its slots and open connections."""

    server: EmbeddedPostgres
    name: str

    @property
    def dsn(self) -> str:
        """A connection URI over TCP, as the superuser."""
        return self.server.dsn(self.name)

    def connect(self, **options: Any) -> psycopg.Connection:
        """A new connection in autocommit. The caller closes it."""
        return self.server.connect(self.name, **options)

    def run(self, *statements: str) -> None:
        """Run each statement in a transaction of its own."""
        with self.connect() as conn:
            for statement in statements:
                conn.execute(statement.encode())

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Everything the query returns."""
        with self.connect() as conn:
            return conn.execute(query.encode()).fetchall()

    def create(self) -> Self:
        """Create it, empty. Raises when it exists."""
        with self.server.connect() as conn:
            conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self.name)))
        return self

    def drop(self) -> None:
        """Drop it with its replication slots, ending every session on it first. Does nothing when it is gone."""
        with self.server.connect() as conn:
            # A slot in use cannot be dropped, and neither can a database that has slots. Ended clients may come back.
            conn.execute("UPDATE pg_database SET datallowconn = false WHERE datname = %s", [self.name])
            conn.execute(
                "SELECT pg_terminate_backend(pid, %s) FROM pg_stat_activity WHERE datname = %s",
                [int(PATIENCE_SECONDS * 1000), self.name],
            )
            conn.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", [self.name]
            )
            conn.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(self.name)))

    def __enter__(self) -> Self:
        return self.create()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
