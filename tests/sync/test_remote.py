"""Answers that no sync server should give: each is an error with a fix, and the next sync is not harmed by it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import tailrace
from tailrace.errors import ConfigError, DamagedError, PreflightError, TailraceError
from tailrace.sync.protobuf import PAGE_BYTES, PullHeader, delimited, encode_page

JUNK = b"\xff" * PAGE_BYTES


class Script:
    """What the server answers, to whatever it is asked."""

    def __init__(self) -> None:
        self.pull = self.batch = b""
        self.status, self.kind = 200, "application/octet-stream"
        self.url = ""


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = script.pull if self.path.endswith("/pull-updates") else script.batch
            self.send_response(script.status)
            self.send_header("Content-Type", script.kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        script.url = f"http://127.0.0.1:{server.server_port}"
        yield script
        server.shutdown()
        thread.join()


@pytest.fixture
def pages(tmp_path: Path) -> list[bytes]:
    path = tmp_path / "remote.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE t (id INTEGER PRIMARY KEY, a); INSERT INTO t VALUES (1, 'kept')")
    data = path.read_bytes()
    return [data[at : at + PAGE_BYTES] for at in range(0, len(data), PAGE_BYTES)]


def answer(revision: str, pages: list[bytes], count: int | None = None) -> bytes:
    header = PullHeader(revision, len(pages) if count is None else count)
    return delimited(header.encode()) + b"".join(encode_page(at, page) for at, page in enumerate(pages))


@pytest.mark.parametrize("is_first", [True, False], ids=["bootstrap", "pull"])
@pytest.mark.parametrize(
    ("pull", "error"),
    [
        (b"", PreflightError),
        (b"<html>a page</html>", PreflightError),
        (answer("bad", [JUNK])[:-9], PreflightError),
        (answer("bad", [], 1 << 63), PreflightError),
        (answer("bad", [JUNK, JUNK], 1), PreflightError),
        (answer("bad", []), DamagedError),
        (answer("bad", [JUNK]), DamagedError),
    ],
    ids=["empty", "html", "cut off", "too many pages", "beyond the end", "no pages", "junk"],
)
def test_an_answer_that_is_no_database_is_named_and_the_next_pull_is_whole(
    script: Script, pages: list[bytes], tmp_path: Path, pull: bytes, error: type[TailraceError], *, is_first: bool
) -> None:
    local = tmp_path / "local.db"
    good = answer("good", pages)
    if not is_first:
        script.pull = good
        tailrace.sync(local, script.url)
    script.pull = pull
    with pytest.raises(error) as raised:
        tailrace.sync(local, script.url)
    assert raised.value.fix
    assert local.exists() is not is_first
    # A server that has the client's revision sends nothing, so what the bad answer wrote must not be taken for it.
    script.pull = answer("better", pages) if is_first or error is DamagedError else good
    tailrace.sync(local, script.url)
    with closing(sqlite3.connect(local)) as connection:
        assert connection.execute("SELECT * FROM t").fetchall() == [(1, "kept")]


@pytest.mark.parametrize(
    "batch",
    [
        b"",
        b"[]",
        b'{"results": []}',
        b'{"results": [{"response": {"result": {}}}]}',
        b'{"results": [{"response": {"result": {"step_results": [], "step_errors": []}}}]}',
        b'{"results": [{"response": {"result": {"step_results": [{"rows": [[1, 2]]}], "step_errors": []}}}]}',
    ],
    ids=len,
)
def test_an_answer_to_a_push_that_is_none_is_named_and_the_change_stays(
    script: Script, pages: list[bytes], tmp_path: Path, batch: bytes
) -> None:
    local = tmp_path / "local.db"
    script.pull, script.batch = answer("good", pages), batch
    tailrace.sync(local, script.url)
    with closing(sqlite3.connect(local, isolation_level=None)) as connection:
        connection.execute("UPDATE t SET a = 'own'")
        with pytest.raises(PreflightError, match="does not answer as a sync server"):
            tailrace.sync(local, script.url)
        assert connection.execute("SELECT * FROM t").fetchall() == [(1, "own")]


def test_what_another_server_says_is_shown_only_if_it_is_text(script: Script, tmp_path: Path) -> None:
    script.status, script.pull = 404, b"canary"
    for kind, is_shown in (("text/plain; charset=utf-8", True), ("application/octet-stream", False)):
        script.kind = kind
        with pytest.raises(PreflightError, match="answers 404") as raised:
            tailrace.sync(tmp_path / "local.db", script.url)
        assert ("canary" in str(raised.value)) is is_shown


@pytest.mark.parametrize("token", ["with a\nline", "€"])
def test_a_token_that_no_header_can_carry_is_refused_without_showing_it(tmp_path: Path, token: str) -> None:
    with pytest.raises(ConfigError, match="the token has characters") as raised:
        tailrace.sync(tmp_path / "local.db", "http://127.0.0.1:1", token=token)
    assert token not in str(raised.value)
    environment = {**os.environ, "SYNC_TOKEN": token}
    command = [str(Path(sys.executable).with_name("tailrace")), "serve-sync", str(tmp_path / "a.db")]
    done = subprocess.run(
        [*command, "--token-env", "SYNC_TOKEN"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert token not in done.stderr
