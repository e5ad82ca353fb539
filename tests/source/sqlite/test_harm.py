"""Every command against every kind of file, while an application has it open, after it closed it, and after it died.

Nothing that was committed is lost, and a command that only reads leaves the file, its WAL and its folder as they were.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from tailrace.cli import app as cli

Kind = Literal["wal", "rollback", "trigger", "hook", "turso", "turso shared"]
State = Literal["open", "closed", "killed"]

KINDS: tuple[Kind, ...] = ("wal", "rollback", "trigger", "hook", "turso", "turso shared")
STATES: tuple[State, ...] = ("open", "closed", "killed")

APPLICATION = """
import sys
path, kind = sys.argv[1:]
if kind.startswith("turso"):
    import turso
    options = {"experimental_features": "multiprocess_wal"} if kind == "turso shared" else {}
    connection = turso.connect(path, isolation_level=None, **options)
elif kind == "hook":
    import apsw
    connection = apsw.Connection(path)
    connection.execute("PRAGMA journal_mode = WAL")
else:
    import sqlite3
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA journal_mode = {'DELETE' if kind == 'rollback' else 'WAL'}")
connection.execute("CREATE TABLE IF NOT EXISTS items (id INTEGER PRIMARY KEY, name TEXT, updated_at TEXT)")
if kind.startswith("turso"):
    connection.execute("PRAGMA capture_data_changes_conn('full')")
if kind == "hook":
    from tailrace.capture import capture
    capture(connection, "full")
if kind == "trigger":
    from tailrace.capture import enable
    enable(connection, "full")
for line in sys.stdin:
    if line == "close\\n":
        connection.close()
        break
    for _ in range(int(line)):
        connection.execute("INSERT INTO items (name, updated_at) VALUES ('x', '2026-01-01 00:00:00')")
    print(list(connection.execute("SELECT count(*) FROM items"))[0][0], flush=True)
"""


class Application:
    """A process of its own that has the file open."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def insert(self, rows: int) -> int:
        """So many rows are committed; how many the table has then."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(rows, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        print("close", file=self._process.stdin, flush=True)
        assert self._process.wait() == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running(path: Path, kind: Kind) -> Iterator[Application]:
    with subprocess.Popen(
        [sys.executable, "-c", APPLICATION, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Application(process)
        finally:
            process.kill()


@contextmanager
def left(path: Path, kind: Kind, state: State) -> Iterator[Application | None]:
    """The file with 50 rows of an application, which is still there if the file is `open`."""
    with running(path, kind) as application:
        assert application.insert(50) == 50
        if state == "closed":
            application.close()
        if state == "killed":
            application.kill()
        yield application if state == "open" else None


def pipeline(path: Path, kind: Kind) -> Path:
    source = f"{{type: poll, dsn: 'sqlite:///{path}'}}"
    if kind in ("trigger", "hook"):
        source = f"{{type: sqlite, path: {path}}}"
    if kind.startswith("turso"):
        source = f"{{type: turso, path: {path}}}"
    folder = path.parents[1]
    file = folder / "pipeline.yaml"
    file.write_text(
        f"name: app\nsource: {source}\ndestination: {{type: delta, path: {folder / 'lake'}}}\n"
        f"tables: {{defaults: {{updated_at: updated_at}}}}\nstate: {folder / 'state'}\n"
        if "poll" in source
        else f"name: app\nsource: {source}\ndestination: {{type: delta, path: {folder / 'lake'}}}\n"
        f"state: {folder / 'state'}\n"
    )
    return file


def run(*words: str | Path) -> int:
    """The exit code of a command, which may refuse, but not fail in an unexpected way."""
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code not in (1, 7), f"{words}: {done.output}"
    return done.exit_code


def contents(path: Path) -> dict[str, bytes]:
    """The file and its WAL, and the names of all else next to it. The index of a WAL has no rows, and locks move it."""
    return {
        file.name: b"" if file.name.endswith(("-shm", "-tshm")) else file.read_bytes() for file in path.parent.iterdir()
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file in a folder of its own."""
    (tmp_path / "app").mkdir()
    return tmp_path / "app" / "app.db"


def require_all(path: Path, kind: Kind, application: Application | None) -> None:
    """All rows are there: for the application that has the file open, and for the one after its death."""
    rows = 50
    if application is not None:
        rows += 5
        assert application.insert(5) == rows
        application.kill()
    with running(path, kind) as another:
        assert another.insert(7) == rows + 7


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_commands_that_read_leave_every_byte_as_it_was(path: Path, kind: Kind, state: State) -> None:
    with left(path, kind, state) as application:
        file = pipeline(path, kind)
        commands: list[list[str | Path]] = [
            ["check", file], ["tables", file], ["status", file], ["verify", file], ["errors", "list", file],
            ["sqlite", "status", path], ["tape", "show", path], ["prepare", file, "--print-sql"], ["metrics", file],
        ]  # fmt: skip
        before = contents(path)
        for words in commands:
            run(*words)
            assert contents(path) == before, words
        require_all(path, kind, application)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_commands_that_write_lose_nothing_that_was_committed(path: Path, kind: Kind, state: State) -> None:
    with left(path, kind, state) as application:
        file = pipeline(path, kind)
        run("sqlite", "enable", path)
        run("sqlite", "purge", path, "--upto", "5")
        run("sqlite", "disable", path, "--drop")
        run("tape", "apply", path, path.with_name("replica.db"))
        run("tape", "apply", path, path.with_name("replica.db"), "--merge")
        run("prepare", file)
        run("reset", file, "--yes")
        require_all(path, kind, application)
