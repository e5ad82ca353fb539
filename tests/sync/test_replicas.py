"""Replicas of both kinds, Turso's and ours, on one server."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import turso.sync

import tailrace
from tests.sync.conftest import SCHEMA, ServerProcess

QUERIES = ("SELECT * FROM note ORDER BY 1", "SELECT * FROM person ORDER BY 1")


def rows(connection: Any) -> list[list[tuple[Any, ...]]]:
    return [[tuple(row) for row in connection.execute(sql).fetchall()] for sql in QUERIES]


@pytest.fixture
def server(tmp_path: Path, serving: Callable[..., ServerProcess]) -> ServerProcess:
    with closing(sqlite3.connect(tmp_path / "served.db")) as connection:
        connection.executescript(SCHEMA + "INSERT INTO note VALUES (1, 'a', 1), (2, 'b', 2);")
    return serving()


@pytest.mark.slow
def test_turso_clients_our_replicas_and_writers_of_the_served_file_agree(server: ServerProcess, tmp_path: Path) -> None:
    ours = tmp_path / "ours.db"
    assert tailrace.sync(ours, server.url).bootstrapped
    theirs = turso.sync.connect(str(tmp_path / "theirs.db"), server.url)
    served = sqlite3.connect(server.file, isolation_level=None)
    local = sqlite3.connect(ours, isolation_level=None)
    with closing(served), closing(local), closing(theirs):
        theirs.execute("INSERT INTO note VALUES (3, 'turso', 3)")
        theirs.execute("INSERT INTO person VALUES ('y', 'same')")
        theirs.commit()
        theirs.push()
        served.execute("INSERT INTO note VALUES (4, 'direct', 4)")
        local.execute("UPDATE note SET text = 'ours' WHERE id = 1")
        local.execute("INSERT INTO person VALUES ('z', 'same')")
        local.execute("ALTER TABLE note ADD COLUMN mood TEXT")
        local.execute("UPDATE note SET mood = 'good' WHERE id = 2")
        done = tailrace.sync(ours, server.url)
        assert (done.dead_letters, done.cdc_operations) == (1, 0)
        again = tailrace.sync(ours, server.url)
        assert (again.pushed, again.pulled) == (0, 0)
        theirs.pull()
        assert rows(served) == rows(local) == rows(theirs)
        assert rows(local)[0] == [
            (1, "ours", 1, None),
            (2, "b", 2, "good"),
            (3, "turso", 3, None),
            (4, "direct", 4, None),
        ]
        assert served.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.slow
def test_a_killed_server_keeps_its_revisions(server: ServerProcess, tmp_path: Path) -> None:
    ours = tmp_path / "ours.db"
    tailrace.sync(ours, server.url)
    for number in range(10, 16):
        with closing(sqlite3.connect(ours, isolation_level=None)) as local:
            local.execute("INSERT INTO note VALUES (?, 'x', 0)", (number,))
        assert tailrace.sync(ours, server.url).pushed == 1
        server.kill()
        with closing(sqlite3.connect(server.file, isolation_level=None)) as served:
            served.execute("UPDATE note SET stars = ? WHERE id = 1", (number,))
        server.start()
    tailrace.sync(ours, server.url)
    with closing(sqlite3.connect(ours)) as local, closing(sqlite3.connect(server.file)) as served:
        assert rows(local) == rows(served)
        assert len(rows(local)[0]) == 8
