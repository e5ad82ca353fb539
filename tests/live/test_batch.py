"""Batches: what one costs Spark, what upstream keeps meanwhile, that a signal lets it end, and which is the last."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tailrace.demo.traffic import Traffic
from tailrace.demo.workload import create_shop, load_shop
from tailrace.model.schema import TableName
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.failpoints import COMMIT
from tests.support.process import send
from tests.support.runner import RunningPipeline
from tests.support.scenario import Scenario

TABLES = 9


def test_a_batch_is_one_job_of_spark_however_many_tables_it_holds(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn)
    events = scenario.folder / "events"
    events.mkdir()
    conf = {"eventLog.enabled": True, "eventLog.dir": f"file:{events}", "eventLog.compress": False}
    scenario.write(
        spark={"master": "local[2]", "conf": {f"spark.{name}": str(value).lower() for name, value in conf.items()}}
    )
    scenario.sql(*(f"CREATE TABLE t{number} (id int PRIMARY KEY)" for number in range(TABLES)))
    with scenario.run() as run:
        scenario.catch_up(run)
        scenario.sql(" ".join(f"INSERT INTO t{number} VALUES (1);" for number in range(TABLES)))
        scenario.catch_up(run)
        run.terminate()
        assert run.wait() == 0

    assert scenario.differences() == []
    [batch] = {scenario.batch_ids(TableName("public", f"t{number}"))[-1] for number in range(TABLES)}
    jobs = _jobs(scenario)
    assert jobs[batch] == 1
    assert set(jobs.values()) == {1}


def _jobs(scenario: Scenario) -> Counter[int]:
    """How many jobs Spark began for each batch."""
    found: Counter[int] = Counter()
    for log in (scenario.folder / "events").rglob("events_*"):
        for event in map(json.loads, log.read_text().splitlines()):
            if event["Event"] == "SparkListenerJobStart":
                found[int(event["Properties"]["streaming.sql.batchId"])] += 1
    return found


@contextmanager
def stopped_before_its_commit(scenario: Scenario) -> Iterator[tuple[RunningPipeline, list[int]]]:
    """A run that has a row of `t` in hand and does not get to write it before its processes get SIGCONT."""
    scenario.sql("CREATE TABLE t (id int PRIMARY KEY)")
    run = scenario.run(failpoints=f"{COMMIT}:pause!once")
    mark = run.marks / COMMIT
    mark.parent.mkdir()
    mark.touch()  # while it is there, the failpoint rests
    with run:
        scenario.catch_up(run)
        mark.unlink()
        scenario.sql("INSERT INTO t VALUES (1)")
        wait_until(lambda: bool(run.paused()))
        yield run, run.paused()


def test_upstream_keeps_what_a_batch_has_in_hand_until_it_is_in_the_lake(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn, source={"acknowledge": "applied", "heartbeat": "1s"})
    with stopped_before_its_commit(scenario) as (run, paused):
        written = scenario.value("SELECT pg_current_wal_insert_lsn()::text")
        passed = f"confirmed_flush_lsn >= '{written}' FROM pg_replication_slots WHERE slot_name LIKE 'tailrace%'"
        # By then the receiver has reported its position to the server several times.
        wait_until(lambda: scenario.value(f"SELECT pg_current_wal_insert_lsn() - '{written}'::pg_lsn > 500"))
        assert not scenario.value(f"SELECT {passed}")
        send(paused, signal.SIGCONT)
        wait_until(lambda: scenario.value(f"SELECT {passed}"))
        scenario.catch_up(run)
    assert scenario.differences() == []


def test_a_signal_lets_the_batch_in_hand_end(scenario: Scenario) -> None:
    with stopped_before_its_commit(scenario) as (run, paused):
        run.terminate()
        wait_until(lambda: (scenario.state / "drain").exists())
        send(paused, signal.SIGCONT)
        assert run.wait() == 0
    assert scenario.differences() == []
    assert scenario.doubled() == []


def test_a_single_run_ends_while_the_source_is_written_to_all_the_time(
    database: PostgresDatabase, scenario: Scenario
) -> None:
    with database.connect() as conn:
        create_shop(conn)
        load_shop(conn, 0.01)
    with Traffic(database.dsn, seed=1, rate=100):
        scenario.apply()
    scenario.apply()
    assert scenario.differences() == []
    assert scenario.doubled() == []
