"""Everything at once: hard tables, several writers, and a pipeline that is killed again and again."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from tailrace.status import Status
from tailrace.testing.database import Database
from tailrace.testing.scenario import Scenario
from tailrace.testing.traffic import Traffic
from tailrace.testing.workload import create_shop, load_shop
from tailrace.testing.zoo import Keeper, create_zoo

KILLS = int(os.environ.get("TAILRACE_SOAK_KILLS", "4"))
SEED = int(os.environ.get("TAILRACE_SOAK_SEED", "1"))
RATE = float(os.environ.get("TAILRACE_SOAK_RATE", "40"))
"""Transactions a second of each of the four writers."""


def reached(batch: int) -> Callable[[Status], bool]:
    return lambda status: (-1 if status.batch is None else status.batch) >= batch


@pytest.mark.timeout(300 + 60 * KILLS)
def test_a_pipeline_killed_at_random_under_load_loses_and_doubles_nothing(
    database: Database, scenario: Scenario
) -> None:
    chance = random.Random(SEED)
    with database.connect() as conn:
        create_shop(conn)
        load_shop(conn, 0.05)
        create_zoo(conn)
    Keeper(database.dsn, SEED).run(100)
    # Small batches and segments, so that kills fall between many of both; a small copy of several chunks.
    scenario.write(
        source={"journal": {"segment_bytes": "1 MB"}, "copy": {"chunk_bytes": "1 MB"}}, batch={"max_rows": 400}
    )

    with ExitStack() as writers:
        for lane in (0, 1):
            writers.enter_context(Traffic(database.dsn, SEED + lane, RATE, truncates=True, lane=lane))
            writers.enter_context(Keeper(database.dsn, SEED + 2 + lane, lane=lane, rate=RATE))
        for _ in range(KILLS):
            with scenario.run() as run:
                before = run.status()
                done = before.batch if before and before.batch is not None else -1
                run.wait_until(reached(done + chance.randint(0, 8)))
                # The moment of death is the only thing here that is not waited for.
                threading.Event().wait(chance.random())
                run.kill()

    assert scenario.run_once() == 0
    assert scenario.differences() == []
    assert scenario.doubled() == []
