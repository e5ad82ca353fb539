"""A finding about one table stops that table, while the pipeline runs and at its next start, and no other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.database import PostgresDatabase
from tests.support.invocation import invoke
from tests.support.postgres_to_delta import Following
from tests.support.scenario import Scenario

BAD = ("public.nothing", "public.own", "public.private", "public.twin")


class Narrow(Following):
    """A role that may replicate, and read what it was granted, follows a publication of all tables."""

    def __init__(self, scenario: Scenario, dsn: str) -> None:
        self.options: dict[str, Any] = {
            "source": {"dsn": dsn, "publication": "everything"},
            "tables": {"defaults": {"errors": {"backoff": "100ms"}}},
        }
        scenario.write(**self.options)
        super().__init__(scenario)

    def reason(self, table: str) -> str:
        return self.wait_until_errored(table).reason or ""


@pytest.fixture
def following(database: PostgresDatabase, make_scenario: Callable[..., Scenario]) -> Iterator[Narrow]:
    scenario = make_scenario(database.dsn)
    database.run(
        *(f"CREATE TABLE {name} (id int PRIMARY KEY, a int)" for name in ("good", "own", "twin", "nothing")),
        "INSERT INTO good VALUES (1, 1)",
        "CREATE PUBLICATION everything FOR ALL TABLES",
        "DROP ROLE IF EXISTS narrow",
        "CREATE ROLE narrow LOGIN REPLICATION",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO narrow",
    )
    try:
        with Narrow(scenario, database.server.dsn(database.name, user="narrow")) as following:
            yield following
    finally:
        database.run("DROP OWNED BY narrow", "DROP ROLE narrow")


def test_only_the_tables_that_something_is_wrong_with_stop_and_each_comes_back_after_its_fix(
    following: Narrow,
) -> None:
    following.catch_up()
    following.sql(
        'ALTER TABLE twin ADD "A" int',
        "INSERT INTO twin VALUES (1, 2, 3)",
        "ALTER TABLE own ADD _tailrace_exact text",
        "INSERT INTO own VALUES (1, 2, 'x')",
        "CREATE TABLE private (id int PRIMARY KEY)",
        "INSERT INTO private VALUES (1)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
        "INSERT INTO good VALUES (2, 2)",
    )
    assert "differ only in case" in following.reason("twin")
    assert "a name that tailrace uses" in following.reason("own")
    assert "permission denied" in following.reason("private") or "may not read" in following.reason("private")
    following.catch_up(without=BAD)

    following.restart(**following.options)
    assert "REPLICA IDENTITY NOTHING" in following.reason("nothing")
    following.sql("INSERT INTO good VALUES (3, 3)")
    following.catch_up(without=BAD)
    assert following.lake("good").keys() == {1, 2, 3}
    checked = invoke("check", following.scenario.file)
    assert checked.exit_code == 3
    assert all(f"error   {name}: " in checked.output for name in BAD)

    following.sql(
        'ALTER TABLE twin RENAME "A" TO b',
        "ALTER TABLE own RENAME _tailrace_exact TO exact",
        "GRANT SELECT ON private TO narrow",
        "ALTER TABLE nothing REPLICA IDENTITY DEFAULT",
        *(f"INSERT INTO {name} (id) VALUES (9)" for name in BAD),
    )
    following.scenario.execute("retry")
    following.catch_up()
    following.require_same()
