"""Polling a server with real sessions: late commits, ties, odd times, watermarks, bounds on the load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import TableError, UnavailableError
from tailrace.model.change import Op
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.poll.connector import ConnectorOptions, Polled, Query, connect
from tailrace.source.poll.keyset import Stretch
from tailrace.source.poll.postgres import PostgresSession
from tailrace.source.poll.source import PollSource
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.polling import LIMIT, TABLE, contents, operations
from tests.support.source_making import with_tables


def settled_counts(database: PostgresDatabase, query: str) -> list[tuple[Any, ...]]:
    """Statistics once every session that could still report some is gone."""
    others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    wait_until(lambda: not database.rows(others))
    return database.rows(query)


def test_a_transaction_that_commits_late_with_an_older_time_is_not_missed(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "CREATE INDEX ON t (updated_at, id)")
    with closing(database.connect()) as late, SourceReplay(make_source(look_back=0.0), LIMIT) as replay:
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


def test_a_poll_that_is_repeated_does_not_hide_what_only_its_repeat_has_seen(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    with closing(database.connect()) as late, SourceReplay(make_source(look_back=0.0), LIMIT) as replay:
        replay.catch_up()
        database.run("INSERT INTO t VALUES (1, 'early', now())")
        late.execute("BEGIN")
        late.execute("INSERT INTO t VALUES (2, 'late', now())")
        assert replay.plan()
        replay.write()
        replay.crash()  # the batch is applied, but its commit is not recorded
        late.execute("COMMIT")
        replay.write()
        replay.commit()
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_role_that_does_not_see_transactions_of_others_looks_back_instead(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    role = f"reader_{database.name}"
    database.run(TABLE, f"CREATE ROLE {role} LOGIN PASSWORD 'x'", f"GRANT SELECT ON t TO {role}")
    source = make_source(dsn=f"{database.dsn}&user={role}" if "?" in database.dsn else f"{database.dsn}?user={role}")
    try:
        [finding] = [each for each in source.check() if each.subject == "transactions"]
        assert finding.level == "warning"
        assert "pg_read_all_stats" in (finding.fix or "")
        with closing(database.connect()) as late, SourceReplay(source, LIMIT) as replay:
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
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    with SourceReplay(make_source(), Limit(rows=4, bytes=1)) as replay:
        replay.catch_up()
        database.run("INSERT INTO t SELECT i, 'tie', now() FROM generate_series(1, 50) i")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


@pytest.mark.parametrize(
    ("declared", "keys"),
    [
        ("numeric(10, 0)", ["9", "10", "-3", "100"]),
        ("numeric", ["9", "10", "-3.5", "100"]),
        ("mood", ["sad", "ok", "happy", "awful"]),
        ("inet", ["9.0.0.1", "10.0.0.1", "100.0.0.1", "::1"]),
        ("interval", ["9 days", "10 days", "1 month", "1 year"]),
    ],
)
def test_keys_whose_order_is_not_that_of_their_text_are_all_read(
    declared: str, keys: list[str], database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    values = ", ".join(f"('{key}', {number}, now())" for number, key in enumerate(keys))
    database.run(
        "CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy', 'awful')",
        f"CREATE TABLE t (id {declared} PRIMARY KEY, v int, updated_at timestamptz)",
        f"INSERT INTO t VALUES {values}",
    )

    def numbers() -> list[int]:
        return sorted(row["v"] for row in replay.tables["public.t"].rows.values())

    with SourceReplay(make_source(page_rows=1, chunk_rows=2), LIMIT) as replay:
        replay.catch_up()
        assert numbers() == [0, 1, 2, 3]
        database.run("UPDATE t SET v = v + 10, updated_at = now()")
        replay.catch_up()
        assert numbers() == [10, 11, 12, 13]


def test_a_time_in_the_future_does_not_hide_what_is_written_before_it(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("INSERT INTO t VALUES (1, 'future', now() + interval '1 day'), (2, 'never', 'infinity')")
        replay.catch_up()
        database.run("INSERT INTO t VALUES (3, 'now', now())")
        replay.catch_up()
        assert [row[0] for row in replay.contents()["public.t"]] == [3]
        database.run("UPDATE t SET updated_at = now() WHERE id < 3")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_row_created_when_it_was_updated_is_an_insert(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    source = make_source()
    wanted = source.context.tables
    named = wanted.defaults.model_copy(update={"created_at": "created_at"})
    with SourceReplay(with_tables(source, wanted.model_copy(update={"defaults": named})), LIMIT) as replay:
        replay.catch_up()
        database.run(
            "INSERT INTO t VALUES (1, 'a', now(), now()), (2, 'b', now(), '2001-01-01'), (3, 'c', now(), NULL)"
        )
        assert replay.plan()
        assert sorted(operations(replay), key=lambda one: one[1]) == [(Op.INSERT, 1), (Op.UPDATE, 2), (Op.UPDATE, 3)]


@pytest.mark.parametrize("policy", ["strict", "permissive"])
def test_a_watermark_of_another_column_stops_the_table_or_is_read_from_the_start(
    policy: str, database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'a', now(), now())")
    with SourceReplay(make_source(), LIMIT) as replay:
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


def test_a_damaged_watermark_stops_the_table(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        assert replay.offset is not None
        [entry] = replay.offset["tables"].values()
        entry["mark"] = "yesterday"
        replay.crash()
        assert replay.plan()
        with pytest.raises(TableError, match="damaged"):
            operations(replay)


def test_a_step_that_failed_is_read_again_when_the_table_goes_on(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'a', now())")
    with SourceReplay(make_source({"full_diff": {"every_cycles": 3}}), LIMIT) as replay:
        replay.catch_up()
        for number in range(2, 8):
            database.run(f"INSERT INTO t VALUES ({number}, 'b', now())", f"DELETE FROM t WHERE id = {number - 1}")
            wait_until(replay.plan)
            assert replay.offset is not None
            [reached] = replay.source.progress(replay.offset)
            replay.commit()  # nothing was written: the table failed
            replay.directives = TableDirectives(stopped={reached.upstream_id: str(reached.position)})
            assert replay.step()
            assert not replay.plan()
            replay.directives = TableDirectives()
        for _ in range(3):
            replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_table_is_copied_again_on_request(database: PostgresDatabase, make_source: Callable[..., PollSource]) -> None:
    database.run(TABLE, "INSERT INTO t SELECT i, 'v', now() FROM generate_series(1, 30) i")
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("DELETE FROM t WHERE id > 5")
        assert replay.offset is not None
        [table] = replay.offset["tables"]
        replay.directives = TableDirectives(resync={table: 1})
        replay.catch_up()
        assert [one.request for one in replay.source.progress(replay.offset)] == [1]
    assert replay.contents()["public.t"] == contents(database)


def test_a_table_that_loses_its_column_stops_and_goes_on_when_it_is_back(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'a', now())")
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("ALTER TABLE t RENAME updated_at TO changed_at")
        for reason in ("no longer there under its name", "no column updated_at"):
            wait_until(replay.plan)
            with pytest.raises(TableError, match=reason):
                operations(replay)
            replay.commit()
            replay.follower.target()  # discover the tables again
        database.run("ALTER TABLE t RENAME changed_at TO updated_at", "INSERT INTO t VALUES (2, 'b', now())")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_polling_an_idle_table_is_an_index_probe(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(
        TABLE,
        "INSERT INTO t SELECT i, 'v', now() - interval '1 day' FROM generate_series(1, 20000) i",
        "CREATE INDEX t_recent ON t (updated_at, id)",
        "ANALYZE t",
    )
    reads = "SELECT seq_scan, seq_tup_read, idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 't'"
    source = make_source(page_rows=10_000, chunk_rows=100_000)
    assert [each.level for each in source.check() if each.subject == "public.t"] == ["ok"]
    with SourceReplay(source, LIMIT) as replay:
        replay.catch_up()
    before = settled_counts(database, reads)
    with SourceReplay(source, LIMIT) as again:
        again.offset, again.versions = replay.offset, replay.versions
        again.catch_up()
        assert again.batch == 0
    assert settled_counts(database, reads) == before


def test_a_column_that_comes_is_followed(database: PostgresDatabase, make_source: Callable[..., PollSource]) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'a', now())")
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("ALTER TABLE t ADD more int", "INSERT INTO t VALUES (2, 'b', now(), NULL, 5)")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_table_that_cannot_be_polled_is_named_with_its_fix(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
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


def test_times_without_zone_are_those_of_the_database(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(
        f"ALTER DATABASE \"{database.name}\" SET timezone TO 'America/New_York'",
        "CREATE TABLE t (id int PRIMARY KEY, v text, updated_at timestamp(0))",
    )
    messages = [each.message for each in make_source().check() if each.subject == "public.t"]
    assert any("America/New_York" in message for message in messages)
    with closing(database.connect()) as late, SourceReplay(make_source(look_back=0.0), LIMIT) as replay:
        replay.catch_up()
        late.execute("BEGIN")
        late.execute("INSERT INTO t VALUES (1, 'late', now())")
        for key in range(2, 6):
            database.run(f"INSERT INTO t VALUES ({key}, 'early', clock_timestamp())")
            replay.catch_up()
            assert len(replay.contents()["public.t"]) == key - 1
        late.execute("COMMIT")
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_patterns_say_which_tables_are_polled_and_each_has_columns_of_its_own(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    columns = "(id int PRIMARY KEY, v text, w text, updated_at timestamptz, version bigint)"
    database.run(*(f"CREATE TABLE {name} {columns}" for name in ("orders", "order_items", "order_log", "customers")))
    wanted = {
        "include": ["public.order*"],
        "exclude": ["*.order_log"],
        "defaults": {"updated_at": "updated_at"},
        "settings": {"public.order_items": {"updated_at": "version", "columns": ["w"]}},
    }
    source = with_tables(make_source(), TableOptions.model_validate(wanted))
    found = {str(table.table): [column.name for column in table.columns] for table in source.tables()}
    assert found == {
        "public.orders": ["id", "v", "w", "updated_at", "version"],
        "public.order_items": ["id", "w", "version"],
    }


def test_a_query_that_takes_too_long_is_given_up(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    [schema] = make_source().tables()
    with closing(database.connect()) as other:
        other.execute("BEGIN")
        other.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        with connect(database.dsn, ConnectorOptions(0.1)).open() as session, pytest.raises(UnavailableError):
            session.select(Query(Polled(schema, "updated_at"), "updated_at", Stretch(), schema, 10))


def test_sessions_can_only_read(database: PostgresDatabase) -> None:
    database.run(TABLE)
    with connect(database.dsn, ConnectorOptions()).open() as session:
        assert isinstance(session, PostgresSession)
        assert session.ask("SHOW default_transaction_read_only") == [("on",)]


@pytest.mark.parametrize("policy", ["strict", "permissive"])
def test_a_watermark_of_a_column_whose_type_changed_is_foreign(
    policy: str, database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, updated_at timestamptz)", "INSERT INTO t VALUES (1, now())")
    with SourceReplay(make_source(on_bad_watermark=policy), LIMIT) as replay:
        replay.catch_up()
        database.run("ALTER TABLE t ALTER updated_at TYPE bigint USING 1", "INSERT INTO t VALUES (2, 2)")
        replay.crash()
        if policy == "strict":
            assert replay.plan()
            with pytest.raises(TableError, match="watermark"):
                operations(replay)
        else:
            replay.catch_up()
            assert replay.contents()["public.t"] == contents(database)


def test_a_single_run_ends_though_its_table_is_written_to_all_the_time(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        target = replay.follower.target()
        for number in range(10):
            database.run(f"INSERT INTO t VALUES ({number}, 'busy', now())")
            if not replay.step():
                break
        assert replay.offset is not None
        assert replay.follower.done(replay.offset, target)
        assert replay.contents()["public.t"].total() == 2


def oid(database: PostgresDatabase) -> str:
    [[number]] = database.rows("SELECT 't'::regclass::oid::int8")
    return str(number)


def test_a_table_that_cannot_be_followed_any_more_says_so_also_when_it_waits_for_its_copy(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, TABLE.replace("TABLE t", "TABLE u"))
    t = oid(database)
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        replay.directives = TableDirectives(stopped={t: None})
        replay.catch_up()
        replay.directives = TableDirectives()
        database.run("ALTER TABLE t DROP CONSTRAINT t_pkey")
        replay.follower.target()
        assert replay.plan()
        with pytest.raises(TableError, match="no primary key"):
            replay.write()


def test_a_resync_of_a_table_that_cannot_be_followed_waits_until_it_can(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, TABLE.replace("TABLE t", "TABLE u"))
    t = oid(database)
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("ALTER TABLE t DROP CONSTRAINT t_pkey")
        replay.directives = TableDirectives(stopped={t: None}, resync={t: 1})
        replay.catch_up()
        database.run("ALTER TABLE t ADD PRIMARY KEY (id)", "INSERT INTO t VALUES (1, 'mended', now())")
        replay.follower.target()
        assert replay.step()
        replay.directives = TableDirectives()
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_resync_whose_copy_cannot_begin_is_not_forgotten(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE, "INSERT INTO t VALUES (1, 'deleted unseen', now()), (2, 'kept', now())")
    t = oid(database)
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        assert replay.offset is not None
        [reached] = replay.source.progress(replay.offset)
        database.run("DELETE FROM t WHERE id = 1", "ALTER TABLE t RENAME TO away")
        replay.directives = TableDirectives(resync={t: 1})
        assert replay.plan()
        with pytest.raises(TableError, match="no longer there under its name"):
            replay.write()
        replay.commit()
        replay.directives = TableDirectives(stopped={t: str(reached.position)})
        assert replay.step()
        database.run("ALTER TABLE away RENAME TO t")
        replay.directives = TableDirectives()
        replay.catch_up()
    assert replay.contents()["public.t"] == contents(database)


def test_a_table_dropped_while_its_version_numbers_are_read_stops_alone(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE.replace("updated_at timestamptz", "updated_at bigint"), "INSERT INTO t VALUES (1, 'a', 1)")
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        database.run("DROP TABLE t")
        wait_until(replay.plan)
        with pytest.raises(TableError, match="no longer there under its name"):
            replay.write()


def test_a_resync_of_a_paused_table_begins(database: PostgresDatabase, make_source: Callable[..., PollSource]) -> None:
    database.run(TABLE)
    t = oid(database)
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        replay.directives = TableDirectives(paused=[t])
        replay.catch_up()
        replay.directives = TableDirectives(paused=[t], resync={t: 1})
        replay.catch_up()
        assert replay.offset is not None
        [table] = replay.source.progress(replay.offset)
    assert (table.phase, table.request) == ("stopped", 1)


def test_a_role_that_a_policy_shows_some_rows_polls_those(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(
        TABLE,
        "INSERT INTO t VALUES (1, 'own', now()), (2, 'hidden', now())",
        "DROP ROLE IF EXISTS tenant",
        "CREATE ROLE tenant LOGIN",
        "GRANT SELECT ON t TO tenant",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY own ON t TO tenant USING (v <> 'hidden')",
    )
    source = make_source(dsn=database.server.dsn(database.name, user="tenant"))
    assert not [finding for finding in source.check() if finding.level == "error"]
    with SourceReplay(source, LIMIT) as replay:
        replay.catch_up()
        database.run("INSERT INTO t VALUES (3, 'own', now()), (4, 'hidden', now())")
        replay.catch_up()
    assert replay.contents()["public.t"].total() == 2
    database.run("DROP OWNED BY tenant", "DROP ROLE tenant")


def test_a_query_that_takes_too_long_names_the_bound_that_was_set_for_it(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(TABLE)
    source = make_source(statement_timeout=3.0)
    with SourceReplay(source, LIMIT) as replay, closing(database.connect()) as other:
        replay.catch_up()
        other.execute("BEGIN; LOCK TABLE t")
        with pytest.raises(UnavailableError) as caught:
            replay.catch_up()
    assert "source.statement_timeout" in (caught.value.fix or "")


def test_a_table_that_the_role_may_not_read_is_named(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    database.run(
        TABLE,
        "CREATE TABLE secret (id int PRIMARY KEY, updated_at timestamptz)",
        "DROP ROLE IF EXISTS nosy",
        "CREATE ROLE nosy LOGIN",
        "GRANT SELECT ON t TO nosy",
    )
    source = make_source(dsn=database.server.dsn(database.name, user="nosy"))
    [notice] = source.notices()
    assert notice.message.endswith("may not be read and are not polled: public.secret")
    assert notice in source.check()
    [table] = source.tables()
    database.run("REVOKE SELECT ON t FROM nosy")
    with pytest.raises(TableError, match="may not read it") as denied:
        source.refetch(table, pa.table({"id": pa.array([1], pa.int32())}))
    assert denied.value.table == "public.t"
    database.run("DROP OWNED BY nosy", "DROP ROLE nosy")
