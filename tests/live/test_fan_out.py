"""Several destinations fed from one slot: each has its own pace, errors, pauses and kills."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tailrace.destination.delta.destination import DeltaDestination
from tailrace.state.status import PipelineStatus
from tailrace.stream.fan_out import FanOut
from tailrace.stream.pipeline import Pipeline
from tailrace.testing.fault import FaultyDestination, HoldResponse
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.fan_out import FanOutScenario
from tests.support.invocation import invoke

SCHEMA = (
    "CREATE TABLE keyed (id int PRIMARY KEY, v int, note text)",
    "INSERT INTO keyed SELECT i, 0, 'row ' || i FROM generate_series(1, 500) i",
    "CREATE TABLE other (id int PRIMARY KEY, at timestamptz)",
    "INSERT INTO other SELECT i, now() FROM generate_series(1, 50) i",
)
CHANGES = (
    "UPDATE keyed SET v = v + 1 WHERE id % 3 = 0",
    "DELETE FROM keyed WHERE id % 50 = 7",
    "INSERT INTO other SELECT coalesce(max(id), 0) + 1, now() FROM other",
)


@pytest.fixture
def scenario(database: PostgresDatabase, tmp_path: Path) -> FanOutScenario:
    made = FanOutScenario(tmp_path / "fan", database.dsn, name="fan").prepare()
    made.sql(*SCHEMA)
    return made


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """An SQLite file that no one else can write."""
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


def waits(status: PipelineStatus) -> bool:
    return status.source is not None and status.source.error is not None


def test_a_dead_destination_holds_neither_the_others_nor_the_server_back_and_catches_up(
    scenario: FanOutScenario,
) -> None:
    with scenario.run() as run:
        scenario.reach(run, "lake", "replica")
        assert scenario.differing() == []
        slots = scenario.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()")
        assert slots == 1
        # On a slow machine a follower may start a second receiver, which ends because the journal has a writer.
        wait_until(lambda: len(run.processes(b"-m\0tailrace.source.postgres\0")) == 1)

        with locked(scenario.replica):
            scenario.sql(*CHANGES)
            run.wait_until(waits, destination="replica")
            for _ in range(5):
                scenario.sql(*CHANGES)
                scenario.reach(run, "lake")
            fence = scenario.fence()
            wait_until(lambda: scenario.confirmed() >= fence)
            behind = run.status("replica")
            assert behind is not None
            assert behind.position is not None
            assert int(behind.position[:16], 16) < fence
            # A kill does not lose what only the journal still has.
            run.kill()
    with scenario.run() as run:
        scenario.reach(run, "lake", "replica")
        assert scenario.differing() == []
        run.terminate()
        assert run.wait() == 0


def test_a_full_journal_says_for_which_destination_it_is_kept_and_loses_nothing(scenario: FanOutScenario) -> None:
    scenario.write(source={"journal": {"max_bytes": "4MB"}})
    rows = "INSERT INTO keyed SELECT 1000 * {0} + i, 0, repeat(md5(i::text), 30) FROM generate_series(1, 900) i"
    with scenario.run() as run:
        scenario.reach(run, "lake", "replica")
        with locked(scenario.replica):
            scenario.sql(*(rows.format(number) for number in range(1, 9)))
            run.wait_until(waits_for_replica, destination="lake")
        scenario.reach(run, "lake", "replica")
        assert scenario.differing() == []
        run.terminate()
        assert run.wait() == 0


def waits_for_replica(status: PipelineStatus) -> bool:
    return status.source is not None and "for the destination replica" in (status.source.error or "")


def test_a_destination_that_hangs_leaves_the_others_their_tasks(
    scenario: FanOutScenario, tmp_path: Path, spark: object
) -> None:
    plans = tmp_path / "plans"
    plans.mkdir()
    slow = FaultyDestination(inner=DeltaDestination(path=str(tmp_path / "slow")), directory=plans)
    fan = FanOut(
        name="fan",
        source={"type": "postgres", "dsn": scenario.dsn, "publish_without_identity": True},
        destinations={"lake": {"type": "delta", "path": str(scenario.lake)}, "slow": slow},
        state=str(scenario.state),
        spark={"master": "local[2]"},
    )
    fan.run(once=True)
    slow.plan(HoldResponse())
    scenario.sql(*CHANGES)
    statuses: dict[str, PipelineStatus] = {}

    def lake_done(status: PipelineStatus) -> None:
        statuses[status.pipeline] = status
        lake = statuses.get("fan.lake")
        if lake is not None and slow.holding() and lake.changes_per_second and lake.lag_bytes == 0:
            slow.release()
            fan.drain()

    fan.run(on_progress=lake_done)
    assert slow.pending() == 0
    fan.run(once=True)
    assert scenario.differences() == []
    found = fan.status()
    assert {name: status.errored for name, status in found.items()} == {"lake": (), "slow": ()}


def test_a_destination_added_later_is_filled_without_the_others_and_one_removed_is_let_go(
    scenario: FanOutScenario,
) -> None:
    lake = {"type": "delta", "path": str(scenario.lake)}
    replica = {"type": "sqlite", "path": str(scenario.replica)}
    scenario.rewrite({"lake": lake})
    FanOut.from_file(scenario.file).run(once=True)
    copied = rows_copied(scenario, "lake")
    scenario.sql(*CHANGES)

    scenario.rewrite({"lake": lake, "replica": replica})
    FanOut.from_file(scenario.file).run(once=True)
    assert scenario.differing() == []
    assert rows_copied(scenario, "lake") == copied
    assert scenario.cursors() == {"pipeline lake", "pipeline replica"}

    scenario.rewrite({"replica": replica})
    scenario.sql(*CHANGES)
    FanOut.from_file(scenario.file).run(once=True)
    assert scenario.differing() == []
    assert scenario.cursors() == {"pipeline replica"}

    # Back again, it is a new one; and so is the only one of a file.
    scenario.sql("CREATE TABLE bag (v int)", "INSERT INTO bag SELECT generate_series(1, 10)")
    scenario.rewrite({"replica": replica, "lake": lake})
    FanOut.from_file(scenario.file).run(once=True)
    assert scenario.differing() == []
    scenario.write_single(lake)
    scenario.sql(*CHANGES, "INSERT INTO bag SELECT generate_series(1, 5)")
    Pipeline.from_file(scenario.file).run(once=True)
    assert scenario.differences() == []
    assert scenario.cursors() == {"pipeline"}
    scenario.rewrite({"lake": lake})
    scenario.sql(*CHANGES, "INSERT INTO bag SELECT generate_series(1, 5)")
    FanOut.from_file(scenario.file).run(once=True)
    assert scenario.differences() == []
    assert scenario.cursors() == {"pipeline lake"}


def rows_copied(scenario: FanOutScenario, destination: str) -> dict[str, int]:
    status = FanOut.from_file(scenario.file).status()[destination]
    return {table.name: table.rows_copied for table in status.tables}


def test_a_destination_that_is_not_ready_stops_only_itself(scenario: FanOutScenario) -> None:
    scenario.replica.mkdir()  # a folder where a file should be
    fan = FanOut.from_file(scenario.file)
    with pytest.raises(Exception, match=r"replica\.db"):
        fan.run(once=True)
    assert scenario.differences() == []
    shown = json.loads(scenario.execute("status", "--json"))["destinations"]
    assert [one["name"] for one in shown] == ["lake", "replica"]
    assert "replica.db" in shown[1]["last_run"]["message"]

    # While another one runs, it is tried again.
    with scenario.run() as run:
        scenario.sql(*CHANGES)
        scenario.reach(run, "lake")
        scenario.replica.rmdir()
        scenario.reach(run, "replica")
        assert scenario.differing() == []
        run.terminate()
        assert run.wait() == 0


def test_requests_are_for_one_destination_or_for_each(scenario: FanOutScenario) -> None:
    fan = FanOut.from_file(scenario.file)
    fan.run(once=True)
    scenario.execute("pause", "--destination", "replica", "--json")
    scenario.sql(*CHANGES)
    fan.run(once=True)
    assert scenario.differences() == []
    assert scenario.differing() == ["replica: public.keyed", "replica: public.other"]

    asked = invoke("resync", scenario.file, "public.keyed")
    assert asked.exit_code == 2
    assert "--destination lake" in asked.output
    resumed = json.loads(scenario.execute("resume", "--json"))["destinations"]
    assert [(one["name"], len(one["requests"])) for one in resumed] == [("lake", 0), ("replica", 3)]
    fan.run(once=True)
    assert scenario.differing() == []

    copied = rows_copied(scenario, "lake")
    scenario.execute("reset", "--destination", "replica", "--yes")
    assert scenario.cursors() == {"pipeline lake"}
    fan.run(once=True)
    assert scenario.differing() == []
    assert rows_copied(scenario, "lake") == copied

    scenario.execute("reset", "--yes")
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    assert scenario.value(slots) == 0
    fan.run(once=True)
    assert scenario.differing() == []


def test_a_kill_at_a_step_of_any_destination_loses_nothing_and_doubles_nothing(scenario: FanOutScenario) -> None:
    steps = ["pipeline.prepared", "delta.before_commit", "sqlite.committed", "pipeline.before_release"]
    orders = ",".join(f"{step}:kill!once" for step in steps)
    for _ in steps:
        scenario.sql(*CHANGES)
        assert scenario.run_once(failpoints=orders) == -signal.SIGKILL
    FanOut.from_file(scenario.file).run(once=True)
    assert scenario.differing() == []
    assert scenario.run().acted() == set(steps)
