"""kill -9 at every step of a copy and of a batch: afterwards all is the same, and nothing happened twice."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tailrace.model.schema import TableName
from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario

# In the order in which a run reaches them. Each kills once, so each start gets one step further than the last.
COPY_STEPS = [
    "postgres.before_slot",
    "pipeline.prepared",
    "stream.staged",
    "delta.before_commit",
    "delta.committed",
    "pipeline.before_release",
]
LOG_STEPS = [
    "receiver.appended",
    "stream.before_write",
    "delta.before_commit",
    "delta.committed",
    "pipeline.applied",
    "pipeline.before_release",
    "pipeline.released",
]

ROWS = "INSERT INTO keyed SELECT i, 'row ' || i, repeat('x', 600) FROM generate_series(1, 6000) i"
TABLES = [
    "CREATE TABLE keyed (id int PRIMARY KEY, v text, filler text)",
    "CREATE TABLE keyless (v text)",
    ROWS,
    "INSERT INTO keyless SELECT 'row ' || i % 50 FROM generate_series(1, 500) i",
]
CHANGES = [
    "UPDATE keyed SET v = v || '!' WHERE id % 7 = 0",
    "DELETE FROM keyed WHERE id % 11 = 0",
    "UPDATE keyed SET id = -id WHERE id % 13 = 0",
    "INSERT INTO keyless SELECT 'more ' || i % 3 FROM generate_series(1, 100) i",
]


def kill_at(scenario: Scenario, steps: list[str]) -> None:
    """Run to the end, with a kill at each of the steps on the way."""
    orders = ",".join(f"{step}:kill!once" for step in steps)
    for _ in steps:
        scenario.sql("INSERT INTO keyless VALUES ('one more')")
        assert scenario.run_once(failpoints=orders) == -signal.SIGKILL
    scenario.apply()
    assert scenario.run().acted() == set(steps)


def test_a_copy_killed_at_every_step_ends_up_the_same_and_finished_chunks_are_not_copied_again(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    # About four chunks, one a batch, so that some are finished before each of the later kills.
    scenario = make_scenario(
        database.dsn, source={"copy": {"chunk_bytes": "1 MB"}}, batch={"max_bytes": "1 MB", "max_rows": 2000}
    )
    scenario.sql(*TABLES)

    kill_at(scenario, COPY_STEPS)

    assert scenario.differences() == []
    assert scenario.doubled() == []
    assert len(scenario.batch_ids(TableName("public", "keyed"))) >= 4
    assert scenario.rows_written(TableName("public", "keyed")) == 6000
    slots = scenario.value(
        "SELECT array_agg(slot_name::text) FROM pg_replication_slots WHERE database = current_database()"
    )
    assert slots == [f"tailrace_{scenario.name}"]


def test_a_batch_killed_at_every_step_is_applied_once(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    # Small tables are rewritten, and killed in other tests while they are: here their rows are marked.
    scenario = make_scenario(database.dsn, destination={"updates": "merge_on_read"})
    scenario.sql(*TABLES)
    scenario.apply()
    scenario.sql(*CHANGES)

    kill_at(scenario, LOG_STEPS)

    assert scenario.differences() == []
    assert scenario.doubled() == []
