"""The compiled reader of rows against ADBC, and at the edges of batches, connections and sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import TailraceError, UnavailableError
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres import row_reader
from tailrace.source.postgres.copy_query import Converter, select_list
from tailrace.source.postgres.row_session import CompiledSession, RowSession, row_session
from tests.support.database import PostgresDatabase

TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "oid": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "text": pa.string(),
    "bytea": pa.binary(),
    "jsonb": pa.string(),
    "uuid": pa.string(),
    "numeric(38,10)": pa.decimal128(38, 10),
    "numeric(9,0)": pa.decimal128(9, 0),
    "numeric(12,12)": pa.decimal128(12, 12),
    "date": pa.date32(),
    "timestamp with time zone": pa.timestamp("us", "UTC"),
}
LITERALS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "oid": st.integers(0, 2**32 - 1),
    "real": st.floats(width=32),
    "double precision": st.floats(),
    "text": st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
    "bytea": st.binary(max_size=40).map(lambda value: "\\x" + value.hex()),
    "jsonb": st.recursive(st.integers() | st.text(st.characters(min_codepoint=32, max_codepoint=0x7FF)), st.lists).map(
        json.dumps
    ),
    "uuid": st.uuids(),
    "numeric(38,10)": st.decimals(-(10**27), 10**27, places=10) | st.just(Decimal("NaN")),
    "numeric(9,0)": st.integers(-(10**9) + 1, 10**9 - 1) | st.sampled_from([10**8, 10**4, -(10**4)]),
    "numeric(12,12)": st.decimals(Decimal("-0.999"), Decimal("0.999"), places=12),
    "date": st.dates() | st.sampled_from(["infinity", "-infinity"]),
    "timestamp with time zone": st.datetimes().map(lambda value: f"{value.isoformat()}Z")
    | st.sampled_from(["infinity", "-infinity", "294276-12-31 23:59:59.999999+00"]),
}
COLUMNS = [
    Column(f"c{index}", type_, True, declared, index + 1) for index, (declared, type_) in enumerate(TYPES.items())
]


def table_of(*columns: Column) -> TableSchema:
    return TableSchema(TableName("public", "t"), columns, ())


def rows_of(session: RowSession, table: TableSchema, source: str) -> list[pa.RecordBatch]:
    listed = select_list(table, binary=session.has_binary).as_string()
    return list(session.read(f"SELECT {listed} FROM {source}", table.columns))


def converted(table: TableSchema, batches: list[pa.RecordBatch]) -> list[Any]:
    """Rows with their exact texts, and NaN in a form that equals itself."""
    found = []
    for batch in batches:
        rows, exact = Converter(table).convert(batch)
        found += list(zip(map(repr, rows.to_pylist()), exact.to_pylist() if exact else [None] * len(rows), strict=True))
    return found


@pytest.fixture
def compiled(database: PostgresDatabase) -> Iterator[CompiledSession]:
    session = CompiledSession(database.dsn)
    yield session
    session.close()


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.fixed_dictionaries({name: st.none() | kind for name, kind in LITERALS.items()}), max_size=12))
def test_any_rows_are_read_as_adbc_reads_them(row_database: PostgresDatabase, rows: list[dict[str, Any]]) -> None:
    table = table_of(*COLUMNS)
    with psycopg.connect(row_database.dsn, autocommit=True) as writer:
        writer.execute("TRUNCATE t")
        marks = ", ".join(f"%s::text::{declared}" for declared in TYPES)
        with writer.cursor() as cursor:
            cursor.executemany(
                f"INSERT INTO t VALUES ({marks})".encode(),
                [[None if row[name] is None else str(row[name]) for name in TYPES] for row in rows],
            )
    with row_session(row_database.dsn, "testing") as session:
        found = converted(table, rows_of(session, table, "public.t"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_reader, "is_available", lambda: False)
        with row_session(row_database.dsn, "testing") as session:
            assert not session.has_binary
            assert found == converted(table, rows_of(session, table, "public.t"))
    assert len(found) == len(rows)


@pytest.fixture(scope="module")
def row_database(postgres: Any) -> Iterator[PostgresDatabase]:
    with PostgresDatabase(postgres, "row_reader") as made:
        made.run("CREATE TABLE t ({})".format(", ".join(f"c{i} {declared}" for i, declared in enumerate(TYPES))))
        yield made


NUMBER = Column("n", pa.int64(), True, "bigint", 1)
TEXT = Column("v", pa.string(), True, "text", 2)


def test_batches_end_at_their_bounds_and_lose_no_row(compiled: CompiledSession) -> None:
    count = row_reader.BATCH_ROWS * 2 + 10
    batches = rows_of(compiled, table_of(NUMBER), f"generate_series(1::int8, {count}) AS g(n)")
    assert [batch.num_rows for batch in batches] == [row_reader.BATCH_ROWS, row_reader.BATCH_ROWS, 10]
    numbers = pa.Table.from_batches(batches).column("n").to_pylist()
    assert numbers == list(range(1, count + 1))


def test_a_batch_of_long_texts_ends_by_its_bytes(compiled: CompiledSession) -> None:
    source = "(SELECT n, repeat(n::text, 700000) AS v FROM generate_series(1::int8, 60) AS g(n)) AS s"
    batches = rows_of(compiled, table_of(NUMBER, TEXT), source)
    assert len(batches) > 2
    assert max(batch.get_total_buffer_size() for batch in batches) < 4 * row_reader.BATCH_BYTES
    read = [(n, v) for batch in batches for n, v in zip(*map(pa.Array.to_pylist, batch.columns), strict=True)]
    assert read == [(n, str(n) * 700000) for n in range(1, 61)]


def test_no_rows_and_no_columns_are_no_batch_and_empty_rows(compiled: CompiledSession) -> None:
    assert rows_of(compiled, table_of(NUMBER, TEXT), "(SELECT 1::int8 n, '' v) AS s WHERE n = 2") == []
    [batch] = compiled.read("SELECT FROM generate_series(1::int8, 3)", [])
    assert batch.num_rows == 3


def test_only_values_that_are_nan_are_kept_as_text(compiled: CompiledSession) -> None:
    column = Column("n", pa.decimal128(6, 2), True, "numeric(6,2)", 1)
    source = "(VALUES (1.5::numeric(6,2)), ('NaN'), (NULL), (-0.01)) AS s(n)"
    rows = converted(table_of(column), rows_of(compiled, table_of(column), source))
    assert [exact for _, exact in rows] == [None, '{"n": "NaN"}', None, None]
    assert [value for value, _ in rows] == [
        "{'n': Decimal('1.50')}",
        "{'n': None}",
        "{'n': None}",
        "{'n': Decimal('-0.01')}",
    ]


@pytest.mark.parametrize(
    ("column", "query"),
    [
        (NUMBER, "SELECT 1::int4"),
        (NUMBER, "SELECT 1::int8, 2::int8"),
        (Column("u", pa.string(), True, "uuid", 1), "SELECT 'text'"),
        (Column("j", pa.string(), True, "jsonb", 1), "SELECT 'text'"),
        (Column("d", pa.decimal128(4, 1), True, "numeric(4,1)", 1), "SELECT 1.55::numeric"),
        (Column("d", pa.decimal128(38, 0), True, "numeric(38,0)", 1), "SELECT 1e60::numeric"),
        (Column("d", pa.decimal128(38, 38), True, "numeric(38,38)", 1), "SELECT 12.5::numeric"),
        (Column("d", pa.decimal128(38, 0), True, "numeric(38,0)", 1), "SELECT 'Infinity'::numeric"),
    ],
)
def test_rows_of_another_form_are_refused(compiled: CompiledSession, column: Column, query: str) -> None:
    with pytest.raises(TailraceError, match="another form"):
        list(compiled.read(query, [column]))


def test_an_error_in_the_middle_of_the_rows_is_the_servers(database: PostgresDatabase) -> None:
    query = "SELECT 100000 / (100000 - n) AS n FROM generate_series(1::int8, 200000) AS g(n)"
    with pytest.raises(TailraceError, match="division by zero"), row_session(database.dsn, "testing") as session:
        list(session.read(query, [NUMBER]))
    with row_session(database.dsn, "testing") as session:
        assert session.ask("SELECT 1") == [(1,)]


def test_a_session_that_ends_in_the_middle_of_the_rows_is_an_outage(database: PostgresDatabase) -> None:
    def read() -> None:
        with row_session(database.dsn, "testing") as session:
            [(pid,)] = session.ask("SELECT pg_backend_pid()")
            rows = session.read(
                "SELECT n, repeat('x', 1000) AS v FROM generate_series(1::int8, 200000) AS g(n)", [NUMBER, TEXT]
            )
            next(rows)
            database.run(f"SELECT pg_terminate_backend({pid})")
            list(rows)

    with pytest.raises(UnavailableError):
        read()


def test_a_session_waits_for_the_next_chunk_and_a_lost_one_is_replaced(database: PostgresDatabase) -> None:
    def pid() -> Any:
        with row_session(database.dsn, "testing") as session:
            session.ask("BEGIN")
            return session.ask("SELECT pg_backend_pid()")[0][0]

    first = pid()
    assert pid() == first
    database.run(f"SELECT pg_terminate_backend({first})")
    assert pid() != first


def test_a_session_whose_rows_were_not_all_read_is_not_used_again(database: PostgresDatabase) -> None:
    with row_session(database.dsn, "testing") as session:
        [(first,)] = session.ask("SELECT pg_backend_pid()")
        next(session.read("SELECT n FROM generate_series(1::int8, 1000000) AS g(n)", [NUMBER]))
    with row_session(database.dsn, "testing") as session:
        assert session.ask("SELECT pg_backend_pid()") != [(first,)]
