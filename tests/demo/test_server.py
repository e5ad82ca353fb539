"""The private server: it starts as promised and leaves no process and no socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tailrace.demo.server import EmbeddedPostgres, find_servers
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.process import is_ended


def test_versions_16_and_18_are_always_there() -> None:
    servers = find_servers()
    assert {16, 18} <= servers.keys()
    assert list(servers) == sorted(servers)


def test_a_missing_version_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no PostgreSQL 9 here \(found: \["):
        EmbeddedPostgres(tmp_path / "data", version=9)


@pytest.mark.parametrize("version", sorted(find_servers()))
def test_every_version_found_decodes_logically(
    version: int,
    postgres_server: Callable[[int], EmbeddedPostgres],
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
) -> None:
    database = make_database(postgres_server(version))
    database.run(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
        "CREATE PUBLICATION p FOR TABLE t",
        "INSERT INTO t VALUES (1)",
    )
    assert database.rows("SELECT current_setting('server_version_num')::int / 10000") == [(version,)]
    changes = "pg_logical_slot_peek_binary_changes('s', NULL, NULL, 'proto_version', '1', 'publication_names', 'p')"
    kinds = [row[0][:1] for row in database.rows(f"SELECT data FROM {changes}")]
    if version < 15:  # sends transactions without a published change as well
        assert kinds[:2] == [b"B", b"C"]
        del kinds[:2]
    assert kinds == [b"B", b"R", b"I", b"C"]


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_committed_rows_and_the_port_survive_a_restart(tmp_path: Path, mode: str) -> None:
    with EmbeddedPostgres(tmp_path / "data") as server:
        port = server.port
        with server.connect() as conn:
            conn.execute("CREATE TABLE t AS SELECT 1 AS id")
        server.restart("fast" if mode == "fast" else "immediate")
        with server.connect() as conn:
            assert conn.execute("SELECT id FROM t").fetchall() == [(1,)]
        assert server.port == port


def test_a_data_directory_is_taken_up_by_the_next_server(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "data") as first, first.connect() as conn:
        conn.execute("CREATE TABLE t AS SELECT 1 AS id")
    with EmbeddedPostgres(tmp_path / "data") as second, second.connect() as conn:
        assert conn.execute("SELECT id FROM t").fetchall() == [(1,)]


def test_settings_go_over_the_defaults(tmp_path: Path) -> None:
    with (
        EmbeddedPostgres(tmp_path / "data", settings={"max_replication_slots": "3", "search_path": "a'b"}) as server,
        server.connect() as conn,
    ):
        assert conn.execute("SHOW max_replication_slots").fetchone() == ("3",)
        assert conn.execute("SHOW search_path").fetchone() == ("a'b",)
        assert conn.execute("SHOW fsync").fetchone() == ("off",)


def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "data", settings={"no_such_setting": "1"})
    with pytest.raises(RuntimeError, match="no_such_setting"):
        server.start()
    assert server.pid is None


def test_with_a_password_tcp_needs_it(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "data", password="p@ss /'wörd") as server:
        with server.connect() as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
        with pytest.raises(psycopg.OperationalError, match="no password supplied"):
            psycopg.connect(f"host=127.0.0.1 port={server.port} user=postgres")
        assert "wörd" not in repr(server)


def test_tls_is_refused_by_a_server_that_was_built_without_it_and_demanded_by_any_other(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="built without TLS"):
        EmbeddedPostgres(tmp_path / "data", version=18, tls=True)
    for version in find_servers().keys() - {16, 18}:
        with EmbeddedPostgres(tmp_path / str(version), version=version, tls=True) as server:
            with server.connect() as conn:
                assert conn.pgconn.ssl_in_use
            with pytest.raises(psycopg.OperationalError, match="no encryption"):
                server.connect(sslmode="disable")


def test_the_unix_socket_answers_and_is_gone_after_the_stop(postgres: EmbeddedPostgres, tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "data") as server:
        with psycopg.connect(server.dsn(unix=True)) as conn:
            assert conn.execute("SELECT 1").fetchone() == (1,)
        socket_dir = server.socket_dir
        assert socket_dir is not None
        assert socket_dir != postgres.socket_dir
    assert not socket_dir.exists()


def test_the_server_dies_with_a_process_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tailrace.demo.server import EmbeddedPostgres\n"
        "server = EmbeddedPostgres(Path(sys.argv[1])).start()\n"
        "print(server.pid, server.socket_dir, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        pid, socket_dir = parent.stdout.readline().split()
        assert not is_ended(int(pid))
        os.killpg(parent.pid, signal.SIGKILL)
    wait_until(lambda: is_ended(int(pid)))
    wait_until(lambda: not Path(socket_dir).exists())
