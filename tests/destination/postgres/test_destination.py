"""What the Postgres destination does beyond the contract: places, types, its own columns, what people add."""

from __future__ import annotations

import datetime
import decimal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.config.pipeline import from_dict
from tailrace.config.registry import open_destination
from tailrace.destination import Batch, Stage, TableBatch
from tailrace.destination.postgres.destination import PostgresDestination
from tailrace.destination.postgres.option import PostgresDestinationOptions
from tailrace.errors import (
    ConfigError,
    OwnedError,
    PreflightError,
    SchemaChangedError,
    TableError,
    UnavailableError,
    UnfitError,
)
from tailrace.model.change import EXACT, Changes
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.option.value import Dsn
from tailrace.testing.destination import (
    ITEMS,
    LOG,
    TRUNCATE,
    altered,
    changes_of,
    delete,
    insert,
    moved,
    read,
    update,
    with_columns,
)
from tests.support.database import PostgresDatabase
from tests.support.destination_writing import with_exact, write

COMMITTED = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def destination(database: PostgresDatabase) -> PostgresDestination:
    return PostgresDestination(dsn=Dsn(database.dsn))


def test_a_pipeline_file_names_it_and_never_shows_its_password() -> None:
    source = {"type": "sqlite", "path": "a.db"}
    section = {"type": "postgres", "dsn": "postgresql://me:secret@host/db", "schema": "copy_{schema}"}
    config = from_dict({"name": "p", "source": source, "destination": section})
    assert type(config.destination) is PostgresDestinationOptions
    opened = open_destination(config)
    assert opened.name == "postgres postgresql://me:***@host/db copy_{schema}"
    assert "secret" not in repr(opened)


@pytest.mark.parametrize("pattern", ["{table}", "{schema", "{schema!r}", " "])
def test_a_schema_that_is_no_pattern_is_refused(pattern: str) -> None:
    section = {"type": "postgres", "dsn": "host=a", "schema": pattern}
    with pytest.raises(ConfigError, match=r"destination\.schema"):
        from_dict({"name": "p", "source": {"type": "sqlite", "path": "a.db"}, "destination": section})


def test_tables_lie_where_the_pattern_says_and_two_of_one_place_are_refused(database: PostgresDatabase) -> None:
    destination = PostgresDestination(dsn=Dsn(database.dsn), schema="all of it")
    twin = TableSchema(TableName("other", "items"), ITEMS.columns, ("id",))
    assert [finding.level for finding in destination.check([ITEMS, twin])] == ["ok", "ok", "error"]
    write(destination, 0, insert(id=1, name="a", price=1))
    with pytest.raises(TableError, match=r"taken in the database by the upstream's table shop\.items"):
        write(destination, 0, insert(id=2, name="b", price=2), table=twin)
    assert database.rows('SELECT id FROM "all of it".items') == [(1,)]


VALUES: list[tuple[pa.DataType, str, Any, str, str]] = [
    (pa.uint64(), "", 2**64 - 1, "numeric(20,0)", "18446744073709551615"),
    (pa.decimal256(60, 2), "", decimal.Decimal("9" * 58 + ".50"), "numeric(60,2)", "9" * 58 + ".50"),
    (pa.float64(), "", float("-inf"), "double precision", "-Infinity"),
    (pa.duration("s"), "", datetime.timedelta(seconds=90), "bigint", "90"),
    (pa.timestamp("ns", "UTC"), "", pa.scalar(1, pa.timestamp("ns", "UTC")), "text", "1970-01-01T00:00:00.000000001Z"),
    (pa.time32("s"), "", datetime.time(1, 2, 3), "time without time zone", "01:02:03"),
    (pa.list_(pa.decimal128(5, 2)), "", [decimal.Decimal("1.50"), None], "numeric(5,2)[]", "{1.50,NULL}"),
    (pa.list_(pa.list_(pa.int8())), "", [[1], []], "text", "[[1],[]]"),
    (pa.struct({"a": pa.string()}), "", {"a": 'x"'}, "text", '{"a":"x\\""}'),
    (pa.string(), "uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "uuid", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    (pa.string(), "jsonb", '{"a": [1, 2.50]}', "jsonb", '{"a": [1, 2.50]}'),
    (pa.string(), "bit(3)", "101", "bit varying", "101"),
    (pa.string(), "numeric", "NaN", "numeric", "NaN"),
    (pa.string(), "inet", "10.0.0.1", "inet", "10.0.0.1/32"),
    (pa.list_(pa.string()), "inet[]", ["10.0.0.1"], "text[]", "{10.0.0.1}"),
    (pa.list_(pa.string()), "cidr[]", ["10.0.0.0/8"], "cidr[]", "{10.0.0.0/8}"),
    (pa.string(), "character varying(3)", "abc", "text", "abc"),
    (pa.string(), "money", "$1.00", "text", "$1.00"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "upstream", "value", "declared", "text"), VALUES, ids=lambda value: str(value)[:20])
def test_a_value_is_kept_exactly_and_read_back(
    destination: PostgresDestination,
    database: PostgresDatabase,
    kind: pa.DataType,
    upstream: str,
    value: Any,
    declared: str,
    text: str,
) -> None:
    table = with_columns(ITEMS, Column("v", kind, number=4, upstream_type=upstream))
    changes = [insert(id=1, name="a", price=1, v=value), insert(id=2, name="b", price=2, v=None)]
    write(destination, 0, *changes, table=table)
    # The value of the first row comes from the table.
    write(destination, 1, update(id=1, name="c", price=1), table=table)
    assert database.rows("SELECT name, v::text FROM shop.items ORDER BY id") == [("c", text), ("b", None)]
    kinds = "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'shop.items'::regclass"
    assert database.rows(f"{kinds} AND attname = 'v'") == [(declared,)]
    there = destination.read_table(table)
    rows = [batch.slice(at, 1) for batch in there.rows for at in range(len(batch))]
    source = pa.RecordBatch.from_pylist([{"id": 1, "name": "c", "price": 1, "v": value}], table.arrow)
    ours = there.shape(source.append_column(EXACT, pa.nulls(1, pa.string())))
    assert ours.to_pylist() in [row.to_pylist() for row in rows]


def test_without_native_types_text_stays_text(database: PostgresDatabase) -> None:
    destination = PostgresDestination(dsn=Dsn(database.dsn), native_types=False)
    table = with_columns(ITEMS, Column("v", pa.string(), number=4, upstream_type="uuid"))
    write(destination, 0, insert(id=1, name="a", price=1, v="no uuid"), table=table)
    with pytest.raises(UnfitError, match="22P02"):
        write(PostgresDestination(dsn=Dsn(database.dsn)), 1, update(id=1, name="b"), table=table)
    assert database.rows("SELECT v FROM shop.items") == [("no uuid",)]


def test_a_native_key_finds_its_rows(destination: PostgresDestination, database: PostgresDatabase) -> None:
    key = Column("id", pa.string(), False, number=1, upstream_type="uuid")
    table = TableSchema(TableName("shop", "items"), (key, *ITEMS.columns[1:]), ("id",))
    one, two = ("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")
    write(destination, 0, insert(id=one, name="a", price=1), insert(id=two, name="b", price=2), table=table)
    write(destination, 1, delete(id=one), update(id=two, price=3), table=table)
    assert database.rows("SELECT id::text, name, price FROM shop.items") == [(two, "b", 3)]


def test_a_text_type_that_changes_upstream_changes_in_place(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    before = with_columns(ITEMS, Column("v", pa.string(), number=4, upstream_type="cidr"))
    write(destination, 0, insert(id=1, name="a", price=1, v="10.0.0.0/8"), table=before)
    after = altered(before, v=Column("v", pa.string(), number=4, upstream_type="inet"))
    write(destination, 1, insert(id=2, name="b", price=2, v="10.0.0.1"), table=after)
    assert database.rows("SELECT v::text FROM shop.items ORDER BY id") == [("10.0.0.0/8",), ("10.0.0.1/32",)]


def test_times_that_postgres_does_not_have_are_null_and_exact_text(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    table = with_columns(ITEMS, Column("d", pa.date32(), number=4), Column("t", pa.timestamp("us", "UTC"), number=5))
    day, instant = pa.scalar(2**31 - 1, pa.int32()).cast(pa.date32()), pa.scalar(2**63 - 1, pa.int64())
    row = {"id": 1, "name": "a", "price": 1, "d": day, "t": instant.cast(pa.timestamp("us", "UTC"))}
    write(destination, 0, insert(**row), table=table)
    assert database.rows(f"SELECT d, t, {EXACT}::json ->> 'd' FROM shop.items") == [(None, None, "+5881580-07-11")]


def test_text_with_the_character_nul_stops_the_table_without_showing_it(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    write(destination, 0, insert(id=1, name="a", price=1))
    with pytest.raises(UnfitError, match="NUL") as caught:
        write(destination, 1, insert(id=2, name="secret\x00", price=1))
    assert "secret" not in str(caught.value)
    assert database.rows("SELECT id FROM shop.items") == [(1,)]


def test_soft_deletes_and_metadata_describe_each_row(database: PostgresDatabase) -> None:
    destination = PostgresDestination(dsn=Dsn(database.dsn), deletes="soft", metadata=True)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    written = write(destination, 1, delete(id=1), delete(id=77))
    assert (written.upserts, written.deletes) == (0, 1)
    found = "SELECT name, _tailrace_op, _tailrace_deleted_at FROM shop.items ORDER BY id"
    assert database.rows(found) == [("a", "delete", COMMITTED), ("b", "insert", None)]
    write(destination, 2, TRUNCATE, insert(id=1, name="again", price=3))
    assert database.rows(found) == [("again", "insert", None), ("b", "truncate", COMMITTED)]
    write(PostgresDestination(dsn=Dsn(database.dsn), deletes="soft"), 3, update(id=1, name="c"))
    assert database.rows(found)[0] == ("c", None, None)


def test_values_that_do_not_fit_bring_their_own_column_and_follow_their_row(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    write(destination, 0, insert(id=1, name="a", price=1))
    odd = with_exact(changes_of(ITEMS, insert(id=2, name="b", price=None)), ['{"price": "9e99"}'])
    destination.write_changes(TableBatch(ITEMS, Batch("p", 1), odd))
    write(destination, 2, delete(id=2), moved(id=3, name="moved"))
    write(destination, 3, table=altered(ITEMS, price=Column("cost", pa.int32(), number=3)))
    assert database.rows(f"SELECT id, {EXACT} FROM shop.items ORDER BY id") == [(1, None), (3, '{"cost": "9e99"}')]


def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "staged", "p")


def test_what_people_add_survives_batches_schema_changes_and_copies(
    destination: PostgresDestination, database: PostgresDatabase, tmp_path: Path
) -> None:
    write(destination, 0, insert(id=1, name="a", price=1))
    database.run(
        "CREATE INDEX by_name ON shop.items (name)",
        "CREATE VIEW names AS SELECT name FROM shop.items",
        "CREATE TABLE notes (item bigint REFERENCES shop.items ON DELETE CASCADE)",
        "INSERT INTO notes VALUES (1)",
        "GRANT SELECT ON shop.items TO PUBLIC",
    )
    write(destination, 1, update(id=1, name="b"), insert(id=2, name="c", price=2))
    assert database.rows("SELECT item FROM notes") == [(1,)]
    wider = with_columns(ITEMS, Column("size", pa.int64(), number=4, initial=pa.scalar(7)))
    write(destination, 2, table=altered(wider, price=Column("price", pa.float64(), number=3)))
    database.run("DROP TABLE notes")
    table = altered(wider, price=Column("price", pa.float64(), number=3))
    staged = [destination.write_rows(table, changes_of(table, read(id=3, name="d")), stage(tmp_path))]
    write(destination, 3, table=table, staged=staged, stage=stage(tmp_path), begins_copy=True, completes_copy=True)
    assert database.rows("SELECT name FROM names") == [("d",)]
    assert database.rows("SELECT indexname FROM pg_indexes WHERE tablename = 'items' ORDER BY 1") == [
        ("by_name",),
        ("items_pkey",),
    ]
    assert database.rows("SELECT has_table_privilege('pg_monitor', 'shop.items', 'SELECT')") == [(True,)]


def test_a_view_on_a_column_that_changes_its_type_stops_the_table_with_its_fix(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    write(destination, 0, insert(id=1, name="a", price=1))
    database.run("CREATE VIEW prices AS SELECT price FROM shop.items")
    wider = altered(ITEMS, price=Column("price", pa.float64(), number=3))
    with pytest.raises(TableError, match="a view") as caught:
        write(destination, 1, table=wider)
    assert "drop it, then tailrace retry FILE shop.items" in (caught.value.fix or "")
    database.run("DROP VIEW prices")
    write(destination, 1, table=wider)
    assert database.rows("SELECT price FROM shop.items") == [(1.0,)]


def test_another_key_is_the_primary_key_from_then_on(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    write(destination, 0, insert(id=1, name="a", price=1))
    keyless = TableSchema(ITEMS.table, ITEMS.columns, (), 2)
    with pytest.raises(SchemaChangedError):
        write(destination, 1, table=keyless)
    both = TableSchema(ITEMS.table, ITEMS.columns, ("id", "price"), 2)
    write(destination, 1, table=both)
    write(destination, 2, insert(id=1, name="b", price=2), table=both)
    key = (
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'p' AND conrelid = 'shop.items'::regclass"
    )
    assert database.rows(key) == [("PRIMARY KEY (id, price)",)]
    assert database.rows("SELECT count(*) FROM shop.items") == [(2,)]


def test_a_constraint_that_the_rows_violate_stops_the_table_without_showing_a_value(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    write(destination, 0, insert(id=1, name="secret", price=1))
    database.run("CREATE UNIQUE INDEX ON shop.items (name)")
    with pytest.raises(TableError, match="23505") as caught:
        write(destination, 1, insert(id=2, name="secret", price=2))
    assert "secret" not in str(caught.value)
    assert database.rows("SELECT count(*) FROM shop.items") == [(1,)]


def test_a_runner_that_was_overtaken_is_fenced(destination: PostgresDestination, database: PostgresDatabase) -> None:
    write(destination, 0, insert(id=1, name="a", price=1))

    def overtaken() -> Iterator[Changes]:
        write(destination, 1, insert(id=9, name="other", price=1))
        yield from changes_of(ITEMS, insert(id=5, name="stale", price=5))

    with pytest.raises(OwnedError, match="batch 1"):
        destination.write_changes(TableBatch(ITEMS, Batch("p", 1), overtaken()))
    assert database.rows("SELECT id FROM shop.items ORDER BY id") == [(1,), (9,)]


def test_of_two_runners_that_write_the_same_batch_at_once_one_is_fenced(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    write(destination, 0, insert(id=1, name="a", price=1))
    both_read = threading.Barrier(2)
    fenced: list[str] = []

    def run(name: str) -> None:
        def changes() -> Iterator[Changes]:
            # Both have read what the last batch was, and neither has begun its transaction.
            both_read.wait(60)
            yield from changes_of(ITEMS, insert(id=5, name=name, price=1))

        try:
            destination.write_changes(TableBatch(ITEMS, Batch("p", 1), changes()))
        except OwnedError:
            fenced.append(name)

    runners = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    [(kept,)] = database.rows("SELECT name FROM shop.items WHERE id = 5")
    assert sorted([kept, *fenced]) == ["one", "two"]


def test_lanes_that_write_at_once_make_what_they_share_once(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    tables = [TableSchema(TableName("lane", f"t{at}"), ITEMS.columns, ("id",)) for at in range(4)]
    failed: list[BaseException] = []

    def lane(table: TableSchema) -> None:
        try:
            for number in range(3):
                write(destination, number, insert(id=number, name="x", price=1), table=table)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    threads = [threading.Thread(target=lane, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [database.rows(f"SELECT count(*) FROM {table.table}") for table in tables] == [[(3,)]] * 4


def test_a_replica_in_the_database_of_its_source_is_not_replicated_again(database: PostgresDatabase) -> None:
    destination = PostgresDestination(dsn=Dsn(database.dsn), schema="copy_{schema}")
    write(destination, 0, insert(id=1, name="a", price=1))
    replica = TableSchema(TableName("copy_shop", "items"), ITEMS.columns, ("id",))
    assert [finding.level for finding in destination.check([ITEMS, replica])] == ["ok", "ok", "error"]
    with pytest.raises(TableError, match=r"the replica of shop\.items") as caught:
        write(destination, 0, insert(id=1, name="a", price=1), table=replica)
    assert "tables.exclude" in (caught.value.fix or "")
    assert database.rows("SELECT 1 FROM pg_namespace WHERE nspname = 'copy_copy_shop'") == []


def test_a_table_that_tailrace_did_not_make_is_refused_and_left_alone(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    database.run("CREATE SCHEMA shop", "CREATE TABLE shop.items (mine int)")
    _, finding = destination.check([ITEMS])
    assert (finding.level, finding.table) == ("error", "shop.items")
    assert "the source's own table" in finding.message
    with pytest.raises(TableError, match="tailrace did not make"):
        write(destination, 0, insert(id=2, name="b", price=2))
    assert database.rows("SELECT * FROM shop.items") == []


def test_checking_finds_what_would_go_wrong_and_creates_nothing(
    destination: PostgresDestination, database: PostgresDatabase
) -> None:
    long = "é" * 32
    odd = TableSchema(
        TableName("pg_shop", long),
        (Column("id", pa.int64()), Column(long, pa.string()), Column("_tailrace_op", pa.month_day_nano_interval())),
        ("id",),
    )
    findings = destination.check([ITEMS, odd, LOG])
    assert [finding.level for finding in findings] == ["ok", "ok", *["error"] * 5, "warning"]
    assert all(finding.fix for finding in findings if finding.level == "error")
    assert database.rows("SELECT 1 FROM pg_namespace WHERE nspname IN ('_tailrace', 'shop')") == []


def test_a_role_without_rights_is_told_the_grants(database: PostgresDatabase) -> None:
    database.run("DROP ROLE IF EXISTS weak", "CREATE ROLE weak LOGIN")
    destination = PostgresDestination(dsn=Dsn(database.dsn.replace("postgres@", "weak@", 1)))
    try:
        (finding,) = destination.check([ITEMS])
        assert finding.fix == f"GRANT CREATE ON DATABASE {database.name} TO weak"
        database.run(finding.fix, "CREATE SCHEMA shop")
        _, finding = destination.check([ITEMS])
        assert finding.fix == 'GRANT USAGE, CREATE ON SCHEMA "shop" TO weak'
        with pytest.raises(TableError, match="lacks a right"):
            write(destination, 0, insert(id=1, name="a", price=1))
        database.run(finding.fix)
        write(destination, 0, insert(id=1, name="a", price=1))
        assert {each.level for each in destination.check([ITEMS])} == {"ok"}
    finally:
        database.run("DROP OWNED BY weak", "DROP ROLE weak")


def test_a_server_that_is_down_is_waited_for_and_a_wrong_database_is_not() -> None:
    down = PostgresDestination(dsn=Dsn("postgresql://me:secret@127.0.0.1:1/x"))
    with pytest.raises(UnavailableError) as caught:
        write(down, 0, insert(id=1, name="a", price=1))
    assert "secret" not in str(caught.value)
    (finding,) = down.check(None)
    assert (finding.level, "secret" in f"{finding}") == ("error", False)


def test_a_database_that_is_not_there_is_a_matter_for_people(database: PostgresDatabase) -> None:
    with pytest.raises(PreflightError, match="refused the login"):
        write(PostgresDestination(dsn=Dsn(f"{database.dsn}_not")), 0, insert(id=1, name="a", price=1))
