"""Each source passes the suite that every source must pass."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tailrace.capture import enable
from tailrace.option.table import TableOptions
from tailrace.source.rqlite import cluster_follower
from tailrace.source.source import Source
from tailrace.testing.source import LogContract, SourceContract, TransactionContract, Upstream
from tests.support.database import PostgresDatabase
from tests.support.rqlite_following import free_port
from tests.support.rqlite_following import make_source as make_rqlite_source
from tests.support.rqlite_node import RqliteNode
from tests.support.slatedb_writing import Writer
from tests.support.source_making import make_polled, make_postgres, make_sqlite

TABLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)"
UPSERT = "INSERT INTO t (id, v) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET v = excluded.v"
SELECT = "SELECT id, v FROM t"


@dataclass(frozen=True)
class Server:
    """A table on a Postgres server."""

    source: Source
    connection: psycopg.Connection[Any]

    def put(self, rows: Mapping[int, str]) -> None:
        with self.connection.transaction(), self.connection.cursor() as cursor:
            cursor.executemany(UPSERT.replace("?", "%s"), list(rows.items()))

    def remove(self, *ids: int) -> None:
        self.connection.execute("DELETE FROM t WHERE id = ANY(%s)", [list(ids)])

    def rows(self) -> dict[int, str]:
        return dict(self.connection.execute(SELECT).fetchall())


class TestPostgres(TransactionContract):
    @pytest.fixture
    def upstream(self, database: PostgresDatabase, tmp_path: Path) -> Iterator[Upstream]:
        source = make_postgres(
            database.dsn,
            tmp_path,
            "contract",
            TableOptions(include=["public.t"]),
            slot=f"contract_{database.name}",
            journal={"segment_bytes": 1_000_000},
            copying={"chunk_bytes": 8192},
        )
        with closing(database.connect()) as connection:
            connection.execute(TABLE)
            yield Server(source, connection)


@dataclass(frozen=True)
class File:
    """A table in an SQLite file."""

    source: Source
    connection: sqlite3.Connection
    upsert: str = UPSERT
    delete: str = "DELETE FROM t WHERE id = ?"
    select: str = SELECT

    def put(self, rows: Mapping[int, str]) -> None:
        with self.connection:
            self.connection.executemany(self.upsert, list(rows.items()))

    def remove(self, *ids: int) -> None:
        with self.connection:
            self.connection.executemany(self.delete, [(number,) for number in ids])

    def rows(self) -> dict[int, str]:
        return dict(self.connection.execute(self.select).fetchall())


@pytest.fixture
def app(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        yield connection


class TestSqlite(LogContract):
    @pytest.fixture
    def upstream(self, app: sqlite3.Connection, tmp_path: Path) -> Upstream:
        app.execute(TABLE)
        enable(app)
        return File(make_sqlite(tmp_path / "app.db", tmp_path, TableOptions(include=["main.*"]), chunk_rows=10), app)


@dataclass(frozen=True)
class Cluster:
    """A table of a scripted rqlite cluster."""

    source: Source
    node: RqliteNode

    def put(self, rows: Mapping[int, str]) -> None:
        self.node.execute(*([UPSERT, *row] for row in rows.items()), transaction=True)

    def remove(self, *ids: int) -> None:
        self.node.execute(*(["DELETE FROM t WHERE id = ?", number] for number in ids), transaction=True)

    def rows(self) -> dict[int, str]:
        return dict(self.node.rows(SELECT))


class TestRqlite(TransactionContract):
    @pytest.fixture
    def upstream(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upstream]:
        # The scripted node sends at once, or reports that it has something to send.
        monkeypatch.setattr(cluster_follower, "QUIET_SECONDS", 0.05)
        port = free_port()
        with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc") as node:
            node.execute(TABLE)
            yield Cluster(make_rqlite_source(tmp_path, port, api=node.url, copying={"chunk_rows": 10}), node)


@dataclass(frozen=True)
class Store:
    """A table over the keys of a SlateDB."""

    source: Source
    writer: Writer

    @staticmethod
    def key(number: int) -> bytes:
        return b"t:" + struct.pack(">q", number)

    def put(self, rows: Mapping[int, str]) -> None:
        self.writer.write(*((self.key(number), text.encode()) for number, text in rows.items()))

    def remove(self, *ids: int) -> None:
        self.writer.write(*((self.key(number), None) for number in ids))

    def rows(self) -> dict[int, str]:
        found = self.writer.rows().values()
        return {struct.unpack(">q", key[2:])[0]: value.decode() for key, value, _, _ in found}


class TestSlateDb(TransactionContract):
    @pytest.fixture
    def upstream(self, tmp_path: Path) -> Iterator[Upstream]:
        mapping = {"prefix": "t:", "key": {"id": "int64"}, "value": "utf8"}
        tables = TableOptions.model_validate({"include": ["kv.t"], "settings": {"kv.t": {"mapping": mapping}}})
        with Writer(tmp_path / "store", tables) as writer:
            yield Store(writer.source(tmp_path / "state", tables), writer)


NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"


def make_file_source(folder: Path, deletes: dict[str, Any]) -> Source:
    tables = TableOptions.model_validate({"defaults": {"updated_at": "updated_at", "deletes": deletes}})
    return make_polled(f"sqlite:///{folder / 'app.db'}", folder, tables, page_rows=7, chunk_rows=20)


class TestPoll(SourceContract):
    @pytest.fixture
    def upstream(self, app: sqlite3.Connection, tmp_path: Path) -> Upstream:
        app.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, updated_at TEXT)")
        upsert = f"INSERT OR REPLACE INTO t VALUES (?, ?, {NOW})"
        return File(make_file_source(tmp_path, {"full_diff": {"every_cycles": 1}}), app, upsert)


class TestPollWithSoftDeletes(SourceContract):
    @pytest.fixture
    def upstream(self, app: sqlite3.Connection, tmp_path: Path) -> Upstream:
        app.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, updated_at TEXT, deleted_at TEXT)")
        return File(
            make_file_source(tmp_path, {"soft": "deleted_at"}),
            app,
            upsert=f"INSERT OR REPLACE INTO t VALUES (?, ?, {NOW}, NULL)",
            delete=f"UPDATE t SET deleted_at = {NOW} WHERE id = ?",
            select=f"{SELECT} WHERE deleted_at IS NULL",
        )
