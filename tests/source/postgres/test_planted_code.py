"""What a table's owner can plant for those who read it: it must not run with the rights of our role.

Every planted function fails when it is called by the role that reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.errors import TailraceError
from tailrace.model.schema import TableSchema
from tailrace.option.table import TableOptions
from tailrace.source.postgres.bulk import bulk
from tailrace.source.postgres.catalog import describe, list_published, list_tables
from tailrace.source.postgres.connection import connect, connection_string, session
from tailrace.source.postgres.copy import PostgresCopySplit, fetch, measure_heaps, read_chunk
from tailrace.source.postgres.reader import read_rows
from tailrace.testing.replay import SourceReplay
from tests.support.database import PostgresDatabase
from tests.support.polling import LIMIT
from tests.support.source_making import make_polled, make_postgres

ROLES = ("planter", "reader")

PLANTED = [
    "CREATE SCHEMA garden",
    "GRANT USAGE ON SCHEMA garden TO reader",
    """CREATE FUNCTION garden.planted() RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN
        IF current_user = 'reader' THEN RAISE EXCEPTION 'planted code ran'; END IF; RETURN true; END $$""",
    "CREATE TYPE garden.mood AS ENUM ('sad', 'glad')",
    "CREATE DOMAIN garden.number AS int CHECK (garden.planted() AND VALUE < 1000)",
    "CREATE DOMAIN garden.word AS text CHECK (garden.planted())",
    "CREATE TYPE garden.pair AS (a garden.number, b text)",
    "CREATE TYPE garden.span AS RANGE (subtype = float8)",
    """CREATE TABLE garden.bed (
        kind garden.mood, number garden.number, word garden.word, couple garden.pair, moods garden.mood[], n bigint,
        numbers garden.number[], pairs garden.pair[], span garden.span, price numeric(8,2), ids uuid[],
        updated_at timestamptz, PRIMARY KEY (kind, number, word, couple, moods, n))""",
    """INSERT INTO garden.bed SELECT (CASE WHEN i % 2 = 0 THEN 'sad' ELSE 'glad' END)::garden.mood, i, 'w' || i,
        ROW(i, 'b,"' || i)::garden.pair, ARRAY['sad', NULL, 'glad']::garden.mood[], i, ARRAY[1, i], '{"(1,x)"}',
        garden.span(1.5, 2), i / 4.0, '{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}', now() FROM generate_series(1, 20) i""",
    # Casts to text, and from it, of everything that a type's owner may define them for.
    *[
        statement
        for name, kind in {
            "mood": "garden.mood", "moods": "garden.mood[]", "numbers": "garden.number[]",
            "pair": "garden.pair", "pairs": "garden.pair[]", "span": "garden.span",
        }.items()
        for statement in (
            f"CREATE FUNCTION garden.{name}_out({kind}) RETURNS text IMMUTABLE LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM garden.planted(); RETURN 'planted'; END $$",
            f"CREATE CAST ({kind} AS text) WITH FUNCTION garden.{name}_out AS IMPLICIT",
            f"CREATE FUNCTION garden.{name}_in(text) RETURNS {kind} IMMUTABLE LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM garden.planted(); RETURN NULL; END $$",
            f"CREATE CAST (text AS {kind}) WITH FUNCTION garden.{name}_in AS IMPLICIT",
        )
    ],
    # Functions and operators with the names of those that the queries use.
    *[
        f"CREATE FUNCTION garden.{name}(VARIADIC text[]) RETURNS text IMMUTABLE LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM garden.planted(); RETURN 'planted'; END $$"
        for name in ("concat", "format", "hashtextextended", "max", "pg_relation_filenode")
    ],
    *[
        statement
        for number, sign in enumerate(("=", ">", ">=", "<", "<="))
        for statement in (
            f"CREATE FUNCTION garden.sign{number}(garden.mood, garden.mood) RETURNS boolean IMMUTABLE"
            " LANGUAGE sql AS 'SELECT garden.planted()'",
            f"CREATE OPERATOR garden.{sign} (LEFTARG = garden.mood, RIGHTARG = garden.mood,"
            f" FUNCTION = garden.sign{number})",
        )
    ],
    "GRANT SELECT ON garden.bed TO reader",
]  # fmt: skip


@pytest.fixture
def garden(database: PostgresDatabase) -> Iterator[PostgresDatabase]:
    """A database in which `planter` owns the table `garden.bed`, and `reader` may read it and the log."""
    database.run(*[f"DROP ROLE IF EXISTS {role}" for role in ROLES], "CREATE ROLE planter LOGIN")
    database.run("CREATE ROLE reader LOGIN REPLICATION", f"GRANT CREATE ON DATABASE {database.name} TO planter")
    with closing(database.server.connect(database.name, user="planter")) as planter:
        for statement in PLANTED:
            planter.execute(statement.encode())
    database.run("CREATE PUBLICATION pub FOR TABLE garden.bed")
    yield database
    database.run("DROP OWNED BY planter, reader CASCADE", "DROP ROLE planter", "DROP ROLE reader")


def reader_dsn(database: PostgresDatabase) -> str:
    return database.server.dsn(database.name, user="reader")


def bed_of(dsn: str) -> TableSchema:
    with session(dsn, "testing") as connection:
        [published] = describe(connection, list_tables(connection), list_published(connection, "pub"))
    return published.schema


def true_rows(database: PostgresDatabase) -> list[tuple[Any, ...]]:
    """Numbers, and the text that output functions give."""
    query = """SELECT n::int, format('%s', kind), number::int, word::text COLLATE "C", format('%s', couple),
        format('%s', span), price FROM garden.bed ORDER BY n"""
    return database.rows(query)


def shown_rows(rows: pa.Table) -> list[tuple[Any, ...]]:
    found = sorted(rows.to_pylist(), key=lambda row: row["n"])
    for row in found:
        assert row["moods"] == ["sad", None, "glad"]
        assert row["numbers"] == [1, row["n"]]
        assert row["pairs"] == ["(1,x)"]
        assert row["ids"] == ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]
    names = ("n", "kind", "number", "word", "couple", "span", "price")
    return [tuple(row[name] for name in names) for row in found]


def test_a_copy_calls_none_of_it_and_has_every_value(garden: PostgresDatabase) -> None:
    dsn = reader_dsn(garden)
    table = bed_of(dsn)
    with closing(connect(connection_string(dsn))) as holding:
        holding.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        row = holding.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        oid = int(table.upstream_id)
        [part] = (measure_heaps(dsn, [oid], row[0]) or {})[oid]
        batches = read_chunk(dsn, PostgresCopySplit(copies=table, part=part, snapshot=row[0]))
        rows = pa.concat_tables(pa.Table.from_struct_array(changes.row) for changes in batches)
    assert shown_rows(rows) == true_rows(garden)


def test_reading_again_by_key_calls_none_of_it_and_finds_every_row(garden: PostgresDatabase) -> None:
    dsn = reader_dsn(garden)
    table = bed_of(dsn)
    source = make_postgres(dsn, Path("/nonexistent"), "p", TableOptions(include=["garden.*"]), publication="pub")
    rows = pa.concat_tables(pa.Table.from_batches([batch]) for batch in read_rows(source, table))
    found = fetch(dsn, table, rows.select(list(table.key)))
    assert shown_rows(found) == shown_rows(rows) == true_rows(garden)


@pytest.mark.parametrize("deletes", [None, {"full_diff": {"every_cycles": 1}}])
def test_polling_calls_none_of_it_and_has_every_row(
    garden: PostgresDatabase, tmp_path: Path, deletes: dict[str, Any] | None
) -> None:
    defaults = {"updated_at": "updated_at", **({"deletes": deletes} if deletes else {})}
    tables = TableOptions.model_validate({"include": ["garden.*"], "defaults": defaults})
    source = make_polled(
        reader_dsn(garden), tmp_path, tables, page_rows=3, chunk_rows=4, interval=0.001, idle_interval=0.001
    )
    with SourceReplay(source, LIMIT) as replay:
        replay.catch_up()
        assert replay.contents()["garden.bed"].total() == 20
        garden.run("SET ROLE planter; UPDATE garden.bed SET price = 0, updated_at = clock_timestamp() WHERE n < 5")
        replay.catch_up()
        assert replay.contents()["garden.bed"].total() == 20


def test_a_view_that_took_the_place_of_a_table_is_not_read(garden: PostgresDatabase) -> None:
    dsn = reader_dsn(garden)
    with closing(garden.server.connect(garden.name, user="planter")) as planter:
        planter.execute("CREATE VIEW garden.trap AS SELECT garden.planted() AS n")
        planter.execute("GRANT SELECT ON garden.trap TO reader")
    with pytest.raises(TailraceError, match="access to non-system view"), session(dsn, "testing") as connection:
        connection.execute("SELECT * FROM garden.trap")
    trapped = pytest.raises(TailraceError, match="access to non-system view")
    with trapped, bulk(dsn, "testing") as rows, rows.cursor() as cursor:
        cursor.execute("SELECT * FROM garden.trap")
