"""Every command against every kind of file, while an application has it open, after it closed it, and after it died.

Nothing that was committed is lost, and a command that only reads leaves the file, its WAL and its folder as they were.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from tailrace.cli import app as cli
from tests.support.sqlite_process import PROCESS_KINDS, ApplicationProcess, ProcessKind, running

State = Literal["open", "closed", "killed"]

STATES: tuple[State, ...] = ("open", "closed", "killed")


@contextmanager
def left(path: Path, kind: ProcessKind, state: State) -> Iterator[ApplicationProcess | None]:
    """The file with 50 rows of an application, which is still there if the file is `open`."""
    with running(path, kind) as application:
        assert application.insert(50) == 50
        if state == "closed":
            application.close()
        if state == "killed":
            application.kill()
        yield application if state == "open" else None


def pipeline(path: Path, kind: ProcessKind) -> Path:
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


def require_all(path: Path, kind: ProcessKind, application: ApplicationProcess | None) -> None:
    """All rows are there: for the application that has the file open, and for the one after its death."""
    rows = 50
    if application is not None:
        rows += 5
        assert application.insert(5) == rows
        application.kill()
    with running(path, kind) as another:
        assert another.insert(7) == rows + 7


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_commands_that_read_leave_every_byte_as_it_was(path: Path, kind: ProcessKind, state: State) -> None:
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
@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_commands_that_write_lose_nothing_that_was_committed(path: Path, kind: ProcessKind, state: State) -> None:
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


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_a_sync_with_the_file_loses_nothing_of_either_side(path: Path, kind: ProcessKind, state: State) -> None:
    replica = path.parents[1] / "replica.db"

    def sync(remote: Path | str) -> bool:
        return run("sync", replica, remote) == 0

    with left(path, kind, state) as application:
        is_synced = sync(path)
        # A file that captures its own changes is refused, and so is one that Turso has open.
        assert is_synced == (kind in ("wal", "rollback"))
        if is_synced:
            with closing(sqlite3.connect(replica, isolation_level=None)) as local:
                local.execute("CREATE TABLE pushed (id INTEGER PRIMARY KEY)")
                local.execute("INSERT INTO pushed VALUES (1), (2)")
            assert sync(path)
            replica.unlink()
        with serving(path) as url:
            assert (url is not None) == is_synced
            if url is not None:
                assert sync(url)
                with closing(sqlite3.connect(replica, isolation_level=None)) as local:
                    local.execute("INSERT INTO pushed VALUES (3)")
                if application is not None:
                    assert application.insert(3) == 53
                    application.insert(0)
                assert sync(url)
        if application is not None and is_synced:
            assert application.insert(2) == 55
            application.kill()
            application = None
            with running(path, kind) as another:
                assert another.insert(7) == 62
        else:
            require_all(path, kind, application)
        if is_synced:
            with closing(sqlite3.connect(path)) as connection:
                assert connection.execute("SELECT id FROM pushed").fetchall() == [(1,), (2,), (3,)]


@contextmanager
def serving(path: Path) -> Iterator[str | None]:
    """The URL of a sync server of the file, which is killed in the end; None if it refuses the file."""
    program = Path(sys.executable).with_name("tailrace")
    command: list[str | Path] = [program, "serve-sync", path, "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield json.loads(line).get("url") if line else None
        finally:
            process.kill()
        assert line or process.returncode not in (1, 7)
