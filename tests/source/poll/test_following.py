"""Polling a server with real sessions: late commits, ties, odd times, deletes, watermarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace.change import Op
from tailrace.errors import TableError
from tailrace.selection import TableOptions
from tailrace.source import Limit, Orders
from tailrace.source.poll.source import PollSource
from tailrace.testing.database import Database
from tailrace.testing.replay import Replay
from tailrace.testing.wait import wait_until

LIMIT = Limit(rows=100_000, bytes=1 << 30)
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, updated_at timestamptz, created_at timestamptz)"
Contents = Counter[tuple[Any, ...]]


@pytest.fixture
def make_source(database: Database, tmp_path: Path) -> Callable[..., PollSource]:
    def make(deletes: dict[str, Any] | None = None, **options: Any) -> PollSource:
        defaults = {"updated_at": options.pop("updated_at", "updated_at"), "deletes": deletes}
        tables = TableOptions.model_validate({"include": ["public.*"], "defaults": defaults})
        fast = {"page_rows": 3, "chunk_rows": 10, "interval_seconds": 0.001, "idle_interval_seconds": 0.001}
        return PollSource("t", options.pop("dsn", database.dsn), str(tmp_path / "known"), tables, **{**fast, **options})

    return make


def contents(database: Database, where: str = "true") -> Contents:
    return Counter(database.rows(f"SELECT * FROM t WHERE {where}"))


def settled_counts(database: Database, query: str) -> list[tuple[Any, ...]]:
    """Statistics once every session that could still report some is gone."""
    others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    wait_until(lambda: not database.rows(others))
    return database.rows(query)


def operations(replay: Replay) -> list[tuple[Op, int]]:
    """The operations of the batch that is planned, with the keys they are for."""
    assert replay.offset is not None
    assert replay.planned is not None
    found = []
    for split in replay.follower.plan(replay.offset, replay.planned):
        for changes in replay.source.read(split):
            found += [(Op(one["op"]), one["row"]["id"]) for one in changes.batch.to_pylist()]
    return found


def test_a_transaction_that_commits_late_with_an_older_time_is_not_missed(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "CREATE INDEX ON t (updated_at, id)")
    with closing(database.connect()) as late, Replay(make_source(look_back_us=0), LIMIT) as replay:
        replay.catch_up()
        late.execute("BEGIN")
        late.execute("INSERT INTO t VALUES (1, 'late', now())")
        for number in range(2, 6):
            database.run(f"INSERT INTO t VALUES ({number}, 'early', now())")
            replay.catch_up()
        # What others commit meanwhile arrives at once, and does not move the watermark past the open transaction.
        assert len(replay.contents()["public.t"]) == 4
        late.execute("COMMIT")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_role_that_does_not_see_transactions_of_others_looks_back_instead(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    role = f"reader_{database.name}"
    database.run(TABLE, f"CREATE ROLE {role} LOGIN PASSWORD 'x'", f"GRANT SELECT ON t TO {role}")
    source = make_source(dsn=f"{database.dsn}&user={role}" if "?" in database.dsn else f"{database.dsn}?user={role}")
    try:
        [finding] = [each for each in source.check() if each.subject == "transactions"]
        assert finding.level == "warning"
        assert "pg_read_all_stats" in (finding.fix or "")
        with closing(database.connect()) as late, Replay(source, LIMIT) as replay:
            replay.catch_up()
            late.execute("BEGIN")
            late.execute("INSERT INTO t VALUES (1, 'late', now())")
            database.run("INSERT INTO t VALUES (2, 'early', now())")
            replay.catch_up()
            late.execute("COMMIT")
            replay.catch_up()
        assert replay.contents()["public.t"] == contents(database)
    finally:
        database.run(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_rows_of_one_time_are_all_read_though_a_page_ends_among_them(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    with Replay(make_source(), Limit(rows=4, bytes=1)) as replay:
        replay.catch_up()
        database.run("INSERT INTO t SELECT i, 'tie', now() FROM generate_series(1, 50) i")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_time_in_the_future_does_not_hide_what_is_written_before_it(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    with Replay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("INSERT INTO t VALUES (1, 'future', now() + interval '1 day'), (2, 'never', 'infinity')")
        replay.catch_up()
        database.run("INSERT INTO t VALUES (3, 'now', now())")
        replay.catch_up()
        assert [row[0] for row in replay.contents()["public.t"]] == [3]
        database.run("UPDATE t SET updated_at = now() WHERE id < 3")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_full_diff_finds_hard_deletes_and_rows_without_a_time(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t SELECT i, 'v', now() FROM generate_series(1, 40) i")
    with Replay(make_source({"full_diff": {"every_cycles": 1}}), LIMIT) as replay:
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


def test_a_diff_of_an_unchanged_table_gives_nothing(database: Database, make_source: Callable[..., PollSource]) -> None:
    database.run(TABLE, "INSERT INTO t SELECT i, 'v', now() - interval '1 day' FROM generate_series(1, 40) i")
    with Replay(make_source({"full_diff": {"every_cycles": 1}}), LIMIT) as replay:
        replay.catch_up()
        wait_until(replay.plan)
        assert replay.planned is not None
        [entry] = replay.planned["tables"].values()
        assert entry["reading"]["kind"] == "diff"
        assert operations(replay) == []


def test_soft_deletes_are_reported_once_and_can_be_undone(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(
        TABLE, "ALTER TABLE t ADD deleted_at timestamptz", "INSERT INTO t VALUES (1, 'a', now()), (2, 'b', now())"
    )
    with Replay(make_source({"soft": "deleted_at"}), LIMIT) as replay:
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


def test_a_row_created_when_it_was_updated_is_an_insert(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    source = make_source()
    wanted = source.tables_wanted
    named = wanted.defaults.model_copy(update={"created_at": "created_at"})
    with Replay(replace(source, tables_wanted=wanted.model_copy(update={"defaults": named})), LIMIT) as replay:
        replay.catch_up()
        database.run(
            "INSERT INTO t VALUES (1, 'a', now(), now()), (2, 'b', now(), '2001-01-01'), (3, 'c', now(), NULL)"
        )
        assert replay.plan()
        assert sorted(operations(replay), key=lambda one: one[1]) == [(Op.INSERT, 1), (Op.UPDATE, 2), (Op.UPDATE, 3)]


@pytest.mark.parametrize("policy", ["strict", "permissive"])
def test_a_watermark_of_another_column_stops_the_table_or_is_read_from_the_start(
    policy: str, database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'a', now(), now())")
    with Replay(make_source(), LIMIT) as replay:
        replay.catch_up()
        replay.crash()
        replay.source = make_source(updated_at="created_at", on_bad_watermark=policy)
        database.run("INSERT INTO t VALUES (2, 'b', '2001-01-01', '2001-01-01')")
        if policy == "strict":
            assert replay.plan()
            with pytest.raises(TableError, match="watermark"):
                operations(replay)
        else:
            replay.catch_up()
            assert replay.contents()["public.t"] == contents(database)


def test_a_damaged_watermark_stops_the_table(database: Database, make_source: Callable[..., PollSource]) -> None:
    database.run(TABLE)
    with Replay(make_source(), LIMIT) as replay:
        replay.catch_up()
        assert replay.offset is not None
        [entry] = replay.offset["tables"].values()
        entry["mark"] = "yesterday"
        replay.crash()
        assert replay.plan()
        with pytest.raises(TableError, match="damaged"):
            operations(replay)


def test_a_step_that_failed_is_read_again_when_the_table_goes_on(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'a', now())")
    with Replay(make_source({"full_diff": {"every_cycles": 3}}), LIMIT) as replay:
        replay.catch_up()
        for number in range(2, 8):
            database.run(f"INSERT INTO t VALUES ({number}, 'b', now())", f"DELETE FROM t WHERE id = {number - 1}")
            wait_until(replay.plan)
            assert replay.offset is not None
            [reached] = replay.source.progress(replay.offset)
            replay.commit()  # nothing was written: the table failed
            replay.orders = Orders(stopped={reached.upstream_id: str(reached.position)})
            assert replay.step()
            assert not replay.plan()
            replay.orders = Orders()
        for _ in range(3):
            replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_table_is_copied_anew_when_somebody_asks(database: Database, make_source: Callable[..., PollSource]) -> None:
    database.run(TABLE, "INSERT INTO t SELECT i, 'v', now() FROM generate_series(1, 30) i")
    with Replay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("DELETE FROM t WHERE id > 5")
        assert replay.offset is not None
        [table] = replay.offset["tables"]
        replay.orders = Orders(resync={table: 1})
        replay.catch_up()
        assert [one.request for one in replay.source.progress(replay.offset)] == [1]
    assert replay.contents()["public.t"] == contents(database)


def test_a_table_that_loses_its_column_stops_and_goes_on_when_it_is_back(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'a', now())")
    with Replay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("ALTER TABLE t RENAME updated_at TO changed_at")
        for reason in ("no longer there under its name", "no column updated_at"):
            wait_until(replay.plan)
            with pytest.raises(TableError, match=reason):
                operations(replay)
            replay.commit()
            replay.follower.target()  # look at the tables anew
        database.run("ALTER TABLE t RENAME changed_at TO updated_at", "INSERT INTO t VALUES (2, 'b', now())")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_polling_an_idle_table_is_an_index_probe(database: Database, make_source: Callable[..., PollSource]) -> None:
    database.run(
        TABLE,
        "INSERT INTO t SELECT i, 'v', now() - interval '1 day' FROM generate_series(1, 20000) i",
        "CREATE INDEX t_recent ON t (updated_at, id)",
        "ANALYZE t",
    )
    reads = "SELECT seq_scan, seq_tup_read, idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 't'"
    source = make_source(page_rows=10_000, chunk_rows=100_000)
    assert [each.level for each in source.check() if each.subject == "public.t"] == ["ok"]
    with Replay(source, LIMIT) as replay:
        replay.catch_up()
    before = settled_counts(database, reads)
    with Replay(source, LIMIT) as again:
        again.offset, again.versions = replay.offset, replay.versions
        again.catch_up()
        assert again.batch == 0
    assert settled_counts(database, reads) == before


def test_a_column_that_comes_is_followed(database: Database, make_source: Callable[..., PollSource]) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'a', now())")
    with Replay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("ALTER TABLE t ADD more int", "INSERT INTO t VALUES (2, 'b', now(), NULL, 5)")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_what_cannot_be_polled_is_named_with_its_fix(
    database: Database, make_source: Callable[..., PollSource]
) -> None:
    database.run(
        "CREATE TABLE plain (id int PRIMARY KEY)",
        "CREATE TABLE keyless (updated_at timestamptz)",
        "CREATE TABLE t (id int PRIMARY KEY, updated_at timestamptz)",
        "INSERT INTO t VALUES (1, NULL)",
    )
    findings = {each.subject: each for each in make_source().check()}
    assert "full_diff" in (findings["public.plain"].fix or "")
    assert findings["public.keyless"].level == "error"
    messages = [each.message for each in make_source().check() if each.subject == "public.t"]
    assert any("no index" in message for message in messages)
    assert any("1 rows have no updated_at" in message for message in messages)
