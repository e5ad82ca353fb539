"""The tape, a replica that follows it, and going back along it."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from tailrace.capture import Tape, capture
from tailrace.capture.replica import apply, open_file, revert
from tailrace.errors import ConfigError, DamagedError, LostError, PreflightError, TableError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "app.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, a, b)")
        connection.commit()
    return file


def write(path: Path, *statements: str) -> None:
    with closing(apsw.Connection(str(path))) as connection:
        capture(connection, "full")
        for sql in statements:
            connection.execute(sql)


@pytest.fixture
def tape(path: Path) -> Iterator[Tape]:
    write(path, "INSERT INTO t VALUES (1, 1, 1), (2, 2, 2)", "CREATE TABLE u(x)", "UPDATE t SET b = 9", "DELETE FROM t")
    with open_file(path, writes=False) as connection:
        yield Tape(connection)


def select(path: Path, sql: str = "SELECT * FROM t ORDER BY 1") -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_batches_of_any_size_hold_the_same_changes(tape: Tape, batch: int) -> None:
    batches = list(tape.iterate(batch=batch))
    assert all(len(rows) <= batch for rows in batches)
    rows = [row for rows in batches for row in rows]
    assert [row.type for row in rows] == [1, 1, 2, 2, 0, 0, 2, -1, -1, 2]
    assert [len(group.changes) for group in tape.transactions(batch=batch)] == [2, 2, 2]


def test_schema_changes_come_when_asked_for(tape: Tape) -> None:
    rows = [row for batch in tape.iterate(ignore_schema_changes=False) for row in batch]
    assert [row.is_schema for row in rows].count(True) == 1


def test_reading_begins_after_a_change(tape: Tape) -> None:
    assert [row.change_id for rows in tape.iterate(8) for row in rows] == [9, 10, 11]
    assert tape.count_after(8) == 3


def test_statistics_count_changes_without_commits(tape: Tape) -> None:
    found = tape.statistics()
    assert (found.cdc_operations, found.transactions, found.first, found.last) == (7, 4, 1, 11)
    assert found.tables == {"sqlite_schema": {"insert": 1}, "t": {"insert": 2, "update": 2, "delete": 2}}


def test_a_damaged_record_is_named_by_its_change(path: Path) -> None:
    write(path, "INSERT INTO t VALUES (1, 1, 1)")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE turso_cdc SET \"after\" = x'07ff' WHERE change_id = 1")
        (change,) = next(Tape(connection).transactions()).changes
        with pytest.raises(DamagedError) as caught:
            change.into_apply()
    assert caught.value.position == "1"


def test_a_replica_is_copied_then_followed_from_where_it_stands(path: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    write(path, "INSERT INTO t VALUES (1, 'a', 'b')")
    assert apply(path, replica).copied
    assert not select(replica, "SELECT 1 FROM sqlite_schema WHERE name LIKE 'turso%'")
    write(path, "UPDATE t SET a = 'z'", "BEGIN; INSERT INTO t VALUES (2, 2, 2); DELETE FROM t WHERE id = 1; COMMIT")
    done = apply(path, replica)
    assert (done.transactions, done.changes) == (2, 3)
    assert apply(path, replica).transactions == 0
    assert select(replica) == select(path) == [(2, 2, 2)]


def test_only_changed_columns_are_written(path: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    write(path, "INSERT INTO t VALUES (1, 1, 1)")
    apply(path, replica)
    with closing(sqlite3.connect(replica)) as connection:
        connection.execute("UPDATE t SET b = 'kept'")
        connection.commit()
    write(path, "UPDATE t SET a = 2, b = 1")
    apply(path, replica)
    assert select(replica) == [(1, 2, "kept")]


APPLY = """
import itertools, os, signal, sys
from pathlib import Path
from tailrace.capture import replica

write, written = replica._write_progress, itertools.count()

def write_and_die(*progress):
    write(*progress)
    if next(written) == 50:
        os.kill(os.getpid(), signal.SIGKILL)

replica._write_progress = write_and_die
replica.apply(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_replica_killed_while_it_follows_goes_on_where_it_was(path: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    write(path)
    apply(path, replica)
    with closing(apsw.Connection(str(path))) as connection:
        capture(connection, "full")
        connection.execute("PRAGMA synchronous = OFF")
        for number in range(60):
            connection.execute("INSERT INTO t(a) VALUES (?); UPDATE t SET b = b || 'x', a = a + 1", (number,))
    killed = subprocess.run([sys.executable, "-c", APPLY, str(path), str(replica)], check=False)
    assert killed.returncode == -signal.SIGKILL
    # Each number is two transactions, and the fiftieth of them was not committed.
    assert select(replica, "SELECT count(*) FROM t") == [(25,)]
    assert apply(path, replica).transactions == 71
    assert select(replica) == select(path)
    assert apply(path, replica).transactions == 0


def test_the_applications_triggers_do_not_run_twice(path: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    write(path, "CREATE TABLE log(x)", "CREATE TRIGGER l AFTER INSERT ON t BEGIN INSERT INTO log VALUES (NEW.id); END")
    apply(path, replica)
    write(path, "INSERT INTO t VALUES (1, 1, 1)")
    apply(path, replica)
    assert select(replica, "SELECT * FROM log") == [(1,)]
    with closing(sqlite3.connect(replica)) as connection:
        connection.execute("INSERT INTO t VALUES (2, 2, 2)")
        assert connection.execute("SELECT count(*) FROM log").fetchone() == (2,)


def test_a_replica_that_others_wrote_to_stops_and_keeps_its_place(path: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    write(path, "INSERT INTO t VALUES (1, 1, 1)")
    apply(path, replica)
    with closing(sqlite3.connect(replica)) as connection:
        connection.execute("DELETE FROM t")
        connection.commit()
    write(path, "INSERT INTO t VALUES (2, 2, 2)", "BEGIN; INSERT INTO t VALUES (3, 3, 3); UPDATE t SET b = 5; COMMIT")
    for _ in range(2):
        with pytest.raises(TableError, match="does not exist"):
            apply(path, replica)
        assert select(replica) == [(2, 2, 2)]


def test_an_existing_file_is_not_taken_for_a_replica(path: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    shutil.copy(path, replica)
    write(path, "INSERT INTO t VALUES (1, 1, 1)")
    with pytest.raises(PreflightError, match="never applied"):
        apply(path, replica)
    assert apply(path, replica, start=0).changes == 1
    with pytest.raises(ConfigError, match="its own tape"):
        apply(path, path)


def test_a_tape_started_over_stops_its_replica(path: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    write(path, "INSERT INTO t VALUES (1, 1, 1)")
    apply(path, replica)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("DROP TABLE turso_cdc; DELETE FROM turso_cdc_version")
    write(path, "BEGIN; DELETE FROM t; INSERT INTO t VALUES (1, 1, 1); COMMIT")
    with pytest.raises(LostError, match="a different change"):
        apply(path, replica)


def test_the_last_transactions_are_undone_and_redone(path: Path) -> None:
    write(path, "INSERT INTO t VALUES (1, 1, 1)", "UPDATE t SET a = 2", "DELETE FROM t")
    assert revert(path, last=2).changes == 2
    assert select(path) == [(1, 1, 1)]
    assert revert(path, last=1).changes == 2
    assert select(path) == []


def test_a_column_that_was_added_goes_with_the_values_in_it(path: Path) -> None:
    write(path, "INSERT INTO t VALUES (1, 1, 1)", "ALTER TABLE t ADD COLUMN c", "UPDATE t SET c = 3")
    assert revert(path, last=2).changes == 2
    assert select(path) == [(1, 1, 1)]
    with pytest.raises(LostError, match="cannot be undone"):
        revert(path, last=1)


def test_an_undo_reaches_replicas_like_any_change(path: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    write(path, "INSERT INTO t VALUES (1, 1, 1)")
    apply(path, replica)
    write(path, "DELETE FROM t", "CREATE TABLE u(x)", "INSERT INTO u VALUES (1)")
    apply(path, replica)
    assert revert(path, to=2).to == 2
    apply(path, replica)
    assert select(replica) == select(path) == [(1, 1, 1)]
    assert not select(replica, "SELECT 1 FROM sqlite_schema WHERE name = 'u'")


@pytest.mark.parametrize("ddl", ["DROP TABLE t", "ALTER TABLE t DROP COLUMN b"])
def test_ddl_that_took_values_is_not_undone_and_nothing_else_either(path: Path, ddl: str) -> None:
    write(path, "INSERT INTO t VALUES (1, 1, 1)", ddl, "CREATE TABLE later(x)", "INSERT INTO later VALUES (1)")
    before = select(path, "SELECT * FROM sqlite_schema")
    with pytest.raises(LostError, match="cannot be undone"):
        revert(path, to=0)
    assert select(path, "SELECT * FROM sqlite_schema") == before
    assert select(path, "SELECT * FROM later") == [(1,)]


def test_a_missing_file_and_one_that_is_no_database_are_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"), open_file(tmp_path / "none.db"):
        pass
    (tmp_path / "text.db").write_text("this is not a database, however long it may be" * 50)
    with pytest.raises(ConfigError, match="not an SQLite"), open_file(tmp_path / "text.db"):
        pass
