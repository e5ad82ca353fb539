"""What the catalog holds under an older snapshot, and for every kind of publication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg import sql

from tailrace.demo.server import EmbeddedPostgres, find_servers
from tailrace.model.schema import TableName
from tailrace.source.postgres.catalog import Published, describe, list_published, list_tables
from tailrace.source.postgres.connection import PgConnection, session
from tests.support.database import PostgresDatabase

TABLES = """
CREATE TABLE t (id int PRIMARY KEY, a int, b text);
CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (100);
INSERT INTO root VALUES (1, 'one');
CREATE PUBLICATION pub FOR TABLE t, root WITH (publish_via_partition_root = true);
"""


def catalog(connection: PgConnection, name: str, publication: str = "pub") -> Published:
    [relation] = [one for one in list_tables(connection) if one.table.name == name]
    [published] = describe(connection, [relation], list_published(connection, publication))
    return published


@contextmanager
def under_snapshot(database: PostgresDatabase) -> Iterator[PgConnection]:
    """A session whose transaction imported a snapshot; everything done meanwhile is later than it."""
    with (
        session(database.dsn, "exporting", autocommit=False) as holder,
        session(database.dsn, "importing") as connection,
    ):
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        row = holder.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(row[0])))
        yield connection


def test_under_a_snapshot_the_catalog_is_as_it_was(database: PostgresDatabase) -> None:
    database.run(
        *TABLES.strip().split("\n"),
        "CREATE TYPE mood AS ENUM ('calm')",
        "ALTER TABLE t ADD m mood DEFAULT 'calm', ADD n int DEFAULT 6",
    )
    with session(database.dsn, "testing") as connection:
        before = {name: catalog(connection, name) for name in ("t", "root")}
    with under_snapshot(database) as connection:
        database.run(
            "ALTER TABLE t DROP b",
            "ALTER TABLE t RENAME a TO z",
            "ALTER TABLE t ADD c int DEFAULT 9",
            "ALTER TABLE t ALTER n TYPE bigint",
            "ALTER TABLE t RENAME TO u",
            "ALTER PUBLICATION pub DROP TABLE root",
            "CREATE TABLE newer (id int PRIMARY KEY)",
            "ALTER PUBLICATION pub ADD TABLE newer",
        )
        assert {name: catalog(connection, name) for name in ("t", "root")} == before
        assert set(list_published(connection, "pub")) == {TableName("public", "t"), TableName("public", "root")}
        database.run("DROP TYPE mood CASCADE", "DROP TABLE root")
        seen = catalog(connection, "t").schema
        assert [column.name for column in seen.columns] == ["id", "a", "b", "m", "n"]
        assert seen.column("m").upstream_type == "mood"
        assert catalog(connection, "root").can_select is False


@pytest.mark.parametrize("version", sorted(find_servers()))
def test_a_publication_is_listed_as_the_server_lists_it(
    version: int,
    postgres_server: Callable[[int], EmbeddedPostgres],
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
) -> None:
    database = make_database(postgres_server(version))
    generated = "GENERATED ALWAYS AS (id * 2) STORED"
    database.run(
        *TABLES.strip().split("\n"),
        "CREATE SCHEMA s",
        "CREATE TABLE s.one (id int PRIMARY KEY, v text)",
        "CREATE TABLE s.parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE middle PARTITION OF s.parts FOR VALUES FROM (0) TO (10) PARTITION BY RANGE (id)",
        "CREATE TABLE s.low PARTITION OF middle FOR VALUES FROM (0) TO (5)",
        "CREATE UNLOGGED TABLE s.unlogged (id int)",
        # The view of version 15 lists generated columns, which that version never sends.
        f"CREATE TABLE g (id int PRIMARY KEY, twice int {generated if version > 15 else ''})",
    )
    kinds = ["FOR ALL TABLES", "FOR TABLE s.parts, s.low, t", "FOR TABLE s.low, middle, g"]
    if version >= 15:
        kinds += [
            "FOR TABLES IN SCHEMA s",
            "FOR TABLES IN SCHEMA s, TABLE t WHERE (a > 1)",
            "FOR TABLE t (b, id), root",
        ]
    options = ["publish_via_partition_root = true", "publish_via_partition_root = false"]
    if version >= 18:
        options.append("publish_generated_columns = stored")
    with session(database.dsn, "testing") as connection:
        for number, (kind, option) in enumerate((kind, option) for kind in kinds for option in options):
            connection.execute(
                f"SET search_path = public; CREATE PUBLICATION p{number} {kind} WITH ({option})".encode()
            )
            connection.execute("SET search_path = pg_catalog")
            shown = list_published(connection, f"p{number}")
            relations = [one for one in list_tables(connection) if one.table in shown]
            listed = {
                (str(one.schema.table), tuple(c.name for c in one.schema.columns), one.row_filter)
                for one in describe(connection, relations, shown)
            }
            assert listed == set(as_the_server_says(connection, f"p{number}")), (kind, option)


def as_the_server_says(
    connection: psycopg.Connection[tuple[object, ...]], publication: str
) -> Iterator[tuple[str, tuple[str, ...], str | None]]:
    # Before version 15, a publication always shows all rows and columns.
    shown = "attnames::text[], rowfilter"
    if connection.info.server_version < 150000:
        shown = (
            "ARRAY(SELECT a.attname::text FROM pg_attribute a"
            " WHERE a.attrelid = format('%%I.%%I', schemaname, tablename)::regclass"
            " AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum), NULL"
        )
    rows = connection.execute(
        f"SELECT schemaname || '.' || tablename, {shown} FROM pg_publication_tables WHERE pubname = %s".encode(),
        [publication],
    )
    for table, columns, row_filter in rows.fetchall():
        yield str(table), tuple(columns), row_filter  # type: ignore[arg-type, misc]
