"""Polling a database that is a file: what holds for SQLite holds for DuckDB, and for any other connector for files."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import duckdb
import pytest

from tailrace.errors import PreflightError, TableError, UnavailableError
from tailrace.model.change import Op
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.source.poll.connector import ConnectorOptions, Polled, Query, connect
from tailrace.source.poll.keyset import Stretch
from tailrace.source.poll.source import PollSource
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.source_making import make_polled

LIMIT = Limit(rows=100_000, bytes=1 << 30)


@dataclass(frozen=True)
class App:
    """An application and its file. It keeps the file open only while it writes."""

    scheme: str
    file: Path
    connect: Callable[[str], Any]
    now: str
    moment: str

    def run(self, *statements: str) -> None:
        with closing(self.connect(str(self.file))) as connection:
            for statement in statements:
                connection.execute(statement)

    def rows(self, query: str) -> Counter[tuple[Any, ...]]:
        with closing(self.connect(str(self.file))) as connection:
            return Counter(connection.execute(query).fetchall())

    @property
    def dsn(self) -> str:
        return f"{self.scheme}:///{self.file}"

    def source(self, deletes: dict[str, Any] | None = None, **options: Any) -> PollSource:
        defaults = {"updated_at": "updated_at", "deletes": deletes, **options.pop("settings", {})}
        tables = TableOptions.model_validate({"defaults": defaults})
        fast = {"page_rows": 7, "chunk_rows": 15, "interval": 1e-6, "idle_interval": 1e-6}
        return make_polled(self.dsn, self.file.parent, tables, **{**fast, **options})


def _sqlite(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


@pytest.fixture(params=["sqlite", "duckdb"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> App:
    file = tmp_path / f"it's an app.{request.param}"
    if request.param == "sqlite":
        return App("sqlite", file, _sqlite, "strftime('%Y-%m-%d %H:%M:%f', 'now')", "TEXT")
    return App("duckdb", file, duckdb.connect, "now()", "TIMESTAMPTZ")


TABLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, updated_at {0})"


def create(app: App, *more: str) -> None:
    app.run(TABLE.format(app.moment), *more)


def put(app: App, *keys: int, value: str = "v") -> None:
    app.run(*(f"INSERT OR REPLACE INTO t (id, v, updated_at) VALUES ({key}, '{value}', {app.now})" for key in keys))


def operations(replay: SourceReplay) -> list[tuple[Op, int]]:
    assert replay.offset is not None
    assert replay.planned is not None
    return [
        (Op(one["op"]), one["row"]["id"])
        for split in replay.follower.plan(replay.offset, replay.planned)
        for changes in replay.source.read(split)
        for one in changes.batch.to_pylist()
    ]


def keys_of(replay: SourceReplay) -> set[int]:
    return {row[0] for row in replay.contents()["main.t"]}


def test_rows_are_copied_in_chunks_and_followed_in_pages(app: App) -> None:
    create(app)
    put(app, *range(35))
    with SourceReplay(app.source(), LIMIT) as replay:
        replay.catch_up()
        assert keys_of(replay) == set(range(35))
        put(app, *range(30, 45), value="w")
        replay.catch_up()
    assert {(row[0], row[1]) for row in replay.contents()["main.t"]} == set(app.rows("SELECT id, v FROM t"))


def test_rows_of_one_time_are_all_read_though_a_page_ends_among_them(app: App) -> None:
    create(app)
    with SourceReplay(app.source(), Limit(rows=4, bytes=1)) as replay:
        replay.catch_up()
        listed = ", ".join(f"({key}, 'tie', {app.now})" for key in range(50))
        app.run(f"INSERT INTO t VALUES {listed}")
        replay.catch_up()
    assert keys_of(replay) == set(range(50))


def test_a_time_in_the_future_does_not_hide_what_is_written_before_it(app: App) -> None:
    create(app)
    with SourceReplay(app.source(), LIMIT) as replay:
        replay.catch_up()
        app.run("INSERT INTO t VALUES (1, 'future', '2999-01-01 00:00:00.000')")
        put(app, 2)
        replay.catch_up()
        put(app, 3)
        replay.catch_up()
    assert keys_of(replay) == {2, 3}


def test_a_full_diff_finds_hard_deletes_rows_without_a_time_and_times_set_back(app: App) -> None:
    create(app)
    put(app, *range(40))
    with SourceReplay(app.source({"full_diff": {"every_cycles": 1}}), LIMIT) as replay:
        replay.catch_up()
        app.run(
            "DELETE FROM t WHERE id % 5 = 0",
            "INSERT INTO t VALUES (100, 'unseen', NULL)",
            "UPDATE t SET v = 'backdated', updated_at = '2001-01-01 00:00:00.000' WHERE id = 7",
        )
        replay.catch_up()
        assert {(row[0], row[1]) for row in replay.contents()["main.t"]} == set(app.rows("SELECT id, v FROM t"))
        put(app, 200)
        replay.step()
        app.run("DELETE FROM t WHERE id = 200")
        replay.catch_up()
    assert 200 not in keys_of(replay)


def test_a_diff_of_an_unchanged_table_gives_nothing(app: App) -> None:
    create(app, *[f"INSERT INTO t VALUES ({key}, 'v', '2001-01-01 00:00:00.000')" for key in range(25)])
    with SourceReplay(app.source({"full_diff": {"every_cycles": 1}}), LIMIT) as replay:
        replay.catch_up()
        wait_until(replay.plan)
        assert replay.planned is not None
        [entry] = replay.planned["tables"].values()
        assert entry["reading"]["kind"] == "diff"
        assert operations(replay) == []


def test_soft_deletes_are_reported_once_and_can_be_undone(app: App) -> None:
    create(app, f"ALTER TABLE t ADD COLUMN deleted_at {app.moment}")
    put(app, 1, 2)
    with SourceReplay(app.source({"soft": "deleted_at"}), LIMIT) as replay:
        replay.catch_up()
        app.run(f"UPDATE t SET deleted_at = {app.now} WHERE id = 1")
        assert replay.plan()
        assert operations(replay) == [(Op.DELETE, 1)]
        replay.write()
        replay.commit()
        app.run(f"UPDATE t SET v = 'c', updated_at = {app.now} WHERE id = 2")
        assert replay.plan()
        assert operations(replay) == [(Op.UPDATE, 2)]
        replay.write()
        replay.commit()
        app.run(f"UPDATE t SET deleted_at = NULL, updated_at = {app.now} WHERE id = 1")
        replay.catch_up()
    assert keys_of(replay) == {1, 2}


def test_a_soft_delete_has_the_time_of_the_delete(tmp_path: Path) -> None:
    app = App("duckdb", tmp_path / "app.duckdb", duckdb.connect, "now()", "TIMESTAMPTZ")
    create(app, "ALTER TABLE t ADD COLUMN deleted_at TIMESTAMPTZ")
    app.run("INSERT INTO t VALUES (1, 'a', '2024-05-01 00:00:00+00', NULL)")
    with SourceReplay(app.source({"soft": "deleted_at"}), LIMIT) as replay:
        replay.catch_up()
        app.run("UPDATE t SET deleted_at = now()")
        assert replay.plan()
        assert replay.offset is not None
        assert replay.planned is not None
        [split] = replay.follower.plan(replay.offset, replay.planned)
        [changes] = replay.source.read(split)
    assert changes.batch.column("op").to_pylist() == [Op.DELETE]
    [(deleted_at,)] = app.rows("SELECT deleted_at FROM t")
    assert changes.batch.column("committed_at").to_pylist() == [deleted_at]


def test_a_composite_key_of_odd_values_is_followed(app: App) -> None:
    letter = "char" if app.scheme == "sqlite" else "chr"
    app.run(
        f"CREATE TABLE pair (a TEXT, b BLOB, c DOUBLE, updated_at {app.moment}, PRIMARY KEY (b, a))",
        *(
            f"INSERT INTO pair VALUES ('k''{n % 3}' || {letter}({n % 2 + 9}), {blob(app, n % 7)}, {n / 7}, {app.now})"
            for n in range(21)
        ),
    )
    with SourceReplay(app.source({"full_diff": {"every_cycles": 1}}), LIMIT) as replay:
        replay.catch_up()
        app.run("DELETE FROM pair WHERE c > 2", f"UPDATE pair SET c = 0, updated_at = {app.now} WHERE c < 1")
        replay.catch_up()
    wanted = {(a, bytes(b), c) for a, b, c in app.rows("SELECT a, b, c FROM pair")}
    assert {row[:3] for row in replay.contents()["main.pair"]} == wanted


def blob(app: App, octet: int) -> str:
    return f"X'{octet:02x}27'" if app.scheme == "sqlite" else f"'\\x{octet:02X}\\x27'::BLOB"


def test_a_number_that_grows_is_followed(app: App) -> None:
    app.run("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, updated_at BIGINT)")
    with SourceReplay(app.source(), LIMIT) as replay:
        replay.catch_up()
        for version in range(1, 13):
            app.run(f"INSERT OR REPLACE INTO t VALUES ({version % 7}, 'v{version}', {version})")
            if version % 4 == 0:
                replay.catch_up()
        replay.catch_up()
    assert replay.contents()["main.t"] == app.rows("SELECT * FROM t")


def test_a_column_that_was_dropped_renamed_or_added_leaves_every_value_in_its_own(app: App) -> None:
    app.run(f"CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b TEXT, c TEXT, updated_at {app.moment})")
    app.run(*(f"INSERT INTO t VALUES ({n}, 'a{n}', 'b{n}', 'c{n}', '2001-01-01 00:00:00.000')" for n in range(5)))
    with SourceReplay(app.source(), LIMIT) as replay:
        replay.catch_up()
        for statement in (
            "ALTER TABLE t DROP COLUMN a",
            "ALTER TABLE t RENAME COLUMN b TO d",
            "ALTER TABLE t ADD COLUMN e INTEGER DEFAULT 5",
        ):
            app.run(statement, f"UPDATE t SET updated_at = {app.now} WHERE id = 0")
            replay.catch_up()
            names = [column.name for column in replay.tables["main.t"].schema.columns]
            shown = [tuple(row) for row in replay.contents()["main.t"]]
            place = names.index("c")
            assert {(row[0], row[place]) for row in shown} == {(n, f"c{n}") for n in range(5)}
    assert "d" in names
    assert {row[names.index("e")] for row in shown} == {5}


def test_only_the_columns_that_are_wanted_are_read_and_others_need_a_copy(app: App) -> None:
    create(app, "ALTER TABLE t ADD COLUMN secret TEXT DEFAULT 'x'")
    put(app, 1, 2)
    with SourceReplay(app.source(settings={"columns": ["v"]}), LIMIT) as replay:
        replay.catch_up()
        assert [column.name for column in replay.tables["main.t"].schema.columns] == ["id", "v", "updated_at"]
        replay.crash()
        replay.source = app.source(settings={"columns": ["v", "secret"]})
        replay.catch_up()
    assert {row[-1] for row in replay.contents()["main.t"]} == {"x"}


@pytest.mark.parametrize("policy", ["strict", "permissive"])
def test_a_watermark_of_another_kind_of_values_or_another_key_is_foreign(app: App, policy: str) -> None:
    create(app)
    put(app, 1, 2)
    with SourceReplay(app.source(on_bad_watermark=policy), LIMIT) as replay:
        replay.catch_up()
        app.run("DROP TABLE t", "CREATE TABLE t (id INTEGER, v TEXT PRIMARY KEY, updated_at BIGINT)")
        app.run("INSERT INTO t VALUES (5, 'x', 1)")
        replay.crash()
        if policy == "strict":
            assert replay.plan()
            with pytest.raises(TableError, match="watermark"):
                operations(replay)
        else:
            replay.catch_up()
            assert replay.contents()["main.t"] == Counter({(5, "x", 1): 1})


def test_a_read_only_file_is_read_and_stays_as_it_is(app: App) -> None:
    create(app)
    put(app, 1)
    app.file.chmod(0o444)
    before = app.file.read_bytes()
    with SourceReplay(app.source(), LIMIT) as replay:
        replay.catch_up()
        assert keys_of(replay) == {1}
    assert app.file.read_bytes() == before


def test_a_query_that_takes_too_long_is_given_up(app: App) -> None:
    create(app)
    many = "FROM range(3000000) r(i)"
    if app.scheme == "sqlite":
        many = "FROM (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200000) SELECT i FROM n)"
    app.run(f"INSERT INTO t SELECT i, 'v', '2001-01-01 00:00:00.000' {many}")
    [schema] = app.source().tables()
    query = Query(Polled(schema, "updated_at"), "updated_at", Stretch(), schema, 10, hashed=True)
    with connect(app.dsn, ConnectorOptions(0.001)).open() as session, pytest.raises(UnavailableError):
        session.select(query)


def test_what_is_no_database_is_refused(app: App) -> None:
    app.file.write_text("no database at all, though it is long enough to be taken for one\n" * 200)
    for source in (app.source(), App(app.scheme, app.file.with_name("missing"), app.connect, "", "").source()):
        [finding] = source.check()
        assert finding.level == "error"
        assert finding.fix
        with pytest.raises(PreflightError):
            source.tables()


def test_a_duckdb_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    app = App("duckdb", tmp_path / "app.duckdb", duckdb.connect, "now()", "TIMESTAMPTZ")
    create(app)
    put(app, 1)
    writing = (
        "import sys, duckdb\n"
        f"c = duckdb.connect({str(app.file)!r})\n"
        "c.execute(\"INSERT INTO t VALUES (2, 'w', now())\")\n"
        "print('open', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen([sys.executable, "-c", writing], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        stdin, stdout = cast(Any, writer.stdin), cast(Any, writer.stdout)
        assert stdout.readline() == b"open\n"
        with pytest.raises(UnavailableError, match="cannot be opened"):
            app.source(statement_timeout=0.2).tables()
        stdin.write(b"\n")
        stdin.flush()
        with SourceReplay(app.source(), LIMIT) as replay:
            replay.catch_up()
            assert keys_of(replay) == {1, 2}


def test_values_that_arrow_has_no_type_for_come_as_text_and_endless_times_as_exact(tmp_path: Path) -> None:
    app = App("duckdb", tmp_path / "app.duckdb", duckdb.connect, "now()", "TIMESTAMPTZ")
    app.run(
        "CREATE TABLE t (id HUGEINT PRIMARY KEY, u UUID, s STRUCT(a INTEGER), until TIMESTAMP, price DECIMAL(10,2),"
        " updated_at TIMESTAMP_S)",
        "INSERT INTO t VALUES (170141183460469231731687303715884105727, '00000000-0000-0000-0000-000000000001',"
        " {'a': 1}, 'infinity', 1.5, now()::TIMESTAMP_S)",
    )
    source = app.source({"full_diff": {"every_cycles": 1}})
    [schema] = source.tables()
    with source.connector().open() as session:
        page = session.select(Query(Polled(schema, None), None, Stretch(), schema, 10))
    [row] = page.rows.to_pylist()
    assert row["id"] == "170141183460469231731687303715884105727"
    assert row["s"] == "{'a': 1}"
    assert row["until"] is None
    assert page.exact is not None
    assert page.exact.to_pylist() == ['{"until": "infinity"}']
    with SourceReplay(source, LIMIT) as replay:
        replay.catch_up()
        app.run("DELETE FROM t")
        replay.catch_up()
        assert replay.contents()["main.t"].total() == 0


@pytest.mark.parametrize("name", ["wanted", "source", "a0"])
def test_a_table_may_have_any_name(name: str, app: App) -> None:
    app.run(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, v TEXT, updated_at {app.moment})")
    app.run(f"INSERT INTO {name} VALUES (1, 'v', '2001-01-01 00:00:00'), (2, 'v', '2001-01-01 00:00:00')")
    with SourceReplay(app.source({"full_diff": {"every_cycles": 1}}), LIMIT) as replay:
        replay.catch_up()
        app.run(f"DELETE FROM {name} WHERE id = 1", f"UPDATE {name} SET v = 'unseen' WHERE id = 2")
        replay.catch_up()
    assert [row[:2] for row in replay.contents()[f"main.{name}"]] == [(2, "unseen")]
