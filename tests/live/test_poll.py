"""A polled database, end to end: Spark, Delta, `tailrace run --once` and the proof that both sides are equal."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tailrace.config.pipeline import load
from tailrace.verify.comparison import verify
from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario

TABLES = {
    "include": ["public.orders", "public.items"],
    "defaults": {"updated_at": "updated_at", "created_at": "created_at"},
    "settings": {
        "public.orders": {"deletes": {"soft": "deleted_at"}},
        "public.items": {"updated_at": "version", "deletes": {"full_diff": {"every_cycles": 1}}},
    },
}
SETUP = [
    "CREATE TABLE orders (id int PRIMARY KEY, total numeric(10,2), placed timestamp, tags text[],"
    " created_at timestamptz DEFAULT now(), updated_at timestamptz DEFAULT now(), deleted_at timestamptz)",
    "CREATE INDEX ON orders (updated_at, id)",
    "CREATE SEQUENCE changes",
    "CREATE TABLE items (a text, b int, v double precision, version bigint DEFAULT nextval('changes'),"
    " PRIMARY KEY (a, b))",
    "INSERT INTO orders (id, total, placed, tags) SELECT i, i * 1.5, 'infinity', ARRAY['x', NULL]"
    " FROM generate_series(1, 3000) i",
    "INSERT INTO items (a, b, v) SELECT 'k' || i % 3, i, i / 3.0 FROM generate_series(1, 3000) i",
]


def test_a_polled_database_and_its_lake_are_equal_after_every_run(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    database.run(*SETUP)
    scene = make_scenario(
        database.dsn, source={"type": "poll", "page_rows": 500, "chunk_rows": 1000, "interval": "50ms"}, tables=TABLES
    )
    scene.apply()
    assert [(one.table, one.source_rows, one.equal) for one in verify(load(scene.file))] == [
        ("public.items", 3000, True),
        ("public.orders", 3000, True),
    ]
    assert scene.differences() == []

    database.run(
        "UPDATE orders SET total = total + 1, updated_at = now() WHERE id BETWEEN 100 AND 200",
        "INSERT INTO orders (id, total) VALUES (5000, 1)",
        "UPDATE orders SET deleted_at = now(), updated_at = now() WHERE id < 10",
        "UPDATE items SET v = 0, version = nextval('changes') WHERE a = 'k1'",
        "DELETE FROM items WHERE b > 2900",
        "UPDATE items SET v = 7 WHERE b = 3",  # no version is given: only the full diff can find it
    )
    before = {one.table: one for one in verify(load(scene.file))}
    assert (before["public.items"].missing, before["public.items"].extra) == (0, 100)
    assert before["public.items"].different > 0
    assert before["public.orders"].missing == 1
    assert all(len(key) == 2 for key in before["public.items"].keys)

    scene.apply()
    assert all(one.equal for one in verify(load(scene.file)))
    assert scene.doubled() == []


@pytest.mark.parametrize("step", ["stream.found", "delta.committed"])
def test_a_full_diff_that_was_killed_is_done_again_and_applied_once(
    step: str, database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    database.run(*SETUP)
    tables = {**TABLES, "include": ["public.items"]}
    scene = make_scenario(database.dsn, source={"type": "poll", "chunk_rows": 500, "interval": "50ms"}, tables=tables)
    scene.apply()
    database.run("DELETE FROM items WHERE b % 100 = 0", "UPDATE items SET v = -1 WHERE b % 100 = 1")
    assert scene.run_once(failpoints=f"{step}:kill") != 0
    scene.apply()
    [verdict] = verify(load(scene.file))
    assert (verdict.source_rows, verdict.equal) == (2970, True)
    assert scene.doubled() == []
    assert not list(scene.state.rglob("found-*"))


@pytest.mark.parametrize("library", ["sqlite", "duckdb"])
def test_a_file_is_polled_with_nothing_but_the_right_to_read_it(
    library: str, tmp_path: Path, make_scenario: Callable[..., Scenario], database: PostgresDatabase
) -> None:
    file = tmp_path / f"app.{library}"
    connect: Any = sqlite3.connect if library == "sqlite" else duckdb.connect
    with closing(connect(str(file))) as connection:
        moment = "TEXT" if library == "sqlite" else "TIMESTAMP"
        connection.execute(f"CREATE TABLE notes (id INTEGER PRIMARY KEY, v TEXT, updated_at {moment})")
        rows = ", ".join(f"({number}, 'n{number}', CURRENT_TIMESTAMP)" for number in range(500))
        connection.execute(f"INSERT INTO notes VALUES {rows}")
        connection.commit()
    file.chmod(0o444)
    scene = make_scenario(database.dsn)
    deletes = {"full_diff": {"every_cycles": 1}}
    scene.write(
        source={"type": "poll", "dsn": f"{library}:///{file}", "chunk_rows": 100},
        tables={"defaults": {"updated_at": "updated_at", "deletes": deletes}},
    )
    scene.apply()
    assert [(one.table, one.source_rows, one.equal) for one in verify(load(scene.file))] == [("main.notes", 500, True)]


def test_a_table_that_cannot_be_polled_is_in_error_and_the_others_are_copied(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    database.run(*SETUP, "DROP TABLE items", "CREATE TABLE timeless (id int PRIMARY KEY)")
    scene = make_scenario(
        database.dsn,
        source={"type": "poll", "interval": "50ms"},
        tables={"include": ["public.orders", "public.timeless"], "defaults": {"updated_at": "updated_at"}},
    )
    scene.apply(errored={"public.timeless"})
    assert [(one.table, one.source_rows, one.equal) for one in verify(load(scene.file))] == [
        ("public.orders", 3000, True)
    ]
    database.run("ALTER TABLE timeless ADD updated_at timestamptz DEFAULT now()")
    scene.apply()
    assert all(one.equal for one in verify(load(scene.file)))
