"""Killing a writer of a SQLite replica at any point, and many writers of one file."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tailrace.destination import Batch, TableBatch
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.system.failpoint import VARIABLE
from tailrace.testing.destination import ITEMS, changes_of, insert
from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario

WRITER = """
import sys
from tailrace.destination import Batch, TableBatch
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.testing.destination import ITEMS, changes_of, insert, read, update

destination = SqliteDestination(path=sys.argv[1])
staged = [destination.write_rows(ITEMS, changes_of(ITEMS, *(read(id=i, name="copied", price=i) for i in range(1000))))]
changes = changes_of(ITEMS, update(id=5, price=50))
destination.write_changes(TableBatch(ITEMS, Batch("p", 1), changes, staged, begins_copy=True, completes_copy=True))
"""


@pytest.mark.parametrize("place", ["sqlite.staged", "sqlite.before_commit", "sqlite.committed"])
def test_a_writer_killed_at_any_point_leaves_the_table_before_or_after_its_batch(tmp_path: Path, place: str) -> None:
    path = tmp_path / "replica.db"
    destination = SqliteDestination(path=path)
    destination.write_changes(TableBatch(ITEMS, Batch("p", 0), changes_of(ITEMS, insert(id=1, name="old", price=1))))
    killed = subprocess.run(
        [sys.executable, "-c", WRITER, str(path)],
        env={**os.environ, VARIABLE: f"{place}:kill"},
        start_new_session=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    committed = place == "sqlite.committed"
    assert count(path) == (1000 if committed else 1)
    again = subprocess.run([sys.executable, "-c", WRITER, str(path)], check=False)
    assert again.returncode == 0
    assert count(path) == 1000
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute('SELECT name, price FROM "shop.items" WHERE id = 5').fetchall() == [("copied", 50)]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT count(*) FROM sqlite_schema WHERE name LIKE '%copy of%'").fetchone() == (0,)


def count(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute('SELECT count(*) FROM "shop.items"').fetchone()[0])


LANE = """
import sys
from tailrace.destination import Batch, TableBatch
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.model.schema import TableName, TableSchema
from tailrace.testing.destination import ITEMS, changes_of, insert

destination = SqliteDestination(path=sys.argv[1])
table = TableSchema(TableName("lane", sys.argv[2]), ITEMS.columns, ITEMS.key)
for number in range(20):
    changes = changes_of(table, insert(id=number, name="x", price=number))
    destination.write_changes(TableBatch(table, Batch("p", number), changes))
"""


def test_lanes_in_processes_of_their_own_make_and_fill_one_file_together(tmp_path: Path) -> None:
    path = tmp_path / "replica.db"
    lanes = [subprocess.Popen([sys.executable, "-c", LANE, str(path), str(lane)]) for lane in range(4)]
    assert [lane.wait() for lane in lanes] == [0] * 4
    with closing(sqlite3.connect(path)) as connection:
        counts = [connection.execute(f'SELECT count(*) FROM "lane.{lane}"').fetchone()[0] for lane in range(4)]
        assert counts == [20] * 4
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_pipeline_killed_after_a_commit_keeps_the_replica_the_same_as_its_source(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario], tmp_path: Path
) -> None:
    path = tmp_path / "replica.db"
    scenario = make_scenario(database.dsn, destination={"type": "sqlite", "path": str(path)})
    scenario.sql(
        "CREATE TABLE orders (id int PRIMARY KEY, note text, amount numeric(10,2))",
        "INSERT INTO orders SELECT i, 'n' || i, i FROM generate_series(1, 2000) i",
        "CREATE TABLE lines (a int, b text, PRIMARY KEY (a, b))",
        "INSERT INTO lines SELECT i, 'l' || i FROM generate_series(1, 500) i",
    )
    scenario.apply()
    scenario.sql(
        "UPDATE orders SET amount = amount + 1 WHERE id % 3 = 0",
        "DELETE FROM orders WHERE id % 7 = 0",
        "UPDATE lines SET a = a + 1000 WHERE a < 100",
        "ALTER TABLE orders ADD COLUMN paid boolean DEFAULT true",
        "UPDATE orders SET paid = false WHERE id % 5 = 0",
    )
    assert scenario.run_once(failpoints="sqlite.committed:kill") == -signal.SIGKILL
    scenario.apply()
    with closing(sqlite3.connect(path)) as connection:
        orders = connection.execute('SELECT id, note, amount, paid FROM "public.orders" ORDER BY id').fetchall()
        lines = connection.execute('SELECT a, b FROM "public.lines" ORDER BY a').fetchall()
    assert [list(row) for row in orders] == scenario.value(
        "SELECT json_agg(json_build_array(id, note, amount::text, paid::int) ORDER BY id) FROM orders"
    )
    assert [list(row) for row in lines] == scenario.value(
        "SELECT json_agg(json_build_array(a, b) ORDER BY a) FROM lines"
    )
