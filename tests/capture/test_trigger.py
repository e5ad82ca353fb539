"""Capture by triggers: any writer of the file, exact values, and DDL caught up with."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from tailrace.capture import CaptureState, Tape, capture, disable, enable
from tailrace.capture.change import CapturedChange
from tailrace.capture.trigger import read_captured, read_status
from tailrace.errors import DamagedError, PreflightError, SchemaChangedError


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as opened:
        opened.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, a UNIQUE COLLATE NOCASE, b)")
        yield opened


def changes(connection: sqlite3.Connection, after: int = 0) -> list[CapturedChange]:
    rows = [row for batch in Tape(connection).iterate(after, ignore_schema_changes=False) for row in batch]
    return [row for row in rows if row.type != 2]


def brief(connection: sqlite3.Connection, after: int = 0) -> list[tuple[Any, ...]]:
    return [(row.type, row.table, row.id, row.row("before"), row.row("after")) for row in changes(connection, after)]


def test_every_writer_is_captured(tmp_path: Path) -> None:
    path = str(tmp_path / "app.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as one:
        one.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, a)")
        assert enable(one) == ("full", "turso_cdc", "triggers-v1")
        one.execute("INSERT INTO t VALUES (1, 'a')")
    with closing(apsw.Connection(path)) as two:
        two.execute("UPDATE t SET a = 'b'; DELETE FROM t")
    with closing(sqlite3.connect(path)) as reader:
        assert brief(reader) == [
            (1, "t", 1, None, (1, "a")),
            (0, "t", 1, (1, "a"), (1, "b")),
            (-1, "t", 1, (1, "b"), None),
        ]
        assert changes(reader)[1].row("updates") == (0, 1, None, "b")


@pytest.mark.parametrize(
    "value", [None, -0.0, 1.7976931348623157e308, 5e-324, float("inf"), "a\0b", b"\0\xff", 2**63 - 1]
)
def test_values_are_kept_to_the_bit(connection: sqlite3.Connection, value: object) -> None:
    enable(connection)
    connection.execute("INSERT INTO t VALUES (1, 'x', ?)", (value,))
    (change,) = changes(connection)
    row = change.row("after")
    assert row is not None
    assert repr(row[2]) == repr(value)


@pytest.mark.parametrize(
    ("mode", "images"), [("id", (None, None)), ("before", ((1, "x", 0), None)), ("after", (None, (1, "x", 1)))]
)
def test_other_modes_keep_less(connection: sqlite3.Connection, mode: str, images: tuple[Any, Any]) -> None:
    connection.execute("INSERT INTO t VALUES (1, 'x', 0)")
    enable(connection, mode)
    connection.execute("UPDATE t SET b = 1")
    assert brief(connection) == [(0, "t", 1, *images)]


@pytest.mark.parametrize("recursive", [0, 1])
def test_rows_that_replace_takes_are_deletes(connection: sqlite3.Connection, recursive: int) -> None:
    connection.execute("INSERT INTO t VALUES (1, 'one', 0), (2, 'two', 0)")
    enable(connection)
    connection.execute(f"PRAGMA recursive_triggers = {recursive}")
    connection.execute("REPLACE INTO t VALUES (1, 'TWO', 9)")
    assert sorted(brief(connection)[:2], key=lambda row: row[2]) == [
        (-1, "t", 1, (1, "one", 0), None),
        (-1, "t", 2, (2, "two", 0), None),
    ]
    assert brief(connection)[2:] == [(1, "t", 1, None, (1, "TWO", 9))]


@pytest.mark.parametrize(
    "statement", ["REPLACE INTO n VALUES (2, NULL)", "UPDATE OR REPLACE n SET a = NULL WHERE id = 2"]
)
def test_rows_that_replace_takes_by_a_default_are_deletes(connection: sqlite3.Connection, statement: str) -> None:
    connection.execute("CREATE TABLE n(id INTEGER PRIMARY KEY, a INTEGER NOT NULL DEFAULT 5 UNIQUE)")
    connection.execute("INSERT INTO n VALUES (1, 5), (2, 6)")
    enable(connection)
    connection.execute(statement)
    assert (-1, "n", 1, (1, 5), None) in brief(connection)


@pytest.mark.parametrize(
    ("default", "kept"),
    [("word", "word"), ('"b"', "b"), ('""', ""), ("'it''s'", "it's"), ("true", 1), ("- 1.5e1", -15)],
)
def test_a_default_means_in_a_trigger_what_it_means_in_its_table(
    connection: sqlite3.Connection, default: str, kept: object
) -> None:
    connection.execute(f"CREATE TABLE n(id INTEGER PRIMARY KEY, a NOT NULL DEFAULT {default} UNIQUE, b)")
    connection.execute("INSERT INTO n(id) VALUES (1)")
    enable(connection)
    connection.execute("REPLACE INTO n VALUES (2, NULL, NULL)")
    assert brief(connection)[0] == (-1, "n", 1, (1, kept, None), None)


def test_a_default_that_a_writer_cannot_compute_is_not_evaluated(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE n(id INTEGER PRIMARY KEY, a NOT NULL DEFAULT (made_by_the_application()) UNIQUE)")
    enable(connection)
    connection.execute("INSERT INTO n VALUES (1, 'given')")
    assert brief(connection) == [(1, "n", 1, None, (1, "given"))]


@pytest.mark.parametrize(
    ("within", "image"),
    [
        ("CREATE TRIGGER own BEFORE INSERT ON t BEGIN UPDATE t SET b = 7 WHERE id = 1; END", (2, "two", 0)),
        ("CREATE TRIGGER own BEFORE INSERT ON t BEGIN UPDATE t SET b = 7 WHERE id = 2; END", (2, "two", 7)),
    ],
)
def test_rows_that_replace_takes_are_deletes_though_the_application_s_trigger_writes_the_table(
    connection: sqlite3.Connection, within: str, image: tuple[object, ...]
) -> None:
    connection.execute("INSERT INTO t VALUES (1, 'one', 0), (2, 'two', 0)")
    connection.execute(within)
    enable(connection)
    connection.execute("REPLACE INTO t VALUES (3, 'TWO', 9)")
    assert brief(connection)[1:] == [(-1, "t", 2, image, None), (1, "t", 3, None, (3, "TWO", 9))]


def test_rows_that_replace_takes_are_deletes_though_a_foreign_key_writes_the_table(
    connection: sqlite3.Connection,
) -> None:
    connection.execute("CREATE TABLE n(id INTEGER PRIMARY KEY, a UNIQUE, up REFERENCES n(id) ON DELETE SET NULL)")
    connection.execute("INSERT INTO n VALUES (1, 'one', NULL), (2, 'two', 1)")
    connection.execute("PRAGMA foreign_keys = ON")
    enable(connection)
    connection.execute("REPLACE INTO n VALUES (3, 'one', NULL)")
    assert sorted(row[:3] for row in brief(connection)) == [(-1, "n", 1), (0, "n", 2), (1, "n", 3)]


def test_rows_that_replace_takes_are_deletes_though_a_foreign_key_takes_the_row_that_was_to_come(
    connection: sqlite3.Connection,
) -> None:
    connection.execute("CREATE TABLE n(id INTEGER PRIMARY KEY, a UNIQUE, up REFERENCES n(id) ON DELETE CASCADE)")
    connection.execute("INSERT INTO n VALUES (1, 'one', NULL), (2, 'two', 1)")
    connection.execute("PRAGMA foreign_keys = ON")
    enable(connection)
    connection.execute("UPDATE OR REPLACE n SET a = 'one' WHERE id = 2")
    assert connection.execute("SELECT * FROM n").fetchall() == []
    assert sorted(row[:3] for row in brief(connection)) == [(-1, "n", 1), (-1, "n", 2)]


def test_rows_that_replace_takes_by_the_collation_of_an_index_are_deletes(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE n(id INTEGER PRIMARY KEY, a COLLATE NOCASE)")
    connection.execute("CREATE UNIQUE INDEX exact ON n(a COLLATE BINARY)")
    connection.execute("INSERT INTO n VALUES (1, 'a'), (2, 'A')")
    enable(connection)
    connection.execute("UPDATE OR REPLACE n SET a = 'A' WHERE id = 1")
    assert [row[:3] for row in brief(connection)] == [(-1, "n", 2), (0, "n", 1)]


def test_a_row_that_refers_to_itself_is_kept_as_its_foreign_key_left_it(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE n(id INTEGER PRIMARY KEY, up REFERENCES n(id) ON UPDATE CASCADE)")
    connection.execute("INSERT INTO n VALUES (1, 1)")
    connection.execute("PRAGMA foreign_keys = ON")
    enable(connection)
    connection.execute("UPDATE n SET id = 2")
    assert brief(connection)[-1] == (1, "n", 2, None, (2, 2))


def test_a_table_that_became_too_wide_for_two_images_is_refused(connection: sqlite3.Connection) -> None:
    names = [f"a{number}" for number in range(990)]
    connection.execute(f"CREATE TABLE narrow({', '.join(names)})")
    enable(connection)
    connection.execute("INSERT INTO narrow (a989) VALUES (1)")
    connection.execute("UPDATE narrow SET a989 = 2")
    assert brief(connection)[-1] == (0, "narrow", 1, (*[None] * 989, 1), (*[None] * 989, 2))
    connection.execute("ALTER TABLE narrow ADD COLUMN a990")
    with pytest.raises(PreflightError, match="990 columns"):
        enable(connection)


def test_an_ignored_insert_and_an_upsert_delete_nothing(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO t VALUES (1, 'one', 0)")
    enable(connection)
    connection.execute("INSERT OR IGNORE INTO t VALUES (1, 'x', 0)")
    connection.execute("INSERT INTO t VALUES (1, 'x', 0) ON CONFLICT(id) DO UPDATE SET b = 5")
    connection.execute("INSERT INTO t VALUES (2, 'two', 0)")
    assert [row[:3] for row in brief(connection)] == [(0, "t", 1), (1, "t", 2)]


def test_what_was_rolled_back_is_not_on_the_tape(connection: sqlite3.Connection) -> None:
    enable(connection)
    connection.executescript("BEGIN; INSERT INTO t(id) VALUES (1); SAVEPOINT s; DELETE FROM t; ROLLBACK TO s; COMMIT")
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute("INSERT INTO t(a) VALUES ('a'), ('A')")
    assert [row[:3] for row in brief(connection)] == [(1, "t", 1)]


def test_generated_columns_are_left_to_the_table(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE g(a, b AS (a + 1), c AS (a * 2) STORED, d)")
    enable(connection)
    connection.execute("INSERT INTO g(a, d) VALUES (1, 4)")
    assert brief(connection) == [(1, "g", 1, None, (1, 4))]


def test_hostile_names_are_only_names(connection: sqlite3.Connection) -> None:
    name = 'we\'ird "na:me"; DROP TABLE t --🜂'
    quoted = '"' + name.replace('"', '""') + '"'
    connection.execute(f'CREATE TABLE {quoted}("or\'der" UNIQUE, rowid, "select")')
    enable(connection)
    connection.execute(f"INSERT INTO {quoted} VALUES (1, 2, 3)")
    connection.execute(f"REPLACE INTO {quoted} VALUES (1, 5, 6)")
    assert [row[:2] for row in brief(connection)] == [(1, name), (-1, name), (1, name)]


def test_ddl_is_caught_up_with_by_enabling_again(connection: sqlite3.Connection) -> None:
    enable(connection)
    connection.execute("ALTER TABLE t ADD COLUMN c DEFAULT 7")
    connection.execute("INSERT INTO t VALUES (1, 'x', 0, 8), (2, 'y', 0, 7)")
    connection.execute("CREATE TABLE fresh(k)")
    connection.execute("INSERT INTO fresh VALUES ('v')")
    assert read_status(connection).pending == 2
    with pytest.raises(SchemaChangedError, match="enable"):
        Tape(connection).require_complete()
    enable(connection)
    assert read_status(connection).pending == 0
    Tape(connection).require_complete()
    found = brief(connection)
    assert [row[:3] for row in found] == [
        (1, "t", 1),
        (1, "t", 2),
        (0, "sqlite_schema", found[2][2]),
        (0, "t", 1),
        (1, "sqlite_schema", found[4][2]),
        (1, "fresh", 1),
    ]
    assert found[3][3:] == ((1, "x", 0, 7), (1, "x", 0, 8))
    connection.execute("UPDATE t SET c = 9 WHERE id = 2")
    assert brief(connection)[-1] == (0, "t", 2, (2, "y", 0, 7), (2, "y", 0, 9))


def test_enabling_again_changes_nothing(connection: sqlite3.Connection) -> None:
    enable(connection)
    before = list(connection.iterdump())
    enable(connection)
    assert list(connection.iterdump()) == before


def test_enabling_again_makes_the_triggers_of_this_release(connection: sqlite3.Connection) -> None:
    enable(connection)
    before = list(connection.iterdump())
    connection.executescript(
        'DROP TRIGGER "tailrace:delete:t"; CREATE TRIGGER "tailrace:delete:t" AFTER DELETE ON t BEGIN SELECT 1; END'
    )
    enable(connection)
    assert sorted(connection.iterdump()) == sorted(before)


def test_rows_that_were_noted_before_a_table_was_recreated_are_not_deleted(connection: sqlite3.Connection) -> None:
    connection.executescript("CREATE TABLE seen(id); CREATE TRIGGER own AFTER DELETE ON seen BEGIN SELECT 1; END")
    connection.execute("INSERT INTO t VALUES (1, 'one', 0), (9, 'nine', 0)")
    enable(connection)
    connection.execute("INSERT INTO t VALUES (9, 'nine', 0) ON CONFLICT DO UPDATE SET b = 1")
    connection.executescript("DROP TABLE t; CREATE TABLE t(a PRIMARY KEY); INSERT INTO t VALUES ('nine')")
    enable(connection)
    done = changes(connection)[-1].change_id
    connection.execute("INSERT INTO t VALUES ('ten')")
    assert brief(connection, done) == [(1, "t", 2, None, ("ten",))]


def test_a_refused_enable_leaves_the_file_as_it_was(connection: sqlite3.Connection) -> None:
    enable(connection)
    connection.execute("CREATE UNIQUE INDEX half ON t(b / 2)")
    before = list(connection.iterdump())
    with pytest.raises(PreflightError, match="t was captured, but no longer can be"):
        enable(connection)
    assert list(connection.iterdump()) == before


def test_the_tape_of_another_capture_is_not_written_to(tmp_path: Path) -> None:
    path = str(tmp_path / "app.db")
    with closing(apsw.Connection(path)) as hooked:
        hooked.execute("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        capture(hooked, "full")
    with closing(sqlite3.connect(path, isolation_level=None)) as plain:
        for argument in ("full", "full,other"):
            with pytest.raises(PreflightError, match="another capture"):
                enable(plain, argument)
        assert read_captured(plain) == CaptureState("off", None, None)


def test_a_stopped_capture_is_not_taken_up_with_a_gap(connection: sqlite3.Connection) -> None:
    enable(connection)
    connection.execute("INSERT INTO t(id) VALUES (1)")
    disable(connection)
    connection.execute("INSERT INTO t(id) VALUES (2)")
    assert [row[:3] for row in brief(connection)] == [(1, "t", 1)]
    with pytest.raises(PreflightError, match="stopped"):
        enable(connection)


def test_a_dropped_capture_leaves_nothing(connection: sqlite3.Connection) -> None:
    before = [line for line in connection.iterdump() if "sqlite_sequence" not in line]
    enable(connection)
    disable(connection, drop=True)
    after = [
        line for line in connection.iterdump() if "turso_cdc_version" not in line and "sqlite_sequence" not in line
    ]
    assert after == before
    assert enable(connection).mode == "full"


def test_a_capture_that_was_stopped_before_can_still_be_dropped(connection: sqlite3.Connection) -> None:
    enable(connection)
    assert not disable(connection)
    assert disable(connection, drop=True)
    assert not disable(connection, drop=True)
    assert enable(connection).mode == "full"


def test_the_fix_for_a_tape_in_the_way_clears_the_way(connection: sqlite3.Connection) -> None:
    enable(connection)
    disable(connection)
    with pytest.raises(PreflightError) as refused:
        enable(connection)
    connection.executescript((refused.value.fix or "").partition(": ")[2])
    assert enable(connection).mode == "full"


def test_changes_that_two_captures_wrote_are_noticed(connection: sqlite3.Connection) -> None:
    enable(connection)
    connection.execute("INSERT INTO t(id) VALUES (1)")
    connection.execute("INSERT INTO turso_cdc(change_txn_id, change_type, table_name, id) VALUES (2, 1, 't', 1)")
    with pytest.raises(DamagedError, match="twice"):
        changes(connection)
