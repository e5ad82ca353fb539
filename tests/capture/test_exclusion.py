"""A table that cannot be captured is left out with a finding, and everything else is captured."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from tailrace.capture import Tape, capture, disable, enable, excluded
from tailrace.capture.layout import CaptureConnection
from tailrace.capture.replica import apply
from tailrace.errors import PreflightError
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.testing.replay import SourceReplay
from tests.support.source_making import make_sqlite

WITHOUT_ROWID = "CREATE TABLE w(k TEXT PRIMARY KEY, v) WITHOUT ROWID"
GENERATED = "CREATE TABLE g(id INTEGER PRIMARY KEY, a, b AS (a + 1))"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "app.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, a)")
        connection.execute(WITHOUT_ROWID)
        connection.execute(GENERATED)
        connection.commit()
    return file


@pytest.fixture
def hooked(path: Path) -> Iterator[apsw.Connection]:
    with closing(apsw.Connection(str(path))) as connection:
        capture(connection, "full")
        yield connection


@pytest.fixture
def triggered(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        enable(connection)
        yield connection


def tables(connection: CaptureConnection) -> list[str]:
    """The tables of the changes on the tape, in order."""
    rows = [row for batch in Tape(connection).iterate(ignore_schema_changes=False) for row in batch]
    return [str(row.table) for row in rows if row.type != 2]


def left_out(connection: CaptureConnection) -> list[str | None]:
    return [finding.table for finding in excluded(connection)]


def test_triggers_leave_out_a_table_without_rowid_only(triggered: sqlite3.Connection) -> None:
    (finding,) = excluded(triggered)
    assert (finding.level, finding.table) == ("warning", "main.w")
    assert "no rowid" in finding.message
    assert "WITHOUT ROWID" in (finding.fix or "")
    triggered.execute("INSERT INTO w VALUES ('k', 1)")
    triggered.execute("INSERT INTO g(a) VALUES (1)")
    triggered.execute("INSERT INTO t(a) VALUES (1)")
    assert tables(triggered) == ["g", "t"]
    before = list(triggered.iterdump())
    enable(triggered)
    assert list(triggered.iterdump()) == before
    disable(triggered, drop=True)
    assert left_out(triggered) == []


def test_hooks_leave_out_what_they_cannot_read_only(hooked: apsw.Connection) -> None:
    assert left_out(hooked) == ["main.g", "main.w"]
    assert "generated columns" in excluded(hooked)[0].message
    hooked.execute("BEGIN; INSERT INTO w VALUES ('k', 1); INSERT INTO g(a) VALUES (1); INSERT INTO t(a) VALUES (1)")
    hooked.execute("UPDATE w SET v = 2; DELETE FROM g; COMMIT")
    assert tables(hooked) == ["t"]
    assert hooked.execute("SELECT v FROM w").fetchall() == [(2,)]


def test_a_table_that_hooks_see_created_is_left_out_from_then_on(hooked: apsw.Connection) -> None:
    hooked.execute("DROP TABLE g; DROP TABLE w")
    assert left_out(hooked) == []
    hooked.execute("BEGIN; CREATE TABLE h(a, b AS (a + 1)); ROLLBACK")
    assert left_out(hooked) == []
    hooked.execute("CREATE TABLE h(a, b AS (a + 1)); INSERT INTO h(a) VALUES (1); INSERT INTO t(a) VALUES (1)")
    assert left_out(hooked) == ["main.h"]
    assert tables(hooked)[-1] == "t"
    assert "h" not in tables(hooked)


def test_a_table_that_another_program_creates_is_stored_as_left_out_with_its_first_change(
    hooked: apsw.Connection, path: Path
) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE h(a, b AS (a + 1))")
        other.commit()
    hooked.execute("BEGIN; INSERT INTO h(a) VALUES (1); ROLLBACK")
    assert "main.h" not in left_out(hooked)
    hooked.execute("INSERT INTO h(a) VALUES (42)")
    assert "main.h" in left_out(hooked)
    assert tables(hooked) == []


def test_a_captured_table_is_not_left_out_by_an_alter(hooked: apsw.Connection, path: Path) -> None:
    with pytest.raises(PreflightError, match="t is captured"):
        hooked.execute("ALTER TABLE t ADD COLUMN b AS (a + 1)")
    hooked.execute("INSERT INTO t(a) VALUES (1)")
    with closing(sqlite3.connect(path)) as other:
        other.execute("ALTER TABLE t ADD COLUMN b AS (a + 1)")
        other.commit()
    with pytest.raises(PreflightError, match="no longer can be"):
        hooked.execute("INSERT INTO t(a) VALUES (2)")
    assert hooked.execute("SELECT a FROM t").fetchall() == [(1,)]


def test_a_table_that_can_be_captured_at_last_is_on_the_tape_with_all_its_rows(
    hooked: apsw.Connection, path: Path, tmp_path: Path
) -> None:
    hooked.execute("INSERT INTO g(a) VALUES (1)")
    replica = tmp_path / "replica.db"
    assert [finding.table for finding in apply(path, replica).excluded] == ["main.g", "main.w"]
    hooked.execute("INSERT INTO g(a) VALUES (2)")
    hooked.execute("ALTER TABLE g DROP COLUMN b")
    hooked.execute("INSERT INTO g(a) VALUES (3)")
    assert left_out(hooked) == ["main.w"]
    apply(path, replica)
    with closing(sqlite3.connect(replica)) as connection:
        assert connection.execute("SELECT * FROM g").fetchall() == [(1, 1), (2, 2), (3, 3)]


def test_triggers_take_up_a_table_that_can_be_captured_at_last(path: Path, tmp_path: Path) -> None:
    replica = tmp_path / "replica.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE e(a)")
        connection.execute("CREATE UNIQUE INDEX half ON e(a / 2)")
        connection.execute("INSERT INTO e VALUES (1)")
        enable(connection)
        assert left_out(connection) == ["main.e", "main.w"]
        connection.execute("CREATE TRIGGER count_g AFTER DELETE ON e BEGIN INSERT INTO t(a) VALUES (99); END")
        enable(connection)
        apply(path, replica)
        connection.execute("INSERT INTO e VALUES (5)")
        connection.execute("DROP INDEX half")
        enable(connection)
        connection.execute("INSERT INTO e VALUES (9)")
        assert left_out(connection) == ["main.w"]
    apply(path, replica)
    with closing(sqlite3.connect(replica)) as connection:
        assert connection.execute("SELECT a FROM e").fetchall() == [(1,), (5,), (9,)]
        assert connection.execute("SELECT * FROM t").fetchall() == []


def test_a_pipeline_follows_the_other_tables_and_is_told_which_are_left_out(
    hooked: apsw.Connection, path: Path, tmp_path: Path
) -> None:
    hooked.execute("INSERT INTO t(a) VALUES (1); INSERT INTO g(a) VALUES (1); INSERT INTO w VALUES ('k', 1)")
    source = make_sqlite(path, tmp_path, TableOptions())
    errors = {finding.table: finding.message for finding in source.check() if finding.level == "error"}
    assert errors.keys() == {"main.g", "main.w"}
    assert "generated columns" in errors["main.g"]
    with SourceReplay(source, Limit(500, 10**9)) as replay:
        replay.catch_up()
        assert replay.contents().keys() == {"main.t"}
        hooked.execute("UPDATE t SET a = 2; ALTER TABLE g DROP COLUMN b")
        replay.catch_up()
        assert replay.contents().keys() == {"main.g", "main.t"}


APPLICATION = """
import sys, apsw
from tailrace.capture import capture
connection = apsw.Connection(sys.argv[1])
connection.execute("PRAGMA synchronous = OFF")
capture(connection, "full")
number = 0
while True:
    number += 1
    with connection:
        connection.execute("INSERT INTO t VALUES (?, 0); INSERT INTO g(id) VALUES (?)", (number, number))
        connection.execute(f"CREATE TABLE h{number}(a, b AS (a)); INSERT INTO h{number}(a) VALUES (1)")
    print(number, flush=True)
"""


def test_a_killed_application_leaves_each_transaction_whole_with_what_is_left_out(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", APPLICATION, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            seen = [int(process.stdout.readline()) for _ in range(30)]
        finally:
            process.kill()
    with closing(sqlite3.connect(path)) as connection:
        rows = [number for (number,) in connection.execute("SELECT id FROM t")]
        assert len(rows) >= seen[-1]
        assert rows == [number for (number,) in connection.execute("SELECT id FROM g")]
        changes = [row for batch in Tape(connection).iterate() for row in batch if row.type == 1]
        assert [(row.table, row.id) for row in changes] == [("t", number) for number in rows]
        made = connection.execute("SELECT 'main.' || name FROM sqlite_schema WHERE name LIKE 'h%'").fetchall()
        assert {table for (table,) in made} | {"main.g", "main.w"} == set(left_out(connection))
