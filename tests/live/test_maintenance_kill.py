"""`tailrace maintain` is killed at each of its steps while batches go on: no row is lost, doubled or brought back."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from tailrace.destination.delta.place import place_of
from tailrace.model.schema import TableName
from tailrace.system.failpoint import VARIABLE
from tests.support.database import PostgresDatabase
from tests.support.delta_table import queried
from tests.support.runner import command
from tests.support.scenario import Scenario

STEPS = (
    "delta.before_compact",
    "delta.before_fold_commit",
    "delta.before_log_entry",
    "delta.before_sync",
    "delta.before_collect",
)
ROWS = 3000


def maintain(scenario: Scenario, dies_at: str = "") -> int:
    """Its exit code."""
    environment = {**os.environ, **({VARIABLE: f"{dies_at}:kill"} if dies_at else {})}
    arguments = command("maintain", str(scenario.file))
    return subprocess.run(
        arguments, env=environment, stdout=subprocess.DEVNULL, start_new_session=True, check=False
    ).returncode


def test_maintenance_that_is_killed_at_any_step_harms_no_row(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn, destination={"updates": "merge_on_read"})
    scenario.sql(
        "CREATE TABLE kept (id int PRIMARY KEY, v int)",
        f"INSERT INTO kept SELECT i, 0 FROM generate_series(1, {ROWS}) i",
    )
    with scenario.run() as run:
        for number, step in enumerate(STEPS):
            for part in range(2):
                scenario.sql(
                    f"UPDATE kept SET v = v + 1 WHERE id % 5 = {part}", f"DELETE FROM kept WHERE id = {number}"
                )
                scenario.catch_up(run)
            scenario.sql(f"UPDATE kept SET v = v + 1 WHERE id % 7 = {number}")
            assert maintain(scenario, step) == -signal.SIGKILL, step
        scenario.catch_up(run)
        assert maintain(scenario) == 0
        scenario.sql("UPDATE kept SET v = v + 1 WHERE id % 11 = 0")
        scenario.catch_up(run)
        run.terminate()
        assert run.wait() == 0
    uri = place_of(str(scenario.lake), TableName("public", "kept"), {}).uri
    ids = [row["id"] for row in queried(uri)]
    assert len(ids) == len(set(ids)) == ROWS - len(STEPS) + 1
    scenario.execute("verify")
