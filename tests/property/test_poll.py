"""Polling, with crashes between any two steps: whatever the order of writes, commits and polls, all rows arrive."""

from __future__ import annotations

import copy
import random
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tailrace.model.change import Changes
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.source.poll.source import PollSource
from tailrace.source.split import ScanSplit, Split
from tailrace.testing.replay import SourceReplay
from tests.support.database import PostgresDatabase
from tests.support.source_making import make_polled

# A case takes too long for hypothesis to try hundreds of smaller ones.
EVERY_ORDER = settings(
    max_examples=25,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
CRASHES = ("plan", "half", "write", "commit", "never", "never", "never")


class ErrandSource(PollSource):
    """Read as a pipeline does: each errand is run first, and what it found is read then."""

    def read(self, split: Split) -> Iterator[Changes]:
        yield from super().read(split.run(super().read) if isinstance(split, ScanSplit) else split)


def make_source(dsn: str, folder: Path, tables: dict[str, Any], **options: Any) -> PollSource:
    fast = {"page_rows": 3, "chunk_rows": 7}
    return make_polled(dsn, folder, TableOptions.model_validate(tables), kind=ErrandSource, **{**fast, **options})


def counted(rows: Iterable[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row) for row in rows)


# -- a file, every order of operations ------------------------------------------------------------------------

KEYS = st.tuples(st.sampled_from("ab"), st.integers(0, 6))
TAME = st.one_of(
    st.tuples(st.just("put"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("ties"), st.integers(0, 3)),
    st.tuples(st.just("begin"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("end"), st.booleans()),
    st.tuples(st.just("step"), st.sampled_from(CRASHES)),
    st.tuples(st.just("step"), st.just("never")),
)
WILD = st.one_of(
    TAME,
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("null"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("backdated"), KEYS, st.integers(0, 3)),
    st.tuples(st.just("future"), KEYS, st.integers(0, 3)),
)
SHUT = WILD.filter(lambda operation: operation[0] not in ("begin", "end"))
NOW = "strftime('%Y-%m-%d %H:%M:%S', 'now')"  # seconds: many writes share one
MOMENTS = {"put": NOW, "null": "NULL", "backdated": "'2001-01-01 00:00:00'", "future": "'2999-01-01 00:00:00'"}


class Writer:
    """The application: one connection, which may keep a transaction open while polls go on."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("CREATE TABLE pair (a TEXT, b INT, v INT, updated_at TEXT, PRIMARY KEY (a, b))")
        self.connection.execute("CREATE INDEX recent ON pair (updated_at, a, b)")
        self.connection.execute("CREATE TABLE tally (a TEXT, b INT, v INT, version INT, PRIMARY KEY (a, b))")
        self.version = 0

    def put(self, key: tuple[str, int], value: int, moment: str = NOW) -> None:
        self.connection.execute(f"INSERT OR REPLACE INTO pair VALUES (?, ?, ?, {moment})", (*key, value))
        self.version += moment == NOW
        version = self.version if moment != "NULL" else None
        self.connection.execute("INSERT OR REPLACE INTO tally VALUES (?, ?, ?, ?)", (*key, value, version))

    def do(self, operation: tuple[Any, ...]) -> None:
        match operation:
            case ("put" | "null" | "backdated" | "future" as kind, key, value):
                self.put(key, value, MOMENTS[kind])
            case ("ties", value):
                for number in range(5):
                    self.put(("t", number), value)
            case ("begin", key, value):
                if not self.connection.in_transaction:
                    self.connection.execute("BEGIN")
                self.put(key, value)
            case ("end", commits) if self.connection.in_transaction:
                self.connection.execute("COMMIT" if commits else "ROLLBACK")
            case ("delete", key):
                for table in ("pair", "tally"):
                    self.connection.execute(f"DELETE FROM {table} WHERE a = ? AND b = ?", key)

    def rows(self, table: str) -> Counter[tuple[Any, ...]]:
        return counted(self.connection.execute(f"SELECT * FROM {table}"))


PAIRS = ("pair", "tally")


def file_tables(deletes: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "defaults": {"deletes": deletes},
        "settings": {"main.pair": {"updated_at": "updated_at"}, "main.tally": {"updated_at": "version"}},
    }


def follow_file(operations: list[tuple[Any, ...]], deletes: dict[str, Any] | None, rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "app.db"
        writer = Writer(file)
        source = make_source(f"sqlite:///{file}", Path(folder), file_tables(deletes))
        with closing(writer.connection), SourceReplay(source, Limit(rows=rows, bytes=1 << 30)) as replay:
            for operation in operations:
                if operation[0] == "step":
                    replay.live(operation[1])
                else:
                    writer.do(operation)
            writer.do(("end", True))
            replay.catch_up()
            for table in PAIRS:
                assert replay.contents()[f"main.{table}"] == writer.rows(table)


@EVERY_ORDER
@given(st.lists(TAME, min_size=5, max_size=40), st.sampled_from([4, 1000]))
def test_polls_alone_bring_every_row_whatever_the_order(operations: list[tuple[Any, ...]], rows: int) -> None:
    follow_file(operations, None, rows)


@EVERY_ORDER
@given(st.lists(WILD, min_size=5, max_size=40), st.sampled_from([1, 3]))
def test_a_full_diff_brings_what_polls_cannot_see(operations: list[tuple[Any, ...]], cycles: int) -> None:
    # Every run ends with a diff that is due, so that one follows the last operation.
    follow_file([*operations, *[("step", "never")] * 3], {"full_diff": {"every_cycles": 1}}, 1000 if cycles == 1 else 4)


class Embedded:
    """The same application with DuckDB, which lets others read its file only while it is closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.version = path, 0
        self.run("CREATE TABLE pair (a TEXT, b INT, v INT, updated_at TIMESTAMPTZ, PRIMARY KEY (a, b))")
        self.run("CREATE TABLE tally (a TEXT, b INT, v INT, version BIGINT, PRIMARY KEY (a, b))")

    def run(self, *statements: str) -> None:
        with duckdb.connect(str(self.path)) as connection:
            for statement in statements:
                connection.execute(statement)

    def put(self, key: tuple[str, int], value: int, moment: str) -> None:
        self.version += moment == "now()"
        version = self.version if moment != "NULL" else "NULL"
        self.run(
            f"INSERT OR REPLACE INTO pair VALUES ('{key[0]}', {key[1]}, {value}, {moment})",
            f"INSERT OR REPLACE INTO tally VALUES ('{key[0]}', {key[1]}, {value}, {version})",
        )

    def do(self, operation: tuple[Any, ...]) -> None:
        match operation:
            case ("put" | "null" | "backdated" | "future" as kind, key, value):
                self.put(key, value, {**MOMENTS, "put": "now()"}[kind])
            case ("ties", value):
                listed = ", ".join(f"('t', {number}, {value}, now())" for number in range(5))
                self.run(f"INSERT OR REPLACE INTO pair VALUES {listed}")
            case ("delete", key):
                self.run(*(f"DELETE FROM {table} WHERE a = '{key[0]}' AND b = {key[1]}" for table in PAIRS))

    def rows(self, table: str) -> Counter[tuple[Any, ...]]:
        with duckdb.connect(str(self.path)) as connection:
            return counted(connection.execute(f"SELECT a, b, v FROM {table}").fetchall())


@settings(EVERY_ORDER, max_examples=5)
@given(st.lists(SHUT, min_size=5, max_size=25))
def test_a_file_that_is_shut_between_writes_is_followed_as_well(operations: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "app.duckdb"
        writer = Embedded(file)
        source = make_source(f"duckdb:///{file}", Path(folder), file_tables({"full_diff": {"every_cycles": 2}}))
        with SourceReplay(source, Limit(rows=1000, bytes=1 << 30)) as replay:
            for operation in operations:
                if operation[0] == "step":
                    replay.live(operation[1])
                else:
                    writer.do(operation)
            for _ in range(2):
                replay.catch_up()
            for table in PAIRS:
                assert counted(row[:3] for row in replay.contents()[f"main.{table}"]) == writer.rows(table)


# -- a server, with transactions that overlap -----------------------------------------------------------------

TABLES = """
CREATE TABLE plain (id int PRIMARY KEY, v text, updated_at timestamptz);
CREATE INDEX ON plain (updated_at, id);
CREATE TABLE coarse (a text, b int, v text, updated_at timestamptz(0), PRIMARY KEY (a, b));
CREATE TABLE daily (id int PRIMARY KEY, v text, updated_at date);
CREATE TABLE counted (id int PRIMARY KEY, v text, version bigint);
CREATE SEQUENCE versions;
CREATE TABLE marked (id int PRIMARY KEY, v text, updated_at timestamptz, deleted_at timestamptz);
"""
NAMES = ("plain", "coarse", "daily", "counted", "marked")
SETTINGS: dict[str, Any] = {
    "include": ["public.*"],
    "defaults": {"updated_at": "updated_at"},
    "settings": {
        "public.counted": {"updated_at": "version"},
        "public.marked": {"deletes": {"soft": "deleted_at"}},
    },
}


class Application:
    """Several sessions with transactions of their own."""

    def __init__(self, database: PostgresDatabase, chance: random.Random, *, wild: bool) -> None:
        self.sessions = [database.connect() for _ in range(3)]
        self.open = [False] * 3
        self.chance = chance
        self.wild = wild

    def act(self) -> None:
        at = self.chance.randrange(3)
        session = self.sessions[at]
        if not self.open[at] and self.chance.random() < 0.4:
            session.execute("BEGIN")
            self.open[at] = True
        # Each session has rows of its own, so that they never wait for each other.
        key = at * 10 + self.chance.randrange(8)
        self.write(session, key)
        if self.open[at] and self.chance.random() < 0.4:
            session.execute(self.chance.choice(["COMMIT", "COMMIT", "ROLLBACK"]))
            self.open[at] = False

    def write(self, session: psycopg.Connection[Any], key: int) -> None:
        value, run = str(self.chance.randrange(4)), session.execute
        stamp = self.chance.choice(["now()", "clock_timestamp()"])
        put = "INSERT INTO {0} VALUES ({1}) ON CONFLICT ({2}) DO UPDATE SET v = excluded.v, {3} = excluded.{3}"
        match self.chance.randrange(8 if self.wild else 6):
            case 0:
                run(put.format("plain", f"{key}, '{value}', {stamp}", "id", "updated_at").encode())
            case 1:
                run(put.format("coarse", f"'k', {key}, '{value}', {stamp}", "a, b", "updated_at").encode())
            case 2:
                run(put.format("daily", f"{key}, '{value}', {stamp}::date", "id", "updated_at").encode())
            case 3:
                run(put.format("counted", f"{key}, '{value}', nextval('versions')", "id", "version").encode())
            case 4:
                run(put.format("marked", f"{key}, '{value}', {stamp}, NULL", "id", "updated_at").encode())
            case 5:
                gone = self.chance.choice(["clock_timestamp()", "NULL"])
                run(f"UPDATE marked SET deleted_at = {gone}, updated_at = {stamp} WHERE id = {key}".encode())
            case 6:
                table = self.chance.choice(NAMES)
                run(f"DELETE FROM {table} WHERE {'b' if table == 'coarse' else 'id'} = {key}".encode())
            case _:
                run(put.format("plain", f"{key}, '{value}', NULL", "id", "updated_at").encode())

    def finish(self) -> None:
        for session, open_ in zip(self.sessions, self.open, strict=True):
            if open_:
                session.execute("COMMIT")
            session.close()


def run_server(seed: int, database: PostgresDatabase, folder: Path, *, wild: bool) -> None:
    chance = random.Random(seed)
    database.run(*filter(None, map(str.strip, TABLES.split(";"))))
    tables = copy.deepcopy(SETTINGS)
    if wild:
        for name in NAMES:
            own = tables["settings"].setdefault(f"public.{name}", {})
            own["deletes"] = {**own.get("deletes", {}), "full_diff": {"every_cycles": 2}}
    source = make_source(database.dsn, folder, tables, page_rows=chance.choice([2, 50]))
    application = Application(database, chance, wild=wild)
    with SourceReplay(source, Limit(rows=chance.choice([5, 1000]), bytes=1 << 30)) as replay:
        for _ in range(30):
            for _ in range(chance.randrange(5)):
                application.act()
            replay.live(chance.choice(CRASHES))
        application.finish()
        for _ in range(3 if wild else 1):
            replay.catch_up()
    with closing(database.connect()) as connection:
        for name in NAMES:
            alive = " WHERE deleted_at IS NULL" if name == "marked" else ""
            rows = connection.execute(f"SELECT * FROM {name}{alive}".encode())
            assert replay.contents()[f"public.{name}"] == counted(rows), name


@pytest.mark.parametrize("seed", range(3))
def test_late_commits_ties_and_soft_deletes_all_arrive(seed: int, database: PostgresDatabase, tmp_path: Path) -> None:
    run_server(seed, database, tmp_path, wild=False)


@pytest.mark.parametrize("seed", range(3))
def test_hard_deletes_and_rows_without_a_version_arrive_with_a_full_diff(
    seed: int, database: PostgresDatabase, tmp_path: Path
) -> None:
    run_server(seed, database, tmp_path, wild=True)
