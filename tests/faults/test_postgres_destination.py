"""Killing a writer of a Postgres replica at any point, and a pipeline that keeps one the same as its source."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.config.pipeline import load
from tailrace.demo.server import EmbeddedPostgres
from tailrace.destination import Batch, TableBatch
from tailrace.destination.postgres.destination import PostgresDestination
from tailrace.option.value import Dsn
from tailrace.system.failpoint import VARIABLE
from tailrace.testing.destination import ITEMS, changes_of, insert
from tailrace.verify.comparison import verify
from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario
from tests.support.type_zoo import ZooTraffic, create_zoo

WRITER = """
import sys
from pathlib import Path
from tailrace.destination import Batch, Stage, TableBatch
from tailrace.destination.postgres.destination import PostgresDestination
from tailrace.option.value import Dsn
from tailrace.testing.destination import ITEMS, changes_of, read, update

destination, stage = PostgresDestination(dsn=Dsn(sys.argv[1])), Stage(Path(sys.argv[2]))
copied = changes_of(ITEMS, *(read(id=i, name="copied", price=i) for i in range(1000)))
batch = TableBatch(
    ITEMS, Batch("p", 1), changes_of(ITEMS, update(id=5, price=50)), [destination.write_rows(ITEMS, copied, stage)],
    begins_copy=True, completes_copy=True, stage=stage,
)
destination.write_changes(batch)
"""


@pytest.mark.parametrize("place", ["postgres_destination.before_commit", "postgres_destination.committed"])
def test_a_writer_killed_at_any_point_leaves_the_table_before_or_after_its_batch(
    database: PostgresDatabase, place: str, tmp_path: Path
) -> None:
    destination = PostgresDestination(dsn=Dsn(database.dsn))
    destination.write_changes(TableBatch(ITEMS, Batch("p", 0), changes_of(ITEMS, insert(id=1, name="old", price=1))))
    command = [sys.executable, "-c", WRITER, database.dsn, str(tmp_path / "staged")]
    killed = subprocess.run(command, env={**os.environ, VARIABLE: f"{place}:kill"}, start_new_session=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    committed = place == "postgres_destination.committed"
    assert database.rows("SELECT count(*) FROM shop.items") == [(1000 if committed else 1,)]
    assert subprocess.run(command, check=False).returncode == 0
    assert database.rows("SELECT count(*) FROM shop.items") == [(1000,)]
    assert database.rows("SELECT name, price FROM shop.items WHERE id = 5") == [("copied", 50)]
    assert database.rows("SELECT tablename FROM pg_tables WHERE schemaname = 'shop'") == [("items",)]


def test_a_pipeline_killed_after_a_commit_keeps_every_type_the_same_as_its_source(
    database: PostgresDatabase,
    postgres: EmbeddedPostgres,
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
    make_scenario: Callable[..., Scenario],
) -> None:
    replica = make_database(postgres)
    scenario = make_scenario(
        database.dsn, destination={"type": "postgres", "dsn": replica.dsn, "schema": "copy_{schema}"}
    )
    with database.connect() as connection:
        create_zoo(connection)
    ZooTraffic(database.dsn, seed=1).run(150)
    scenario.apply()
    assert_equal(scenario)
    ZooTraffic(database.dsn, seed=2).run(200)
    database.run("ALTER TABLE zoo.full_log ADD COLUMN since text DEFAULT 'before'")
    ZooTraffic(database.dsn, seed=3).run(20)
    # The batch that is repeated finds itself in the database.
    assert scenario.run_once(failpoints="postgres_destination.committed:kill") == -signal.SIGKILL
    scenario.apply()
    assert_equal(scenario)
    kinds = replica.rows(
        "SELECT DISTINCT format_type(atttypid, NULL) FROM pg_attribute WHERE attrelid = 'copy_zoo.every_type'::regclass"
    )
    assert {"uuid", "jsonb", "inet", "interval", "numeric", "tstzrange", "integer[]", "uuid[]"} <= {k for (k,) in kinds}
    replica.run("DELETE FROM copy_zoo.every_type WHERE id = (SELECT min(id) FROM copy_zoo.every_type)")
    assert [one.missing for one in verify(load(scenario.file), "zoo.every_type")] == [1]


def assert_equal(scenario: Scenario) -> None:
    verdicts = {one.table: one for one in verify(load(scenario.file))}
    assert verdicts["zoo.every_type"].source_rows > 10
    assert [(one.table, one.missing, one.extra, one.different) for one in verdicts.values() if not one.equal] == [
        (one.table, 0, 0, 0) for one in verdicts.values() if not one.compared
    ]
