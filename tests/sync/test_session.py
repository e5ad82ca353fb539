"""What `sync` decides: which change stays in a conflict, which DDL travels, and what it refuses."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import apsw
import pytest
import turso.sync

import tailrace
from tailrace.errors import ConfigError, PreflightError, SchemaChangedError, TableError, UnavailableError
from tailrace.sync.served_file import ServedFile
from tailrace.sync.session import SyncResult
from tests.sync.conftest import ServerProcess

TABLE = "CREATE TABLE note (id INTEGER PRIMARY KEY, text, stars, name TEXT UNIQUE);"
ROW = "INSERT INTO note VALUES (1, 'old', 1, NULL);"


def run(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


def rows(path: Path, table: str = "note") -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()


class Trio:
    """A remote file and two replicas of it, `first` and `second`, in a folder of their own."""

    def __init__(self, folder: Path, script: str = TABLE + ROW) -> None:
        self.remote, self.first, self.second = (folder / f"{name}.db" for name in ("remote", "first", "second"))
        run(self.remote, script)
        self.sync()

    def edit(self, first: str, second: str) -> None:
        run(self.first, first)
        run(self.second, second)

    def sync(self, **options: Any) -> SyncResult:
        """Sync both, the first one first and last; the result is that of the second replica."""
        tailrace.sync(self.first, self.remote)
        done = tailrace.sync(self.second, self.remote, **options)
        tailrace.sync(self.first, self.remote)
        return done

    def held(self, table: str = "note") -> list[tuple[Any, ...]]:
        """The rows of all three, which must be equal."""
        held = rows(self.remote, table)
        assert rows(self.first, table) == rows(self.second, table) == held
        for replica in (self.first, self.second):
            again = tailrace.sync(replica, self.remote)
            assert (again.pushed, again.pulled, again.cdc_operations) == (0, 0, 0)
        return held


# -- conflicts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "own", "kind", "local", "remote"),
    [
        ("UPDATE note SET text = 'b'", "UPDATE note SET text = 'c'", "update-update", "c", "b"),
        ("DELETE FROM note", "UPDATE note SET text = 'c'", "update-delete", None, None),
        ("UPDATE note SET text = 'b'", "DELETE FROM note", "delete-update", None, "b"),
        (
            "DELETE FROM note; INSERT INTO note (id, text) VALUES (2, 'b')",
            "DELETE FROM note; INSERT INTO note (id, text) VALUES (2, 'c')",
            "insert-insert",
            "c",
            "b",
        ),
    ],
    ids=["update-update", "update-delete", "delete-update", "insert-insert"],
)
def test_every_kind_of_conflict_ends_as_its_policy_says(
    tmp_path: Path, theirs: str, own: str, kind: str, local: str | None, remote: str | None
) -> None:
    for policy, kept in (("local", local), ("remote", remote), (None, "merged")):
        folder = tmp_path / str(policy)
        folder.mkdir()
        trio = Trio(folder)
        trio.edit(theirs, own)
        decide = None if policy else (lambda conflict: {"text": "merged"})
        done = trio.sync(conflict=policy, on_conflict=decide)
        assert done.conflicts == {kind: 1}
        assert [row[1] for row in trio.held()] == ([] if kept is None else [kept])


def test_different_columns_of_one_row_are_merged_without_a_conflict(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    trio.edit("UPDATE note SET text = 'b'", "UPDATE note SET stars = 5")
    assert trio.sync().conflicts == {}
    assert trio.held() == [(1, "b", 5, None)]


def test_stop_leaves_the_local_file_as_it_was(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    trio.edit("UPDATE note SET text = 'b'", "UPDATE note SET text = 'c'")
    with pytest.raises(TableError, match="update-update"):
        trio.sync(conflict="stop")
    assert rows(trio.second) == [(1, "c", 1, None)]
    with pytest.raises(ConfigError, match="not both"):
        trio.sync(conflict="local", on_conflict=lambda conflict: "local")
    trio.sync()
    assert trio.held() == [(1, "c", 1, None)]


def test_an_own_row_that_breaks_a_unique_constraint_is_given_up_and_kept_as_a_dead_letter(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    trio.edit("INSERT INTO note VALUES (2, 'b', 1, 'same')", "INSERT INTO note VALUES (3, 'c', 1, 'same')")
    assert trio.sync().dead_letters == 1
    assert [row[0] for row in trio.held()] == [1, 2]
    with closing(sqlite3.connect(trio.second)) as connection:
        sql = 'SELECT kind, table_name, kept, "after" IS NOT NULL FROM tailrace_sync_conflict'
        assert connection.execute(sql).fetchall() == [("dead-letter", "note", "remote", 1)]


def test_a_row_that_is_deleted_and_inserted_after_its_change_was_given_up_is_kept(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    again = "UPDATE note SET text = 'c'; DELETE FROM note; INSERT INTO note (id, text) VALUES (1, 'again')"
    trio.edit("DELETE FROM note", again)
    assert trio.sync().conflicts == {"update-delete": 1}
    assert trio.held() == [(1, "again", None, None)]


def test_text_that_is_not_utf_8_is_synced_as_it_is_also_in_conflicts(tmp_path: Path) -> None:
    trio = Trio(tmp_path, TABLE + "INSERT INTO note (id, text) VALUES (1, CAST(x'ff' AS TEXT));")
    own = "INSERT INTO note (id, text) VALUES (2, CAST(x'ff41' AS TEXT)); UPDATE note SET name = CAST(x'80' AS TEXT)"
    trio.edit(
        "UPDATE note SET stars = 1; INSERT INTO note (id, text) VALUES (2, CAST(x'fe' AS TEXT))", f"{own} WHERE id = 1"
    )
    assert trio.sync().conflicts == {"insert-insert": 1}
    trio.edit("UPDATE note SET text = CAST(x'c3' AS TEXT) WHERE id = 1", "UPDATE note SET text = CAST(x'c0' AS TEXT)")
    assert trio.sync(conflict="remote").conflicts == {"update-update": 1}
    hexadecimal = "(SELECT id, hex(text), hex(name), typeof(text), stars FROM note)"
    assert trio.held(hexadecimal) == [(1, "C3", "80", "text", 1), (2, "C0", "", "text", None)]


def test_tables_with_as_many_columns_as_can_be_captured_are_synced(tmp_path: Path) -> None:
    columns = ", ".join(f"c{number} DEFAULT {number}" for number in range(989))
    trio = Trio(tmp_path, f"CREATE TABLE note (id INTEGER PRIMARY KEY, {columns});")
    trio.edit("INSERT INTO note (id, c0) VALUES (1, 'a')", "INSERT INTO note (id, c988) VALUES (2, 'b')")
    trio.sync()
    trio.edit("UPDATE note SET c5 = 'c' WHERE id = 2", "UPDATE note SET c988 = 'd'")
    trio.sync()
    assert trio.held("(SELECT id, c0, c5, c987, c988 FROM note)") == [(1, "a", 5, 987, "d"), (2, 0, "c", 987, "d")]


# -- schema ---------------------------------------------------------------------------------------------------


def test_what_is_created_and_added_travels_in_both_directions_with_its_rows(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    trio.edit(
        "CREATE TABLE tag (id TEXT PRIMARY KEY, n); INSERT INTO tag VALUES ('a', 1); CREATE INDEX by_n ON tag (n);"
        "ALTER TABLE note ADD COLUMN mood TEXT NOT NULL DEFAULT 'fine'; INSERT INTO note (id, mood) VALUES (2, 'bad')",
        "ALTER TABLE note ADD COLUMN size REAL; UPDATE note SET size = 2;"
        "CREATE VIEW twice AS SELECT 2 * size FROM note",
    )
    trio.sync()
    for replica in (trio.first, trio.second, trio.remote):
        with closing(sqlite3.connect(replica)) as connection:
            sql = "SELECT id, mood, size FROM note ORDER BY 1"
            assert connection.execute(sql).fetchall() == [(1, "fine", 2.0), (2, "bad", None)]
            found = connection.execute("SELECT name FROM sqlite_schema WHERE name IN ('by_n', 'twice')").fetchall()
            assert len(found) == 2
    assert trio.held("tag") == [("a", 1)]


def test_own_rows_that_a_unique_index_of_others_does_not_allow_are_given_up(tmp_path: Path) -> None:
    trio = Trio(tmp_path, TABLE + ROW + "CREATE TRIGGER t AFTER INSERT ON note BEGIN SELECT 1; END;")
    trio.edit(
        "CREATE UNIQUE INDEX one ON note (text)",
        "INSERT INTO note (id, text) VALUES (2, 'old'), (3, 'new')",
    )
    assert trio.sync().dead_letters == 1
    assert [row[:2] for row in trio.held()] == [(1, "old"), (3, "new")]
    with pytest.raises(sqlite3.IntegrityError):
        run(trio.second, "INSERT INTO note (id, text) VALUES (9, 'new')")


def test_a_unique_index_is_pushed_after_the_changes_that_make_rows_unique(tmp_path: Path) -> None:
    trio = Trio(tmp_path, TABLE + ROW + "INSERT INTO note VALUES (2, 'old', 2, NULL);")
    trio.edit(
        "INSERT INTO note (id, text) VALUES (3, 'more')",
        "DELETE FROM note WHERE id = 2; CREATE UNIQUE INDEX one ON note (text)",
    )
    trio.sync()
    assert [row[:2] for row in trio.held()] == [(1, "old"), (3, "more")]
    with pytest.raises(sqlite3.IntegrityError):
        run(trio.first, "INSERT INTO note (id, text) VALUES (9, 'more')")


@pytest.mark.parametrize(
    ("theirs", "own", "match"),
    [
        ("INSERT INTO note (id, text) VALUES (2, 'old')", "CREATE UNIQUE INDEX one ON note (text)", "DROP INDEX"),
        ("", "CREATE TRIGGER t AFTER INSERT ON note BEGIN SELECT 1; END", "trigger"),
        ("", "ALTER TABLE note ADD COLUMN longer AS (text || '!')", "generated column longer"),
        ("CREATE TABLE new (id INTEGER PRIMARY KEY)", "CREATE TABLE new (id TEXT PRIMARY KEY)", "column id"),
        ("CREATE TABLE new (a PRIMARY KEY, b)", "CREATE TABLE new (a, b PRIMARY KEY)", "column a"),
        ("ALTER TABLE note ADD COLUMN x INTEGER", "ALTER TABLE note ADD COLUMN x TEXT", "column x"),
        ("CREATE VIEW new AS SELECT 1", "CREATE TABLE new (id INTEGER PRIMARY KEY)", "already exists"),
        ("", "ALTER TABLE note RENAME COLUMN stars TO points", "stars was dropped or renamed here"),
        ("", "DROP TABLE note", "the table was dropped"),
        ("DELETE FROM note", "ALTER TABLE note RENAME COLUMN stars TO points", "stars was dropped or renamed here"),
        ("DELETE FROM note", "DROP TABLE note", "the table was dropped"),
    ],
    ids=lambda value: value[:40],
)
def test_ddl_that_cannot_travel_stops_with_what_to_do(tmp_path: Path, theirs: str, own: str, match: str) -> None:
    trio = Trio(tmp_path)
    trio.edit(theirs, own)
    for _ in range(2):
        with pytest.raises(SchemaChangedError, match=match) as raised:
            trio.sync()
        assert raised.value.fix
    # The others go on.
    run(trio.first, "INSERT INTO note (id, text) VALUES (7, 'on')")
    assert tailrace.sync(trio.first, trio.remote).pushed == 1


@pytest.mark.parametrize("ddl", ["ALTER TABLE note DROP COLUMN stars", "DROP TABLE note"])
def test_what_the_remote_dropped_stops_a_replica_that_keeps_its_rows(tmp_path: Path, ddl: str) -> None:
    trio = Trio(tmp_path)
    run(trio.second, "UPDATE note SET stars = 3")
    run(trio.remote, ddl)
    with pytest.raises(SchemaChangedError, match="dropped or renamed on the remote"):
        tailrace.sync(trio.second, trio.remote)
    assert rows(trio.second) == [(1, "old", 3, None)]


# -- refused at the start -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "match"),
    [
        ("CREATE TABLE t (a)", "t has no primary key"),
        ("CREATE TABLE t (a PRIMARY KEY, b) WITHOUT ROWID", "t has no rowid"),
        ("CREATE TABLE t (id INTEGER PRIMARY KEY, a, b AS (a) STORED)", "STORED generated column"),
        (
            "CREATE TABLE t (id INTEGER PRIMARY KEY, a); CREATE UNIQUE INDEX i ON t (lower(a))",
            "unique on an expression",
        ),
        ("CREATE TABLE t (a PRIMARY KEY, " + ", ".join(f"c{n}" for n in range(990)) + ")", "more than 990 columns"),
        ("CREATE VIRTUAL TABLE t USING fts5(a)", "t is a virtual table"),
        ("PRAGMA page_size = 1024; CREATE TABLE t (id INTEGER PRIMARY KEY)", "pages of 1024 bytes"),
        ("PRAGMA encoding = 'UTF-16le'; CREATE TABLE t (id INTEGER PRIMARY KEY)", "UTF-16le"),
    ],
    ids=["no key", "no rowid", "stored", "expression", "wide", "virtual", "pages", "encoding"],
)
def test_a_file_that_cannot_be_synced_is_refused_by_server_and_client_with_its_reason(
    tmp_path: Path, script: str, match: str
) -> None:
    path = tmp_path / "remote.db"
    run(path, script)
    refusals: list[Callable[[], object]] = [
        lambda: ServedFile(path).close(),
        lambda: tailrace.sync(tmp_path / "local.db", path),
    ]
    for refused in refusals:
        with pytest.raises(PreflightError, match=match) as raised:
            refused()
        assert raised.value.fix
    assert not (tmp_path / "local.db").exists()


@pytest.mark.parametrize(
    ("made", "error", "match"),
    [
        ("mvcc", ConfigError, "MVCC"),
        ("other bytes", ConfigError, "not an SQLite database"),
        ("in use", UnavailableError, "locked"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_by_server_and_client(
    tmp_path: Path, made: str, error: type[Exception], match: str
) -> None:
    path = tmp_path / "remote.db"
    with ExitStack() as stack:
        if made == "mvcc":
            script = (
                "import sys, turso; turso.connect(sys.argv[1]).execute(\"PRAGMA journal_mode = 'mvcc'\").fetchall()"
            )
            subprocess.run([sys.executable, "-c", script, str(path)], check=True)
        elif made == "other bytes":
            path.write_bytes(b"some other bytes" * 100)
        else:
            run(path, TABLE)
            other = stack.enter_context(closing(apsw.Connection(str(path))))
            other.execute("BEGIN EXCLUSIVE")
        refusals: list[Callable[[], object]] = [
            lambda: ServedFile(path, seconds=0.1).close(),
            lambda: tailrace.sync(tmp_path / "local.db", path),
        ]
        for refused in refusals[: 1 if made == "in use" else 2]:
            with pytest.raises(error, match=match) as raised:
                refused()
            assert getattr(raised.value, "fix", None)
    assert not (tmp_path / "local.db").exists()


def test_a_table_that_cannot_be_synced_and_is_made_later_stops_the_sync_before_anything_happens(tmp_path: Path) -> None:
    trio = Trio(tmp_path)
    trio.edit("UPDATE note SET text = 'b'", "CREATE TABLE loose (a); UPDATE note SET stars = 9")
    with pytest.raises(PreflightError, match="loose has no primary key"):
        trio.sync()
    assert rows(trio.second) == [(1, "old", 9, None)]
    run(trio.second, "DROP TABLE loose; CREATE UNIQUE INDEX one ON note (lower(text))")
    with pytest.raises(PreflightError, match="unique on an expression"):
        trio.sync()
    run(trio.second, "DROP INDEX one")
    trio.sync()
    assert trio.held() == [(1, "b", 9, None)]


def test_a_file_that_something_else_syncs_or_made_is_refused(
    tmp_path: Path, serving: Callable[..., ServerProcess]
) -> None:
    run(tmp_path / "served.db", TABLE + ROW)
    url = serving().url
    theirs, other = tmp_path / "theirs.db", tmp_path / "other.db"
    turso.sync.connect(str(theirs), url).close()
    with pytest.raises(PreflightError, match="Turso's own client"):
        tailrace.sync(theirs, url)
    run(other, TABLE)
    with pytest.raises(PreflightError, match="never synced"):
        tailrace.sync(other, url)
    assert tailrace.sync(tmp_path / "ours.db", url).bootstrapped
    with pytest.raises(PreflightError, match="another remote"):
        tailrace.sync(tmp_path / "ours.db", tmp_path / "other.db")
