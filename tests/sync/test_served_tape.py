"""The tape of a served file: every change is on it, whoever made it, and nothing of it reaches the clients."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest
import turso.sync

import tailrace
from tailrace.capture import enable, replica
from tailrace.capture.layout import served_tape
from tailrace.errors import PreflightError
from tailrace.sync.served_tape import ServedTape
from tailrace.system import failpoint
from tailrace.testing.wait import wait_until
from tests.sync.conftest import SCHEMA, ServerProcess


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "served.db"
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(SCHEMA)
    return path


def rows(path: Path, *tables: str) -> list[list[tuple[Any, ...]]]:
    with closing(apsw.Connection(str(path))) as connection:
        return [connection.execute(f"SELECT rowid, * FROM {table} ORDER BY 1").fetchall() for table in tables]


def change_ids(path: Path) -> list[int]:
    with closing(apsw.Connection(str(served_tape(path)))) as connection:
        return [number for (number,) in connection.execute("SELECT change_id FROM turso_cdc ORDER BY 1")]


def test_a_reader_of_the_tape_has_all_rows_of_any_writer_and_keeps_its_place(file: Path, tmp_path: Path) -> None:
    chance, follower = random.Random(3), tmp_path / "follower.db"
    with closing(apsw.Connection(str(file))) as writer, closing(ServedTape(file)) as tape:
        writer.execute("INSERT INTO note VALUES (1, 'before the tape', 1)")
        tape.advance()
        assert change_ids(file) == []  # rows that were there are copied, not captured
        seen: list[int] = []
        for _ in range(30):
            for _ in range(chance.randint(1, 5)):
                key = chance.randint(1, 12)
                writer.execute("INSERT OR REPLACE INTO note VALUES (?, ?, ?)", (key, f"t{key}", chance.random()))
                writer.execute("DELETE FROM note WHERE id = ?", (chance.randint(1, 12),))
                writer.execute("INSERT OR REPLACE INTO person VALUES (?, ?)", (f"m{key}", f"n{key % 4}"))
            # Values of a UNIQUE column change places.
            writer.execute("UPDATE person SET name = name || 'x'")
            tape.advance()
            replica.apply(served_tape(file), follower)
            assert rows(follower, "note", "person") == rows(file, "note", "person")
            assert change_ids(file)[: len(seen)] == seen
            seen = change_ids(file)
        assert tape.advance() == 0
        assert change_ids(file) == seen


def test_ddl_of_the_served_file_is_on_the_tape(file: Path, tmp_path: Path) -> None:
    follower = tmp_path / "follower.db"
    with closing(apsw.Connection(str(file))) as writer, closing(ServedTape(file)) as tape:
        writer.execute("INSERT INTO note VALUES (1, 'a', 1), (2, 'b', 2)")
        tape.advance()
        replica.apply(served_tape(file), follower)
        for ddl in (
            "CREATE TABLE tag (name TEXT PRIMARY KEY); INSERT INTO tag VALUES ('x')",
            "ALTER TABLE note ADD COLUMN mood TEXT NOT NULL DEFAULT 'good'",
            "ALTER TABLE note RENAME COLUMN stars TO points",
            "ALTER TABLE tag RENAME TO label",
            "DROP TABLE label; UPDATE note SET points = 9",
            "CREATE TABLE made (id INTEGER PRIMARY KEY, v); INSERT INTO made SELECT id, text FROM note; "
            "DROP TABLE note; ALTER TABLE made RENAME TO note",
        ):
            writer.execute(ddl)
            tape.advance()
            replica.apply(served_tape(file), follower)
            names = [name for (name,) in writer.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
            assert rows(follower, *names) == rows(file, *names), ddl
        with closing(apsw.Connection(str(follower))) as connection:
            found = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        assert {"note", "person"} <= {name for (name,) in found}
        assert not {"tag", "label", "made"} & {name for (name,) in found}


def test_an_update_of_the_tape_that_fails_leaves_it_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    with closing(apsw.Connection(str(file))) as writer, closing(ServedTape(file)) as tape:
        tape.advance()
        writer.execute("INSERT INTO note VALUES (1, 'a', 1)")
        with monkeypatch.context() as patch:
            patch.setattr(failpoint, "reach", fail)
            with pytest.raises(OSError, match="tape"):
                tape.advance()
        assert change_ids(file) == []
        assert tape.advance() == 1
        assert len(change_ids(file)) == 1


def test_clients_receive_nothing_of_the_tape_and_all_that_they_push_is_on_it(
    file: Path, tmp_path: Path, serving: Callable[..., ServerProcess]
) -> None:
    server = serving("--tape")
    ours, theirs = tmp_path / "ours.db", turso.sync.connect(str(tmp_path / "theirs.db"), server.url)
    with closing(theirs):
        theirs.execute("INSERT INTO note VALUES (1, 'turso', 1)")
        theirs.commit()
        theirs.push()
        names = [row[0] for row in theirs.execute("SELECT name FROM sqlite_schema").fetchall()]
    assert not [name for name in names if name.startswith("tailrace")]
    tailrace.sync(ours, server.url)
    with closing(sqlite3.connect(ours, isolation_level=None)) as local:
        local.execute("INSERT INTO note VALUES (2, 'ours', 2)")
    tailrace.sync(ours, server.url)
    wait_until(lambda: rows(served_tape(file), "note") == rows(file, "note"))
    server.kill()
    with closing(apsw.Connection(str(file))) as writer:
        writer.execute("DELETE FROM note WHERE id = 1")
    server.start()
    assert rows(served_tape(file), "note") == rows(file, "note") == [[(2, 2, "ours", 2)]]
    assert len(change_ids(file)) == 3
    assert server.stop() == 0


def test_a_file_that_is_served_or_has_a_served_tape_is_not_captured_itself(
    file: Path, serving: Callable[..., ServerProcess]
) -> None:
    server = serving()
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        with pytest.raises(PreflightError, match="is served") as refused:
            enable(connection)
        assert "--tape" in str(refused.value.fix)
    server.stop()
    served_tape(file).touch()
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        with pytest.raises(PreflightError, match="was served"):
            enable(connection)
        served_tape(file).unlink()
        assert enable(connection).mode == "full"
