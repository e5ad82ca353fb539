"""What the DuckDB destination does beyond the contract: names, values, its own columns, other users of the file."""

from __future__ import annotations

import datetime
import decimal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config.pipeline import from_dict
from tailrace.config.registry import open_destination
from tailrace.destination import Batch, Stage, TableBatch, chunking
from tailrace.destination.duckdb.destination import DuckDbDestination
from tailrace.destination.duckdb.name import file_name, folded
from tailrace.destination.duckdb.option import DuckDbOptions
from tailrace.errors import DamagedError, OwnedError, PreflightError, TableError, UnavailableError, UnfitError
from tailrace.model.change import EXACT, Changes
from tailrace.model.schema import Column, TableName, TableSchema
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
from tests.support.destination_writing import files_of_at_most, with_exact, write

COMMITTED = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "replica.duckdb"


def query(path: Path, statement: str) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(path)) as file:
        return file.execute(f"SET TimeZone = 'UTC'; {statement}").fetchall()


def rows_at(path: Path, table: str = "shop.items") -> list[dict[str, Any]]:
    with duckdb.connect(str(path)) as file:
        file.execute("SET TimeZone = 'UTC'")
        found: list[dict[str, Any]] = file.sql(f"FROM {table} ORDER BY ALL").to_arrow_table().to_pylist()
        return found


def test_a_pipeline_file_names_it_with_a_type_and_a_path() -> None:
    source = {"type": "postgres", "dsn": "host=a"}
    config = from_dict({"name": "p", "source": source, "destination": {"type": "duckdb", "path": "replica.duckdb"}})
    assert type(config.destination) is DuckDbOptions
    assert open_destination(config) == DuckDbDestination(path=Path.cwd() / "replica.duckdb")


def test_without_the_package_it_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['duckdb'] = None\n"
        "from tailrace.config.pipeline import from_dict\n"
        "from tailrace.config.registry import open_destination\n"
        "from tailrace.errors import ConfigError\n"
        "config = from_dict({'name': 'p', 'source': {'type': 'postgres', 'dsn': 'host=a'},"
        " 'destination': {'type': 'duckdb', 'path': 'x'}})\n"
        "try:\n    open_destination(config)\nexcept ConfigError as error:\n    print(error.fix)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "pip install 'tailrace[duckdb]'\n"


NAMES = st.text('aA"_', min_size=1, max_size=3) | st.sampled_from(
    ["main", "_tailrace", "_Tailrace x", "information_schema", '"pg_catalog"', "pg_catalog"]
)


@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES))
def test_no_two_tables_share_a_name_and_none_has_one_that_is_reserved(
    one: tuple[str, str], two: tuple[str, str]
) -> None:
    names = [file_name(TableName(*name)) for name in (one, two)]
    assert (names[0] == names[1]) == (one == two)
    for name in names:
        assert name.schema.lower() not in {"_tailrace", "information_schema", "pg_catalog"}
        assert not name.name.lower().startswith("_tailrace")


def test_schemas_that_duckdb_has_itself_are_kept_under_quoted_names(path: Path) -> None:
    for number, schema in enumerate(["information_schema", "pg_catalog", "_tailrace", "main", "temp"]):
        table = TableSchema(TableName(schema, "_tailrace_x"), ITEMS.columns, ("id",))
        write(DuckDbDestination(path=path), 0, insert(id=number, name="a", price=1), table=table)
        assert rows_at(
            path, f'replica."{file_name(table.table).schema.replace(chr(34), chr(34) * 2)}"."""_tailrace_x"""'
        )


def test_tables_that_differ_only_in_case_are_refused_together_and_never_mixed(path: Path) -> None:
    destination = DuckDbDestination(path=path)
    twin = TableSchema(TableName("shop", "ITEMS"), ITEMS.columns, ("id",))
    assert [finding.level for finding in destination.check([ITEMS, twin])] == ["ok", "ok", "error"]
    write(destination, 0, insert(id=1, name="a", price=1))
    with pytest.raises(TableError, match=r"taken in the file by the upstream's table shop\.items"):
        write(destination, 0, insert(id=2, name="b", price=2), table=twin)
    assert [row["id"] for row in rows_at(path)] == [1]
    accents = [TableSchema(TableName("shop", name), ITEMS.columns, ("id",)) for name in ("Ä", "ä")]
    for table in accents:
        write(destination, 0, insert(id=1, name="a", price=1), table=table)
    assert folded(accents[0].table) != folded(accents[1].table)


VALUES: list[tuple[pa.DataType, list[Any], str, list[Any] | None]] = [
    (pa.uint8(), [255], "UTINYINT", None),
    (pa.uint64(), [2**64 - 1], "UBIGINT", None),
    (pa.float16(), [0.5], "FLOAT", None),
    (pa.float64(), [float("-inf"), -0.0], "DOUBLE", None),
    (pa.decimal128(38, 38), [decimal.Decimal("0." + "9" * 38)], "DECIMAL(38,38)", None),
    (pa.large_string(), ["a\x00é"], "VARCHAR", None),
    (pa.binary(2), [b"\x00\xff"], "BLOB", None),
    (pa.time32("ms"), [datetime.time(1, 2, 3, 4000)], "TIME", None),
    (pa.time64("us"), [datetime.time(23, 59, 59, 999999)], "TIME", None),
    (pa.timestamp("ms", "Europe/Paris"), [COMMITTED], "TIMESTAMP WITH TIME ZONE", None),
    (pa.duration("s"), [datetime.timedelta(seconds=90)], "BIGINT", [90]),
    (pa.list_(pa.list_(pa.int8())), [[[1], None, []]], "TINYINT[][]", None),
    (pa.large_list(pa.decimal128(5, 2)), [[decimal.Decimal("1.50")]], "DECIMAL(5,2)[]", None),
    (pa.struct({'a "b"': pa.string(), "b": pa.binary()}), [{'a "b"': "x", "b": b"\xff"}], "", None),
    (pa.map_(pa.string(), pa.int64()), [[("k", 1), ("l", None)]], "MAP(VARCHAR, BIGINT)", None),
    (pa.string(), ["a"], "VARCHAR", None),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "declared", "kept"), VALUES, ids=lambda value: str(value)[:20])
def test_a_value_is_kept_exactly(
    path: Path, kind: pa.DataType, values: list[Any], declared: str, kept: list[Any] | None
) -> None:
    table = with_columns(ITEMS, Column("v", kind, number=4))
    rows = [insert(id=at, name="a", price=1, v=value) for at, value in enumerate([*values, None])]
    write(DuckDbDestination(path=path), 0, *rows, table=table)
    assert [row["v"] for row in rows_at(path)] == [*(kept or values), None]
    assert EXACT not in rows_at(path)[0]
    if declared:
        assert query(path, "SELECT typeof(v) FROM shop.items LIMIT 1") == [(declared,)]


def test_nanoseconds_that_duckdb_has_no_type_for_are_exact_text(path: Path) -> None:
    kinds = [pa.timestamp("ns"), pa.timestamp("ns", "UTC"), pa.time64("ns")]
    table = with_columns(ITEMS, *(Column(f"v{at}", kind, number=at + 4) for at, kind in enumerate(kinds)))
    row = {f"v{at}": pa.scalar(1, kind) for at, kind in enumerate(kinds)}
    write(DuckDbDestination(path=path), 0, insert(id=1, name="a", price=1, **row), table=table)
    assert query(path, "SELECT v0::VARCHAR, v1, v2 FROM shop.items") == [
        ("1970-01-01 00:00:00.000000001", "1970-01-01T00:00:00.000000001Z", "00:00:00.000000001")
    ]


ENDS = [
    (pa.date32(), 2**31 - 1),
    (pa.date32(), -(2**31) + 1),
    (pa.timestamp("us"), 2**63 - 1),
    (pa.timestamp("us", "UTC"), -(2**63) + 1),
]


@pytest.mark.parametrize(("kind", "number"), ENDS, ids=str)
def test_a_time_that_duckdb_takes_for_infinity_is_null_and_exact_text(
    path: Path, kind: pa.DataType, number: int
) -> None:
    table = with_columns(ITEMS, Column("v", kind, number=4), Column("l", pa.list_(kind), number=5))
    storage = pa.int32() if kind == pa.date32() else pa.int64()
    end, near = (pa.scalar(one, storage).cast(kind) for one in (number, number // 2))
    destination = DuckDbDestination(path=path)
    rows = [insert(id=1, name="a", price=1, v=end, l=[near]), insert(id=2, name="a", price=1, v=near, l=None)]
    write(destination, 0, *rows, table=table)
    found = query(path, "SELECT v IS NULL, _tailrace_exact LIKE '{\"v\": %' FROM shop.items ORDER BY id")
    assert found == [(True, True), (False, None)]
    with pytest.raises(UnfitError, match="column l"):
        write(destination, 1, insert(id=3, name="a", price=1, v=None, l=[end]), table=table)
    keyed = TableSchema(TableName("shop", "ends"), (Column("v", kind, False, number=1),), ("v",))
    with pytest.raises(UnfitError, match="key column v"):
        write(destination, 2, insert(v=end), table=keyed)


def test_a_column_without_a_form_is_refused_and_says_how_to_go_on(path: Path) -> None:
    odd = TableSchema(
        TableName("shop", "odd"),
        (
            Column("id", pa.int64()),
            Column("ID", pa.month_day_nano_interval()),
            Column("_tailrace_op", pa.string()),
            Column("wide", pa.decimal256(50, 0)),
        ),
        ("id",),
    )
    destination = DuckDbDestination(path=path.parent / "new" / "replica.duckdb")
    findings = destination.check([ITEMS, odd, LOG])
    assert [finding.level for finding in findings] == ["ok", "ok", *["error"] * 4, "warning"]
    assert all(finding.fix for finding in findings if finding.level == "error")
    assert list(path.parent.iterdir()) == []


def test_metadata_columns_describe_the_last_change_of_each_row(path: Path) -> None:
    destination = DuckDbDestination(path=path, metadata=True)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    write(destination, 1, update(id=1, name="c", price=1))
    first, second = rows_at(path)
    assert (first["_tailrace_op"], second["_tailrace_op"]) == ("update", "insert")
    assert first["_tailrace_committed_at"] == COMMITTED
    write(DuckDbDestination(path=path), 2, update(id=1, name="d"))
    assert rows_at(path)[0]["_tailrace_op"] is None


def test_a_soft_delete_keeps_the_row_and_says_when_until_it_is_inserted_again(path: Path) -> None:
    destination = DuckDbDestination(path=path, deletes="soft")
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2), delete(id=2))
    written = write(destination, 1, delete(id=1), delete(id=77))
    assert (written.upserts, written.deletes) == (0, 1)
    assert [(row["id"], row["name"], row["_tailrace_deleted_at"]) for row in rows_at(path)] == [
        (1, "a", COMMITTED),
        (2, "b", COMMITTED),
    ]
    write(destination, 2, insert(id=1, name="again", price=3))
    assert rows_at(path)[0] == {"id": 1, "name": "again", "price": 3, "_tailrace_deleted_at": None}


def test_a_soft_truncate_marks_every_row_that_was_alive(path: Path) -> None:
    destination = DuckDbDestination(path=path, deletes="soft", metadata=True)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    write(destination, 1, TRUNCATE, insert(id=2, name="new", price=3))
    assert [(row["name"], row["_tailrace_op"], row["_tailrace_deleted_at"]) for row in rows_at(path)] == [
        ("a", "truncate", COMMITTED),
        ("new", "insert", None),
    ]


@pytest.mark.parametrize("how", ["renamed", "rebuilt"])
def test_values_that_do_not_fit_bring_their_own_column_and_follow_their_row(path: Path, how: str) -> None:
    destination = DuckDbDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    assert EXACT not in rows_at(path)[0]
    big = '{"price": "99999999999"}'
    odd = with_exact(changes_of(ITEMS, insert(id=2, name="b", price=None)), [big])
    destination.write_changes(TableBatch(ITEMS, Batch("p", 1), odd))
    write(destination, 2, update(id=2, name="renamed"))
    write(destination, 3, delete(id=2), moved(id=3, name="moved"))
    assert [(row["id"], row[EXACT]) for row in rows_at(path)] == [(1, None), (3, big)]
    kind = pa.int32() if how == "renamed" else pa.float64()
    renamed = altered(ITEMS, price=Column("cost", kind, number=3))
    write(destination, 4, table=renamed)
    assert [row[EXACT] for row in rows_at(path)] == [None, '{"cost": "99999999999"}']
    write(destination, 5, update(id=3, cost=5), table=renamed)
    assert [row[EXACT] for row in rows_at(path)] == [None, None]


@contextmanager
def opened_elsewhere(path: Path, *, read_only: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the file open for the length of the block."""
    script = "import duckdb, sys; c = duckdb.connect(sys.argv[1], read_only={}); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script.format(read_only), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        yield other
        if other.poll() is None:
            other.communicate()


def test_a_file_that_another_process_has_open_is_waited_for_and_named(path: Path) -> None:
    write(DuckDbDestination(path=path), 0, insert(id=1, name="a", price=1))
    script = (
        f"import duckdb, sys; c = duckdb.connect({str(path)!r}, read_only=True); print(1, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(UnavailableError, match=rf"PID {other.pid}") as caught:
            write(DuckDbDestination(path=path, lock_timeout=0.1), 1, delete(id=1))
        assert "close the file in other programs" in (caught.value.fix or "")
        waiting = threading.Thread(target=write, args=(DuckDbDestination(path=path), 1, delete(id=1)))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        other.communicate()
    waiting.join()
    assert rows_at(path) == []


def test_checking_names_the_process_that_has_the_file_open_for_writing(path: Path) -> None:
    write(DuckDbDestination(path=path), 0, insert(id=1, name="a", price=1))
    command = [
        sys.executable,
        "-c",
        f"import duckdb, sys; c = duckdb.connect({str(path)!r}); print(1, flush=True); sys.stdin.read()",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        finding, _ = DuckDbDestination(path=path).check([ITEMS])
    assert (finding.level, f"PID {other.pid}" in finding.message) == ("warning", True)
    assert DuckDbDestination(path=path).check([ITEMS])[0].level == "ok"


def test_between_two_batches_others_can_read_the_file(path: Path) -> None:
    write(DuckDbDestination(path=path), 0, insert(id=1, name="a", price=1))
    reading = (
        "import duckdb, sys; print(duckdb.connect(sys.argv[1], read_only=True).sql('SELECT name FROM shop.items'))"
    )
    done = subprocess.run([sys.executable, "-c", reading, str(path)], capture_output=True, text=True, check=True)
    assert "│ a " in done.stdout


def test_a_runner_that_was_overtaken_is_fenced(path: Path) -> None:
    destination = DuckDbDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))

    def overtaken() -> Iterator[Changes]:
        write(DuckDbDestination(path=path), 1, insert(id=9, name="other", price=1))
        yield from changes_of(ITEMS, insert(id=5, name="stale", price=5))

    with pytest.raises(OwnedError, match="batch 1"):
        destination.write_changes(TableBatch(ITEMS, Batch("p", 1), overtaken()))
    assert [row["id"] for row in rows_at(path)] == [1, 9]


def test_files_of_other_programs_are_refused_and_left_alone(path: Path, tmp_path: Path) -> None:
    with duckdb.connect(str(path)) as file:
        file.execute("CREATE TABLE items (id INT)")
    text = tmp_path / "notes.txt"
    text.write_text("mine")
    for foreign in (path, text, tmp_path):
        destination = DuckDbDestination(path=foreign)
        (finding,) = destination.check([ITEMS])
        assert finding.level == "error"
        assert finding.fix
        with pytest.raises(PreflightError):
            write(destination, 0, insert(id=2, name="b", price=2))
    assert query(path, "SELECT table_schema, table_name FROM information_schema.tables") == [("main", "items")]
    assert text.read_text() == "mine"


def test_a_table_that_a_user_created_in_the_replica_is_left_alone(path: Path) -> None:
    destination = DuckDbDestination(path=path)
    write(destination, 0, insert(line="x"), table=LOG)
    query(path, "CREATE TABLE shop.Items (mine INT)")
    with pytest.raises(TableError, match="tailrace did not make"):
        write(destination, 0, insert(id=2, name="b", price=2))
    assert rows_at(path) == []


def test_indexes_and_views_that_people_add_survive_batches_and_copies(path: Path) -> None:
    destination = DuckDbDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    query(path, "CREATE INDEX by_name ON shop.items (name)")
    query(path, "CREATE VIEW names AS SELECT name FROM shop.items")
    write(destination, 1, update(id=1, name="b"), insert(id=2, name="c", price=2))
    wider = with_columns(ITEMS, Column("size", pa.int64(), number=4, initial=pa.scalar(7)))
    write(destination, 2, table=wider)
    staged = [destination.write_rows(wider, changes_of(wider, read(id=3, name="d", price=1, size=1)), stage(path))]
    write(destination, 3, table=wider, staged=staged, stage=stage(path), begins_copy=True, completes_copy=True)
    write(destination, 4, table=altered(wider, price=Column("price", pa.float64(), number=3)))
    assert query(path, "SELECT index_name FROM duckdb_indexes()") == [("by_name",)]
    assert query(path, "FROM names") == [("d",)]


def test_an_index_that_prevents_a_change_of_columns_stops_the_table_with_its_fix(path: Path) -> None:
    destination = DuckDbDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    query(path, "CREATE INDEX by_name ON shop.items (name)")
    renamed = altered(ITEMS, name=Column("title", pa.string(), number=2))
    for table in (renamed, altered(renamed, price=Column("price", pa.float64(), number=3))):
        with pytest.raises(TableError, match="an index") as caught:
            write(destination, 1, table=table)
        assert "drop the index" in (caught.value.fix or "")
        assert rows_at(path) == [{"id": 1, "name": "a", "price": 1}]
    query(path, "DROP INDEX shop.by_name")
    write(destination, 1, table=renamed)
    assert rows_at(path) == [{"id": 1, "title": "a", "price": 1}]


def test_a_unique_index_that_the_rows_violate_stops_the_table_without_showing_a_value(path: Path) -> None:
    destination = DuckDbDestination(path=path)
    write(destination, 0, insert(id=1, name="secret", price=1))
    query(path, "CREATE UNIQUE INDEX by_name ON shop.items (name)")
    with pytest.raises(TableError, match="ConstraintException") as caught:
        write(destination, 1, insert(id=2, name="secret", price=2))
    assert "secret" not in str(caught.value)
    assert len(rows_at(path)) == 1


def test_a_damaged_file_is_not_taken_for_a_busy_one(path: Path) -> None:
    destination = DuckDbDestination(path=path)
    write(destination, 0, *(insert(id=number, name=f"x{number}" * 30, price=1) for number in range(3000)))
    with path.open("r+b") as file:
        file.seek(12_288)
        file.write(b"\xff" * (path.stat().st_size - 12_288))
    with pytest.raises(DamagedError):
        write(destination, 1, *(update(id=number, name="y") for number in range(500)))


def test_a_disk_that_takes_no_more_is_unavailable_and_nothing_is_half_written(path: Path) -> None:
    destination = DuckDbDestination(path=path)
    write(destination, 0, insert(id=1, name="a", price=1))
    many = [insert(id=number, name=f"{number}" * 1000, price=0) for number in range(2, 2000)]
    with files_of_at_most(path.stat().st_size), pytest.raises(UnavailableError):
        write(destination, 1, *many)
    assert [row["id"] for row in rows_at(path)] == [1]
    write(destination, 1, *many)
    assert len(rows_at(path)) == 1999


def test_a_batch_larger_than_memory_is_one_transaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "PART_BYTES", 1)
    destination = DuckDbDestination(path=path)
    parts = [
        *changes_of(ITEMS, *(insert(id=number, name="a", price=0) for number in range(50))),
        *changes_of(ITEMS, *(update(id=number, name="b") for number in range(50)), commit=100),
    ]

    def breaking() -> Iterator[Changes]:
        yield from parts
        raise UnavailableError("the upstream is gone")

    with pytest.raises(UnavailableError, match="upstream"):
        destination.write_changes(TableBatch(ITEMS, Batch("p", 0), breaking()))
    assert query(path, "SELECT 1 FROM information_schema.tables WHERE table_schema = 'shop'") == []
    assert destination.write_changes(TableBatch(ITEMS, Batch("p", 0), parts)).changes == 100
    assert {(row["name"], row["price"]) for row in rows_at(path)} == {("b", 0)}


def stage(path: Path) -> Stage:
    return Stage(path.parent / "staged", "p")
