"""Killing a writer of Kafka at any point, a broker that dies, and a pipeline that keeps topics like its source."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.config.pipeline import load
from tailrace.destination.kafka.destination import KafkaDestination
from tailrace.system.failpoint import VARIABLE
from tailrace.testing.destination import insert
from tailrace.verify.comparison import verify
from tests.support.database import PostgresDatabase
from tests.support.destination_writing import write
from tests.support.kafka_broker import KafkaBroker, kafka_destination
from tests.support.scenario import Scenario
from tests.support.type_zoo import ZooTraffic, create_zoo

WRITER = """
import pickle, sys
from tailrace.testing.destination import delete, insert
from tests.support.destination_writing import write

destination = pickle.load(sys.stdin.buffer)
write(destination, 1, delete(id=0), *(insert(id=i, name="new", price=i) for i in range(1, 1000)))
"""


@pytest.mark.parametrize("place", ["kafka.before_commit", "kafka.committed"])
def test_a_writer_killed_at_any_point_leaves_all_of_its_batch_or_nothing_and_a_repeat_adds_no_record(
    kafka: KafkaBroker, place: str
) -> None:
    destination = kafka_destination(kafka)
    topic = destination.topic.format(schema="shop", table="items")
    write(destination, 0, insert(id=0, name="old", price=0))
    killed = run_writer(destination, place)
    assert killed == -signal.SIGKILL
    if place == "kafka.committed":
        assert len(kafka.records(topic)) == 1002
    else:
        # What the writer left open holds readers back, and none of it shows.
        assert len(kafka.records(topic)) == 1
        assert len(kafka.records(topic, committed=False)) == 1002
    for _ in range(2):
        assert run_writer(destination) == 0
        assert len(kafka.records(topic)) == 1002


def run_writer(destination: KafkaDestination, failpoint: str = "") -> int:
    environment = {**os.environ, VARIABLE: f"{failpoint}:kill"} if failpoint else {**os.environ}
    done = subprocess.run(
        [sys.executable, "-c", WRITER],
        input=pickle.dumps(destination),
        env=environment,
        start_new_session=True,
        check=False,
    )
    return done.returncode


def test_a_pipeline_killed_before_and_after_a_commit_keeps_every_type_and_writes_no_event_twice(
    kafka: KafkaBroker, database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn, destination={"type": "kafka", "servers": kafka.servers})
    with database.connect() as connection:
        create_zoo(connection)
    ZooTraffic(database.dsn, seed=1).run(150)
    scenario.apply()
    assert_equal(scenario)
    for number, failpoint in enumerate(("kafka.before_commit:kill", "kafka.committed:kill")):
        ZooTraffic(database.dsn, seed=2 + number).run(100)
        assert scenario.run_once(failpoints=failpoint) == -signal.SIGKILL
    database.run("ALTER TABLE zoo.full_log ADD COLUMN since text DEFAULT 'before'")
    ZooTraffic(database.dsn, seed=9).run(20)
    scenario.apply()
    assert_equal(scenario)
    assert_no_doubles(kafka, scenario)


def test_a_broker_that_dies_and_comes_back_costs_no_event_and_doubles_none(
    tmp_path: Path, database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    with KafkaBroker(tmp_path / "kafka") as broker:
        destination = {"type": "kafka", "servers": broker.servers, "timeout": "5s"}
        scenario = make_scenario(database.dsn, destination=destination, batch={"interval": "200ms"})
        database.run("CREATE TABLE public.items (id int PRIMARY KEY, name text)")
        with scenario.run() as run:
            scenario.catch_up(run)
            for start in (0, 100):
                database.run(f"INSERT INTO items SELECT n, 'a' FROM generate_series({start}, {start + 49}) n")
                broker.kill()
                database.run(f"INSERT INTO items SELECT n, 'b' FROM generate_series({start + 50}, {start + 99}) n")
                broker.start()
                scenario.catch_up(run)
        assert [one.equal for one in verify(load(scenario.file), "public.items")] == [True]
        assert_no_doubles(broker, scenario)
        assert len(broker.records(f"{scenario.name}.public.items")) == 200


def assert_equal(scenario: Scenario) -> None:
    verdicts = {one.table: one for one in verify(load(scenario.file))}
    assert verdicts["zoo.every_type"].source_rows > 10
    assert [(one.table, one.missing, one.extra, one.different) for one in verdicts.values() if not one.equal] == [
        (one.table, 0, 0, 0) for one in verdicts.values() if not one.compared
    ]


def assert_no_doubles(broker: KafkaBroker, scenario: Scenario) -> None:
    """No position of the log is in a topic twice, and a copied row is there once for each key."""
    for topic in broker.topics():
        if not topic.startswith(f"{scenario.name}."):
            continue
        events = [(record.key, json.loads(record.value)) for record in broker.records(topic) if record.value]
        changed = [(event["source"]["position"], event["op"]) for _, event in events if event["op"] != "r"]
        copied = [key for key, event in events if event["op"] == "r" and key is not None]
        assert (len(set(changed)), len(set(copied))) == (len(changed), len(copied)), topic
