"""Every type through a real server, by the log and by the copy: both must give what Postgres itself says."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
import pytest
from psycopg import conninfo, sql

from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import UnfitError
from tailrace.model.change import Changes
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres import row_reader
from tailrace.source.postgres.copy_query import SESSION, Converter, select_list
from tailrace.source.postgres.pgoutput.decode import decode, only
from tailrace.source.postgres.pgoutput.message import EPOCH_US
from tailrace.source.postgres.row_session import row_session
from tailrace.source.postgres.type_map import builtin_arrow, read_types
from tests.support.database import PostgresDatabase

PREPARATION = """
CREATE TYPE mood AS ENUM ('sad', 'so-so', 'mit "Quote"', 'glücklich');
CREATE TYPE pair AS (a int, b text);
CREATE DOMAIN price AS numeric(8,2);
CREATE DOMAIN dear_price AS price CHECK (value > 0);
CREATE DOMAIN code AS char(4);
CREATE DOMAIN tall AS bigint;
CREATE DOMAIN later AS timestamptz;
CREATE DOMAIN flag AS boolean;
CREATE DOMAIN numbers AS int[];
CREATE DOMAIN address AS inet;
CREATE TYPE float_range AS RANGE (subtype = float8);
"""

NUMERIC_EDGES = ["0", "-0.00", "NaN", "12.34", "-99999.99"]
TEXTS = ["", " ", "a", "NULL", "naïve ☃ 🦫", 'quo"te', "back\\slash", "new\nline\ttab", "x" * 5000, "{}", "'"]
DATES = ["2026-11-15", "infinity", "-infinity", "0044-03-15 BC", "4713-11-24 BC", "0001-01-01", "10000-01-01"]
DATES += ["5874897-12-31", "1969-12-31", "2024-02-29"]
TIMES = ["2026-11-15 19:34:01.123456", "2026-11-15 00:00:00", "2026-11-15 23:59:59.1", "infinity", "-infinity"]
TIMES += [
    "4713-11-24 00:00:00 BC",
    "0001-12-31 23:59:59.999999 BC",
    "10000-01-01 00:00:00.5",
    "1969-12-31 23:59:59.999999",
]
TIMES += ["294247-01-10 04:00:54.775807", "294247-01-10 04:00:54.775808", "294276-12-31 23:59:59.999999"]

# Declared type: literals to go through, to which NULL is always added.
VALUES: dict[str, list[str]] = {
    "bool": ["true", "false"],
    "int2": ["0", "-32768", "32767"],
    "int4": ["0", "-2147483648", "2147483647"],
    "int8": ["0", "-9223372036854775808", "9223372036854775807"],
    "float4": ["0", "-0", "NaN", "Infinity", "-Infinity", "1.1", "1e-45", "3.4028235e38", "16777217"],
    "float8": ["0", "-0", "NaN", "Infinity", "-Infinity", "0.1", "5e-324", "1.7976931348623157e308", "1e22"],
    "numeric(7,2)": NUMERIC_EDGES,
    "numeric(12,2)": [*NUMERIC_EDGES, "9999999999.99"],
    "numeric(38,0)": ["9" * 38, "-" + "9" * 38, "NaN"],
    "numeric(38,38)": ["0." + "9" * 38, "-0.00000000000000000000000000000000000001"],
    "numeric(5)": ["12345"],
    "numeric": [*NUMERIC_EDGES, "Infinity", "-Infinity", "1.10", "1e-20", "9" * 200 + ".5", "1e500"],
    "numeric(40,2)": ["9" * 38 + ".99", "NaN"],
    "numeric(3,-2)": ["12345"],
    "numeric(2,4)": ["0.0012"],
    "text": TEXTS,
    "varchar": TEXTS,
    "varchar(7)": ["", "abcdefg", "ü🦫"],
    "char(5)": ["", "a", "abcde", "🦫"],
    "char": ["x"],
    "bpchar": ["ab", "ab  "],
    '"char"': ["a", "", "\\377"],
    "name": ["pg_catalog", "Ünïcode"],
    "bytea": ["\\x", "\\x00", "\\xdeadbeef", "\\x" + "5c" * 3000],
    "date": DATES,
    "timestamp": TIMES,
    "timestamptz": TIMES,
    "timestamptz(3)": ["2026-11-15 19:34:01.123456+05:30", "infinity"],
    "timestamp(0)": ["2026-11-15 19:34:01.9"],
    "time": ["00:00:00", "24:00:00", "23:59:59.999999"],
    "timetz": ["24:00:00+00", "12:34:56.5-07:30", "00:00:00+15:59:59"],
    "interval": ["0", "1 year -2 mons 3 days -04:05:06.789", "-178000000 years", "1 mon ago"],
    "money": ["12.34", "-92233720368547758.08"],
    "uuid": ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"],
    "json": ['{"b" : 1, "a":[1, 2.50], "b": null}', '"☃"', " 1 "],
    "jsonb": ['{"b" : 1, "a":[1, 2.50], "b": null}', '"☃"', "1e2"],
    "inet": ["10.0.0.1", "10.0.0.1/8", "::1", "::ffff:1.2.3.4/128"],
    "cidr": ["10.0.0.0/8", "::1/128"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "bit(3)": ["101"],
    "varbit": ["", "1", "10101"],
    "point": ["(1.5,-2)", "(NaN,Infinity)"],
    "line": ["{1,2,3}"],
    "lseg": ["[(0,0),(1,1)]"],
    "box": ["(1,1),(0,0)"],
    "path": ["((0,0),(1,1))", "[(0,0),(1,1)]"],
    "polygon": ["((0,0),(1,1),(1,0))"],
    "circle": ["<(0,0),1.1>"],
    "tsvector": ["a fat cat", "'it''s':1A"],
    "tsquery": ["fat & !rat"],
    "pg_lsn": ["16/B374D848"],
    "oid": ["0", "4294967295"],
    "xid": ["4294967295"],
    "cid": ["7"],
    "xid8": ["18446744073709551615"],
    "tid": ["(0,1)"],
    "regclass": ["pg_catalog.pg_class", "mood_t"],
    "regtype": ["int4"],
    "pg_snapshot": ["10:20:10,14,15"],
    "int2vector": ["1 2 3", ""],
    "int4range": ["empty", "[1,5)", "(,)"],
    "numrange": ["[1.10,2]"],
    "tstzrange": ['["2026-01-01 00:00:00+00",infinity)'],
    "daterange": ["[2026-01-01,)"],
    "int4multirange": ["{}", "{[1,2),[5,7)}"],
    "float_range": ["[0.1,Infinity]"],
    "mood": ["sad", 'mit "Quote"', "glücklich"],
    "pair": ["(,)", '(1,"a b")', '(,"quo""te")'],
    "price": ["12.34", "NaN"],
    "dear_price": ["12.34", "NaN"],
    "code": ["ab"],
    "tall": ["9223372036854775807"],
    "later": TIMES,
    "flag": ["true", "false"],
    "address": ["10.0.0.1"],
    "numbers": ["{1,2}", "{{1},{2}}"],
    "int4[]": ["{}", "{1,NULL,-3}", "{{1,2},{3,4}}", "[0:1]={1,2}", "{NULL}"],
    "int8[]": ["{9223372036854775807}"],
    "float8[]": ["{NaN,Infinity,-0,0.1}"],
    "bool[]": ["{t,f,NULL}"],
    "text[]": [
        "{}", '{"",NULL,"NULL","null",a}', '{"a b","c,d","{e}","q\\"uo","b\\\\s","🦫","\n"}', "{{a},{b}}", '{"x\\\\"}',
        '{{"a b",c},{NULL,""}}', '[2:3]={"a b",c}', '{"{","}"}',
    ],
    "varchar(3)[]": ["{abc,NULL}"],
    "char(3)[]": ["{a,NULL}"],
    "uuid[]": ["{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11,NULL}"],
    "date[]": ["{2026-11-15,NULL,10000-01-01}", "{infinity}", '{"0044-03-15 BC"}'],
    "timestamp[]": ['{"2026-11-15 19:34:01.5"}', "{infinity,NULL}"],
    "timestamptz[]": ['{"2026-11-15 19:34:01.5+00",NULL}', "{-infinity}", '{{"2026-11-15 19:34:01+00"}}'],
    "numeric(6,2)[]": ["{1.50,NULL,-0.01}", "{NaN,1}", "{}"],
    "numeric[]": ["{1.50,NaN}"],
    "bytea[]": ['{"\\\\x00ff",NULL,"\\\\x"}'],
    "jsonb[]": ['{"{\\"a\\": [1, null]}",NULL}'],
    "interval[]": ['{"1 day 02:00:00"}'],
    "time[]": ["{24:00:00}"],
    "mood[]": ['{sad,NULL,"mit \\"Quote\\""}'],
    "pair[]": ['{"(1,a)",NULL}'],
    "price[]": ["{1.50,NaN}", "{1.50}"],
    "box[]": ["{(1,1),(0,0);(2,2),(1,1)}"],
    "inet[]": ["{10.0.0.1,10.0.0.0/8}"],
    "int4range[]": ['{"[1,2)",empty}'],
}  # fmt: skip


class Passage(NamedTuple):
    """One type's values: as Postgres prints them, as it counts them (see `witness`), by the log and by each copy."""

    column: Column
    printed: list[str | None]
    counted: list[Any]
    log: tuple[pa.Array[Any], list[str | None]]
    copies: list[tuple[pa.Array[Any], list[str | None]]]


def pinned(dsn: str) -> str:
    options = " ".join(f"-c {name}={value}" for name, value in SESSION.items())
    return conninfo.make_conninfo(dsn, options=options)


def describe(session: psycopg.Connection[Any], table: str) -> TableSchema:
    columns = session.execute(
        "SELECT attname::text, atttypid::int8, atttypmod, format_type(atttypid, atttypmod), attnum"
        " FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 ORDER BY attnum",
        [f"public.{table}"],
    ).fetchall()
    types = read_types(session, (row[1] for row in columns))
    return TableSchema(
        TableName("public", table),
        tuple(
            Column(name, types[oid].arrow(mod), True, declared, number) for name, oid, mod, declared, number in columns
        ),
        ("id",),
    )


def read_log(session: psycopg.Connection[Any], tables: dict[int, TableSchema]) -> list[Changes]:
    rows = session.execute(
        "SELECT data FROM pg_logical_slot_get_binary_changes("
        "'types', NULL, NULL, 'proto_version', '1', 'publication_names', 'everything')",
        binary=True,
    ).fetchall()
    messages = pa.array([row[0] for row in rows], pa.binary())
    histories = {oid: only(table) for oid, table in tables.items()}
    return list(decode(messages, relations={}, transaction=None, tables=histories))


READERS = [True, False]
"""The compiled reader, and the one that is used where there is none."""


def read_copy(dsn: str, table: TableSchema, is_compiled: bool) -> tuple[pa.StructArray, list[str | None]]:
    with pytest.MonkeyPatch.context() as patch:
        if not is_compiled:
            patch.setattr(row_reader, "is_available", lambda: False)
        with row_session(dsn, "testing") as session:
            assert session.has_binary == is_compiled, "make setup compiles the reader"
            query = sql.SQL("SELECT {} FROM {} ORDER BY id").format(
                select_list(table, binary=session.has_binary), sql.Identifier(table.table.schema, table.table.name)
            )
            [batch] = session.read(query.as_string(), table.columns)
            row, exact = Converter(table).convert(batch)
    return row, [None] * len(row) if exact is None else exact.to_pylist()


@pytest.fixture(scope="module", params=[16, 18])
def passages(
    request: pytest.FixtureRequest, postgres_server: Callable[[int], EmbeddedPostgres]
) -> Iterator[dict[str, Passage]]:
    """All of VALUES sent through one server, by type."""
    with PostgresDatabase(postgres_server(request.param), f"types_{request.param}") as database:
        database.run(PREPARATION, "CREATE TABLE public.mood_t ()", "CREATE PUBLICATION everything FOR ALL TABLES")
        database.run("SELECT pg_create_logical_replication_slot('types', 'pgoutput')")
        dsn = pinned(database.dsn)
        with psycopg.connect(dsn, autocommit=True) as session:
            names = {declared: f"t{index}" for index, declared in enumerate(VALUES)}
            session.execute("SET search_path = public")
            for declared, name in names.items():
                session.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v {declared})".encode())
                with session.cursor() as cursor:
                    cursor.executemany(
                        f"INSERT INTO {name} VALUES (%s, %s::text::{declared})".encode()
                        if declared == "money"
                        else f"INSERT INTO {name} VALUES (%s, %s)".encode(),
                        list(enumerate([*VALUES[declared], None])),
                    )
            session.execute("RESET search_path")
            tables = {name: describe(session, name) for name in names.values()}
            oids = {
                name: session.execute("SELECT %s::regclass::oid::int8", [f"public.{name}"]).fetchone()[0]  # type: ignore[index]
                for name in tables
            }
            logged = {
                changes.table.table.name: changes
                for changes in read_log(session, {oids[name]: table for name, table in tables.items()})
            }
            found = {}
            for declared, name in names.items():
                table, log = tables[name], logged[name]
                copies = [read_copy(dsn, table, is_compiled) for is_compiled in READERS]
                counted = witness("v", table.columns[1].type)
                query = f"SELECT {TEXT_OF.format('v')}, {counted} FROM public.{name} ORDER BY id"
                said = session.execute(query.encode()).fetchall()
                found[declared] = Passage(
                    table.columns[1],
                    [printed for printed, _ in said],
                    [counted for _, counted in said],
                    (log.row.field(1), log.batch.column("exact").to_pylist()),
                    [(row.field(1), exact) for row, exact in copies],
                )
        yield found


@pytest.mark.parametrize("declared", VALUES)
def test_log_and_copy_give_identical_values(passages: dict[str, Passage], declared: str) -> None:
    passage = passages[declared]
    assert passage.log[0].type == passage.column.type
    for array, exact in passage.copies:
        assert array.type == passage.column.type
        assert plain(passage.log[0]) == plain(array)
        assert passage.log[1] == exact


@pytest.mark.parametrize("declared", VALUES)
def test_values_are_what_postgres_says_they_are(passages: dict[str, Passage], declared: str) -> None:
    passage = passages[declared]
    array, exacts = passage.log
    for value, exact, printed, counted in zip(plain(array), exacts, passage.printed, passage.counted, strict=True):
        if exact is None:
            assert value == counted
        else:
            assert value is None
            assert json.loads(exact) == {"v": printed}


@pytest.mark.parametrize(
    ("declared", "unfit"),
    [
        ("numeric(7,2)", ["NaN"]),
        ("date", ["infinity", "-infinity"]),
        ("timestamp", ["infinity", "-infinity", "294247-01-10 04:00:54.775808", "294276-12-31 23:59:59.999999"]),
        (
            "timestamptz",
            ["infinity", "-infinity", "294247-01-10 04:00:54.775808+00", "294276-12-31 23:59:59.999999+00"],
        ),
        ("int4[]", ["{{1,2},{3,4}}", "[0:1]={1,2}"]),
        ("numeric(6,2)[]", ["{NaN,1.00}"]),
        ("date[]", ["{infinity}"]),
        ("text[]", ["{{a},{b}}", '{{"a b",c},{NULL,""}}', '[2:3]={"a b",c}']),
    ],
)
def test_only_values_that_their_type_cannot_hold_are_kept_as_exact_text(
    passages: dict[str, Passage], declared: str, unfit: list[str]
) -> None:
    assert [json.loads(exact)["v"] for exact in passages[declared].log[1] if exact] == unfit


@pytest.mark.parametrize(
    ("declared", "arrow"),
    [
        ("bool", pa.bool_()),
        ("int2", pa.int16()),
        ("oid", pa.int64()),
        ("numeric(12,2)", pa.decimal128(12, 2)),
        ("numeric(38,38)", pa.decimal128(38, 38)),
        ("numeric", pa.string()),
        ("numeric(40,2)", pa.string()),
        ("numeric(3,-2)", pa.string()),
        ("numeric(2,4)", pa.string()),
        ("dear_price", pa.decimal128(8, 2)),
        ("later", pa.timestamp("us", "UTC")),
        ("timestamp", pa.timestamp("us")),
        ("bytea", pa.binary()),
        ("numbers", pa.list_(pa.int32())),
        ("price[]", pa.list_(pa.decimal128(8, 2))),
        ("mood[]", pa.list_(pa.string())),
        ("numeric[]", pa.list_(pa.string())),
        ("box[]", pa.string()),
        ("int2vector", pa.string()),
    ],
)
def test_a_type_has_its_documented_arrow_type(passages: dict[str, Passage], declared: str, arrow: pa.DataType) -> None:
    assert passages[declared].column.type == arrow


@pytest.mark.parametrize("version", [16, 18])
def test_fixed_types_are_mapped_without_the_catalog_as_with_it(
    version: int, postgres_server: Callable[[int], EmbeddedPostgres]
) -> None:
    with postgres_server(version).connect() as session:
        oids = session.execute("SELECT oid::int8 FROM pg_type WHERE oid < 10000 AND typtype <> 'p'").fetchall()
        types = read_types(session, (oid for (oid,) in oids))
    for (oid,) in oids:
        assert (builtin_arrow(oid, -1) or pa.string()) == types[oid].arrow(-1), oid


@pytest.mark.parametrize("is_compiled", READERS)
def test_infinity_in_a_key_is_refused_rather_than_merged_with_other_nulls(
    database: PostgresDatabase, is_compiled: bool
) -> None:
    database.run("CREATE TABLE bounds (id date PRIMARY KEY)", "INSERT INTO bounds VALUES ('infinity')")
    with database.connect() as session:
        table = describe(session, "bounds")
    with pytest.raises(UnfitError, match="key column id"):
        read_copy(database.dsn, table, is_compiled)


# Postgres's own text of a value, whatever its type.
TEXT_OF = "CASE WHEN {0} IS DISTINCT FROM NULL THEN format('%s', {0}) END"


def witness(value: str, type_: pa.DataType) -> str:
    """SQL by which Postgres itself says what Arrow should hold: bytes of floats, counts of days and microseconds."""
    if pa.types.is_list(type_):
        item = witness(f"({value})[n]", type_.value_type)
        each = f"SELECT array_agg({item} ORDER BY n) FROM generate_subscripts({value}, 1) n"
        return f"CASE WHEN cardinality({value}) = 0 THEN '{{}}' ELSE ({each}) END"
    if pa.types.is_floating(type_):
        return f"float{type_.bit_width // 8}send({value})"
    if pa.types.is_date32(type_):
        return f"CASE WHEN isfinite({value}) THEN {value} - date '1970-01-01' END"
    if pa.types.is_timestamp(type_):
        return f"timestamp{'tz' if type_.tz else ''}_send({value})"
    if pa.types.is_boolean(type_) or pa.types.is_binary(type_):
        return value
    return TEXT_OF.format(value)


def plain(array: pa.Array[Any]) -> list[Any]:
    """Arrow values in the form that `witness` asks Postgres for."""
    type_ = array.type
    if pa.types.is_list(type_):
        return [plain(item.values) if item.is_valid else None for item in array]
    if pa.types.is_floating(type_):
        form = ">f" if type_.bit_width == 32 else ">d"
        return [None if value is None else struct.pack(form, value) for value in array.to_pylist()]
    if pa.types.is_date32(type_):
        return list(array.view(pa.int32()).to_pylist())
    if pa.types.is_timestamp(type_):
        since_1970 = array.view(pa.int64()).to_pylist()
        return [None if value is None else struct.pack(">q", value - EPOCH_US) for value in since_1970]
    if pa.types.is_integer(type_) or pa.types.is_decimal(type_):
        return [
            None if value is None else f"{value:f}" if pa.types.is_decimal(type_) else str(value)
            for value in array.to_pylist()
        ]
    return list(array.to_pylist())


@pytest.mark.parametrize("is_compiled", READERS)
def test_names_are_printed_alike_whatever_the_role_is_set_to(database: PostgresDatabase, is_compiled: bool) -> None:
    database.run(
        "CREATE TABLE named (id int PRIMARY KEY, v regclass)",
        "INSERT INTO named VALUES (1, 'pg_class')",
        f"ALTER DATABASE {database.name} SET quote_all_identifiers = on",
    )
    with database.connect() as session:
        table = describe(session, "named")
    row, _ = read_copy(database.dsn, table, is_compiled)
    assert row.field(1).to_pylist() == ["pg_class"]
