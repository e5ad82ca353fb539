"""kill -9 at the steps of a schema change and of a resync: afterwards all is the same, and nothing happened twice."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.support.database import PostgresDatabase
from tests.support.scenario import Scenario

ROWS = "SELECT i, 'row ' || i, repeat(md5(i::text), 30) FROM generate_series(1, 3000) i"
TABLES = [
    "CREATE TABLE altered (id int PRIMARY KEY, a text, filler text)",
    f"INSERT INTO altered {ROWS}",
    "CREATE TABLE bag (id int, a text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT i % 10, 'row' FROM generate_series(1, 100) i",
]


def kill_once_at(scenario: Scenario, step: str) -> None:
    """A run that dies at the step; the next one must go on from there."""
    assert scenario.run_once(failpoints=f"{step}:kill!once") == -signal.SIGKILL
    assert step in scenario.run().acted()


def change(scenario: Scenario, number: int) -> None:
    """Rows before, within and after a schema change of each table, in one transaction."""
    scenario.sql(
        f"BEGIN; UPDATE altered SET a = 'before {number}' WHERE id % 7 = {number};"
        f" ALTER TABLE altered ADD COLUMN b{number} int;"
        f" INSERT INTO altered (id, a, b{number}) VALUES (10000 + {number}, 'new', {number});"
        f" ALTER TABLE bag ADD COLUMN b{number} text; INSERT INTO bag (id, b{number}) VALUES ({number}, 'x');"
        f" DELETE FROM bag WHERE id = {number}; COMMIT"
    )


@pytest.mark.parametrize("has_trigger", [True, False], ids=["event trigger", "relation messages"])
def test_a_schema_change_killed_between_its_version_and_its_rows_ends_up_the_same(
    has_trigger: bool, database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn)
    scenario.sql(*TABLES)
    if has_trigger:
        scenario.execute("prepare")
    scenario.apply()

    change(scenario, 1)
    # The version is stored by now, and nothing has read its rows.
    kill_once_at(scenario, "stream.planned")
    # The columns changed once more before the rows of the first change were applied.
    change(scenario, 2)
    scenario.sql("ALTER TABLE altered RENAME COLUMN a TO title")
    kill_once_at(scenario, "delta.before_commit")
    scenario.sql(
        "ALTER TABLE altered DROP COLUMN b1, ALTER COLUMN id TYPE bigint",
        "UPDATE altered SET title = 'wide' WHERE id % 11 = 0",
    )
    scenario.apply()

    assert scenario.differences() == []
    assert scenario.doubled() == []


def test_a_resync_killed_while_its_copy_is_held_back_goes_on_and_replaces_the_rows_once(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn, source={"copy": {"chunk_bytes": "1 MB"}}, batch={"max_bytes": "1 MB"})
    scenario.sql(*TABLES)
    scenario.apply()

    scenario.execute("resync", "public.altered")
    scenario.sql("UPDATE altered SET a = 'meanwhile' WHERE id % 5 = 0")
    kill_once_at(scenario, "delta.held")
    scenario.sql("ALTER TABLE altered ADD COLUMN b int DEFAULT 4", "DELETE FROM altered WHERE id % 9 = 0")
    scenario.execute("resync", "public.bag")
    kill_once_at(scenario, "delta.committed")
    scenario.sql("INSERT INTO altered (id, a) VALUES (20000, 'last')")
    scenario.apply()

    assert scenario.differences() == []
    assert scenario.doubled() == []
