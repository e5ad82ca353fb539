"""What a stranger, or a client that misbehaves, can make the server do."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import urllib3

from tailrace.sync.serve import ServeOptions, serve
from tailrace.sync.server import SyncLimits
from tailrace.system import http_listener
from tailrace.testing.wait import wait_until
from tests.sync.conftest import SCHEMA, ServerProcess, count_connections

Serving = Callable[..., ServerProcess]


def post(url: str, body: bytes, **headers: str) -> tuple[int, bytes]:
    answer = urllib3.request("POST", url, body=body, headers=headers, retries=False, timeout=120)
    return answer.status, answer.data


@pytest.fixture
def server(tmp_path: Path, serving: Serving) -> ServerProcess:
    with closing(sqlite3.connect(tmp_path / "served.db")) as connection:
        connection.executescript(SCHEMA)
    return serving()


def test_without_the_token_nothing_is_served(serving: Serving) -> None:
    server = serving("--token-env", "SYNC_TOKEN", environment={**os.environ, "SYNC_TOKEN": "canary"})
    for path in ("pull-updates", "v2/pipeline"):
        assert post(f"{server.url}/{path}", b"")[0] == 401
        assert post(f"{server.url}/{path}", b"", Authorization="Bearer wrong")[0] == 401
    assert post(f"{server.url}/pull-updates", b"", Authorization="Bearer canary")[0] == 200


def test_other_machines_are_not_served_without_a_token(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("tailrace")), "serve-sync", str(tmp_path / "a.db")]
    done = subprocess.run([*command, "--listen", "0.0.0.0:0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--token-env" in done.stderr


def test_a_web_page_cannot_use_the_server(server: ServerProcess) -> None:
    assert post(f"{server.url}/pull-updates", b"", Origin="https://example.com")[0] == 403


def test_a_body_beyond_the_limit_is_refused(serving: Serving) -> None:
    server = serving("--max-body", "1MB")
    assert post(f"{server.url}/v2/pipeline", b"x" * (2 << 20))[0] == 413


@pytest.mark.parametrize("body", [b"\xff", b"\x0b", b"\x2a\x7f", b"\x08\x01", b"\x2a\x04junk"], ids=bytes.hex)
def test_a_malformed_pull_is_refused_and_the_server_goes_on(server: ServerProcess, body: bytes) -> None:
    assert post(f"{server.url}/pull-updates", body)[0] == 400
    assert post(f"{server.url}/pull-updates", b"")[0] == 200


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"requests":[{"type":"batch"}]}', b"[" * 100_000], ids=len)
def test_a_malformed_push_is_refused_and_the_server_goes_on(server: ServerProcess, body: bytes) -> None:
    assert post(f"{server.url}/v2/pipeline", body)[0] == 400
    assert server.run("SELECT 1")["step_errors"] == [None]


def test_a_push_reaches_no_other_file_and_no_setting(server: ServerProcess, tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    for sql in (
        f"ATTACH '{other}' AS other",
        f"VACUUM INTO '{other}'",
        "VACUUM",
        "PRAGMA writable_schema = ON",
        "PRAGMA journal_mode = DELETE",
        "SELECT * FROM pragma_database_list",
        "UPDATE sqlite_schema SET sql = ''",
        "CREATE VIRTUAL TABLE v USING fts5(x)",
        "CREATE TRIGGER t AFTER INSERT ON note BEGIN DELETE FROM note; END",
        "CREATE TEMP TABLE t (x)",
        "SELECT load_extension('x')",
    ):
        assert server.run(sql)["step_errors"][0] is not None, sql
    assert not other.exists()


def test_a_push_that_fails_leaves_nothing(server: ServerProcess) -> None:
    result = server.run("BEGIN", "INSERT INTO note VALUES (1, 'a', 1)", "INSERT INTO gone VALUES (1)",
                 "INSERT INTO note VALUES (2, 'b', 1)", "COMMIT")  # fmt: skip
    assert [error is not None for error in result["step_errors"]] == [False, False, True, False, False]
    assert server.run("SELECT count(*) FROM note")["step_results"][0]["rows"] == [[{"type": "integer", "value": "0"}]]


def test_the_time_of_a_push_is_that_of_all_its_statements(serving: Serving) -> None:
    server = serving("--max-seconds", "1")
    result = server.run(*["SELECT length(randomblob(20000000))"] * 1000)
    codes = [error["code"] for error in result["step_errors"] if error]
    assert codes == ["SQLITE_INTERRUPT"]
    assert server.run("SELECT 1")["step_errors"] == [None]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT instr(zeroblob(20000000), zeroblob(10000000) || x'01')",
        "SELECT length(replace(hex(zeroblob(10000000)), hex(zeroblob(5000000)) || '1', ''))",
        "SELECT length(trim(hex(zeroblob(10000000)), hex(randomblob(1000000))))",
        "SELECT hex(zeroblob(10000000)) LIKE '%' || hex(zeroblob(200)) || '1%'",
    ],
    ids=["instr", "replace", "trim", "like"],
)
def test_a_function_that_sqlite_cannot_interrupt_is_bounded(serving: Serving, sql: str) -> None:
    server = serving("--max-seconds", "5")
    began = time.monotonic()
    assert server.run(sql)["step_errors"][0] is not None
    assert time.monotonic() - began < 60


def test_bounded_functions_are_the_ones_that_checks_and_indexes_use(tmp_path: Path, serving: Serving) -> None:
    with closing(sqlite3.connect(tmp_path / "served.db")) as connection:
        connection.executescript(
            "CREATE TABLE mail (address TEXT PRIMARY KEY CHECK (instr(address, '@') > 1), "
            "short AS (replace(trim(address, '.'), '@', ' at '))); CREATE INDEX i ON mail (rtrim(address, 'm'), short);"
            "INSERT INTO mail VALUES ('.a@b.com')"
        )
    server = serving()
    assert server.run("INSERT INTO mail VALUES ('no address')")["step_errors"][0]["code"] == "SQLITE_CONSTRAINT"
    assert server.run("INSERT INTO mail VALUES ('c@d.com.')", "DELETE FROM mail WHERE address = '.a@b.com'")
    with closing(sqlite3.connect(tmp_path / "served.db")) as connection:
        assert connection.execute("SELECT short FROM mail").fetchall() == [("c at d.com",)]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT length(hex(zeroblob(900000000)))",
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 3000) "
        "SELECT " + ", ".join(f"length(group_concat(zeroblob({size})))" for size in range(300)) + " FROM n",
    ],
    ids=["one value", "many values"],
)
def test_a_push_takes_a_bounded_amount_of_memory(serving: Serving, sql: str) -> None:
    server = serving("--max-body", "1MB")
    assert server.run(sql)["step_errors"][0]["code"] in ("SQLITE_TOOBIG", "SQLITE_NOMEM")
    assert server.peak_bytes() < 400 << 20
    assert server.run("SELECT 1")["step_errors"] == [None]


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE loose (a)",
        "CREATE TABLE loose AS SELECT 1 AS a",
        "CREATE TABLE loose (a PRIMARY KEY) WITHOUT ROWID",
        "CREATE TABLE loose (a PRIMARY KEY, b AS (a) STORED)",
        "CREATE TABLE tailrace_sync (name TEXT PRIMARY KEY, value)",
        "CREATE TABLE turso_cdc (change_id INTEGER PRIMARY KEY)",
        "ALTER TABLE note RENAME TO other",
        "CREATE UNIQUE INDEX one ON note (lower(text))",
        "BEGIN; CREATE TABLE loose (a); COMMIT",
        "SAVEPOINT s; CREATE TABLE loose (a); RELEASE s",
    ],
)
def test_a_push_leaves_no_table_that_would_stop_the_replicas_or_the_next_start(server: ServerProcess, sql: str) -> None:
    names = "SELECT name FROM sqlite_schema ORDER BY 1"
    before = server.run(names)
    for statements in ([sql], ["BEGIN", sql, "COMMIT"], ["BEGIN", "ALTER TABLE note ADD COLUMN id", sql, "COMMIT"]):
        assert any(server.run(*statements)["step_errors"])
        assert server.run(names) == before
    for statements in (["CREATE TABLE one (a PRIMARY KEY)"], ["BEGIN", "CREATE TABLE two (a PRIMARY KEY)", "COMMIT"]):
        assert not any(server.run(*statements)["step_errors"])
    server.kill()
    server.start()


def test_a_statement_with_a_nul_is_malformed(server: ServerProcess) -> None:
    body = b'{"requests":[{"type":"execute","stmt":{"sql":"SELECT 1\\u0000"}}]}'
    assert post(f"{server.url}/v2/pipeline", body)[0] == 400


def test_bodies_of_many_clients_take_a_bounded_amount_of_memory(serving: Serving) -> None:
    server = serving("--max-body", "1MB")
    host, _, port = server.url.removeprefix("http://").partition(":")
    with ExitStack() as stack:
        clients = [stack.enter_context(closing(socket.create_connection((host, int(port)), 300))) for _ in range(5)]
        for client in clients:
            client.sendall(b"POST /v2/pipeline HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 999_999)
        # The first four wait for their last byte.
        answers = [client for client in clients if _answers(client)]
        assert [client.recv(12) for client in answers] == [b"HTTP/1.1 503"]
    wait_until(lambda: server.run("SELECT 1")["step_errors"] == [None])


def _answers(client: socket.socket) -> bool:
    client.settimeout(1)
    try:
        return bool(client.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_what_lies_next_to_a_served_file_is_as_private_as_the_file(tmp_path: Path, serving: Serving, mode: int) -> None:
    file = tmp_path / "served.db"
    file.touch()
    file.chmod(mode)
    serving("--tape")
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert {"served.db-sync", "served.db-sync-wal", "served.db-tape", "served.db-tshm"} <= found.keys()
    assert {name: given for name, given in found.items() if given & ~mode} == {}


def test_a_client_that_does_not_read_its_answer_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listener, "STALL_SECONDS", 0.5)
    file = tmp_path / "served.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript(SCHEMA + "INSERT INTO note VALUES (1, zeroblob(30000000), 1);")
    stop, urls = threading.Event(), list[str]()
    options = ServeOptions(file, ("127.0.0.1", 0), SyncLimits())
    server = threading.Thread(target=serve, args=(options, stop, urls.append))
    server.start()
    try:
        wait_until(lambda: bool(urls))
        port = int(urls[0].rpartition(":")[2])
        with closing(socket.create_connection(("127.0.0.1", port), 300)) as client:
            client.sendall(b"POST /pull-updates HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 200"
            wait_until(lambda: count_connections(port) == 0)
    finally:
        stop.set()
        server.join()
