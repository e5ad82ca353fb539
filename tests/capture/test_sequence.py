"""Purging never lets the numbers start over; a tape that was started over is noticed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest

from tailrace.capture import Tape, check_sequence, enable, purge
from tailrace.capture.tape import TapeMark, read_tape_mark
from tailrace.errors import LostError

TABLE = "turso_cdc"


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as opened:
        opened.execute("CREATE TABLE t(id INTEGER PRIMARY KEY)")
        enable(opened)
        opened.execute("INSERT INTO t VALUES (1), (2), (3)")
        yield opened


def mark(connection: sqlite3.Connection, change_id: int) -> TapeMark:
    found = read_tape_mark(connection, TABLE, change_id)
    assert found.is_on_tape
    return found


@pytest.mark.parametrize(("upto", "gone"), [(0, 0), (2, 1), (3, 2), (99, 2)])
def test_purging_keeps_the_reader_s_row_and_the_last_one(connection: sqlite3.Connection, upto: int, gone: int) -> None:
    assert purge(connection, upto, TABLE) == gone
    assert purge(connection, upto, TABLE) == 0
    connection.execute("INSERT INTO t VALUES (4)")
    assert Tape(connection).statistics().last == 4
    images = connection.execute("SELECT count(*) FROM turso_cdc_image").fetchone()[0]
    assert images == Tape(connection).count_after(0) == 4 - gone


def test_a_reader_that_kept_up_goes_on_after_a_purge(connection: sqlite3.Connection) -> None:
    seen = mark(connection, 2)
    purge(connection, 2, TABLE)
    check_sequence(connection, TABLE, seen)
    with pytest.raises(LostError, match="purged"):
        check_sequence(connection, TABLE, TapeMark(0))
    with pytest.raises(LostError):
        check_sequence(connection, TABLE, TapeMark(1, seen.rows))


def test_a_tape_that_was_started_over_is_noticed(connection: sqlite3.Connection) -> None:
    seen = TapeMark.parse(str(mark(connection, 3)))
    connection.execute("DELETE FROM turso_cdc")
    connection.execute("DELETE FROM sqlite_sequence")
    with pytest.raises(LostError, match="does not hold the last change"):
        check_sequence(connection, TABLE, seen)
    connection.execute("DELETE FROM t")
    with pytest.raises(LostError, match="a different change"):
        check_sequence(connection, TABLE, seen)


def test_a_tape_that_was_started_over_within_the_same_second_is_noticed(connection: sqlite3.Connection) -> None:
    seen = mark(connection, 3)
    kept = connection.execute("SELECT change_time FROM turso_cdc WHERE change_id = 3").fetchone()
    connection.execute("DELETE FROM turso_cdc")
    connection.execute("DELETE FROM sqlite_sequence")
    connection.execute("INSERT INTO t VALUES (11), (12), (13)")
    connection.execute("UPDATE turso_cdc SET change_time = ?", kept)
    with pytest.raises(LostError, match="a different change"):
        check_sequence(connection, TABLE, seen)
