"""A tape merged into a database with rows of its own: by key, repeatedly, and whole or not at all."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from tailrace.capture import capture
from tailrace.capture.replica import apply
from tailrace.errors import PreflightError, SchemaChangedError, TableError

TABLES = (
    "CREATE TABLE t(id INTEGER PRIMARY KEY, a, b)",
    "CREATE TABLE words(w TEXT PRIMARY KEY, n UNIQUE)",
    "CREATE TABLE pair(a, b, v, PRIMARY KEY (a, b))",
    "CREATE TABLE bag(x)",
)


def write(path: Path, *statements: str, mode: str = "full") -> None:
    with closing(apsw.Connection(str(path))) as connection:
        capture(connection, mode)
        for sql in statements:
            connection.execute(sql)


def make(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for sql in statements:
            connection.execute(sql)
        connection.commit()
    return path


def select(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql).fetchall()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "app.db"
    write(file, *TABLES)
    return file


def test_rows_are_written_by_key_and_others_stay(path: Path, tmp_path: Path) -> None:
    other = make(
        tmp_path / "other.db",
        *TABLES,
        "INSERT INTO t VALUES (1, 'own', 'own'), (2, 'own', 'own'), (9, 'own', 'own')",
        "INSERT INTO words VALUES ('mine', 1), ('two', 2)",
        "INSERT INTO pair VALUES (1, 1, 'own')",
    )
    write(
        path,
        "INSERT INTO t VALUES (1, 'x', 'x'), (2, 'x', 'x'), (3, 'x', 'x')",
        "UPDATE t SET a = 'y' WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
        "INSERT INTO words VALUES ('one', 10), ('two', 20)",
        "UPDATE words SET w = 'three' WHERE w = 'one'",
        "INSERT INTO pair VALUES (1, 1, 'x'), (1, 2, 'x')",
        "INSERT INTO bag VALUES ('x'), ('x')",
        "DELETE FROM bag WHERE rowid = 1",
    )
    apply(path, other, merge=True)
    assert select(other, "SELECT * FROM t ORDER BY 1") == [(1, "y", "x"), (3, "x", "x"), (9, "own", "own")]
    assert select(other, "SELECT * FROM words ORDER BY 1") == [("mine", 1), ("three", 10), ("two", 20)]
    assert select(other, "SELECT * FROM pair ORDER BY 1, 2") == [(1, 1, "x"), (1, 2, "x")]
    assert select(other, "SELECT rowid, x FROM bag") == [(2, "x")]


def test_an_update_writes_only_its_columns_where_the_row_exists_and_the_row_where_it_does_not(
    path: Path, tmp_path: Path
) -> None:
    write(path, "INSERT INTO t VALUES (1, 1, 1), (2, 2, 2)")
    other = tmp_path / "other.db"
    apply(path, other)
    make(other, "UPDATE t SET b = 'own'", "DELETE FROM t WHERE id = 2")
    write(path, "UPDATE t SET a = 'x'")
    with pytest.raises(TableError, match="does not exist"):
        apply(path, other)
    apply(path, other, merge=True)
    assert select(other, "SELECT * FROM t") == [(1, "x", "own"), (2, "x", 2)]


def test_a_key_that_another_row_has_here_is_taken_over(path: Path, tmp_path: Path) -> None:
    write(path, "INSERT INTO words VALUES ('one', 1)")
    other = tmp_path / "other.db"
    apply(path, other)
    make(other, "INSERT INTO words VALUES ('new', 7)")
    write(path, "UPDATE words SET w = 'new'")
    apply(path, other, merge=True)
    assert select(other, "SELECT * FROM words") == [("new", 1)]


def test_rows_with_nulls_in_their_key_touch_no_others(path: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other.db", *TABLES, "INSERT INTO words VALUES ('own', 1), ('kept', 2)")
    write(path, "INSERT INTO words VALUES (NULL, 5), (NULL, 6)", "UPDATE words SET n = 7 WHERE n = 6")
    apply(path, other, merge=True)
    rows = [(None, 5), (None, 7), ("kept", 2), ("own", 1)]
    assert select(other, "SELECT * FROM words ORDER BY 1, 2") == rows
    write(path, "DELETE FROM words WHERE n = 5", "UPDATE words SET w = 'named'")
    apply(path, other, merge=True)
    assert select(other, "SELECT * FROM words ORDER BY 1") == [("kept", 2), ("named", 7), ("own", 1)]


def test_ddl_that_was_done_here_already_is_harmless(path: Path, tmp_path: Path) -> None:
    write(path, "CREATE INDEX i ON t(a)", "CREATE VIEW v AS SELECT 1", "ALTER TABLE t ADD COLUMN c DEFAULT 5")
    write(path, "INSERT INTO t VALUES (1, 2, 3, 4)", "DROP TABLE bag")
    other = make(tmp_path / "other.db", *TABLES, "CREATE INDEX i ON t(a)", "ALTER TABLE t ADD COLUMN c DEFAULT 5")
    make(other, "ALTER TABLE t ADD COLUMN own", "INSERT INTO t VALUES (1, 0, 0, 0, 'own')", "DROP TABLE bag")
    apply(path, other, merge=True)
    assert select(other, "SELECT * FROM t") == [(1, 2, 3, 4, "own")]
    assert select(other, "SELECT * FROM v") == [(1,)]
    write(path, "ALTER TABLE words ADD COLUMN more")
    apply(path, other, merge=True)
    assert select(other, "SELECT name FROM pragma_table_info('words')") == [("w",), ("n",), ("more",)]


def test_a_table_with_other_columns_stops_the_merge(path: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other.db", "CREATE TABLE t(a, id INTEGER PRIMARY KEY)")
    with pytest.raises(SchemaChangedError, match="not those of the tape"):
        apply(path, other, merge=True)
    assert select(other, "SELECT name FROM sqlite_schema WHERE name = 'words'") == []


def test_a_strict_replica_that_has_the_table_is_told_what_to_do(path: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other.db", *TABLES)
    with pytest.raises(SchemaChangedError, match="already exists") as refused:
        apply(path, other, start=0)
    assert all(word in (refused.value.fix or "") for word in ("--merge", "--from"))


def test_a_row_in_the_way_stops_the_merge_at_its_transaction(path: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other.db", *TABLES, "INSERT INTO words VALUES ('own', 1)")
    write(path, "INSERT INTO t VALUES (1, 1, 1)", "INSERT INTO words VALUES ('w', 1)", "INSERT INTO t VALUES (2, 2, 2)")
    with pytest.raises(TableError, match="violates a constraint"):
        apply(path, other, merge=True)
    assert select(other, "SELECT id FROM t") == [(1,)]
    make(other, "DELETE FROM words")
    apply(path, other, merge=True)
    assert select(other, "SELECT id FROM t") == [(1,), (2,)]


def test_a_delete_without_its_key_is_refused(path: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other.db", *TABLES)
    write(path, "INSERT INTO words VALUES ('w', 1)", "DELETE FROM words", mode="after")
    with pytest.raises(PreflightError, match="key of a row that was deleted"):
        apply(path, other, merge=True)


APPLICATION = """
import sys, time
from tailrace.capture import connect
connection = connect(sys.argv[1])
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("PRAGMA synchronous = OFF")
connection.execute("PRAGMA capture_data_changes_conn('full')")
number = 0
while True:
    number += 1
    with connection:
        connection.execute("INSERT INTO t VALUES (?, 0, 0)", (number,))
        connection.execute("INSERT INTO words VALUES (?, ?)", (f"w{number}", number))
    connection.execute("UPDATE words SET w = 'u' || w WHERE n = ?", (number - 3,))
    connection.execute("DELETE FROM t WHERE id = ?", (number - 5,))
    print(number, flush=True)
    time.sleep(0.005)
"""

MERGE = """
import os, random, signal, sys
from pathlib import Path
from tailrace.capture import replica
write, left = replica._write_progress, random.Random(int(sys.argv[3])).randrange(1, 60)
def write_and_die(*progress):
    global left
    write(*progress)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
replica._write_progress = write_and_die
replica.apply(Path(sys.argv[1]), Path(sys.argv[2]), merge=True)
"""


def test_a_merge_from_a_file_in_use_survives_the_death_of_both(path: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other.db", *TABLES, "INSERT INTO t VALUES (-1, 'own', 'own'), (2, 'own', 'own')")
    make(other, "INSERT INTO words VALUES ('own', -1), ('w4', -4)")
    seeds = random.Random(4)
    with subprocess.Popen([sys.executable, "-c", APPLICATION, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            killed = 0
            while killed < 3:
                for _ in range(40):
                    assert process.stdout.readline()
                words = [sys.executable, "-c", MERGE, str(path), str(other), str(seeds.randrange(10**6))]
                killed += subprocess.run(words, check=False).returncode == -signal.SIGKILL
        finally:
            process.kill()
    apply(path, other, merge=True)
    assert apply(path, other, merge=True).changes == 0
    theirs = select(path, "SELECT * FROM t ORDER BY 1")
    assert select(other, "SELECT * FROM t ORDER BY 1") == [(-1, "own", "own"), *theirs]
    rows = select(path, "SELECT * FROM words ORDER BY 2")
    assert len(rows) >= 40
    assert select(other, "SELECT * FROM words ORDER BY 2") == [("own", -1), *rows]
