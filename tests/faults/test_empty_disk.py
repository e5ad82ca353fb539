"""A driver that is killed and started again with an empty disk: the store and the journal are all that is left.

The journal is in an object store, as it is where the driver has no disk that lasts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailrace.config.pipeline import load
from tailrace.demo.server import EmbeddedPostgres
from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario
from tests.support.slatedb_bucket import BucketProcess, serving

STEPS = (
    "receiver.appended",
    "stream.planned",
    "pipeline.before_planned",
    "pipeline.before_apply",
    "delta.before_commit",
    "delta.committed",
    "pipeline.applied",
    "pipeline.before_release",
    "pipeline.released",
)
"""The steps of a change, in the order in which they become durable."""


@pytest.fixture
def bucket() -> Iterator[BucketProcess]:
    with serving() as server:
        yield server


@pytest.fixture
def diskless(
    postgres: EmbeddedPostgres,
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
    bucket: BucketProcess,
    tmp_path: Path,
) -> Scenario:
    """Two tables with a key and one without, the state in Postgres, the journal in an object store."""
    followed, kept = make_database(postgres), make_database(postgres)
    scenario = Scenario(
        tmp_path / "diskless",
        followed.dsn,
        name="diskless",
        source={"journal": {"path": "s3://diskless/journal", "storage_options": bucket.options}},
        store={"type": "postgres", "dsn": kept.dsn},
    ).prepare()
    scenario.sql(
        "CREATE TABLE keyed (id int PRIMARY KEY, v int)",
        "CREATE TABLE other (id int PRIMARY KEY, v int)",
        "CREATE TABLE keyless (v int)",
        "INSERT INTO keyed SELECT i, 0 FROM generate_series(1, 500) i",
        "INSERT INTO other SELECT i, 0 FROM generate_series(1, 500) i",
    )
    return scenario


def change(scenario: Scenario, number: int) -> None:
    scenario.sql(
        f"UPDATE keyed SET v = v + 1 WHERE id % 3 = {number % 3}",
        f"UPDATE other SET v = v + 1 WHERE id % 4 = {number % 4}",
        f"INSERT INTO keyless SELECT {number} FROM generate_series(1, 20)",
    )


def lose_disk(scenario: Scenario) -> None:
    shutil.rmtree(scenario.state)


def test_a_driver_that_dies_at_any_step_goes_on_with_an_empty_disk_or_an_old_one(
    diskless: Scenario, tmp_path: Path
) -> None:
    assert diskless.run_once(failpoints="delta.committed:kill") != 0, "the copy is interrupted"
    old = tmp_path / "old"
    diskless.state.rename(old)
    diskless.apply()
    for number, step in enumerate(STEPS):
        lose_disk(diskless)
        # More changes than the batch had that was interrupted: were it planned again with them, a table that has the
        # batch already would take them for a repeat.
        change(diskless, number)
        run = diskless.run(once=True, failpoints=f"{step}:kill")
        with run:
            assert run.wait() != 0, step
            assert step in run.acted(), step
    lose_disk(diskless)
    old.rename(diskless.state)
    change(diskless, len(STEPS))
    diskless.apply()
    assert diskless.differences() == []
    assert diskless.doubled() == []
    with load(diskless.file).store_address.open_reading() as store:
        assert {table.name: table.rows_copied for table in store.tables() if table.rows_copied > 500} == {}
