"""What a server promises beyond a plain sync: TLS, long polls, bootstraps in pieces, old revisions, and limits."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import turso.sync
import urllib3
from turso.sync import PartialSyncOpts, PartialSyncPrefixBootstrap, PartialSyncQueryBootstrap

import tailrace
from tailrace.errors import PreflightError, UnavailableError
from tailrace.sync.protobuf import PullHeader, PullRequest, read_delimited
from tailrace.testing.certificate import make_authority
from tailrace.testing.wait import wait_until
from tests.sync.conftest import SCHEMA, ServerProcess

Serving = Callable[..., ServerProcess]


def execute(path: Path, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=300)) as connection:
        return connection.execute(sql, parameters).fetchall()


def wait_for(path: Path, sql: str, *parameters: object) -> None:
    wait_until(lambda: execute(path, sql, *parameters) == [(1,)])


def pull(url: str, **fields: Any) -> tuple[int, PullHeader | None, int]:
    """Status, header and number of pages of a pull."""
    body = PullRequest(**fields).encode()
    answer = urllib3.request("POST", f"{url}/pull-updates", body=body, retries=False, timeout=300)
    if answer.status != 200:
        return answer.status, None, 0
    pieces = iter([answer.data])
    messages = list(read_delimited(lambda size: next(pieces, b"")))
    return 200, PullHeader.decode(messages[0]), len(messages) - 1


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "served.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA + "INSERT INTO note VALUES (1, 'a', 1);")
    return path


@pytest.fixture
def large(file: Path) -> Path:
    with closing(sqlite3.connect(file)) as connection:
        rows = ((number, "x" * 500, number) for number in range(2, 4000))
        connection.executemany("INSERT INTO note VALUES (?, ?, ?)", rows)
        connection.commit()
    return file


def test_only_a_client_that_trusts_the_certificate_syncs(file: Path, tmp_path: Path, serving: Serving) -> None:
    authority, other = make_authority(tmp_path / "tls"), make_authority(tmp_path / "other")
    server = serving("--cert", str(authority.cert_file), "--key", str(authority.key_file))
    assert server.url.startswith("https://")
    for ca in (None, other.ca_file):
        with pytest.raises(UnavailableError, match="certificate"):
            tailrace.sync(tmp_path / "replica.db", server.url, ca=ca)
    assert not (tmp_path / "replica.db").exists()
    assert tailrace.sync(tmp_path / "replica.db", server.url, ca=authority.ca_file).bootstrapped
    execute(tmp_path / "replica.db", "INSERT INTO note VALUES (2, 'over TLS', 2)")
    assert tailrace.sync(tmp_path / "replica.db", server.url, ca=authority.ca_file).pushed == 1
    assert execute(file, "SELECT count(*) FROM note") == [(2,)]


def test_a_server_with_a_token_is_synced_over_tls(file: Path, tmp_path: Path, serving: Serving) -> None:
    authority = make_authority(tmp_path / "tls")
    options = ("--cert", str(authority.cert_file), "--key", str(authority.key_file), "--token-env", "SYNC_TOKEN")
    server = serving(*options, environment={"SYNC_TOKEN": "canary", "PATH": "/usr/bin:/bin"})
    with pytest.raises(PreflightError, match="401"):
        tailrace.sync(tmp_path / "replica.db", server.url, ca=authority.ca_file, token="wrong")
    done = tailrace.sync(tmp_path / "replica.db", server.url, ca=authority.ca_file, token="canary")
    assert done.bootstrapped


def test_a_long_poll_is_answered_at_the_next_commit_and_not_before(file: Path, serving: Serving) -> None:
    server = serving()
    _, header, _ = pull(server.url)
    assert header is not None
    answers: list[tuple[int, PullHeader | None, int]] = []
    thread = threading.Thread(
        target=lambda: answers.append(pull(server.url, client_revision=header.revision, long_poll_ms=60_000))
    )
    thread.start()
    # Until it has an answer it waits; a poll that waits too short ends by itself and says that nothing changed.
    assert pull(server.url, client_revision=header.revision, long_poll_ms=300)[1:] == (header, 0)
    assert answers == []
    execute(file, "UPDATE note SET stars = 2")
    thread.join()
    status, now, pages = answers[0]
    assert status == 200
    assert now is not None
    assert now.revision != header.revision
    assert pages > 0


def test_a_server_that_ends_answers_its_long_polls(file: Path, serving: Serving) -> None:
    server = serving()
    _, header, _ = pull(server.url)
    assert header is not None
    answers: list[int] = []
    request = {"client_revision": header.revision, "long_poll_ms": 60_000}
    thread = threading.Thread(target=lambda: answers.append(pull(server.url, **request)[0]))
    thread.start()
    while server.open_connections() == 0:
        time.sleep(0.05)
    assert server.stop() == 0
    thread.join()
    assert answers == [200]


def test_turso_bootstraps_in_chunks(large: Path, tmp_path: Path, serving: Serving) -> None:
    server = serving()
    replica = turso.sync.connect(str(tmp_path / "theirs.db"), server.url, pull_bytes_threshold=256 << 10)
    with closing(replica):
        assert replica.execute("SELECT count(*), sum(stars) FROM note").fetchone() == (3999, 3999 * 4000 // 2)
        execute(large, "UPDATE note SET stars = 0")
        replica.pull()
        assert replica.execute("SELECT count(*), sum(stars) FROM note").fetchone() == (3999, 0)


@pytest.mark.parametrize(
    "strategy",
    [PartialSyncPrefixBootstrap(length=64 << 10), PartialSyncQueryBootstrap(query="SELECT * FROM note WHERE id < 9")],
    ids=["prefix", "query"],
)
def test_turso_bootstraps_a_part_and_fetches_the_rest_as_of_the_same_revision(
    large: Path, tmp_path: Path, serving: Serving, strategy: Any
) -> None:
    server = serving()
    options = PartialSyncOpts(bootstrap_strategy=strategy)
    replica = turso.sync.connect(str(tmp_path / "theirs.db"), server.url, partial_sync_experimental=options)
    with closing(replica):
        assert replica.execute("SELECT text FROM note WHERE id = 1").fetchone() == ("a",)
        execute(large, "UPDATE note SET stars = -1")
        assert replica.execute("SELECT count(*), min(stars) FROM note").fetchone() == (3999, 1)
        replica.pull()
        assert replica.execute("SELECT count(*), max(stars) FROM note").fetchone() == (3999, -1)


def test_a_revision_beyond_the_history_is_gone_and_a_client_of_it_still_pulls(
    large: Path, tmp_path: Path, serving: Serving
) -> None:
    server = serving("--history", "100KB")
    _, first, pages = pull(server.url)
    assert first is not None
    theirs = turso.sync.connect(str(tmp_path / "theirs.db"), server.url)
    ours = tmp_path / "ours.db"
    tailrace.sync(ours, server.url)
    for turn in range(5):
        execute(large, "UPDATE note SET stars = ?", turn)
        assert pull(server.url)[0] == 200
    assert pull(server.url, server_revision=first.revision)[0] == 410
    status, now, changed = pull(server.url, client_revision=first.revision)
    assert (status, changed <= pages) == (200, True)
    assert now is not None
    assert pull(server.url, client_revision="another:1:history")[2] == now.pages
    with closing(theirs):
        theirs.pull()
        assert theirs.execute("SELECT count(*), max(stars) FROM note").fetchone() == (3999, 4)
    tailrace.sync(ours, server.url)
    assert execute(ours, "SELECT count(*), max(stars) FROM note") == [(3999, 4)]


def test_a_long_reader_of_another_program_holds_up_neither_pushes_nor_pulls(
    file: Path, tmp_path: Path, serving: Serving
) -> None:
    server = serving()
    ours = tmp_path / "ours.db"
    tailrace.sync(ours, server.url)
    with closing(sqlite3.connect(file, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        before = reader.execute("SELECT * FROM note").fetchall()
        for turn in range(20):
            execute(ours, "INSERT INTO note VALUES (?, ?, 0)", 100 + turn, "x" * 50_000)
            assert tailrace.sync(ours, server.url).pushed == 1
        assert reader.execute("SELECT * FROM note").fetchall() == before
        reader.execute("COMMIT")
    assert execute(ours, "SELECT * FROM note ORDER BY id") == execute(file, "SELECT * FROM note ORDER BY id")


def test_a_push_waits_for_a_long_writer_of_another_program_and_pulls_do_not(
    file: Path, tmp_path: Path, serving: Serving
) -> None:
    server = serving()
    ours, other = tmp_path / "ours.db", tmp_path / "other.db"
    tailrace.sync(ours, server.url)
    execute(ours, "INSERT INTO note VALUES (2, 'ours', 0)")
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO note VALUES (3, 'direct', 0)")
        pushed: list[int] = []
        thread = threading.Thread(target=lambda: pushed.append(tailrace.sync(ours, server.url).pushed))
        thread.start()
        assert tailrace.sync(other, server.url).pulled == 1
        assert pushed == []
        writer.execute("COMMIT")
    thread.join()
    assert pushed == [1]
    tailrace.sync(ours, server.url)
    assert execute(ours, "SELECT id FROM note ORDER BY id") == [(1,), (2,), (3,)]


def test_a_push_that_another_program_keeps_waiting_is_kept_for_the_next_sync(
    file: Path, tmp_path: Path, serving: Serving
) -> None:
    server = serving("--max-seconds", "1")
    ours = tmp_path / "ours.db"
    tailrace.sync(ours, server.url)
    execute(ours, "INSERT INTO note VALUES (2, 'ours', 0)")
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match="locked"):
            tailrace.sync(ours, server.url)
        writer.execute("ROLLBACK")
    assert tailrace.sync(ours, server.url).pushed == 1


def test_statements_and_bodies_that_take_too_long_are_ended(file: Path, serving: Serving) -> None:
    server = serving("--max-seconds", "1")
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    result = server.run(endless)
    assert result["step_errors"][0]["code"] == "SQLITE_INTERRUPT"
    host, _, port = server.url.removeprefix("http://").partition(":")
    with closing(socket.create_connection((host, int(port)), 300)) as slow:
        slow.sendall(b"POST /v2/pipeline HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")
    assert server.run("SELECT 1")["step_errors"] == [None]


def test_a_body_of_unknown_length_is_read_only_up_to_the_limit(file: Path, serving: Serving) -> None:
    server = serving("--max-body", "1MB")
    host, _, port = server.url.removeprefix("http://").partition(":")
    with closing(socket.create_connection((host, int(port)), 300)) as endless:
        endless.sendall(b"POST /v2/pipeline HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        answer = b""
        endless.settimeout(0.01)
        for _ in range(10_000):
            try:
                answer = endless.recv(100)
                break
            except TimeoutError:
                endless.settimeout(300)
                endless.sendall(piece)
                endless.settimeout(0.01)
    assert answer.startswith(b"HTTP/1.1 413")


class Watching:
    """`tailrace sync --watch` as a process; `lines` are the syncs that it reported."""

    def __init__(self, local: Path, remote: str) -> None:
        tailrace_command = str(Path(sys.executable).with_name("tailrace"))
        self._process = subprocess.Popen(
            [tailrace_command, "sync", str(local), remote, "--watch", "--json"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.errors.extend(self._process.stderr)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> int:
        self._process.terminate()
        code = self._process.wait()
        self._reading.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code


@pytest.mark.parametrize("kind", ["server", "file"])
def test_watch_goes_on_in_both_directions_until_sigterm(
    file: Path, tmp_path: Path, serving: Serving, kind: str
) -> None:
    local = tmp_path / "local.db"
    watching = Watching(local, serving().url if kind == "server" else str(file))
    try:
        wait_until(local.exists)
        for turn in range(3):
            execute(file, "UPDATE note SET stars = ? WHERE id = 1", 10 + turn)
            wait_for(local, "SELECT 1 FROM note WHERE id = 1 AND stars = ?", 10 + turn)
            execute(local, "INSERT INTO note VALUES (?, 'local', 0)", 50 + turn)
            wait_for(file, "SELECT 1 FROM note WHERE id = ?", 50 + turn)
        assert watching.is_alive()
    finally:
        code = watching.stop()
    assert code == 0


def test_watch_survives_that_the_server_is_away(file: Path, tmp_path: Path, serving: Serving) -> None:
    local, server = tmp_path / "local.db", serving()
    watching = Watching(local, server.url)
    try:
        wait_until(local.exists)
        server.kill()
        execute(local, "INSERT INTO note VALUES (50, 'written while the server is away', 0)")
        wait_until(lambda: bool(watching.errors))
        assert watching.is_alive()
        server.start()
        wait_until(lambda: execute(file, "SELECT 1 FROM note WHERE id = 50") == [(1,)])
    finally:
        code = watching.stop()
    assert code == 0
