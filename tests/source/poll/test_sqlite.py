"""Polling an SQLite file."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import ConfigError, TableError
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.source.poll.connector import ConnectorOptions, Polled, Query, connect
from tailrace.source.poll.keyset import Stretch
from tailrace.source.poll.source import PollSource
from tailrace.testing.replay import SourceReplay
from tests.support.source_making import make_polled, with_options, with_tables

LIMIT = Limit(rows=100_000, bytes=1 << 30)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "it's an app.db"


@pytest.fixture
def app(file: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        yield connection


def make_source(file: Path, **settings: Any) -> PollSource:
    tables = TableOptions.model_validate({"defaults": {"updated_at": "updated_at", **settings}})
    return make_polled(f"sqlite:///{file}", file.parent, tables, page_rows=3, interval=1e-6, idle_interval=30.0)


def rows(app: sqlite3.Connection, table: str) -> Counter[tuple[Any, ...]]:
    return Counter(app.execute(f"SELECT * FROM {table}").fetchall())


@pytest.mark.parametrize(
    ("declared", "moment"),
    [
        ("TEXT", "CURRENT_TIMESTAMP"),
        ("DATETIME", "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')"),
        ("TEXT", "date('now')"),
        ("INTEGER", "unixepoch('now')"),
    ],
)
def test_every_way_to_write_a_time_is_followed(declared: str, moment: str, file: Path, app: sqlite3.Connection) -> None:
    app.execute(f"CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, updated_at {declared})")
    with SourceReplay(make_source(file), LIMIT) as replay:
        replay.catch_up()  # empty: the format of its times is not known yet
        for number in range(4):
            app.execute(f"INSERT INTO t (v, updated_at) VALUES ('a', {moment}), ('b', {moment})")
            app.execute(f"UPDATE t SET v = v || ?, updated_at = {moment} WHERE id < 3", [str(number)])
            replay.catch_up()
            assert replay.contents()["main.t"] == rows(app, "t")


def test_keys_of_every_class_are_paged_through(file: Path, app: sqlite3.Connection) -> None:
    app.execute("CREATE TABLE t (a TEXT, b BLOB, c REAL, updated_at TEXT, PRIMARY KEY (a, b, c)) WITHOUT ROWID")
    app.executemany(
        "INSERT INTO t VALUES (?, ?, ?, CURRENT_TIMESTAMP)",
        [(f"k'{n % 3}\n", bytes([n % 5]), n / 7) for n in range(30)],
    )
    app.execute("CREATE TABLE keyless (v TEXT, updated_at TEXT)")
    app.executemany("INSERT INTO keyless VALUES (?, CURRENT_TIMESTAMP)", [("same",)] * 10)
    with SourceReplay(make_source(file, deletes={"full_diff": {"every_cycles": 1}}), LIMIT) as replay:
        replay.catch_up()
        app.execute("DELETE FROM t WHERE c > 3")
        app.execute("DELETE FROM keyless WHERE rowid < 4")
        replay.catch_up()
        assert replay.contents()["main.t"] == rows(app, "t")
        assert replay.contents()["main.keyless"].total() == 7


def test_keys_without_end_are_paged_through(file: Path, app: sqlite3.Connection) -> None:
    app.execute("CREATE TABLE t (k REAL PRIMARY KEY, updated_at TEXT)")
    keys = [float("-inf"), -1.5, 0.0, 1e300, float("inf")]
    app.executemany("INSERT INTO t VALUES (?, CURRENT_TIMESTAMP)", [(key,) for key in keys])
    source = with_options(make_source(file), page_rows=1, chunk_rows=1)
    with SourceReplay(source, LIMIT) as replay:
        replay.catch_up()
        assert replay.contents()["main.t"] == rows(app, "t")


def test_a_column_that_is_called_rowid_is_not_taken_for_it(file: Path, app: sqlite3.Connection) -> None:
    app.execute("CREATE TABLE t (rowid TEXT, updated_at TEXT)")
    app.executemany("INSERT INTO t VALUES (?, CURRENT_TIMESTAMP)", [("same",)] * 5)
    app.execute("CREATE TABLE hidden (rowid TEXT, _rowid_ TEXT, oid TEXT, updated_at TEXT)")
    source = make_source(file)
    with SourceReplay(with_tables(source, source.context.tables.only("main.t")), LIMIT) as replay:
        replay.catch_up()
        assert Counter(replay.contents()["main.t"]) == Counter(app.execute("SELECT _rowid_, * FROM t").fetchall())
    assert [one.message for one in source.check() if one.level == "error"] == [
        "it has no primary key, so its rows cannot be identified"
    ]


@pytest.mark.parametrize("later", ["1700000000.5", "'2026-01-01 00:00:00'", "X'00'"])
def test_values_of_another_class_stop_a_table_instead_of_hiding_its_changes(
    later: str, file: Path, app: sqlite3.Connection
) -> None:
    app.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, updated_at INTEGER)")
    app.execute("INSERT INTO t VALUES (1, 1)")
    with SourceReplay(make_source(file), LIMIT) as replay:
        replay.catch_up()
        app.execute(f"INSERT INTO t VALUES (2, {later})")
        with pytest.raises(TableError, match="order of changes is not known"):
            replay.catch_up()


def test_a_check_names_every_table_whose_values_have_no_order(file: Path, app: sqlite3.Connection) -> None:
    app.execute("CREATE TABLE mixed (id INTEGER PRIMARY KEY, updated_at)")
    app.execute("CREATE TABLE real (id INTEGER PRIMARY KEY, updated_at)")
    app.execute("CREATE TABLE foreign_text (id INTEGER PRIMARY KEY, updated_at)")
    app.execute("INSERT INTO mixed (updated_at) VALUES (1), (CURRENT_TIMESTAMP)")
    app.execute("INSERT INTO real (updated_at) VALUES (1.5)")
    app.execute("INSERT INTO foreign_text (updated_at) VALUES ('15.11.2026')")
    errors = [finding for finding in make_source(file).check() if finding.level == "error"]
    assert {finding.subject for finding in errors} == {"main.mixed", "main.real", "main.foreign_text"}
    assert all(finding.fix for finding in errors)


def test_a_table_that_this_sqlite_does_not_understand_leaves_the_others_alone(
    file: Path, app: sqlite3.Connection
) -> None:
    app.create_collation("mine", lambda one, two: (one > two) - (one < two))
    app.execute("CREATE TABLE other (k TEXT COLLATE mine PRIMARY KEY, updated_at TEXT)")
    app.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, updated_at TEXT)")
    app.execute("INSERT INTO t VALUES (1, CURRENT_TIMESTAMP)")
    source = make_source(file)
    assert {one.subject for one in source.check() if one.level == "error"} == {"main.other"}
    with SourceReplay(with_tables(source, source.context.tables.only("main.t")), LIMIT) as replay:
        replay.catch_up()
        assert replay.contents()["main.t"].total() == 1


def test_a_read_only_file_is_read(file: Path, app: sqlite3.Connection) -> None:
    app.execute("PRAGMA journal_mode = WAL")
    app.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, updated_at TEXT)")
    app.execute("INSERT INTO t VALUES (1, CURRENT_TIMESTAMP)")
    app.close()
    file.chmod(0o444)
    with SourceReplay(make_source(file), LIMIT) as replay:
        replay.catch_up()
        assert replay.contents()["main.t"].total() == 1
    assert file.stat().st_mode & 0o222 == 0


def test_values_a_column_cannot_hold_are_compared_too(file: Path, app: sqlite3.Connection) -> None:
    app.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n INTEGER, updated_at TEXT)")
    app.execute("INSERT INTO t VALUES (1, 'one', CURRENT_TIMESTAMP), (2, 2, CURRENT_TIMESTAMP)")
    source = make_source(file)
    [schema] = source.tables()

    def hashes() -> list[int]:
        with source.connector().open() as session:
            page = session.select(Query(Polled(schema, None), None, Stretch(), schema, 10, hashed=True))
            assert page.hashes is not None
            return [int(each) for each in page.hashes]

    before = hashes()
    app.execute("UPDATE t SET n = 'uno' WHERE id = 1")
    assert [now == then for now, then in zip(hashes(), before, strict=True)] == [False, True]


def test_a_scheme_without_a_connector_is_refused() -> None:
    with pytest.raises(ConfigError, match="mysql"):
        connect("mysql://x/y", ConnectorOptions())
