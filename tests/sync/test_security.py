"""What a stranger, or a client that misbehaves, can make the server do."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import urllib3

from tests.sync.conftest import SCHEMA, ServerProcess

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
