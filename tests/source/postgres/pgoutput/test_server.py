"""What a real server sends for updates, moved keys, TOAST, DDL and odd encodings, decoded; and any values at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import conninfo, sql

from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import SchemaChangedError, UnfitError
from tailrace.model.change import START, Changes, Op, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres.copy_query import Converter, select_list, session_for
from tailrace.source.postgres.frame_builder import FrameBuilder, FrameMeta
from tailrace.source.postgres.pgoutput.decode import decode
from tailrace.source.postgres.pgoutput.message import EPOCH_US
from tailrace.source.postgres.type_map import read_types
from tests.support.database import PostgresDatabase

LONG = "x" * 200_000  # kept out of line, uncompressed
OUT_OF_LINE = "ALTER TABLE {0} ALTER COLUMN v SET STORAGE EXTERNAL"


class Upstream:
    """A database with a slot, and the schemas of its tables as they are when asked for."""

    def __init__(self, database: PostgresDatabase) -> None:
        self.database = database
        database.run("CREATE PUBLICATION everything FOR ALL TABLES")
        with database.connect(client_encoding="UTF8") as session:
            (encoding,) = session.execute("SHOW server_encoding").fetchone() or ("",)
        settings_ = " ".join(f"-c {name}={value}" for name, value in session_for(encoding).items())
        self.dsn = conninfo.make_conninfo(database.dsn, options=settings_)
        database.run("SELECT pg_create_logical_replication_slot(current_database()::text, 'pgoutput')")

    def table(self, name: str, key: tuple[str, ...] = ("id",), version: int = 1) -> TableSchema:
        with self.database.connect(client_encoding="UTF8") as session:
            columns = session.execute(
                "SELECT attname::text, atttypid::int8, atttypmod, format_type(atttypid, atttypmod), attnum"
                " FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
                [name],
            ).fetchall()
            types = read_types(session, (column[1] for column in columns))
        found = tuple(
            Column(each, types[oid].arrow(mod), True, declared, at) for each, oid, mod, declared, at in columns
        )
        return TableSchema(TableName("public", name), found, key, version)

    def read(self, *tables: TableSchema) -> list[Changes]:
        """Everything since the last call."""
        versions: dict[int, list[TableSchema]] = {}
        with psycopg.connect(self.dsn, autocommit=True) as session:
            for table in tables:
                oid = session.execute("SELECT to_regclass(%b)::oid::int8", [str(table.table)]).fetchone()
                assert oid is not None
                versions.setdefault(oid[0], []).append(table)
            rows = session.execute(
                "SELECT data FROM pg_logical_slot_get_binary_changes(current_database(), NULL, NULL,"
                " 'proto_version', '1', 'publication_names', 'everything')",
                binary=True,
            ).fetchall()
        messages = pa.array([row[0] for row in rows], pa.binary())
        histories = {oid: list(zip(_begins(messages, oid), tables, strict=False)) for oid, tables in versions.items()}
        return list(decode(messages, relations={}, transaction=None, tables=histories))


def _begins(messages: pa.Array[Any], oid: int) -> list[Position]:
    """Where each shape of a relation begins, as the receiver notes it."""
    shapes = [shape for frame in FrameBuilder(0).feed(messages) for shape in FrameMeta.from_bytes(frame.meta).shapes]
    return [shape.at for shape in shapes if int.from_bytes(shape.raw[1:5], "big") == oid] or [START]


@pytest.fixture(params=[16, 18])
def upstream(
    request: pytest.FixtureRequest,
    postgres_server: Callable[[int], EmbeddedPostgres],
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
) -> Upstream:
    return Upstream(make_database(postgres_server(request.param)))


def summarize(changes: list[Changes]) -> list[tuple[Any, ...]]:
    """(op, ordinal, row values, before values, unchanged columns), long values by their length."""
    found = []
    for each in changes:
        mask = each.unchanged_mask()
        for index, change in enumerate(each.batch.to_pylist()):
            unchanged = (
                ""
                if mask is None
                else "".join(c.name for c, bit in zip(each.table.columns, mask[index], strict=True) if bit)
            )
            found.append(
                (Op(change["op"]).name, change["ordinal"], short(change["row"]), short(change["before"]), unchanged)
            )
    return found


def short(row: dict[str, Any] | None) -> tuple[Any, ...] | None:
    if row is None:
        return None
    return tuple(len(value) if isinstance(value, str) and len(value) > 100 else value for value in row.values())


def test_toasted_values_that_did_not_change_are_marked_alone_and_with_a_moved_key(upstream: Upstream) -> None:
    upstream.database.run(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
        OUT_OF_LINE.format("t"),
        f"INSERT INTO t VALUES (1, '{LONG}', 0)",
        "BEGIN; UPDATE t SET n = 1; UPDATE t SET id = 2; UPDATE t SET v = 'short'; COMMIT",
    )
    assert summarize(upstream.read(upstream.table("t"))) == [
        ("INSERT", 0, (1, len(LONG), 0), None, ""),
        ("UPDATE", 0, (1, None, 1), None, "v"),
        ("DELETE", 2, (1, None, None), None, ""),
        ("INSERT", 3, (2, None, 1), None, "v"),
        ("UPDATE", 4, (2, "short", 1), None, ""),
    ]


def test_a_toasted_key_that_did_not_change_is_not_a_moved_key(upstream: Upstream) -> None:
    # Out of line although short enough for an index: other wide columns push it out.
    key = "k" * 2500
    upstream.database.run(
        "CREATE TABLE t (v text PRIMARY KEY, n int, w text)",
        OUT_OF_LINE.format("t"),
        f"INSERT INTO t VALUES ('{key}', 0, repeat('w', 1000))",
        "UPDATE t SET n = 1",
    )
    found = summarize(upstream.read(upstream.table("t", ("v",))))
    assert found[1] == ("UPDATE", 0, (len(key), 1, 1000), None, "")


def test_a_full_replica_identity_gives_whole_old_rows_and_no_unsent_values(upstream: Upstream) -> None:
    upstream.database.run(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n int)",
        OUT_OF_LINE.format("t"),
        "ALTER TABLE t REPLICA IDENTITY FULL",
        f"INSERT INTO t VALUES (1, '{LONG}', NULL)",
        "BEGIN; UPDATE t SET n = 1; UPDATE t SET id = 2; DELETE FROM t; COMMIT",
    )
    size = len(LONG)
    assert summarize(upstream.read(upstream.table("t")))[1:] == [
        ("UPDATE", 0, (1, size, 1), (1, size, None), ""),
        ("DELETE", 2, (1, size, 1), (1, size, 1), ""),
        ("INSERT", 3, (2, size, 1), None, ""),
        ("DELETE", 4, (2, size, 1), (2, size, 1), ""),
    ]


PARTED = (
    "ALTER PUBLICATION everything SET (publish_via_partition_root = true)",
    "CREATE TABLE t (id int PRIMARY KEY, v text, n int NOT NULL) PARTITION BY RANGE (id)",
    "CREATE TABLE leaf PARTITION OF t DEFAULT",
    OUT_OF_LINE.format("leaf"),
    f"INSERT INTO t VALUES (1, '{LONG}', 0)",
)


def test_the_old_key_of_a_partition_is_not_taken_for_a_whole_row_because_its_root_says_so(upstream: Upstream) -> None:
    upstream.database.run(*PARTED, "ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET id = 2")
    assert summarize(upstream.read(upstream.table("t")))[-1] == ("INSERT", 1, (2, None, 0), None, "v")


@pytest.mark.parametrize("change", ["DELETE FROM t", "UPDATE t SET n = 1"])
def test_an_old_row_of_a_partition_that_lacks_the_key_of_the_root_is_refused(upstream: Upstream, change: str) -> None:
    upstream.database.run(
        *PARTED,
        "CREATE UNIQUE INDEX by_n ON leaf (n)",
        "ALTER TABLE leaf REPLICA IDENTITY USING INDEX by_n",
        change,
    )
    with pytest.raises(SchemaChangedError, match="does not cover the key"):
        upstream.read(upstream.table("t"))


def test_a_table_without_key_gives_deletes_and_inserts_of_whole_rows(upstream: Upstream) -> None:
    upstream.database.run(
        "CREATE TABLE t (id int, v text)",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t VALUES (1, 'a'), (1, 'a')",
        "UPDATE t SET v = 'b' WHERE ctid = '(0,1)'",
        "TRUNCATE t",
    )
    assert [each[:3] for each in summarize(upstream.read(upstream.table("t", ())))] == [
        ("INSERT", 0, (1, "a")),
        ("INSERT", 2, (1, "a")),
        ("DELETE", 0, (1, "a")),
        ("INSERT", 1, (1, "b")),
        ("TRUNCATE", 0, (None, None)),
    ]


def test_a_unique_index_as_replica_identity_is_the_key(upstream: Upstream) -> None:
    upstream.database.run(
        "CREATE TABLE t (id int PRIMARY KEY, a text NOT NULL UNIQUE, b text)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_a_key",
        "INSERT INTO t VALUES (1, 'x', 'y')",
        "UPDATE t SET a = 'z'",
        "DELETE FROM t",
    )
    assert [each[:3] for each in summarize(upstream.read(upstream.table("t", ("a",))))] == [
        ("INSERT", 0, (1, "x", "y")),
        ("DELETE", 0, (None, "x", None)),
        ("INSERT", 1, (1, "z", "y")),
        ("DELETE", 0, (None, "z", None)),
    ]


def test_a_column_added_within_a_transaction_gives_both_versions_their_rows(upstream: Upstream) -> None:
    upstream.database.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
    old = upstream.table("t")
    upstream.database.run(
        "BEGIN; INSERT INTO t VALUES (1, 'a'); ALTER TABLE t ADD COLUMN n int DEFAULT 7;"
        " INSERT INTO t VALUES (2, 'b'); COMMIT",
        "ALTER TABLE t DROP COLUMN v",
        "INSERT INTO t VALUES (3, 9)",
    )
    newest = upstream.table("t", version=3)
    between = TableSchema(old.table, (*old.columns, newest.column("n")), old.key, 2)
    found = upstream.read(old, between, newest)
    assert [changes.table.version for changes in found] == [1, 2, 3]
    assert [each[2] for each in summarize(found)] == [(1, "a"), (2, "b", 7), (3, 9)]


def test_hostile_names_are_only_names(upstream: Upstream) -> None:
    name = 'we"ird. Ünï🦫{}%s'
    quoted = name.replace('"', '""')
    upstream.database.run(
        f'CREATE TABLE t (id int PRIMARY KEY, "{quoted}" date)',
        f"INSERT INTO t (\"{quoted}\", id) VALUES ('infinity', 1)",
    )
    table = upstream.table("t")
    (changes,) = upstream.read(table)
    assert json.loads(changes.batch.column("exact")[0].as_py()) == {name: "infinity"}
    _, exact = copy(upstream, table)
    assert exact == changes.batch.column("exact").to_pylist()


def test_bytes_that_are_not_utf8_in_a_sql_ascii_database_stop_their_table_alone(postgres: EmbeddedPostgres) -> None:
    with postgres.connect() as session:
        session.execute("CREATE DATABASE raw ENCODING 'SQL_ASCII' TEMPLATE template0 LOCALE 'C'")
    database = PostgresDatabase(postgres, "raw")
    try:
        upstream = Upstream(database)
        database.run("CREATE TABLE bad (id int PRIMARY KEY, v text)", "CREATE TABLE good (id int PRIMARY KEY, v text)")
        database.run(
            "INSERT INTO bad SELECT 1, convert_from('\\xc3', 'SQL_ASCII')", "INSERT INTO good VALUES (1, 'ok')"
        )
        found: list[Changes] = []
        bad, good = upstream.table("bad"), upstream.table("good")
        with pytest.raises(UnfitError, match="column v") as raised:
            found.extend(upstream.read(bad, good))
        assert raised.value.table == "public.bad"
        with pytest.raises(UnfitError, match="column v"):
            copy(upstream, bad)
        assert copy(upstream, good)[0] == [{"id": 1, "v": "ok"}]
    finally:
        database.drop()


def copy(upstream: Upstream, table: TableSchema) -> tuple[list[Any], list[str | None]]:
    query = sql.SQL("SELECT {} FROM {} ORDER BY id").format(
        select_list(table), sql.Identifier("public", table.table.name)
    )
    with adbc.connect(upstream.dsn) as connection, connection.cursor() as cursor:
        cursor.execute(query.as_string())
        batch = cursor.fetch_arrow_table().combine_chunks().to_batches()[0]
        row, exact = Converter(table).convert(batch)
    return comparable(row), [None] * len(row) if exact is None else exact.to_pylist()


def comparable(row: pa.StructArray) -> list[Any]:
    """Rows with times as numbers, which Python's own types could not all hold."""
    columns = [
        row.field(index).view(pa.int64()) if pa.types.is_timestamp(each.type) else row.field(index)
        for index, each in enumerate(row.type)
    ]
    return list(pa.StructArray.from_arrays(columns, [each.name for each in row.type]).to_pylist())


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
# Microseconds since 2000 over the whole range of a timestamp.
MICROSECOND = st.integers(-211_813_488_000_000_000, 9_223_371_331_199_999_999)
CENTS = st.just(Decimal("NaN")) | st.decimals(-9_999_999_999, 9_999_999_999, places=2, allow_nan=False)
ROW = st.tuples(
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | TEXT,
    st.none() | CENTS,
    st.none() | MICROSECOND,
    st.none() | st.binary(max_size=40),
    st.none() | st.lists(st.none() | TEXT, max_size=4),
    st.none() | st.floats(allow_nan=False),
)


@pytest.fixture(scope="module")
def anything(postgres_server: Callable[[int], EmbeddedPostgres]) -> Iterator[Upstream]:
    with PostgresDatabase(postgres_server(18), "anything") as database:
        upstream = Upstream(database)
        database.run(
            "CREATE TABLE t (id int PRIMARY KEY, n bigint, s text, d numeric(12,2), at timestamptz,"
            " b bytea, a text[], f float8)"
        )
        yield upstream


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(ROW, min_size=1, max_size=30))
def test_any_values_come_the_same_by_log_and_copy_and_as_they_were_put_in(anything: Upstream, rows: list[Any]) -> None:
    table = anything.table("t")
    with anything.database.connect() as session, session.transaction():
        session.execute("TRUNCATE t")
        session.cursor().executemany(
            "INSERT INTO t VALUES (%s, %s, %s, %s, timestamptz '2000-01-01 00:00:00+00'"
            " + %s * interval '1 day' + %s * interval '1 microsecond', %s, %s, %s)",
            [(index, n, s, d, *parts(at), b, a, f) for index, (n, s, d, at, b, a, f) in enumerate(rows)],
        )
    (changes,) = anything.read(table)
    log, exact = comparable(changes.row)[1:], changes.batch.column("exact").to_pylist()[1:]
    assert (log, exact) == copy(anything, table)
    for (n, s, d, at, b, a, f), found in zip(rows, log, strict=True):
        held = None if d is not None and d.is_nan() else d
        assert found["at"] == (None if at is None or at + EPOCH_US >= 2**63 else at + EPOCH_US)
        assert (found["n"], found["s"], found["d"], found["b"], found["a"], found["f"]) == (n, s, held, b, a, f)


def parts(since_2000: int | None) -> tuple[int | None, int | None]:
    """Days and microseconds, each of which SQL multiplies exactly."""
    return (None, None) if since_2000 is None else divmod(since_2000, 86_400_000_000)
