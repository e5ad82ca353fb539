"""Nothing that an application committed to its own file is ever lost, whatever tailrace does with the file meanwhile.

The application is a process of its own, with the real engine, and ends as applications do: by a kill.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

import pytest
from typer.testing import CliRunner

from tailrace.capture.replica import revert
from tailrace.cli import app as cli
from tailrace.errors import UnavailableError
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.source.sqlite.connection import CapturedFile
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.source_making import make_sqlite
from tests.support.sqlite_process import running

Opens = Literal["turso", "turso shared"]


def count(path: Path, opens: Opens = "turso") -> int:
    """How many rows the application finds."""
    with running(path, opens) as application:
        found = application.insert(0)
        application.close()
    return found


def pipeline(path: Path) -> Path:
    file = path.with_name("pipeline.yaml")
    file.write_text(
        f"name: app\nsource: {{type: turso, path: {path}}}\n"
        f"destination: {{type: delta, path: {path.parent / 'lake'}}}\nstate: {path.parent / 'state'}\n"
    )
    return file


def check(path: Path) -> None:
    done = CliRunner().invoke(cli, ["check", str(pipeline(path))])
    assert done.exit_code == 0, done.output


def tables(path: Path) -> None:
    done = CliRunner().invoke(cli, ["tables", str(pipeline(path))])
    assert done.exit_code == 0, done.output


def follow(path: Path) -> None:
    source = make_sqlite(path, path.parent, TableOptions(), type="turso")
    with SourceReplay(source, Limit(500, 10**9)) as replay:
        replay.catch_up()
        assert len(replay.contents()["main.items"]) == count_quietly(path)


def count_quietly(path: Path) -> int:
    with CapturedFile("turso", str(path)).snapshot("counting") as connection:
        return int(connection.execute("SELECT count(*) FROM items").fetchone()[0])


READERS = [check, tables, follow]


def contents(path: Path) -> dict[str, bytes]:
    """The file, and whatever lies next to it under its name."""
    return {file.name: file.read_bytes() for file in path.parent.glob(f"{path.name}*")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "app.db"


@pytest.mark.parametrize("before", ["turso shared", "turso"])
@pytest.mark.parametrize("read", READERS)
def test_rows_of_a_killed_application_are_read_and_kept(
    path: Path, read: Callable[[Path], None], before: Opens
) -> None:
    with running(path, before) as application:
        assert application.insert(1) == 1
        application.close()
    read(path)
    with running(path, "turso") as application:
        assert application.insert(299) == 300
    held = contents(path)
    read(path)
    assert count_quietly(path) == 300
    assert contents(path) == held
    assert count(path) == 300


@pytest.mark.parametrize("read", READERS)
def test_a_closed_file_is_read_without_a_trace(path: Path, read: Callable[[Path], None]) -> None:
    with running(path, "turso") as application:
        application.insert(3)
        application.close()
    held = contents(path)
    read(path)
    assert contents(path) == held


def test_an_application_that_shares_its_file_may_end_while_it_is_read(path: Path) -> None:
    engine = CapturedFile("turso", str(path))
    with running(path, "turso shared") as application:
        application.insert(1)
        with engine.snapshot("reading") as connection:
            application.close()
            with running(path, "turso") as another:
                assert another.insert(99) == 100
            assert connection.execute("SELECT count(*) FROM items").fetchone()[0] in (1, 100)
    assert count(path) == 100


def test_a_file_that_is_written_while_it_is_read_as_a_closed_one_is_read_again(path: Path) -> None:
    with running(path, "turso") as application:
        application.insert(1)
        application.close()
    written = pytest.raises(UnavailableError, match="was written while")
    with written, CapturedFile("turso", str(path)).snapshot("reading") as connection:
        connection.execute("SELECT count(*) FROM items").fetchone()
        with running(path, "turso") as application:
            application.insert(1)
            application.close()


def purge(path: Path) -> None:
    done = CliRunner().invoke(cli, ["sqlite", "purge", str(path), "--upto", "2"])
    assert done.exit_code != 0
    assert "multiprocess_wal" in done.output


def enable(path: Path) -> None:
    done = CliRunner().invoke(cli, ["sqlite", "enable", str(path)])
    assert done.exit_code != 0
    assert "multiprocess_wal" in done.output


def take_back(path: Path) -> None:
    with pytest.raises(UnavailableError, match="multiprocess_wal"):
        revert(path, last=1)


@pytest.mark.parametrize("write", [purge, enable, take_back])
def test_what_writes_without_turso_leaves_a_file_alone_that_turso_shares(
    path: Path, write: Callable[[Path], None]
) -> None:
    with running(path, "turso shared") as application:
        application.insert(5)
        held = contents(path)
        write(path)
        assert contents(path) == held
        assert application.insert(10) == 15
    assert count(path, "turso shared") == 15


def test_what_is_written_without_turso_is_seen_by_the_next_that_shares_the_file(path: Path) -> None:
    with running(path, "turso shared") as application:
        application.insert(5)
    revert(path, last=2)
    assert count(path, "turso shared") == 3


def test_consumed_changes_are_purged_while_the_application_shares_the_file_and_when_it_is_closed(path: Path) -> None:
    source = make_sqlite(path, path.parent, TableOptions(), type="turso", purge=0.0)
    with running(path, "turso shared") as application:
        assert application.insert(5) == 5
        source._purge(8, before=2**40)
        assert application.insert(1) == 6
    source._purge(10, before=2**40)
    with CapturedFile("turso", str(path)).snapshot("looking") as connection:
        assert connection.execute("SELECT min(change_id) FROM turso_cdc").fetchone()[0] == 10
    assert count(path, "turso shared") == 6


def has_open(pid: int, name: str) -> bool:
    with suppress(OSError):
        return any(str(entry.readlink()).endswith(name) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_an_application_that_shares_a_file_for_the_first_time_while_it_is_written_is_refused_not_robbed(
    path: Path,
) -> None:
    with running(path, "turso") as application:
        application.insert(5)
        application.close()
    assert not path.with_name("app.db-tshm").exists()
    with ExitStack() as later:
        with CapturedFile("turso", str(path)).session("writing", writes=True) as connection:
            early = later.enter_context(running(path, "turso shared"))
            wait_until(lambda: has_open(early.pid, "app.db-tshm"))
            connection.execute("INSERT INTO items (name) VALUES ('ours')")
        del connection  # Turso keeps its lock for as long as the object is there
        # It has waited, and then finds the index of the WAL empty.
        assert early.wait() != 0
    with running(path, "turso shared") as application:
        assert application.insert(10) == 16
    assert count(path, "turso shared") == 16
    assert count(path) == 16
