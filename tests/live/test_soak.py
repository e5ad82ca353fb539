"""Everything at once: hard tables, several writers, and a pipeline that is killed again and again.

A few kills here; `make soak` is the same with many, and prints its seed.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing

import pytest

from tailrace.demo.traffic import Traffic
from tailrace.demo.workload import create_shop, load_shop
from tailrace.state.status import PipelineStatus
from tests.support.database import PostgresDatabase
from tests.support.fuzz.application import Application
from tests.support.fuzz.comparison import differences, held_in_lake
from tests.support.fuzz.sequence import SCHEMA
from tests.support.invocation import invoke
from tests.support.scenario import Scenario
from tests.support.type_zoo import ZooTraffic, create_zoo

KILLS = int(os.environ.get("TAILRACE_SOAK_KILLS", "2"))
SEED = int(os.environ.get("TAILRACE_SOAK_SEED", "1"))
RATE = float(os.environ.get("TAILRACE_SOAK_RATE", "40"))
"""Transactions a second of each of the four writers."""


def reached(batch: int) -> Callable[[PipelineStatus], bool]:
    return lambda status: (-1 if status.batch is None else status.batch) >= batch


@pytest.mark.timeout(900 + 60 * KILLS)
def test_a_pipeline_killed_at_random_under_load_loses_and_doubles_nothing(
    database: PostgresDatabase, scenario: Scenario
) -> None:
    print(f"{KILLS} kills with seed {SEED}")
    chance = random.Random(SEED)
    with database.connect() as conn:
        create_shop(conn)
        load_shop(conn, 0.05)
        create_zoo(conn)
    ZooTraffic(database.dsn, SEED).run(100)
    # Small batches and segments, so that kills fall between many of both; a small copy of several chunks. Rows are
    # marked and files merged at every turn, so that some kills fall into maintenance.
    scenario.write(
        source={"journal": {"segment_bytes": "1 MB"}, "copy": {"chunk_bytes": "1 MB"}},
        batch={"max_rows": 400},
        destination={"updates": "merge_on_read", "compact": {"files": 2}},
    )

    with ExitStack() as writers:
        for lane in (0, 1):
            writers.enter_context(Traffic(database.dsn, SEED + lane, RATE, truncates=True, lane=lane))
            writers.enter_context(ZooTraffic(database.dsn, SEED + 2 + lane, lane=lane, rate=RATE))
        for _ in range(KILLS):
            with scenario.run() as run:
                before = run.status()
                done = before.batch if before and before.batch is not None else -1
                run.wait_until(reached(done + chance.randint(0, 24)))
                # The moment of death is the only thing here that is not waited for.
                threading.Event().wait(chance.random())
                run.kill()

    scenario.apply()
    assert scenario.differences() == []
    assert scenario.doubled() == []


@pytest.mark.timeout(900 + 60 * KILLS)
def test_a_pipeline_killed_at_random_among_schema_changes_new_tables_and_resyncs_loses_and_doubles_nothing(
    database: PostgresDatabase, scenario: Scenario
) -> None:
    """What tests/fuzz does thousands of times in one process, here with Spark, all processes and real kills."""
    print(f"{KILLS} kills with seed {SEED}")
    chance = random.Random(SEED)
    has_trigger = SEED % 2 == 1  # even seeds do without it
    scenario.write(
        source={"journal": {"segment_bytes": "1 MB"}, "copy": {"chunk_bytes": "1 MB"}},
        batch={"max_rows": 400, "max_bytes": "2 MB"},
        tables={"include": [f"{SCHEMA}.*", "public.fence"]},
    )
    with closing(database.connect(prepare_threshold=None)) as session:
        application = Application(session, SEED, scenario.name, pause_seconds=10 / RATE, has_trigger=has_trigger)
        if has_trigger:
            scenario.execute("prepare")
        with application:
            for _ in range(KILLS):
                with scenario.run() as run:
                    before = run.status()
                    done = before.batch if before and before.batch is not None else -1
                    run.wait_until(reached(done + 1 + chance.randint(0, 12)))
                    status = run.status()
                    assert status is not None
                    # By now the table may have another name, or be gone; then the command says so.
                    invoke("resync", scenario.file, chance.choice(status.tables).name)
                    run.wait_until(reached(done + 1 + chance.randint(8, 20)))
                    threading.Event().wait(chance.random())
                    run.kill()
        application.finish()
        scenario.apply()
        found = differences(session, scenario.name, SCHEMA, held_in_lake(scenario.lake), lenient=not has_trigger)

    assert found == {}
    assert scenario.doubled() == []
