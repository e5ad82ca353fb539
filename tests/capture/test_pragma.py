"""Turso's words on connections of ours: the pragma, and the functions that read records from SQL."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import apsw
import pytest
import turso

from tailrace.capture import connect, register_functions
from tailrace.errors import ConfigError, PreflightError

STATE = "PRAGMA capture_data_changes_conn"


@pytest.fixture
def connection() -> Iterator[apsw.Connection]:
    with closing(connect(":memory:")) as opened:
        opened.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, n TEXT)")
        yield opened


@pytest.mark.parametrize(
    "words",
    [
        "PRAGMA capture_data_changes_conn('full')",
        "PRAGMA capture_data_changes_conn = 'full'",
        "pragma Capture_Data_Changes_Conn=full;",
        ' -- on\n PRAGMA main.capture_data_changes_conn ( "full" ) ; ',
        "PRAGMA unstable_capture_data_changes_conn('full,turso_cdc')",
    ],
)
def test_the_pragma_turns_capture_on_and_off(connection: apsw.Connection, words: str) -> None:
    assert connection.execute(STATE).fetchall() == [("off", None, None)]
    assert connection.execute(words).fetchall() == []
    assert connection.execute(STATE).fetchall() == [("full", "turso_cdc", "v2")]
    connection.execute("INSERT INTO t VALUES (1, 'a')")
    assert connection.execute("SELECT change_type, id FROM turso_cdc").fetchall() == [(1, 1), (2, None)]
    connection.execute("PRAGMA capture_data_changes_conn('id,other')")
    assert connection.execute(STATE).fetchall() == [("id", "other", "v2")]
    connection.execute("PRAGMA capture_data_changes_conn('off')")
    assert connection.execute(STATE).fetchall() == [("off", None, None)]
    connection.execute("INSERT INTO t VALUES (2, 'b')")
    assert connection.execute("SELECT count(*) FROM turso_cdc").fetchall() == [(2,)]


def test_the_method_for_pragmas_does_the_same(connection: apsw.Connection) -> None:
    connection.pragma("capture_data_changes_conn", "full")
    assert connection.execute(STATE).fetchall() == [("full", "turso_cdc", "v2")]


def test_a_wrong_mode_and_words_among_others_are_refused(connection: apsw.Connection) -> None:
    with pytest.raises(ConfigError, match="everything"):
        connection.execute("PRAGMA capture_data_changes_conn('everything')")
    with pytest.raises(PreflightError, match="one of several statements"):
        connection.execute("SELECT 1; PRAGMA capture_data_changes_conn('full')")
    connection.execute("INSERT INTO t VALUES (1, 'PRAGMA capture_data_changes_conn')")
    assert connection.execute(STATE).fetchall() == [("off", None, None)]


def test_capture_and_mvcc_exclude_each_other_in_both_orders(connection: apsw.Connection) -> None:
    with pytest.raises(PreflightError, match="SQLite has no MVCC"):
        connection.execute("PRAGMA journal_mode = 'mvcc'")
    connection.execute("PRAGMA capture_data_changes_conn('full')")
    with pytest.raises(PreflightError, match="capture and MVCC exclude each other") as refused:
        connection.execute("PRAGMA main.journal_mode=experimental_mvcc")
    connection.execute(refused.value.fix or "")
    assert connection.execute(STATE).fetchall() == [("off", None, None)]


def read(connection: Any) -> list[Any]:
    sql = (
        "SELECT bin_record_json_object(table_columns_json_array('t'), {0}) FROM turso_cdc "
        "WHERE {0} IS NOT NULL AND table_name = 't' ORDER BY change_id"
    )
    images = ("before", "after", "updates")
    return [[json.loads(row[0]) for row in connection.execute(sql.format(f'"{image}"')).fetchall()] for image in images]


def test_records_are_read_from_sql_on_every_kind_of_connection(tmp_path: Any) -> None:
    path = str(tmp_path / "app.db")
    with closing(turso.connect(path, isolation_level=None)) as theirs:
        theirs.execute("PRAGMA capture_data_changes_conn('full')")
        theirs.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, n TEXT, v REAL)")
        theirs.execute("INSERT INTO t VALUES (1, 'é', 1.5)")
        theirs.execute("UPDATE t SET n = NULL")
        theirs.execute("DELETE FROM t")
        register_functions(theirs)
        expected = read(theirs)
    assert expected[2] == [{"id": 0, "n": 1, "v": 0}]
    with closing(sqlite3.connect(path)) as stdlib:
        register_functions(stdlib)
        assert read(stdlib) == expected
        with pytest.raises(sqlite3.OperationalError):
            stdlib.execute("SELECT table_columns_json_array('nope')").fetchall()
    with closing(connect(path)) as ours:
        assert read(ours) == expected
        with pytest.raises(PreflightError, match="no table nope"):
            ours.execute("SELECT table_columns_json_array('nope')").fetchall()
    with pytest.raises(ConfigError):
        register_functions(object())  # type: ignore[arg-type]
