"""Tables whose columns, types, keys and names change while a pipeline follows them, with the event trigger and without.

One run for each of the two; every test has tables of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.state import TableRecord
from tests.support.database import PostgresDatabase
from tests.support.postgres_to_delta import Following
from tests.support.scenario import Scenario

NAMES = (
    "altered",
    "busy",
    "typed",
    "odd",
    "rekeyed",
    "unkeyed",
    "renamed",
    "recreated",
    "defaulted",
    "frozen",
    "strict",
    "kept",
)
TABLES = [
    *(f"CREATE TABLE {name} (id int PRIMARY KEY, a text, n int)" for name in NAMES),
    *(f"INSERT INTO {name} SELECT i, 'row ' || i, i FROM generate_series(1, 20) i" for name in NAMES),
    "CREATE TABLE bulk (id int PRIMARY KEY, filler text)",
    "CREATE TABLE bag (id int, a text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag VALUES (1, 'one'), (1, 'one')",
    "CREATE TABLE parted (id int PRIMARY KEY, a text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE parted_high PARTITION OF parted DEFAULT",
]
SETTINGS = {
    "public.frozen": {"schema_changes": "ignore"},
    "public.strict": {"schema_changes": "stop"},
    "public.kept": {"truncate": "ignore"},
}
UNLIKE = ("public.frozen", "public.kept")
"""Tables that are not to be like their source."""
# Small chunks, four a batch, so that a copy takes several batches.
SMALL: dict[str, dict[str, Any]] = {
    "source": {"copy": {"chunk_bytes": "1 MB"}, "journal": {"segment_bytes": "1 MB"}},
    "batch": {"max_bytes": "4 MB"},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="event trigger", marks=pytest.mark.xdist_group("event trigger")),
        pytest.param(False, id="relation messages", marks=pytest.mark.xdist_group("relation messages")),
    ],
)
def has_trigger(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def following(
    has_trigger: bool, postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Following]:
    """A pipeline that runs and has copied everything."""
    name = "ddl_trigger" if has_trigger else "ddl_relation"
    with PostgresDatabase(postgres, name) as database:
        scenario = Scenario(
            tmp_path_factory.mktemp(name), database.dsn, name=name, tables={"settings": SETTINGS}, **SMALL
        ).prepare()
        scenario.sql(*TABLES)
        if has_trigger:
            assert "installed" in scenario.execute("prepare")
        with Following(scenario) as running:
            running.catch_up()
            yield running


def test_columns_that_come_go_and_change_their_name_within_a_transaction_are_followed_row_by_row(
    following: Following,
) -> None:
    following.sql(
        "BEGIN; INSERT INTO altered VALUES (101, 'before', 1);"
        " ALTER TABLE altered ADD COLUMN b text; INSERT INTO altered VALUES (102, 'added', 2, 'b');"
        " ALTER TABLE altered RENAME COLUMN a TO title; UPDATE altered SET title = 'renamed' WHERE id = 101;"
        " ALTER TABLE altered DROP COLUMN n; INSERT INTO altered VALUES (103, 'dropped', 'b'); COMMIT",
        "BEGIN; ALTER TABLE bag ADD COLUMN b int; INSERT INTO bag VALUES (2, 'two', 2); DELETE FROM bag WHERE id = 1;"
        " ALTER TABLE bag DROP COLUMN a; INSERT INTO bag VALUES (3, 3); COMMIT",
    )
    following.catch_up()

    following.require_same(without=UNLIKE)
    rows = following.lake("altered")
    # The dropped column stays, with what it held; rows that came after it have nothing in it.
    assert (rows[1]["n"], rows[103]["n"]) == (1, None)


def test_columns_that_change_between_batches_are_followed(following: Following) -> None:
    for number, change in enumerate(
        ["ADD COLUMN b int", "RENAME COLUMN b TO c", "DROP COLUMN a", "ADD COLUMN a int", "RENAME COLUMN n TO b"]
    ):
        following.sql(f"ALTER TABLE busy {change}", f"INSERT INTO busy (id) VALUES ({200 + number})")
        following.catch_up()
        following.require_same(without=UNLIKE)


def test_columns_that_change_while_a_copy_takes_many_batches_are_followed(following: Following) -> None:
    following.sql(
        "CREATE TABLE large (id int PRIMARY KEY, a text, n int)",
        "INSERT INTO large SELECT i, repeat(md5(i::text), 30), i FROM generate_series(1, 35000) i",
    )
    oid = following.oid("large")
    steps = [
        "ALTER TABLE large ADD COLUMN b int NOT NULL DEFAULT 7",
        "ALTER TABLE large RENAME COLUMN a TO title",
        "ALTER TABLE large DROP COLUMN n",
    ]
    for done, step in enumerate(steps, start=1):
        record = following.wait_for(oid, lambda record, done=done: record.chunks_done >= 4 * done)  # type: ignore[misc]
        assert record.chunks_total is not None
        assert record.chunks_done < record.chunks_total
        following.sql(step, f"UPDATE large SET id = id + 100000 WHERE id % 100 = {done}")
    following.wait_until_ready("large")
    following.catch_up()
    following.require_same(without=UNLIKE)


def test_types_that_become_wider_narrower_or_another_are_followed_with_every_value(following: Following) -> None:
    following.sql(
        "ALTER TABLE typed ADD COLUMN s smallint, ADD COLUMN d numeric(8, 2), ADD COLUMN f real",
        "UPDATE typed SET s = id, d = id + 0.25, f = id / 2.0",
        "BEGIN; ALTER TABLE typed ALTER n TYPE bigint USING n * 2, ALTER s TYPE int, ALTER d TYPE numeric(12, 4),"
        " ALTER f TYPE double precision; INSERT INTO typed VALUES (50, 'wide', 5000000000, 70000, 12345678.1234, 0.1);"
        " DELETE FROM typed WHERE id = 7; COMMIT",
    )
    following.catch_up()
    following.require_same(without=UNLIKE)
    assert following.lake("typed")[50]["n"] == 5_000_000_000

    following.sql("DELETE FROM typed WHERE n > 1000000")
    following.catch_up()
    following.sql("ALTER TABLE typed ALTER n TYPE int", "UPDATE typed SET n = n + 1 WHERE id = 3")
    following.catch_up()
    following.require_same(without=UNLIKE)

    # The table is copied again; rows that came before that are as they are now.
    following.sql(
        "BEGIN; ALTER TABLE odd ALTER n TYPE text; INSERT INTO odd VALUES (50, 'odd', 'text');"
        " INSERT INTO bulk SELECT i, repeat(md5(i::text), 30) FROM generate_series(1, 6000) i; COMMIT"
    )
    following.catch_up()
    following.require_same(without=UNLIKE)
    assert following.lake("odd")[50]["n"] == "text"


def test_a_table_with_another_key_or_none_is_copied_again_and_goes_on(following: Following) -> None:
    following.sql(
        "UPDATE rekeyed SET n = 1000 + id",
        "ALTER TABLE rekeyed DROP CONSTRAINT rekeyed_pkey, ALTER n SET NOT NULL, ADD PRIMARY KEY (n)",
        "UPDATE rekeyed SET id = 1 WHERE n < 1010",
        "DELETE FROM rekeyed WHERE n = 1003",
        "ALTER TABLE unkeyed DROP CONSTRAINT unkeyed_pkey",
        "INSERT INTO unkeyed VALUES (1, 'twin', 1)",
    )
    following.catch_up()
    following.sql("INSERT INTO rekeyed VALUES (1, 'again', 7)", "UPDATE rekeyed SET a = 'x' WHERE n = 1004")
    following.catch_up()
    following.require_same(without=UNLIKE)


def test_a_renamed_table_is_followed_under_its_new_name(following: Following) -> None:
    oid = following.oid("renamed")
    following.sql(
        "INSERT INTO renamed VALUES (50, 'old name', 1)",
        "ALTER TABLE renamed RENAME TO newly_named",
        "INSERT INTO newly_named VALUES (51, 'new name', 1)",
    )
    following.wait_for(oid, lambda record: record.name == "public.newly_named")
    following.catch_up()
    following.sql("UPDATE newly_named SET a = 'after' WHERE id = 1")
    following.catch_up()
    following.require_same(without=UNLIKE)
    assert "public.renamed" not in {record.name for record in following.records().values()}


def test_a_table_dropped_and_made_again_is_copied_again(following: Following) -> None:
    old = following.oid("recreated")
    following.sql(
        "INSERT INTO recreated VALUES (50, 'gone', 1)",
        "DROP TABLE recreated",
        "CREATE TABLE recreated (id bigint PRIMARY KEY, kind text)",
        "INSERT INTO recreated VALUES (1, 'new'), (2, 'new')",
    )
    following.wait_until_gone(old)
    following.wait_until_ready("recreated")
    following.sql("UPDATE recreated SET kind = 'followed' WHERE id = 2")
    following.catch_up()
    following.require_same(without=UNLIKE)
    assert set(following.lake("recreated")) == {1, 2}


def test_defaults_and_nullability_come_with_their_values(following: Following, has_trigger: bool) -> None:
    following.sql(
        "ALTER TABLE defaulted ADD COLUMN fixed text NOT NULL DEFAULT 'then', ADD COLUMN empty int",
        "ALTER TABLE defaulted ALTER fixed SET DEFAULT 'now', ALTER fixed DROP NOT NULL, ALTER a SET NOT NULL",
        "INSERT INTO defaulted (id, a) VALUES (50, 'with the new default')",
        "INSERT INTO defaulted (id, a, fixed) VALUES (51, 'null', NULL)",
        "ALTER TABLE defaulted ADD COLUMN rolled double precision DEFAULT random()",
        "INSERT INTO defaulted (id, a) VALUES (52, 'last')",
    )
    following.catch_up()
    following.require_same(without=UNLIKE)
    assert following.lake("defaulted")[1]["fixed"] == "then"


def test_a_table_whose_policy_is_ignore_keeps_the_columns_of_its_copy(following: Following) -> None:
    following.sql(
        "BEGIN; ALTER TABLE frozen ADD COLUMN b text; INSERT INTO frozen VALUES (50, 'a', 1, 'b');"
        " ALTER TABLE frozen RENAME COLUMN a TO title; ALTER TABLE frozen DROP COLUMN n;"
        " UPDATE frozen SET title = 'new' WHERE id = 1; COMMIT"
    )
    following.catch_up()
    rows = following.lake("frozen")
    assert set(rows[1]) == {"id", "a", "n"}
    assert rows[1]["a"] == "new"
    assert rows[50] == {"id": 50, "a": "a", "n": 1}
    following.require_same(without=UNLIKE)


def test_truncates_are_applied_in_order_to_every_table_they_name_unless_they_are_to_be_ignored(
    following: Following, has_trigger: bool
) -> None:
    following.sql(
        "INSERT INTO parted SELECT i, 'before' FROM generate_series(1, 200) i",
        "BEGIN; INSERT INTO kept VALUES (50, 'kept', 1); TRUNCATE parted, bag, kept;"
        " INSERT INTO parted VALUES (5, 'after'), (500, 'after'); INSERT INTO kept VALUES (51, 'after', 1); COMMIT",
    )
    following.catch_up()
    following.require_same(without=UNLIKE)
    assert set(following.lake("kept")) == {*range(1, 21), 50, 51}

    if has_trigger:  # the server itself does not report a truncated leaf
        following.sql("TRUNCATE parted_high", "INSERT INTO parted VALUES (501, 'later')")
        following.catch_up()
        following.require_same(without=UNLIKE)


def test_a_table_whose_policy_is_stop_waits_until_it_may_evolve(following: Following) -> None:
    following.sql(
        "INSERT INTO strict VALUES (50, 'before', 1)",
        "ALTER TABLE strict ADD COLUMN b text",
        "INSERT INTO strict VALUES (51, 'after', 1, 'b')",
    )
    record: TableRecord = following.wait_until_errored("strict")
    assert "`stop`" in (record.reason or "")
    following.catch_up(without=("public.strict",))
    following.require_same(without=("public.strict", *UNLIKE))

    settings = {name: own for name, own in SETTINGS.items() if name != "public.strict"}
    following.restart(tables={"settings": settings}, **SMALL)
    following.scenario.execute("retry", "public.strict")
    following.wait_until_ready("strict")
    following.catch_up()
    following.require_same(without=UNLIKE)
    assert following.lake("strict")[51]["b"] == "b"
