"""Rows that go: soft deletes and full diffs of a polled server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailrace.model.change import Op
from tailrace.source.poll.source import PollSource
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.polling import LIMIT, TABLE, contents, operations


def test_a_full_diff_finds_hard_deletes_and_rows_without_a_time(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t SELECT i, 'v', now() FROM generate_series(1, 40) i")
    with SourceReplay(make_source({"full_diff": {"every_cycles": 1}}), LIMIT) as replay:
        replay.catch_up()
        database.run(
            "DELETE FROM t WHERE id % 5 = 0",
            "INSERT INTO t VALUES (100, 'unseen', NULL)",
            "UPDATE t SET v = 'backdated', updated_at = '2001-01-01' WHERE id = 7",
        )
        replay.catch_up()
        assert replay.contents()["public.t"] == contents(database)
        # What came and went between two diffs is gone as well.
        database.run("INSERT INTO t VALUES (200, 'short', now())")
        replay.step()
        database.run("DELETE FROM t WHERE id = 200")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


@pytest.mark.parametrize("came", ["before the diff", "since the diff"])
def test_a_diff_that_is_repeated_does_not_hide_a_delete_that_only_its_repeat_has_seen(
    came: str, database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'v', now()), (2, 'v', now())")
    with SourceReplay(make_source({"full_diff": {"every_cycles": 2}}), LIMIT) as replay:
        replay.catch_up()
        key = 1
        if came == "since the diff":
            key = 3
            database.run("INSERT INTO t VALUES (3, 'new', now())")
        while True:
            wait_until(replay.plan)
            assert replay.planned is not None
            replay.write()
            [entry] = replay.planned["tables"].values()
            if entry["reading"]["kind"] == "diff":
                break
            replay.commit()
        replay.crash()
        database.run(f"DELETE FROM t WHERE id = {key}")
        replay.write()
        replay.commit()
        for _ in range(2):
            replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_diff_of_an_unchanged_table_gives_nothing(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t SELECT i, 'v', now() - interval '1 day' FROM generate_series(1, 40) i")
    with SourceReplay(make_source({"full_diff": {"every_cycles": 1}}), LIMIT) as replay:
        replay.catch_up()
        wait_until(replay.plan)
        assert replay.planned is not None
        [entry] = replay.planned["tables"].values()
        assert entry["reading"]["kind"] == "diff"
        assert operations(replay) == []


def test_soft_deletes_are_reported_once_and_can_be_undone(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(
        TABLE, "ALTER TABLE t ADD deleted_at timestamptz", "INSERT INTO t VALUES (1, 'a', now()), (2, 'b', now())"
    )
    with SourceReplay(make_source({"soft": "deleted_at"}), LIMIT) as replay:
        replay.catch_up()
        database.run("UPDATE t SET deleted_at = now() WHERE id = 1")  # updated_at stays as it is
        assert replay.plan()
        assert operations(replay) == [(Op.DELETE, 1)]
        replay.write()
        replay.commit()
        database.run("UPDATE t SET v = 'c', updated_at = now() WHERE id = 2")
        assert replay.plan()
        assert operations(replay) == [(Op.UPDATE, 2)]
        replay.write()
        replay.commit()
        database.run("UPDATE t SET deleted_at = NULL, updated_at = now() WHERE id = 1")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database, "deleted_at IS NULL")


def test_soft_deletes_that_are_turned_on_later_are_found_by_a_new_copy(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(
        TABLE,
        "ALTER TABLE t ADD deleted_at timestamptz",
        "INSERT INTO t VALUES (1, 'a', '2001-01-01', NULL, NULL), (2, 'b', '2001-01-01', NULL, '2001-01-01')",
    )
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        assert len(replay.contents()["public.t"]) == 2
        replay.crash()
        replay.source = make_source({"soft": "deleted_at"})
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database, "deleted_at IS NULL")
