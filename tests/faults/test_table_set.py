"""Tables that come and go while a pipeline runs."""

from __future__ import annotations

from collections.abc import Callable

from tailrace.state import TableState
from tests.support.database import PostgresDatabase
from tests.support.postgres_to_delta import Following
from tests.support.scenario import Scenario

TABLES = [
    "CREATE TABLE first (id int PRIMARY KEY, v text)",
    "CREATE TABLE second (id int PRIMARY KEY, v text)",
    "CREATE TABLE outside (id int PRIMARY KEY, v text)",
    "CREATE TABLE excluded (id int PRIMARY KEY, v text)",
    *(
        f"INSERT INTO {name} SELECT i, 'row ' || i FROM generate_series(1, 20) i"
        for name in ("first", "second", "outside", "excluded")
    ),
]


def names(following: Following) -> set[str]:
    return {record.name.removeprefix("public.") for record in following.records().values()}


def take_out_and_put_back(following: Following, publication: str) -> None:
    """A table that leaves the publication is forgotten with its rows kept; when it comes back it is copied again."""
    oid = following.oid("second")
    following.sql(f"ALTER PUBLICATION {publication} DROP TABLE second")
    following.wait_until_gone(oid)
    following.sql("UPDATE second SET v = 'unseen' WHERE id = 1", "DELETE FROM second WHERE id = 2")
    following.catch_up()
    assert "second" not in names(following)
    assert following.lake("second")[1]["v"] == "row 1"
    assert 2 in following.lake("second")

    following.sql(f"ALTER PUBLICATION {publication} ADD TABLE second", "INSERT INTO second VALUES (50, 'seen')")
    assert following.wait_until_ready("second").rows_copied > 0
    following.catch_up()
    following.require_same()


def test_a_publication_that_tailrace_made_takes_in_new_tables_but_none_that_was_taken_out(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn, tables={"exclude": ["*.excluded*"]})
    scenario.sql(*TABLES)
    with Following(scenario) as following:
        following.catch_up()
        assert names(following) == {"fence", "first", "second", "outside"}

        following.sql(
            "CREATE TABLE later (id int PRIMARY KEY, v text)",
            "INSERT INTO later SELECT i, 'row ' || i FROM generate_series(1, 100) i",
            "CREATE TABLE excluded_later (id int PRIMARY KEY)",
            "INSERT INTO first VALUES (50, 'meanwhile')",
        )
        record = following.wait_until_ready("later")
        assert TableState.DATA_SYNC in record.since
        following.sql("UPDATE later SET v = 'followed' WHERE id = 1")
        following.catch_up()
        following.require_same()

        take_out_and_put_back(following, scenario.name)

        # What leaves and comes back between two looks was not sent in between, and is copied again just so.
        following.sql(
            f"ALTER PUBLICATION {scenario.name} DROP TABLE first",
            "UPDATE first SET v = 'unseen' WHERE id = 1",
            f"ALTER PUBLICATION {scenario.name} ADD TABLE first",
        )
        following.run.wait_until(lambda _: following.lake("first")[1]["v"] == "unseen")
        following.catch_up()
        following.require_same()

        # A dropped table and one taken out for good stay as they are in the lake.
        later, outside = following.oid("later"), following.oid("outside")
        following.sql("DROP TABLE later", f"ALTER PUBLICATION {scenario.name} DROP TABLE outside")
        following.wait_until_gone(later)
        following.wait_until_gone(outside)
        assert len(following.lake("later")) == 100
        following.restart(tables={"exclude": ["*.excluded*"]})
        following.catch_up()
        assert names(following) == {"fence", "first", "second"}
        status = following.run.status()
        assert status is not None
        assert any(notice.message.endswith("followed: public.outside") for notice in status.notices)
        following.require_same()


def test_a_publication_that_others_made_is_followed_as_it_changes_and_never_added_to(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    scenario = make_scenario(database.dsn, source={"publication": "theirs"}, tables={"exclude": ["*.excluded"]})
    scenario.sql(*TABLES, "CREATE PUBLICATION theirs FOR TABLE fence, first, second, excluded")
    with Following(scenario) as following:
        following.catch_up()
        assert names(following) == {"fence", "first", "second"}

        following.sql(
            "CREATE TABLE later (id int PRIMARY KEY)",
            "ALTER PUBLICATION theirs ADD TABLE outside",
            "UPDATE outside SET v = 'followed' WHERE id = 1",
        )
        following.wait_until_ready("outside")
        following.catch_up()
        assert names(following) == {"fence", "first", "second", "outside"}
        following.require_same()

        take_out_and_put_back(following, "theirs")
        assert scenario.value("SELECT count(*) FROM pg_publication_tables WHERE tablename = 'later'") == 0
