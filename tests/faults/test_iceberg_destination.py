"""Killing a writer of an Iceberg table at any point, and a pipeline that keeps one the same as its source."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.config.pipeline import load
from tailrace.destination import Batch, TableBatch
from tailrace.destination.iceberg.destination import IcebergDestination
from tailrace.destination.iceberg.snapshot import IcebergSnapshot
from tailrace.model.schema import TableName
from tailrace.system.failpoint import VARIABLE
from tailrace.testing.destination import ITEMS, changes_of, delete, insert
from tailrace.verify.comparison import verify
from tests.support.database import PostgresDatabase
from tests.support.iceberg_table import opened, rows_in
from tests.support.scenario import Scenario
from tests.support.type_zoo import ZooTraffic, create_zoo

WRITER = """
import sys
from pathlib import Path
from tailrace.destination import Batch, Stage, TableBatch
from tailrace.destination.iceberg.destination import IcebergDestination
from tailrace.testing.destination import ITEMS, changes_of, read, update

destination, stage = IcebergDestination(warehouse=sys.argv[1]), Stage(Path(sys.argv[1] + "-staged"))
copied = changes_of(ITEMS, *(read(id=i, name="copied", price=i) for i in range(1000)))
batch = TableBatch(
    ITEMS, Batch("p", 1), changes_of(ITEMS, update(id=5, price=50)), [destination.write_rows(ITEMS, copied, stage)],
    begins_copy=True, completes_copy=True, stage=stage,
)
destination.write_changes(batch)
"""


@pytest.mark.parametrize("place", ["iceberg.before_commit", "iceberg.committed"])
def test_a_writer_killed_at_any_point_leaves_the_table_before_or_after_its_batch(tmp_path: Path, place: str) -> None:
    destination = IcebergDestination(warehouse=str(tmp_path / "ice"))
    destination.write_changes(TableBatch(ITEMS, Batch("p", 0), changes_of(ITEMS, insert(id=1, name="old", price=1))))
    killed = subprocess.run(
        [sys.executable, "-c", WRITER, destination.warehouse],
        env={**os.environ, VARIABLE: f"{place}:kill"},
        start_new_session=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(rows_in(destination, ITEMS.table)) == (1000 if place == "iceberg.committed" else 1)
    again = subprocess.run([sys.executable, "-c", WRITER, destination.warehouse], check=False)
    assert again.returncode == 0
    rows = {row["id"]: row for row in rows_in(destination, ITEMS.table)}
    assert len(rows) == 1000
    assert rows[5] == {"id": 5, "name": "copied", "price": 50}


def test_a_pipeline_killed_after_a_commit_keeps_every_type_the_same_as_its_source(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario], tmp_path: Path
) -> None:
    destination = IcebergDestination(warehouse=str(tmp_path / "ice"))
    scenario = make_scenario(database.dsn, destination={"type": "iceberg", "warehouse": destination.warehouse})
    with database.connect() as connection:
        create_zoo(connection)
    ZooTraffic(database.dsn, seed=1).run(150)
    scenario.apply()
    assert_equal(scenario)
    ZooTraffic(database.dsn, seed=2).run(200)
    database.run("ALTER TABLE zoo.full_log ADD COLUMN since text DEFAULT 'before'")
    ZooTraffic(database.dsn, seed=3).run(20)
    # The batch that is repeated finds itself in the table.
    assert scenario.run_once(failpoints="iceberg.committed:kill") == -signal.SIGKILL
    scenario.apply()
    assert_equal(scenario)
    table = TableName("zoo", "every_type")
    first = min(opened(destination, table).scan(selected_fields=("id",)).to_arrow().column("id").to_pylist())
    snapshot = IcebergSnapshot.load(destination, table)
    assert snapshot is not None
    kept = snapshot.columns.kept
    destination.write_changes(TableBatch(kept, Batch("another", 0), changes_of(kept, delete(id=first))))
    assert [one.missing for one in verify(load(scenario.file), "zoo.every_type")] == [1]


def assert_equal(scenario: Scenario) -> None:
    verdicts = {one.table: one for one in verify(load(scenario.file))}
    assert verdicts["zoo.every_type"].source_rows > 10
    assert [(one.table, one.missing, one.extra, one.different) for one in verdicts.values() if not one.equal] == [
        (one.table, 0, 0, 0) for one in verdicts.values() if not one.compared
    ]
