"""What is followed, and what `tailrace check` says, on a real database."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import Finding, PreflightError, TailraceError, UnavailableError
from tailrace.model.schema import TableName
from tailrace.option.table import TableOptions
from tailrace.source import discovery
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.postgres.catalog import list_tables
from tailrace.source.postgres.connection import session
from tailrace.source.postgres.copy import PostgresSnapshot
from tailrace.source.postgres.discovery import PostgresDiscovery
from tailrace.source.postgres.preflight import selection_hash
from tailrace.source.postgres.source import PostgresSource
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.descriptor import open_below
from tests.support.source_making import make_postgres, with_options, with_tables


@pytest.fixture
def source(database: PostgresDatabase, tmp_path: Path) -> PostgresSource:
    tables = TableOptions(include=["public.*"])
    return make_postgres(database.dsn, tmp_path, "look", tables, slot=f"look_{database.name}", heartbeat=None)


def keys(source: PostgresSource) -> dict[str, tuple[str, ...]]:
    return {schema.table.name: schema.key for schema in source.tables()}


def errors(source: PostgresSource) -> dict[str, Finding]:
    return {finding.subject: finding for finding in source.check() if finding.level == "error"}


def test_keys_follow_the_replica_identity(database: PostgresDatabase, source: PostgresSource) -> None:
    database.run(
        "CREATE TABLE by_primary (b int, a int, v text, PRIMARY KEY (a, b))",
        "CREATE TABLE by_index (id int PRIMARY KEY, code text NOT NULL)",
        "CREATE UNIQUE INDEX by_code ON by_index (code)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_code",
        "CREATE TABLE by_full (id int PRIMARY KEY, v text)",
        "ALTER TABLE by_full REPLICA IDENTITY FULL",
        "CREATE TABLE keyless (v text)",
    )
    assert keys(source) == {"by_primary": ("a", "b"), "by_index": ("code",), "by_full": ("id",), "keyless": ()}


def test_other_options_of_the_publication_are_seen_while_the_pipeline_runs(
    database: PostgresDatabase, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.run("CREATE TABLE first (id int PRIMARY KEY)", "CREATE PUBLICATION look FOR TABLE first")
    monkeypatch.setattr(discovery, "DISCOVERY_SECONDS", 0.0)
    looking = PostgresDiscovery(source)
    [before] = looking.tables.values()
    looking.refresh()
    assert list(looking.tables.values()) == [before]
    database.run("ALTER PUBLICATION look SET (publish = 'insert')")
    looking.refresh()
    [after] = looking.tables.values()
    assert after.options != before.options


def test_nodes_that_start_together_make_one_publication_and_add_a_table_once(
    database: PostgresDatabase, source: PostgresSource, tmp_path: Path
) -> None:
    database.run("CREATE TABLE first (id int PRIMARY KEY)")
    nodes = [
        with_options(source, slot=f"{source.options.slot}_{number}", journal={"path": tmp_path / f"journal {number}"})
        for number in range(4)
    ]
    together = threading.Barrier(len(nodes))

    def prepare(node: PostgresSource) -> None:
        together.wait()
        node.prepare()

    def look(node: PostgresSource) -> list[str]:
        together.wait()
        return sorted(str(one.schema.table) for one in PostgresDiscovery(node, frozenset()).tables.values())

    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(prepare, nodes))
        database.run("CREATE TABLE second (id int PRIMARY KEY)")
        assert list(pool.map(look, nodes)) == [["public.first", "public.second"]] * len(nodes)


def test_a_partitioned_table_is_one_table_and_its_partitions_are_none(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE root (id int, day date, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
    )
    assert keys(source) == {"root": ("id", "day")}
    assert keys(with_options(source, publish_via_partition_root=False)) == {"leaf": ("id", "day")}


def test_only_what_the_publication_shows_is_copied_and_followed(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE t (id int PRIMARY KEY, shown text, hidden text, twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "INSERT INTO t (id, shown, hidden) SELECT i, 's' || i, 'h' FROM generate_series(1, 20) i",
        "CREATE PUBLICATION look FOR TABLE t (id, shown) WHERE (id > 10)",
    )
    [schema] = source.tables()
    assert [column.name for column in schema.columns] == ["id", "shown"]
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        replay.catch_up()
        database.run("INSERT INTO t (id, shown) VALUES (-5, 'no'), (50, 'yes')")
        database.run("UPDATE t SET shown = 'new' WHERE id = 11")
        replay.catch_up()
    rows = {row["id"]: row["shown"] for row in replay.tables["public.t"].rows.values()}
    assert rows == {11: "new", 50: "yes", **{i: f"s{i}" for i in range(12, 21)}}


def test_a_row_filter_is_copied_by_under_the_names_its_columns_have_by_now(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, 'row' FROM generate_series(1, 20) i",
        "CREATE PUBLICATION look FOR TABLE t WHERE (id > 10)",
    )
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        replay.catch_up()
        database.run("ALTER TABLE t RENAME id TO number")
        replay.directives = TableDirectives(resync={source.tables()[0].upstream_id: 1})
        # Nothing makes the follower discover the tables at once: it still has the old columns.
        wait_until(lambda: replay.step() and replay.tables["public.t"].schema.key == ("number",))
    assert sorted(row["number"] for row in replay.tables["public.t"].rows.values()) == list(range(11, 21))


def test_rows_of_a_table_without_columns_are_counted(database: PostgresDatabase, source: PostgresSource) -> None:
    database.run("CREATE TABLE t ()", "INSERT INTO t DEFAULT VALUES")
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        replay.catch_up()
        database.run("INSERT INTO t DEFAULT VALUES")
        replay.catch_up()
    assert replay.tables["public.t"].contents() == {(): 2}


@pytest.mark.parametrize("published", ["FOR ALL TABLES", "FOR TABLES IN SCHEMA public", "FOR TABLE root"])
def test_a_partition_that_was_out_of_the_publication_for_a_while_is_copied_again(
    database: PostgresDatabase, source: PostgresSource, published: str
) -> None:
    database.run(
        "CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf PARTITION OF root DEFAULT",
        "INSERT INTO root VALUES (1, 'seen')",
        f"CREATE PUBLICATION look {published}",
    )
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        replay.catch_up()
        database.run("DROP PUBLICATION look", "UPDATE root SET v = 'unseen'", f"CREATE PUBLICATION look {published}")
        replay.catch_up()
    assert replay.tables["public.leaf"].contents() == {(1, "unseen"): 1}


def test_a_resync_of_a_table_that_lost_its_last_partition_leaves_no_rows(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf PARTITION OF root DEFAULT",
        "INSERT INTO root VALUES (1)",
    )
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        replay.catch_up()
        database.run("DROP TABLE leaf")
        replay.directives = TableDirectives(resync={source.tables()[0].upstream_id: 1})
        replay.catch_up()
    assert replay.tables["public.root"].contents() == {}


def test_a_parent_of_a_table_that_is_followed_joins_without_it(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run("CREATE TABLE child (id int PRIMARY KEY)")
    source.prepare()
    database.run("CREATE TABLE parent (id int PRIMARY KEY)", "ALTER TABLE child INHERIT parent")
    assert sorted(str(one.schema.table) for one in PostgresDiscovery(source, frozenset()).tables.values()) == [
        "public.child",
        "public.parent",
    ]


def test_a_partition_whose_old_rows_would_not_do_for_its_root_is_named(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE keyed (id int PRIMARY KEY, code int NOT NULL) PARTITION BY RANGE (id)",
        "CREATE TABLE by_code PARTITION OF keyed DEFAULT",
        "CREATE UNIQUE INDEX codes ON by_code (code)",
        "ALTER TABLE by_code REPLICA IDENTITY USING INDEX codes",
        "CREATE TABLE keyless (id int, v text) PARTITION BY RANGE (id)",
        "ALTER TABLE keyless REPLICA IDENTITY FULL",
        "CREATE TABLE by_id PARTITION OF keyless (PRIMARY KEY (id)) DEFAULT",
    )
    found = {finding.level: finding for finding in source.check() if "its partition" in finding.message}
    assert {level: finding.subject for level, finding in found.items()} == {
        "warning": "public.keyed",
        "error": "public.keyless",
    }
    database.run(*(finding.fix for finding in found.values() if finding.fix))
    assert not [finding for finding in source.check() if "its partition" in finding.message]


def test_a_source_that_is_prepared_and_was_followed_leaves_no_file_of_its_journal_open(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)")
    source.prepare()
    source.prepare()
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        replay.catch_up()
    assert open_below(Path(source.folder)) == []


def test_a_copy_in_progress_holds_no_lock_on_its_tables(database: PostgresDatabase, source: PostgresSource) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t SELECT generate_series(1, 10)")
    source.prepare()
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay, closing(database.connect()) as connection:
        wait_until(replay.plan)
        connection.execute("SET lock_timeout = '2s'")
        connection.execute("TRUNCATE t")


def test_a_snapshot_outlives_the_slot_it_came_from(database: PostgresDatabase) -> None:
    database.run("CREATE TABLE t (id int)")
    round_ = PostgresSnapshot(database.dsn)
    try:
        # The server drops it when it notices that the connection is gone.
        wait_until(
            lambda: (
                database.rows(
                    "SELECT count(*) FROM pg_replication_slots WHERE temporary AND database = current_database()"
                )
                == [(0,)]
            )
        )
        with closing(database.connect(autocommit=False)) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute(f"SET TRANSACTION SNAPSHOT '{round_.snapshot}'".encode())
            database.run("INSERT INTO t VALUES (1)")
            assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    finally:
        round_.close()


def test_every_error_of_the_check_comes_with_sql_that_fixes_it(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE nothing (id int PRIMARY KEY)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
        "CREATE TABLE secret (id int PRIMARY KEY)",
        "DROP ROLE IF EXISTS weak",
        "CREATE ROLE weak LOGIN",
        "GRANT SELECT ON nothing TO weak",
    )
    weak = with_options(source, dsn=database.server.dsn(database.name, user="weak"))
    found = errors(weak)
    assert found.keys() >= {"role", "publication", "public.nothing", "public.secret"}
    with pytest.raises(PreflightError):
        weak.prepare()
    database.run(*(finding.fix for finding in found.values() if finding.fix))
    assert errors(weak) == {}
    database.run("DROP OWNED BY weak", "DROP ROLE weak")


def test_a_role_that_may_create_but_owns_no_table_is_advised_to_let_an_owner_publish(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE foreign_to_it (id int PRIMARY KEY)",
        "DROP ROLE IF EXISTS guest",
        "CREATE ROLE guest LOGIN REPLICATION",
        "GRANT SELECT ON foreign_to_it TO guest",
        f'GRANT CREATE ON DATABASE "{database.name}" TO guest',
    )
    guest = with_options(source, dsn=database.server.dsn(database.name, user="guest"))
    found = errors(guest)
    assert found.keys() == {"publication"}
    database.run(found["publication"].fix or "")
    guest.prepare()
    guest.reset()
    database.run("DROP OWNED BY guest", "DROP ROLE guest")


def test_a_mistake_in_the_dsn_is_not_taken_for_a_server_that_is_down(tmp_path: Path, source: PostgresSource) -> None:
    wrong = {
        "password=''": "refused the login",
        "user=nobody_here": "refused the login",
        "sslmode=sometimes": "do not fit",
        "options='-c nosuch=1'": "do not fit",
    }
    with EmbeddedPostgres(tmp_path / "guarded", password="guarded") as server:
        for setting, said in wrong.items():
            dsn = make_conninfo(server.dsn(), **conninfo_to_dict(setting))
            assert said in errors(with_options(source, dsn=dsn))["connection"].message


def test_a_server_without_a_free_connection_is_not_taken_for_one_that_is_down(
    tmp_path: Path, source: PostgresSource
) -> None:
    limits = {"max_connections": "4", "superuser_reserved_connections": "0", "max_wal_senders": "1"}
    with EmbeddedPostgres(tmp_path / "full", settings=limits) as server, ExitStack() as taken:
        for _ in range(int(limits["max_connections"])):
            taken.enter_context(closing(server.connect()))
        with pytest.raises(UnavailableError) as caught:
            with_options(source, dsn=server.dsn()).check()
    assert "max_connections" in (caught.value.fix or "")


def test_a_server_that_cannot_be_reached_is_unavailable_and_its_password_stays_secret(source: PostgresSource) -> None:
    with pytest.raises(UnavailableError) as caught:
        with_options(source, dsn="postgresql://nobody:hunter2@127.0.0.1:1/none").check()
    assert "hunter2" not in str(caught.value)
    assert caught.value.fix


def test_a_pattern_that_matches_nothing_names_what_there_is(database: PostgresDatabase, source: PostgresSource) -> None:
    database.run("CREATE TABLE orders (id int PRIMARY KEY)")
    found = errors(with_tables(source, TableOptions(include=["public.order"])))
    assert "public.orders" in (found["tables"].fix or "")


def test_a_prepared_transaction_that_holds_up_the_slot_is_named(tmp_path: Path, source: PostgresSource) -> None:
    with EmbeddedPostgres(tmp_path / "server", settings={"max_prepared_transactions": "1"}) as server:
        database = PostgresDatabase(server, "held").create()
        database.run("CREATE TABLE t (id int)", "BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'half done'")
        findings = with_options(source, dsn=database.dsn).check()
    [warning] = [finding for finding in findings if finding.subject == "slot"]
    assert (warning.level, "'half done'" in warning.message) == ("warning", True)


def test_a_wal_level_that_is_not_logical_is_named_with_the_way_out(tmp_path: Path, source: PostgresSource) -> None:
    with EmbeddedPostgres(tmp_path / "replica", settings={"wal_level": "replica"}) as server:
        with closing(server.connect()) as connection:
            connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
        found = errors(with_options(source, dsn=server.dsn()))
    assert "ALTER SYSTEM SET wal_level = 'logical'" in (found["wal_level"].fix or "")


def test_a_server_without_room_for_slots_or_senders_is_named_with_the_way_out(
    tmp_path: Path, source: PostgresSource
) -> None:
    limits = {"max_replication_slots": "2", "max_wal_senders": "1"}
    with EmbeddedPostgres(tmp_path / "narrow", settings=limits) as server:
        with closing(server.connect()) as connection:
            connection.execute("CREATE TABLE t (id int PRIMARY KEY)")
            connection.execute("SELECT pg_create_logical_replication_slot('of_another', 'pgoutput')")
        narrow = with_options(source, dsn=server.dsn())
        found = [finding for finding in narrow.check() if finding.level == "error"]
        with pytest.raises(PreflightError):
            narrow.prepare()
        with closing(server.connect()) as connection:
            assert connection.execute("SELECT count(*) FROM pg_publication").fetchone() == (0,)
    assert [finding.subject for finding in found] == ["slot", "slot"]
    fixes = " ".join(finding.fix or "" for finding in found)
    assert all(f"ALTER SYSTEM SET {name} = " in fixes for name in limits)


def test_preparing_twice_changes_nothing(database: PostgresDatabase, source: PostgresSource) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)")
    source.prepare()
    slots = "SELECT slot_name, confirmed_flush_lsn FROM pg_replication_slots WHERE NOT temporary"
    before = database.rows(slots)
    source.prepare()
    assert database.rows(slots) == before
    assert [schema.table for schema in source.tables()] == [TableName("public", "t")]


def test_rows_are_read_again_by_any_kind_of_key(database: PostgresDatabase, source: PostgresSource) -> None:
    database.run(
        "CREATE TABLE t (a text, b numeric(10,2), c timestamptz, d uuid, e bytea, v text, PRIMARY KEY (a, b, c, d, e))",
        "INSERT INTO t VALUES ('it''s', 1.50, '2024-02-29 12:00:00.123456+00',"
        " '0b0e0c5e-9b1d-4a3f-8d53-0d9f1c1f0f00', '\\x00ff', 'kept'), ('no', 1, now(), gen_random_uuid(), '', 'no')",
    )
    source.prepare()
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        replay.catch_up()
    [schema] = source.tables()
    copied = replay.tables["public.t"].rows
    wanted = next(row for row in copied.values() if row["a"] == "it's")
    table = pa.Table.from_pylist([wanted], pa.schema(list(schema.row_type)))
    assert source.refetch(schema, table.select(list(schema.key))).to_pylist() == [wanted]


def test_psycopg_is_not_left_with_open_connections(database: PostgresDatabase, source: PostgresSource) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)")
    source.check()
    source.tables()
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tailrace' AND datname = current_database()"
    with psycopg.connect(database.dsn) as connection:
        wait_until(lambda: connection.execute(query).fetchone() == (0,))


def test_rows_that_a_policy_hides_from_the_role_are_an_error_and_not_left_out(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE t (id int PRIMARY KEY, owner text)",
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (10)",
        "INSERT INTO t VALUES (1, 'a'), (2, 'b')",
        "CREATE PUBLICATION look FOR TABLE t, root WITH (publish_via_partition_root = true)",
        "DROP ROLE IF EXISTS hemmed_in",
        "CREATE ROLE hemmed_in LOGIN REPLICATION",
        "GRANT SELECT ON t, root, leaf TO hemmed_in",
        "ALTER TABLE root ENABLE ROW LEVEL SECURITY",
    )
    hemmed_in = with_options(source, dsn=database.server.dsn(database.name, user="hemmed_in"))
    [_, table] = sorted(hemmed_in.tables(), key=lambda each: each.table.name)
    assert errors(hemmed_in) == {}
    database.run(
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY own ON t TO hemmed_in USING (owner = 'a')",
        "ALTER TABLE leaf ENABLE ROW LEVEL SECURITY",
    )
    found = errors(hemmed_in)
    assert set(found) == {"public.t", "public.root"}
    assert found["public.t"].fix == "ALTER ROLE hemmed_in BYPASSRLS;"
    with pytest.raises(TailraceError, match="row-level security"):
        hemmed_in.refetch(table, pa.table({"id": pa.array([2], pa.int32())}))
    database.run("ALTER ROLE hemmed_in BYPASSRLS")
    assert errors(hemmed_in) == {}
    assert hemmed_in.refetch(table, pa.table({"id": pa.array([2], pa.int32())})).num_rows == 1
    database.run("DROP OWNED BY hemmed_in", "DROP ROLE hemmed_in")


def test_a_name_that_is_not_utf8_is_reported_with_a_fix(postgres: EmbeddedPostgres) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE DATABASE bytes ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    database = PostgresDatabase(postgres, "bytes")
    try:
        with database.connect() as connection:
            connection.execute(b'CREATE TABLE "caf\xe9" (id int PRIMARY KEY)')
        with (
            pytest.raises(TailraceError, match="not UTF-8 in a name") as raised,
            session(database.dsn, "looking") as reader,
        ):
            list_tables(reader)
        assert "rename" in str(raised.value.fix)
    finally:
        database.drop()


def test_a_text_without_a_form_in_utf8_is_not_taken_for_a_server_that_is_down(postgres: EmbeddedPostgres) -> None:
    with postgres.connect() as connection:
        connection.execute("CREATE DATABASE windows ENCODING 'WIN1252' TEMPLATE template0 LOCALE 'C'")
    database = PostgresDatabase(postgres, "windows")
    try:
        with (
            pytest.raises(TailraceError, match="cannot be converted to UTF-8") as raised,
            session(database.dsn, "reading") as reader,
        ):
            reader.execute("SELECT chr(129)").fetchall()
        assert not isinstance(raised.value, UnavailableError)
        assert "tailrace reset" in str(raised.value.fix)
    finally:
        database.drop()


def test_a_table_that_moves_into_a_matching_schema_and_a_detached_partition_join_and_a_removed_one_does_not(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE SCHEMA other",
        "CREATE TABLE other.moved (id int PRIMARY KEY)",
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE unwanted (id int PRIMARY KEY)",
    )
    source.prepare()
    discovery = PostgresDiscovery(source, frozenset())
    assert names(discovery) == ["public.root", "public.unwanted"]
    discovery.followed = frozenset(discovery.tables)
    database.run(
        "ALTER TABLE other.moved SET SCHEMA public",
        "ALTER TABLE root DETACH PARTITION leaf",
        f"ALTER PUBLICATION {source.options.publication} DROP TABLE unwanted",
    )
    discovery.refresh(at_once=True)
    assert names(discovery) == ["public.leaf", "public.moved", "public.root"]
    # Another process, which has never followed it, leaves it out as well.
    again = PostgresDiscovery(source, frozenset())
    assert names(again) == ["public.leaf", "public.moved", "public.root"]


def test_the_mark_of_an_earlier_version_leaves_out_what_it_left_out(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run("CREATE TABLE first (id int PRIMARY KEY)", "CREATE TABLE unwanted (id int PRIMARY KEY)")
    source.prepare()
    publication = source.options.publication
    [(seen,)] = database.rows("SELECT max(oid)::int8 FROM pg_class WHERE relname IN ('first', 'unwanted')")
    database.run(
        f"ALTER PUBLICATION {publication} DROP TABLE unwanted",
        f"COMMENT ON PUBLICATION {publication} IS"
        f" 'tailrace made this and adds new tables to it: {selection_hash(source)} {seen}'",
        "CREATE TABLE second (id int PRIMARY KEY)",
    )
    for _ in range(2):
        assert names(PostgresDiscovery(source, frozenset())) == ["public.first", "public.second"]


def names(discovery: PostgresDiscovery) -> list[str]:
    return sorted(str(one.schema.table) for one in discovery.tables.values())


def test_an_event_trigger_of_an_earlier_version_is_named_by_check_and_while_the_pipeline_runs(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run("CREATE TABLE first (id int PRIMARY KEY)")
    source.set_up(remove=False)
    assert source.notices() == []
    database.run("COMMENT ON FUNCTION tailrace.report_ddl() IS 'tailrace 2'")
    [notice] = source.notices()
    assert "can gain rights" in notice.message
    assert notice.fix == "tailrace prepare FILE"
    assert notice in source.check()
    source.set_up(remove=False)
    assert source.notices() == []
