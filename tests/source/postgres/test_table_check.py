"""What `check` and the run find about single tables, on a real database: rights, identities, what is not sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import Finding, LostError, TableError, problems
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.source.postgres.discovery import PostgresDiscovery
from tailrace.source.postgres.source import PostgresSource
from tailrace.testing.replay import SourceReplay
from tests.support.database import PostgresDatabase
from tests.support.source_making import make_postgres, with_options

LIMIT = Limit(1000, 10_000_000)


def make(database: PostgresDatabase, folder: Path, **options: object) -> PostgresSource:
    """A source with the defaults of a file: it publishes no table without a replica identity."""
    given = {"slot": f"look_{database.name}", "heartbeat": None, "publish_without_identity": False, **options}
    return make_postgres(database.dsn, folder, "look", TableOptions(include=["public.*"]), **given)


@pytest.fixture
def source(database: PostgresDatabase, tmp_path: Path) -> PostgresSource:
    return make(database, tmp_path)


@contextmanager
def role(database: PostgresDatabase, name: str) -> Iterator[str]:
    """A role that may replicate and nothing else; its dsn."""
    database.run(f"DROP ROLE IF EXISTS {name}", f"CREATE ROLE {name} LOGIN REPLICATION")
    try:
        yield database.server.dsn(database.name, user=name)
    finally:
        database.run(f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def about(findings: list[Finding], word: str) -> Finding:
    [found] = [finding for finding in findings if word in finding.message]
    return found


def names(source: PostgresSource) -> list[str]:
    return [str(table.table) for table in source.tables()]


def test_a_table_without_a_replica_identity_is_left_out_and_its_application_goes_on(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE keyed (id int PRIMARY KEY)",
        "CREATE TABLE bag (v int)",
        "CREATE TABLE nothing (id int PRIMARY KEY)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
        "INSERT INTO bag VALUES (1)",
    )
    assert about(source.check(), "UPDATE and DELETE; not followed: public.bag, public.nothing").level == "warning"
    source.prepare()
    assert names(source) == ["public.keyed"]
    database.run("CREATE TABLE later (v int)", "CREATE TABLE whole (v int)", "ALTER TABLE whole REPLICA IDENTITY FULL")
    discovery = PostgresDiscovery(source, frozenset())
    assert sorted(str(one.schema.table) for one in discovery.tables.values()) == ["public.keyed", "public.whole"]
    [notice] = source.notices()
    assert "not followed: public.bag, public.later, public.nothing" in notice.message
    assert "source.publish_without_identity" in (notice.fix or "")
    database.run(
        "INSERT INTO later VALUES (1)", "UPDATE later SET v = 2", "UPDATE bag SET v = 2", "DELETE FROM nothing"
    )


def test_a_table_without_a_replica_identity_is_followed_where_the_file_allows_it(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    database.run("CREATE TABLE bag (v int)")
    source = make(database, tmp_path, publish_without_identity=True)
    source.prepare()
    assert names(source) == ["public.bag"]
    assert source.notices() == []
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        database.run("INSERT INTO bag VALUES (1)", "UPDATE bag SET v = 2")


def test_a_pipeline_of_tables_that_may_not_be_published_is_refused_with_the_reason(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run("CREATE TABLE bag (v int)")
    found = about(source.check(), "not followed: public.bag")
    assert (found.level, found.table) == ("error", None)


def test_the_grants_that_a_check_prints_are_enough_for_a_partitioned_table(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE SCHEMA parts",
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE parts.high PARTITION OF root FOR VALUES FROM (10) TO (20)",
        "INSERT INTO root VALUES (1), (11)",
        "CREATE PUBLICATION look FOR TABLE root WITH (publish_via_partition_root = true)",
    )
    with role(database, "granted") as dsn:
        database.run("GRANT SELECT ON root TO granted")
        granted = with_options(source, dsn=dsn)
        found = problems(granted.check())["public.root"]
        assert "2 of its partitions" in found.message
        database.run(found.fix or "")
        assert problems(granted.check()) == {}
        with SourceReplay(granted, LIMIT) as replay:
            replay.catch_up()
        assert sorted(row["id"] for row in replay.tables["public.root"].rows.values()) == [1, 11]


def test_a_right_that_is_missing_while_rows_are_read_stops_one_table(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION look FOR ALL TABLES")
    with role(database, "denied") as dsn:
        denied = with_options(source, dsn=dsn)
        [table] = denied.tables()
        with pytest.raises(TableError, match="permission denied") as caught:
            denied.refetch(table, pa.table({"id": pa.array([424242], pa.int32())}))
        assert caught.value.table == "public.t"
        assert "424242" not in str(caught.value)


def test_a_dropped_slot_of_a_pipeline_that_ran_is_lost_and_not_about_to_be_created(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)")
    source.prepare()
    database.run(f"SELECT pg_drop_replication_slot('{source.options.slot}')")
    with pytest.raises(LostError, match="is gone") as caught:
        source.check()
    assert "tailrace reset FILE" in (caught.value.fix or "")


def test_a_partitioned_table_without_a_key_is_followed_by_the_whole_rows_of_its_partitions(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE root (id int, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE high PARTITION OF root FOR VALUES FROM (10) TO (20)",
        "ALTER TABLE low REPLICA IDENTITY FULL",
        "ALTER TABLE high REPLICA IDENTITY FULL",
        "INSERT INTO root VALUES (1, 'a'), (11, 'b'), (12, 'c')",
    )
    found = problems(source.check())["public.root"]
    assert "refuses" not in found.message
    database.run(found.fix or "")
    assert problems(source.check()) == {}
    with SourceReplay(source, LIMIT) as replay:
        replay.catch_up()
        database.run("UPDATE root SET v = 'x' WHERE id = 1", "DELETE FROM root WHERE id = 11")
        replay.catch_up()
    assert +replay.tables["public.root"].contents() == {(1, "x"): 1, (12, "c"): 1}


def test_a_partition_that_sends_only_its_own_key_stops_a_root_without_one(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE root (id int, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF root (PRIMARY KEY (id)) DEFAULT",
    )
    found = problems(source.check())["public.root"]
    assert "does not send whole rows" in found.message
    database.run(*(found.fix or "").splitlines())
    assert problems(source.check()) == {}


def test_a_table_that_leaves_the_publication_is_named_until_it_is_back(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run("CREATE TABLE stays (id int PRIMARY KEY)", "CREATE TABLE leaves (id int PRIMARY KEY)")
    source.prepare()
    assert source.notices() == []
    discovery = PostgresDiscovery(source, frozenset())
    discovery.followed = frozenset(discovery.tables)
    database.run("ALTER PUBLICATION look DROP TABLE leaves")
    discovery.refresh(at_once=True)
    [notice] = source.notices()
    assert notice.message.endswith("will not be followed: public.leaves")
    assert notice in source.check()
    database.run(notice.fix or "")
    assert source.notices() == []


@pytest.mark.parametrize("version", [16, 18])
def test_a_generated_column_that_is_not_published_is_named(
    postgres_server: Callable[[int], EmbeddedPostgres],
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
    tmp_path: Path,
    version: int,
) -> None:
    database = make_database(postgres_server(version))
    source = make(database, tmp_path)
    database.run(
        "CREATE TABLE priced (id int PRIMARY KEY, net int, gross int GENERATED ALWAYS AS (net * 2) STORED)",
        "CREATE TABLE listed (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE PUBLICATION look FOR TABLE priced, listed (id)" if version > 14 else "",
    )
    [notice] = source.notices()
    assert (notice.table, notice.message) == (
        "public.priced",
        "column gross is generated and not published, so not copied",
    )
    assert notice in source.check()
    if version < 18:
        assert "PostgreSQL 18" in (notice.fix or "")
    else:
        database.run(notice.fix or "")
        assert source.notices() == []
        assert "gross" in next(table for table in source.tables() if table.table.name == "priced").arrow.names


def test_a_partition_whose_application_would_be_refused_is_named(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF root DEFAULT",
        "ALTER TABLE part REPLICA IDENTITY NOTHING",
        "CREATE PUBLICATION look FOR TABLE root WITH (publish_via_partition_root = true)",
    )
    found = about(source.check(), "refuses UPDATE and DELETE on its partition")
    database.run(found.fix or "")
    assert not [finding for finding in source.check() if "refuses" in finding.message]


def test_an_unlogged_partition_is_named_until_it_is_logged_again(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    database.run(
        "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE part PARTITION OF root DEFAULT",
        "CREATE PUBLICATION look FOR TABLE root WITH (publish_via_partition_root = true)",
    )
    assert source.notices() == []
    database.run("ALTER TABLE part SET UNLOGGED")
    found = problems(source.check())["public.root"]
    assert 'its partition "public"."part" is UNLOGGED' in found.message
    [notice] = source.notices()
    assert (notice.level, notice.message) == ("warning", found.message)
    database.run(found.fix or "")
    assert source.notices() == []
    assert problems(source.check()) == {}


def test_a_table_of_another_owner_is_named_and_keeps_no_other_from_being_followed(
    database: PostgresDatabase, source: PostgresSource
) -> None:
    with role(database, "keeper") as dsn:
        database.run(
            f'GRANT CREATE ON DATABASE "{database.name}" TO keeper',
            "CREATE TABLE own (id int PRIMARY KEY)",
            "ALTER TABLE own OWNER TO keeper",
        )
        keeper = with_options(source, dsn=dsn)
        keeper.prepare()
        database.run("CREATE TABLE foreign_one (id int PRIMARY KEY)", "GRANT SELECT ON foreign_one TO keeper")
        assert [str(one.schema.table) for one in PostgresDiscovery(keeper, frozenset()).tables.values()] == [
            "public.own"
        ]
        [notice] = keeper.notices()
        assert notice.message.endswith("will not be followed: public.foreign_one")
        database.run(notice.fix or "")
        assert keeper.notices() == []
        database.run("ALTER PUBLICATION look OWNER TO CURRENT_USER", "CREATE TABLE later (id int PRIMARY KEY)")
        assert "public.later" in keeper.notices()[0].message
        assert len(PostgresDiscovery(keeper, frozenset()).tables) == 2
        database.run(f'REVOKE CREATE ON DATABASE "{database.name}" FROM keeper', "DROP PUBLICATION look")
