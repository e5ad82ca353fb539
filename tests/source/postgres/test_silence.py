"""A network that is silent, not closed: every kind of session waits for a bounded time, unless the server works on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest
from psycopg import conninfo

from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import UnavailableError
from tailrace.source.postgres.bulk import bulk
from tailrace.source.postgres.catalog import describe, list_published, list_tables
from tailrace.source.postgres.connection import Replication, session
from tailrace.source.postgres.copy import PostgresSnapshot, fetch
from tailrace.state.postgres import PostgresStore
from tailrace.system import silence
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.proxy import Proxy

ROWS = "SELECT repeat(md5(i::text), 30) FROM generate_series(1, 300000) i"


@pytest.fixture
def proxy(postgres: EmbeddedPostgres) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", postgres.port) as made:
        yield made


@pytest.fixture
def dsn(database: PostgresDatabase, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """The database through the proxy, for sessions that soon lose patience."""
    database.run("CREATE TABLE t (id int PRIMARY KEY, v text)", "CREATE PUBLICATION pub FOR TABLE t")
    monkeypatch.setattr(silence, "SILENCE_SECONDS", 1.0)
    return conninfo.make_conninfo(database.dsn, host="127.0.0.1", port=proxy.port, connect_timeout=2)


def a_query_of_the_catalog(dsn: str, go_silent: Callable[[], None], folder: Path) -> None:
    with session(dsn, "testing") as connection:
        go_silent()
        list_tables(connection)


def a_result_that_stops_arriving(dsn: str, go_silent: Callable[[], None], folder: Path) -> None:
    with bulk(dsn, "testing") as connection, connection.cursor() as cursor:
        cursor.set_batch_bytes(100_000)
        cursor.execute(ROWS)
        batches = cursor.fetch_batches()
        next(batches)
        go_silent()
        for _ in batches:
            pass


def a_bulk_query_that_is_not_answered(dsn: str, go_silent: Callable[[], None], folder: Path) -> None:
    with bulk(dsn, "testing") as connection, connection.cursor() as cursor:
        go_silent()
        cursor.execute("SELECT 1")


def rows_read_again(dsn: str, go_silent: Callable[[], None], folder: Path) -> None:
    with session(dsn, "testing") as connection:
        [published] = describe(connection, list_tables(connection), list_published(connection, "pub"))
    with bulk(dsn, "testing"):
        go_silent()
    fetch(dsn, published.schema, pa.table({"id": pa.array([1], pa.int32())}))


def a_command_of_the_replication_protocol(dsn: str, go_silent: Callable[[], None], folder: Path) -> None:
    with Replication(dsn) as replication:
        go_silent()
        replication.execute("IDENTIFY_SYSTEM")


def the_state_in_a_database(dsn: str, go_silent: Callable[[], None], folder: Path) -> None:
    with PostgresStore("p", folder, dsn).open() as store:
        go_silent()
        store.tables()


@pytest.mark.parametrize(
    "wait",
    [
        a_query_of_the_catalog,
        a_result_that_stops_arriving,
        a_bulk_query_that_is_not_answered,
        rows_read_again,
        a_command_of_the_replication_protocol,
        the_state_in_a_database,
    ],
)
def test_a_silent_network_is_not_waited_for_without_end(
    dsn: str, proxy: Proxy, tmp_path: Path, wait: Callable[[str, Callable[[], None], Path], None]
) -> None:
    with pytest.raises(UnavailableError):
        wait(dsn, proxy.blackhole, tmp_path)
    proxy.restore()


def test_a_server_that_is_slow_is_waited_for(dsn: str) -> None:
    with session(dsn, "testing") as connection:
        assert connection.execute("SELECT 1 FROM pg_sleep(3)").fetchone() == (1,)
    with bulk(dsn, "testing") as rows, rows.cursor() as cursor:
        cursor.execute("SELECT 1 AS n FROM pg_sleep(3)")
        assert cursor.fetchall() == [(1,)]


def test_a_snapshot_that_waits_for_an_open_transaction_is_waited_for(dsn: str, database: PostgresDatabase) -> None:
    opened: list[PostgresSnapshot] = []
    with closing(database.connect()) as writer:
        writer.execute("BEGIN; INSERT INTO t VALUES (1, 'open')")
        thread = threading.Thread(target=lambda: opened.append(PostgresSnapshot(dsn)))
        thread.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid'"
        wait_until(lambda: database.rows(waiting)[0][0] == 1)
        thread.join(3 * silence.SILENCE_SECONDS)
        assert thread.is_alive()
        writer.execute("COMMIT")
        thread.join()
    [snapshot] = opened
    snapshot.close()


@pytest.mark.parametrize("version", [16, 18])
def test_timeouts_of_the_role_do_not_end_our_sessions(
    version: int,
    postgres_server: Callable[[int], EmbeddedPostgres],
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
) -> None:
    database = make_database(postgres_server(version))
    names = ["statement_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"]
    names += ["transaction_timeout"] if version >= 17 else []
    database.run(*[f"ALTER DATABASE {database.name} SET {name} = '50ms'" for name in names])
    asked = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
    with session(database.dsn, "testing") as connection:
        assert connection.execute(asked.encode()).fetchone() == ("0",) * len(names)
        # A lock that is not free in time is an error that says so, and is tried again.
        assert connection.execute("SHOW lock_timeout").fetchone() == ("20s",)
    with bulk(database.dsn, "testing") as rows, rows.cursor() as cursor:
        cursor.execute(asked)
        assert cursor.fetchall() == [("0",) * len(names)]
    with Replication(database.dsn) as replication:
        assert replication.execute("SHOW lock_timeout") == ["0"]
        assert all(replication.execute(f"SHOW {name}") == ["0"] for name in names)
