"""Capture on one apsw connection: what is on the tape is what was committed, no more and no less."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from tailrace.capture import CaptureState, capture, captured, change_buffer, enable, excluded
from tailrace.capture.record import decode
from tailrace.errors import ConfigError, PreflightError

OFF = CaptureState("off", None, None)


@pytest.fixture
def connection() -> Iterator[apsw.Connection]:
    with closing(apsw.Connection(":memory:")) as opened:
        opened.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, n TEXT UNIQUE, v REAL, b BLOB)")
        yield opened


def tape(connection: apsw.Connection, table: str = "turso_cdc", after: int = 0) -> list[tuple[Any, ...]]:
    """(transaction, type, table, id, before, after, updates) of each row, images decoded."""
    names = 'change_txn_id, change_type, table_name, id, "before", "after", updates'
    sql = f"SELECT {names} FROM {table} WHERE change_id > ? ORDER BY change_id"
    rows: list[Any] = connection.execute(sql, (after,)).fetchall()
    return [(*row[:4], *(decode(image) if image is not None else None for image in row[4:])) for row in rows]


def commit(txn: int) -> tuple[Any, ...]:
    return (txn, 2, None, None, None, None, None)


def test_the_tables_are_those_of_turso(connection: apsw.Connection) -> None:
    capture(connection, "full")
    found: list[Any] = connection.execute("SELECT name, sql FROM sqlite_schema WHERE name LIKE 'turso%'").fetchall()
    made = dict(found)
    assert made["turso_cdc"] == (
        'CREATE TABLE "turso_cdc" (change_id INTEGER PRIMARY KEY AUTOINCREMENT, change_time INTEGER, '
        "change_txn_id INTEGER, change_type INTEGER, table_name TEXT, id, "
        '"before" BLOB, "after" BLOB, updates BLOB)'
    )
    assert made["turso_cdc_version"] == (
        "CREATE TABLE turso_cdc_version (table_name TEXT PRIMARY KEY, version TEXT NOT NULL)"
    )
    assert connection.execute("SELECT * FROM turso_cdc_version").fetchall() == [("turso_cdc", "v2")]


def test_what_was_asked_for_reads_back(connection: apsw.Connection) -> None:
    assert captured(connection) == OFF
    capture(connection, "full")
    assert captured(connection) == ("full", "turso_cdc", "v2")
    capture(connection, "after,other")
    assert captured(connection) == ("after", "other", "v2")
    capture(connection, "off")
    assert captured(connection) == OFF


@pytest.mark.parametrize(
    ("mode", "images"),
    [
        ("id", [(None, None, None)] * 3),
        ("before", [(None, None, None), ((1, "a", 1.0, None), None, None), ((1, "b", 1.0, None), None, None)]),
        ("after", [(None, (1, "a", 1.0, None), None), (None, (1, "b", 1.0, None), None), (None, None, None)]),
        (
            "full",
            [
                (None, (1, "a", 1.0, None), None),
                ((1, "a", 1.0, None), (1, "b", 1.0, None), (0, 1, 0, 0, None, "b", None, None)),
                ((1, "b", 1.0, None), None, None),
            ],
        ),
    ],
)
def test_each_mode_keeps_its_images(connection: apsw.Connection, mode: str, images: list[Any]) -> None:
    capture(connection, mode)
    connection.execute("INSERT INTO t VALUES (1, 'a', 1, NULL)")
    connection.execute("UPDATE t SET n = 'b'")
    connection.execute("DELETE FROM t")
    assert tape(connection) == [
        (1, 1, "t", 1, *images[0]),
        commit(1),
        (3, 0, "t", 1, *images[1]),
        commit(3),
        (5, -1, "t", 1, *images[2]),
        commit(5),
    ]


def test_a_transaction_has_one_id_and_one_commit(connection: apsw.Connection) -> None:
    capture(connection, "id")
    connection.execute("INSERT INTO t(id) VALUES (1), (2)")
    connection.execute("BEGIN; INSERT INTO t(id) VALUES (3); DELETE FROM t WHERE id = 1; COMMIT")
    assert [row[:2] for row in tape(connection)] == [(1, 1), (1, 1), (1, 2), (4, 1), (4, -1), (4, 2)]


def test_what_was_rolled_back_is_not_on_the_tape(connection: apsw.Connection) -> None:
    capture(connection, "id")
    connection.execute("BEGIN; INSERT INTO t(id) VALUES (1); ROLLBACK")
    connection.execute("BEGIN; INSERT INTO t(id) VALUES (2); SAVEPOINT a; INSERT INTO t(id) VALUES (3)")
    connection.execute("SAVEPOINT b; INSERT INTO t(id) VALUES (4); RELEASE b; ROLLBACK TO a; COMMIT")
    connection.execute("SAVEPOINT a; SAVEPOINT b; INSERT INTO t(id) VALUES (5); RELEASE b; ROLLBACK TO a; RELEASE a")
    connection.execute("DELETE FROM t WHERE id = 99")
    assert [row[:4] for row in tape(connection)] == [(1, 1, "t", 2), (1, 2, None, None)]


def test_a_statement_that_failed_captures_nothing(connection: apsw.Connection) -> None:
    capture(connection, "id")
    with pytest.raises(apsw.ConstraintError):
        connection.execute("INSERT INTO t(n) VALUES ('a'), ('a')")
    connection.execute("BEGIN; INSERT INTO t(id) VALUES (7)")
    with pytest.raises(apsw.ConstraintError):
        connection.execute("INSERT INTO t(n) VALUES ('a'), ('a')")
    connection.execute("COMMIT")
    assert [row[:4] for row in tape(connection)] == [(1, 1, "t", 7), (1, 2, None, None)]


def test_replace_is_a_delete_and_an_insert(connection: apsw.Connection) -> None:
    connection.execute("INSERT INTO t VALUES (1, 'a', NULL, NULL), (2, 'b', NULL, NULL)")
    capture(connection, "full")
    connection.execute("REPLACE INTO t VALUES (1, 'b', NULL, NULL)")
    assert [row[1:4] for row in tape(connection)] == [(-1, "t", 1), (-1, "t", 2), (1, "t", 1), (2, None, None)]


def test_a_changed_key_is_a_delete_and_an_insert(connection: apsw.Connection) -> None:
    connection.execute("INSERT INTO t VALUES (1, 'a', NULL, NULL)")
    capture(connection, "full")
    connection.execute("UPDATE t SET id = 5")
    assert tape(connection) == [
        (1, -1, "t", 1, (1, "a", None, None), None, None),
        (1, 1, "t", 5, None, (5, "a", None, None), None),
        commit(1),
    ]


def test_triggers_and_cascades_are_captured_in_their_transaction(connection: apsw.Connection) -> None:
    connection.execute("CREATE TABLE child(p INTEGER REFERENCES t(id) ON DELETE CASCADE); PRAGMA foreign_keys = ON")
    connection.execute("CREATE TRIGGER extra AFTER INSERT ON t BEGIN INSERT INTO child VALUES (NEW.id); END")
    capture(connection, "id")
    connection.execute("INSERT INTO t(id) VALUES (1)")
    connection.execute("DELETE FROM t")
    assert [(row[0], row[1], row[2]) for row in tape(connection)] == [
        (1, 1, "t"),
        (1, 1, "child"),
        (1, 2, None),
        (4, -1, "t"),
        (4, -1, "child"),
        (4, 2, None),
    ]


def test_ddl_is_rows_of_sqlite_schema(connection: apsw.Connection) -> None:
    capture(connection, "full")
    connection.execute("CREATE TABLE u(a)")
    connection.execute("BEGIN; ALTER TABLE u ADD COLUMN b; INSERT INTO u VALUES (1, 2); COMMIT")
    connection.execute("DROP TABLE u")
    rows = tape(connection)
    assert [row[:3] for row in rows] == [
        (1, 1, "sqlite_schema"),
        (1, 2, None),
        (3, 0, "sqlite_schema"),
        (3, 1, "u"),
        (3, 2, None),
        (6, -1, "sqlite_schema"),
        (6, 2, None),
    ]
    assert rows[0][5][4] == "CREATE TABLE u(a)"
    assert rows[2][6] == (0, 0, 0, 0, 1, None, None, None, None, "ALTER TABLE u ADD COLUMN b")


def test_a_table_made_from_a_query_is_captured_with_its_rows(connection: apsw.Connection) -> None:
    connection.execute("INSERT INTO t(id) VALUES (1), (2)")
    capture(connection, "full")
    connection.execute("CREATE TABLE copy AS SELECT id FROM t")
    assert [row[1:4] for row in tape(connection)][1:] == [(1, "copy", 1), (1, "copy", 2), (2, None, None)]


def test_ddl_that_was_rolled_back_or_failed_is_not_on_the_tape(connection: apsw.Connection) -> None:
    capture(connection, "full")
    connection.execute("BEGIN; CREATE TABLE u(a); INSERT INTO u VALUES (1); ROLLBACK")
    connection.execute("BEGIN; SAVEPOINT s; CREATE TABLE u(a); ROLLBACK TO s; COMMIT")
    with pytest.raises(apsw.SQLError):
        connection.execute("CREATE TABLE t(a)")
    assert not connection.in_transaction
    assert tape(connection) == []


def test_a_write_to_a_virtual_table_is_refused_with_its_reason(connection: apsw.Connection) -> None:
    connection.execute("CREATE VIRTUAL TABLE words USING fts5(word)")
    capture(connection, "full")
    with pytest.raises(PreflightError, match="virtual table") as caught:
        connection.execute("INSERT INTO words VALUES ('a')")
    assert "tailrace sqlite enable" in str(caught.value.fix)
    assert not connection.in_transaction
    connection.execute("INSERT INTO t(id) VALUES (1)")
    assert [row[2] for row in tape(connection)] == ["t", None]
    assert connection.execute("SELECT count(*) FROM words").fetchall() == [(0,)]


def test_a_refused_capture_leaves_the_connection_as_it_was(connection: apsw.Connection) -> None:
    capture(connection, "id")
    connection.execute("CREATE TABLE mine(x)")
    connection.execute("INSERT INTO turso_cdc_version VALUES ('future', 'v9'); CREATE TABLE future(x)")
    before = connection.execute("SELECT count(*) FROM sqlite_schema").fetchall()
    with pytest.raises(PreflightError, match="v9"):
        capture(connection, "full,future")
    assert captured(connection) == ("id", "turso_cdc", "v2")
    assert connection.execute("SELECT count(*) FROM sqlite_schema").fetchall() == before
    connection.execute("INSERT INTO mine VALUES (1)")
    assert tape(connection)[-2][:3] == (tape(connection)[-1][0], 1, "mine")


@pytest.mark.parametrize("argument", ["", "everything", "full,sqlite_x"])
def test_an_unknown_mode_is_refused(connection: apsw.Connection, argument: str) -> None:
    with pytest.raises(ConfigError):
        capture(connection, argument)
    assert captured(connection) == OFF


def test_a_capture_table_without_a_version_row_is_v1(connection: apsw.Connection) -> None:
    connection.execute(
        "CREATE TABLE turso_cdc(change_id INTEGER PRIMARY KEY AUTOINCREMENT, change_time INTEGER, "
        'change_type INTEGER, table_name TEXT, id, "before" BLOB, "after" BLOB, updates BLOB)'
    )
    capture(connection, "full")
    assert captured(connection) == ("full", "turso_cdc", "v1")
    connection.execute("INSERT INTO t(id) VALUES (1)")
    assert connection.execute("SELECT change_type, id FROM turso_cdc").fetchall() == [(1, 1)]


def test_capture_is_of_one_connection_each_with_its_own_table(tmp_path: Path) -> None:
    path = str(tmp_path / "app.db")
    with (
        closing(apsw.Connection(path)) as one,
        closing(apsw.Connection(path)) as two,
        closing(apsw.Connection(path)) as three,
    ):
        one.execute("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        capture(one, "id,first")
        capture(two, "id,second")
        one.execute("INSERT INTO t VALUES (1)")
        two.execute("INSERT INTO t VALUES (2)")
        three.execute("INSERT INTO t VALUES (3)")
        assert [row[3] for row in tape(one, "first") if row[1] == 1] == [1]
        assert [row[3] for row in tape(one, "second") if row[1] == 1] == [2]


def test_tables_that_another_connection_makes_are_captured_too(tmp_path: Path) -> None:
    path = str(tmp_path / "app.db")
    with closing(apsw.Connection(path)) as one, closing(apsw.Connection(path)) as other:
        capture(one, "id")
        other.execute("CREATE TABLE t(id INTEGER PRIMARY KEY); CREATE TABLE w(k PRIMARY KEY) WITHOUT ROWID")
        one.execute("INSERT INTO t VALUES (1)")
        one.execute("BEGIN; ROLLBACK")
        one.executemany("INSERT INTO t VALUES (?)", [(2,), (3,)])
        one.execute("INSERT INTO w VALUES (1)")
        assert [finding.table for finding in excluded(other)] == ["main.w"]
        assert [row[3] for row in tape(one) if row[1] == 1] == [1, 2, 3]


def test_changes_of_the_capture_tables_are_not_captured(connection: apsw.Connection) -> None:
    capture(connection, "full")
    connection.execute("INSERT INTO t(id) VALUES (1)")
    connection.execute("UPDATE turso_cdc SET change_time = 0; DELETE FROM turso_cdc_version WHERE table_name = 'x'")
    assert len(tape(connection)) == 2


@pytest.mark.parametrize("count", [1, 2000])
def test_the_last_rowid_is_that_of_the_application(connection: apsw.Connection, count: int) -> None:
    capture(connection, "full")
    connection.execute("INSERT INTO t(id) VALUES (42)")
    assert connection.execute("SELECT last_insert_rowid()").fetchall() == [(42,)]
    with connection:
        connection.executemany("INSERT INTO t(id) VALUES (?)", [(number,) for number in range(7000, 7000 - count, -1)])
        connection.execute("CREATE TABLE u(x); CREATE TABLE w(k PRIMARY KEY) WITHOUT ROWID")
        assert connection.last_insert_rowid() == 7001 - count
    assert connection.last_insert_rowid() == 7001 - count
    connection.execute("DELETE FROM t WHERE id = 42")
    assert connection.last_insert_rowid() == 7001 - count


def test_dropping_the_capture_table_leaves_no_version_and_captures_nothing_unseen(connection: apsw.Connection) -> None:
    capture(connection, "full")
    connection.execute("INSERT INTO t(id) VALUES (1)")
    connection.execute("DROP TABLE turso_cdc")
    assert connection.execute("SELECT * FROM turso_cdc_version").fetchall() == []
    with pytest.raises(PreflightError, match="turso_cdc was dropped"):
        connection.execute("INSERT INTO t(id) VALUES (2)")
    assert connection.execute("SELECT id FROM t").fetchall() == [(1,)]
    capture(connection, "full")
    connection.execute("INSERT INTO t(id) VALUES (3)")
    assert captured(connection) == ("full", "turso_cdc", "v2")
    assert [row[1:4] for row in tape(connection)] == [(1, "t", 3), (2, None, None)]


def test_a_dropped_capture_table_that_is_rolled_back_is_there_with_its_version(connection: apsw.Connection) -> None:
    capture(connection, "full")
    connection.execute("BEGIN; DROP TABLE turso_cdc; ROLLBACK; INSERT INTO t(id) VALUES (1)")
    assert connection.execute("SELECT * FROM turso_cdc_version").fetchall() == [("turso_cdc", "v2")]
    assert len(tape(connection)) == 2


def test_a_commit_that_meets_a_lock_captures_once_when_it_succeeds(tmp_path: Path) -> None:
    path = str(tmp_path / "app.db")
    with closing(apsw.Connection(path)) as writer, closing(apsw.Connection(path)) as reader:
        writer.execute("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        capture(writer, "id")
        writer.execute("INSERT INTO t VALUES (1)")
        reader.execute("BEGIN; SELECT * FROM t").fetchall()
        writer.execute("BEGIN; INSERT INTO t VALUES (2)")
        with pytest.raises(apsw.BusyError):
            writer.execute("COMMIT")
        writer.execute("INSERT INTO t VALUES (3)")
        reader.execute("ROLLBACK")
        writer.execute("COMMIT")
        assert [row[:4] for row in tape(writer, after=2)] == [(3, 1, "t", 2), (3, 1, "t", 3), (3, 2, None, None)]


def test_a_blob_written_in_place_does_not_slip_past_the_tape(connection: apsw.Connection) -> None:
    connection.execute("INSERT INTO t(id, b) VALUES (1, zeroblob(4))")
    capture(connection, "full")
    blob = connection.blob_open("main", "t", "b", 1, True)
    with pytest.raises(PreflightError, match="in place"):
        blob.write(b"abcd")
    with suppress(apsw.ConstraintError, PreflightError):
        blob.close()
    assert tape(connection) == []
    assert connection.execute("SELECT b FROM t").fetchall() == [(bytes(4),)]


def test_savepoints_hold_across_ddl(connection: apsw.Connection) -> None:
    connection.execute("INSERT INTO t(id) VALUES (1)")
    capture(connection, "id")
    connection.execute("BEGIN; DELETE FROM t; SAVEPOINT s; INSERT INTO t(id) VALUES (2)")
    connection.execute("ALTER TABLE t ADD COLUMN c; INSERT INTO t(id) VALUES (3); ROLLBACK TO s; COMMIT")
    assert [row[:4] for row in tape(connection)] == [(1, -1, "t", 1), (1, 2, None, None)]


def test_files_captured_by_triggers_are_not_captured_twice(tmp_path: Path) -> None:
    path = str(tmp_path / "app.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as plain, closing(apsw.Connection(path)) as hooked:
        plain.execute("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        enable(plain)
        with pytest.raises(PreflightError, match="twice"):
            capture(hooked, "full")
        assert captured(hooked) == OFF


def test_a_standard_library_connection_is_refused_with_what_to_use_instead() -> None:
    with closing(sqlite3.connect(":memory:")) as plain, pytest.raises(ConfigError, match="no hooks"):
        capture(plain, "full")  # type: ignore[arg-type]


def test_ddl_run_while_rows_of_many_are_made_is_captured(connection: apsw.Connection) -> None:
    def rows() -> Iterator[tuple[int]]:
        yield (1,)
        connection.execute("CREATE TABLE u(a)")
        yield (2,)

    capture(connection, "id")
    connection.execute("BEGIN")
    connection.executemany("INSERT INTO t(id) VALUES (?)", rows())
    connection.execute("INSERT INTO u VALUES (1); COMMIT")
    changed = [row[2] for row in tape(connection)]
    assert changed == ["t", "sqlite_schema", "t", "u", None]


def test_a_trace_that_is_set_later_hides_no_ddl(connection: apsw.Connection) -> None:
    seen: list[str] = []

    def trace(_cursor: object, sql: str, _bindings: object) -> bool:
        seen.append(sql)
        return True

    capture(connection, "id")
    connection.exec_trace = trace
    connection.execute("CREATE TABLE u(a)")
    assert [row[2] for row in tape(connection)] == ["sqlite_schema", None]
    connection.executemany("INSERT INTO u VALUES (?)", [(1,)])
    assert {"CREATE TABLE u(a)", "INSERT INTO u VALUES (?)"} <= set(seen)
    cursor = connection.cursor()
    cursor.exec_trace = trace
    found: Any = connection.exec_trace
    connection.exec_trace = lambda *args: found(*args)
    connection.execute("DROP TABLE u; CREATE TABLE u(a)")
    assert [row[2] for row in tape(connection)[4:]] == ["sqlite_schema", None, "sqlite_schema", None]
    with pytest.raises(PreflightError, match="its own trace"):
        cursor.execute("CREATE TABLE w(a)")
    cursor.execute("INSERT INTO u VALUES (2)")
    capture(connection, "off")
    cursor.execute("CREATE TABLE w(a)")
    connection.execute("CREATE TABLE x(a)")
    assert len(tape(connection)) == 10


def test_many_changes_keep_to_the_connections_limit(connection: apsw.Connection) -> None:
    capture(connection, "full")
    connection.limit(apsw.SQLITE_LIMIT_LENGTH, 100_000)
    connection.execute("BEGIN")
    insert_many(connection, many())
    connection.execute("COMMIT")
    assert [row[5] for row in tape(connection)[:-1]] == many()


def test_the_applications_own_trace_and_hooks_go_on(connection: apsw.Connection) -> None:
    seen: list[str] = []

    def trace(_cursor: object, sql: str, _bindings: object) -> bool:
        seen.append(sql)
        return True

    connection.exec_trace = trace
    capture(connection, "id")
    connection.execute("INSERT INTO t(id) VALUES (1)")
    assert "INSERT INTO t(id) VALUES (1)" in seen
    capture(connection, "off")
    connection.execute("INSERT INTO t(id) VALUES (2)")
    assert "INSERT INTO t(id) VALUES (2)" in seen
    assert len(tape(connection)) == 2


MANY = 5000
"""Enough for a run that becomes records on its way, and a rest."""


def many(first: int = 1, count: int = MANY) -> list[tuple[Any, ...]]:
    return [(n, f"né {n}", n / 2, bytes(n % 90) if n % 3 else None) for n in range(first, first + count)]


def insert_many(connection: apsw.Connection, rows: list[tuple[Any, ...]]) -> None:
    connection.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)


@pytest.mark.parametrize("mode", ["id", "before", "after", "full"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_many_changes_are_on_the_tape_as_few_are(connection: apsw.Connection, mode: str, version: str) -> None:
    def change() -> list[Any]:
        connection.execute("BEGIN")
        insert_many(connection, many())
        connection.execute("UPDATE t SET v = -v, b = NULL WHERE id % 5; UPDATE t SET id = -id WHERE id < 3000")
        connection.execute("DELETE FROM t; COMMIT")
        return connection.execute(f"SELECT {names} FROM turso_cdc ORDER BY change_id").fetchall()

    names = 'change_id, change_type, table_name, id, typeof(id), "before", "after", updates'
    if version == "v1":
        connection.execute(
            "CREATE TABLE turso_cdc(change_id INTEGER PRIMARY KEY AUTOINCREMENT, change_time INTEGER, "
            'change_type INTEGER, table_name TEXT, id, "before" BLOB, "after" BLOB, updates BLOB)'
        )
    capture(connection, mode)
    at_once = change()
    assert len(at_once) == MANY + MANY * 4 // 5 + 2 * 2999 + MANY + (version == "v2")
    connection.execute("DELETE FROM turso_cdc; DELETE FROM sqlite_sequence")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(change_buffer, "STREAK", 10**9)
        assert change() == at_once


def test_rowids_far_apart_are_kept_in_many_changes(connection: apsw.Connection) -> None:
    capture(connection, "full")
    rows = [(-(2**63), None, 1.0, None), *many(), (2**63 - 1, "last", 1.0, b"")]
    connection.execute("BEGIN")
    insert_many(connection, rows)
    connection.execute("COMMIT")
    found = tape(connection)
    assert [(row[3], row[5]) for row in found[:-1]] == [(row[0], row) for row in rows]
    assert found[-1] == commit(1)


def test_savepoints_cut_many_changes_anywhere(connection: apsw.Connection) -> None:
    capture(connection, "id")
    connection.execute("BEGIN")
    insert_many(connection, many(1, 3000))
    connection.execute("SAVEPOINT a")
    insert_many(connection, many(3001, 3000))
    connection.execute("SAVEPOINT b")
    insert_many(connection, many(6001, 3000))
    connection.execute("RELEASE b; INSERT INTO t(id) VALUES (0); ROLLBACK TO a")
    insert_many(connection, many(7001, 2000))
    connection.execute("COMMIT")
    assert [row[3] for row in tape(connection)] == [*range(1, 3001), *range(7001, 9001), None]


@pytest.mark.parametrize(("clause", "kept"), [("", MANY - 1), ("OR FAIL", MANY - 1), ("OR ROLLBACK", 0)])
def test_a_row_that_fails_among_many_is_not_on_the_tape(connection: apsw.Connection, clause: str, kept: int) -> None:
    capture(connection, "id")
    connection.execute("BEGIN")
    rows = many()
    rows[-1] = rows[0]
    with pytest.raises(apsw.ConstraintError):
        connection.executemany(f"INSERT {clause} INTO t VALUES (?, ?, ?, ?)", rows)
    assert connection.in_transaction == bool(kept)
    if kept:
        connection.execute("COMMIT")
    assert [row[3] for row in tape(connection)] == ([*range(1, kept + 1), None] if kept else [])
    after = len(tape(connection))
    connection.execute("INSERT INTO t(id) VALUES (-1)")
    assert [row[3] for row in tape(connection, after=after)] == [-1, None]


def test_every_table_enlists_again_after_many_inserts(connection: apsw.Connection) -> None:
    capture(connection, "id")
    sql = "SELECT count(*), count(DISTINCT name) FROM temp.sqlite_schema WHERE type = 'trigger'"
    triggers = connection.execute(sql).fetchall()
    for ending in ("COMMIT", "ROLLBACK"):
        connection.execute("BEGIN")
        insert_many(connection, many(1, 1000))
        assert connection.execute(sql).fetchall() == triggers
        connection.execute(ending)
        connection.execute("INSERT INTO t(id) VALUES (NULL)")
        assert connection.execute(sql).fetchall() == triggers
        connection.execute("DELETE FROM t")
    assert sum(row[1] == 2 for row in tape(connection)) == 5


def test_triggers_of_the_application_and_open_cursors_stand_many_inserts(connection: apsw.Connection) -> None:
    connection.execute("CREATE TABLE log(what); CREATE TEMP TABLE t2(id); INSERT INTO log VALUES (1), (2), (3)")
    connection.execute("CREATE TRIGGER said AFTER INSERT ON t BEGIN INSERT INTO log VALUES (NEW.id); END")
    capture(connection, "full")
    reading = connection.execute("SELECT what FROM log ORDER BY rowid LIMIT 3")
    assert next(reading) == (1,)
    connection.execute("BEGIN")
    insert_many(connection, many())
    assert list(reading) == [(2,), (3,)]
    connection.execute("COMMIT")
    found = tape(connection)
    assert [(row[2], row[3]) for row in found[:4]] == [("t", 1), ("log", 4), ("t", 2), ("log", 5)]
    assert [row[5] for row in found[:-1:2]] == many()
    assert [row[5] for row in found[1:-1:2]] == [(row[0],) for row in many()]
    assert len(found) == 2 * MANY + 1


def test_a_temporary_table_of_the_same_name_stays_out_of_many_changes(connection: apsw.Connection) -> None:
    capture(connection, "id")
    connection.execute("BEGIN")
    insert_many(connection, many())
    connection.execute("CREATE TEMP TABLE t AS SELECT * FROM main.t LIMIT 0")
    insert_many(connection, many())
    connection.executemany("INSERT INTO main.t VALUES (?, ?, ?, ?)", many(MANY + 1, 1000))
    connection.execute("COMMIT")
    assert [row[3] for row in tape(connection)] == [*range(1, MANY + 1001), None]


@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("declared", ["log(what)", "log(what PRIMARY KEY) WITHOUT ROWID"])
def test_a_trigger_on_the_tape_cannot_change_a_table_unseen(tmp_path: Path, count: int, declared: str) -> None:
    path = str(tmp_path / "app.db")
    with closing(apsw.Connection(path)) as one, closing(apsw.Connection(path)) as other:
        one.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, n TEXT UNIQUE, v REAL, b BLOB)")
        capture(one, "id")
        other.execute(f"CREATE TABLE {declared}")
        other.execute("CREATE TRIGGER echo AFTER INSERT ON turso_cdc BEGIN INSERT INTO log VALUES (NEW.change_id); END")
        one.execute("BEGIN")
        insert_many(one, many(1, count))
        with pytest.raises((apsw.LockedError, PreflightError)):
            one.execute("COMMIT")
        one.close()
        assert other.execute("SELECT count(*) FROM t").fetchall() == [(0,)]
        assert tape(other) == []


def test_many_changes_whose_commit_meets_a_lock_are_captured_once(tmp_path: Path) -> None:
    path = str(tmp_path / "app.db")
    with closing(apsw.Connection(path)) as writer, closing(apsw.Connection(path)) as reader:
        writer.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, n TEXT UNIQUE, v REAL, b BLOB)")
        capture(writer, "full")
        reader.execute("BEGIN; SELECT * FROM t").fetchall()
        writer.execute("BEGIN")
        insert_many(writer, many())
        with pytest.raises(apsw.BusyError):
            writer.execute("COMMIT")
        insert_many(writer, many(MANY + 1, 1000))
        reader.execute("ROLLBACK")
        writer.execute("COMMIT")
        assert [row[3] for row in tape(writer)] == [*range(1, MANY + 1001), None]


def test_small_transactions_do_not_load_what_many_changes_need(tmp_path: Path) -> None:
    script = """
import sys, apsw
from tailrace.capture.hook import capture
loaded = set(sys.modules)
connection = apsw.Connection(sys.argv[1])
connection.execute("CREATE TABLE t(x)")
capture(connection, "full")
connection.execute("BEGIN")
connection.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(100)])
connection.execute("COMMIT; UPDATE t SET x = -x; DELETE FROM t")
print(sorted({name.partition(".")[0] for name in set(sys.modules) - loaded} & {"numpy", "pyarrow"}))
print("tailrace.capture.record_encode" in sys.modules)
"""
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "app.db")], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == ["[]", "False"]
