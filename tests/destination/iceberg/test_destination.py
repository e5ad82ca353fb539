"""What the Iceberg destination does beyond the contract: files, columns, values, other writers, its catalog."""

from __future__ import annotations

import datetime
import decimal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from tailrace.config.pipeline import from_dict
from tailrace.config.registry import open_destination
from tailrace.destination import Batch, TableBatch
from tailrace.destination.iceberg import commit, data_file
from tailrace.destination.iceberg.destination import IcebergDestination
from tailrace.destination.iceberg.option import IcebergOptions
from tailrace.errors import ConfigError, OwnedError, SchemaChangedError, TableError, UnavailableError
from tailrace.model.change import Changes, Op
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.system import failpoint
from tailrace.testing.destination import (
    ITEMS,
    LOG,
    TRUNCATE,
    altered,
    changes_of,
    delete,
    insert,
    update,
    with_columns,
)
from tests.support.destination_writing import files_of_at_most, parts_of, with_exact, write
from tests.support.iceberg_table import forget_everything, opened, rows_in, scanned

COMMITTED = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture
def ice(tmp_path: Path) -> IcebergDestination:
    return IcebergDestination(warehouse=str(tmp_path / "ice"))


def rows_at(destination: IcebergDestination, table: TableName = ITEMS.table) -> list[dict[str, Any]]:
    return sorted(rows_in(destination, table), key=lambda row: str(row.get("id")))


# -- configuration ---------------------------------------------------------------------------------------------


def test_a_pipeline_file_names_it_with_a_type_and_a_warehouse() -> None:
    given = {"type": "iceberg", "warehouse": "./ice", "catalog": {"type": "rest", "uri": "http://localhost:8181"}}
    config = from_dict({"name": "p", "source": {"type": "postgres", "dsn": "host=a"}, "destination": given})
    assert type(config.destination) is IcebergOptions
    made = open_destination(config)
    assert isinstance(made, IcebergDestination)
    assert made.warehouse == str(Path.cwd() / "ice")
    assert made.catalog.name == "tailrace"


@pytest.mark.parametrize(
    "given",
    [
        {"warehouse": "s3://bucket/ice"},
        {"warehouse": "./ice", "catalog": {"type": "rest"}},
        {"warehouse": "./ice", "catalog": {"type": "hive"}},
    ],
    ids=["an object store", "rest", "hive"],
)
def test_a_catalog_that_cannot_be_in_the_warehouse_needs_its_address(given: dict[str, Any]) -> None:
    source = {"type": "postgres", "dsn": "host=a"}
    with pytest.raises(ConfigError, match=r"catalog\.uri is missing"):
        from_dict({"name": "p", "source": source, "destination": {"type": "iceberg", **given}})


def test_without_the_package_it_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['pyiceberg'] = None\n"
        "from tailrace.config.pipeline import from_dict\n"
        "from tailrace.config.registry import open_destination\n"
        "from tailrace.errors import ConfigError\n"
        "config = from_dict({'name': 'p', 'source': {'type': 'postgres', 'dsn': 'host=a'},"
        " 'destination': {'type': 'iceberg', 'warehouse': 'x'}})\n"
        "try:\n    open_destination(config)\nexcept ConfigError as error:\n    print(error.fix)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "pip install 'tailrace[iceberg]'\n"


def test_secrets_of_the_catalog_are_not_shown() -> None:
    made = IcebergDestination.model_validate(
        {
            "type": "iceberg",
            "warehouse": "s3://bucket/ice",
            "catalog": {"uri": "postgresql://u:geheim@h/db", "properties": {"s3.secret-access-key": "geheim"}},
        }
    )
    assert "geheim" not in f"{made!r} {made} {made.model_dump_json()} {made.name}"


def test_checking_makes_nothing_and_names_what_is_wrong(ice: IcebergDestination, tmp_path: Path) -> None:
    assert [finding.level for finding in ice.check([ITEMS, LOG])] == ["ok", "ok", "warning"]
    assert not (tmp_path / "ice").exists()
    odd = with_columns(ITEMS, Column("gap", pa.month_day_nano_interval()), Column("_tailrace_x", pa.int32()))
    assert [finding.level for finding in ice.check([odd])] == ["ok", "error", "error"]
    (tmp_path / "ice").mkdir()
    (tmp_path / "ice" / "catalog.db").write_bytes(b"no database" * 500)
    assert "error" in [finding.level for finding in ice.check([ITEMS])]


def test_a_sql_catalog_may_be_elsewhere_under_another_name(tmp_path: Path) -> None:
    given = {"name": "shared", "uri": f"sqlite:///{tmp_path}/elsewhere.db"}
    ice = IcebergDestination.model_validate({"type": "iceberg", "warehouse": str(tmp_path / "ice"), "catalog": given})
    write(ice, 0, insert(id=1, name="a", price=1))
    assert not (tmp_path / "ice/catalog.db").exists()
    theirs = SqlCatalog("shared", uri=f"sqlite:///{tmp_path}/elsewhere.db")
    assert theirs.load_table(("shop", "items")).scan().to_arrow().to_pylist() == [{"id": 1, "name": "a", "price": 1}]


def test_a_catalog_that_does_not_answer_is_a_finding_and_is_waited_for(tmp_path: Path) -> None:
    given = {"type": "rest", "uri": "http://127.0.0.1:9"}
    ice = IcebergDestination.model_validate({"type": "iceberg", "warehouse": str(tmp_path / "ice"), "catalog": given})
    assert [finding.level for finding in ice.check([ITEMS])] == ["ok", "error"]
    with pytest.raises(UnavailableError, match="the catalog failed"):
        write(ice, 0, insert(id=1, name="a", price=1))


# -- files -----------------------------------------------------------------------------------------------------


def test_a_changed_row_is_marked_in_one_delete_file_for_each_data_file(
    ice: IcebergDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_file, "LEAST_ROWS", 10)
    write(ice, 0, *(insert(id=n, name="a", price=n) for n in range(30)))
    data = set(scanned(ice, ITEMS.table))
    assert len(data) == 3
    for number in (1, 2):
        write(ice, number, update(id=1, price=-number), delete(id=10 + number), delete(id=20 + number))
    files = scanned(ice, ITEMS.table)
    assert data < set(files)
    assert all(len(deletes) <= 1 for deletes in files.values())
    assert sorted(one.record_count for path in data for one in files[path]) == [1, 2, 2]
    assert [row["price"] for row in rows_at(ice) if row["id"] == 1] == [-2]
    assert len(rows_in(ice, ITEMS.table)) == 26


def test_a_file_of_which_every_row_is_deleted_is_no_longer_in_the_table(ice: IcebergDestination) -> None:
    write(ice, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    write(ice, 1, delete(id=1))
    write(ice, 2, delete(id=2), insert(id=3, name="c", price=3))
    [deletes] = scanned(ice, ITEMS.table).values()
    assert deletes == []
    assert [row["id"] for row in rows_at(ice)] == [3]


def test_snapshots_and_manifests_do_not_pile_up(ice: IcebergDestination) -> None:
    few = ice.model_copy(update={"snapshots": 5})
    for number in range(30):
        write(few, number, insert(id=number, name="a", price=number), update(id=number // 2, price=-1))
    table = opened(few, ITEMS.table)
    assert len(table.metadata.snapshots) == 5
    current = table.current_snapshot()
    assert current is not None
    assert len(current.manifests(table.io)) <= commit.MOST_MANIFESTS + 1
    assert len(table.metadata.metadata_log) <= 21
    assert len(rows_in(few, ITEMS.table)) == 30
    assert table.metadata.next_sequence_number() == 31
    assert few.last_batch(ITEMS.table, "p") is not None


def test_a_table_reads_the_same_after_each_process_began_again(ice: IcebergDestination) -> None:
    for number in range(10):
        forget_everything()
        before = [update(id=number - 1, name="b", price=0)] if number else []
        write(ice, number, insert(id=number, name="a", price=number), *before)
    expected = dict.fromkeys(range(9), ("b", 0)) | {9: ("a", 9)}
    assert {row["id"]: (row["name"], row["price"]) for row in rows_at(ice)} == expected


def test_a_batch_in_many_parts_is_one_commit(ice: IcebergDestination) -> None:
    write(ice, 0, *(insert(id=n, name="a", price=n) for n in range(20)))
    changes = [changes_of(ITEMS, update(id=n, price=-n), commit=n + 10)[0] for n in range(20)]
    changes += [changes_of(ITEMS, delete(id=n), commit=n + 50)[0] for n in range(5)]
    with parts_of(1):
        ice.write_changes(TableBatch(ITEMS, Batch("p", 1), changes))
    assert {row["id"]: row["price"] for row in rows_at(ice)} == {n: -n for n in range(5, 20)}
    assert len(opened(ice, ITEMS.table).metadata.snapshots) == 2


def test_on_a_full_disk_a_batch_waits_and_changes_nothing(ice: IcebergDestination) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))
    with files_of_at_most(2_000), pytest.raises(UnavailableError, match="cannot use the Iceberg warehouse"):
        write(ice, 1, *(insert(id=n, name=f"name {n}", price=n) for n in range(2, 2_000)))
    assert [row["id"] for row in rows_at(ice)] == [1]
    write(ice, 1, insert(id=2, name="b", price=2))
    assert [row["id"] for row in rows_at(ice)] == [1, 2]


def test_a_table_whose_data_file_is_gone_stops(ice: IcebergDestination, tmp_path: Path) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))
    for file in (tmp_path / "ice/shop/items/data").glob("*.parquet"):
        file.unlink()
    forget_everything()
    with pytest.raises(TableError, match="no longer in") as caught:
        write(ice, 1, update(id=1, price=2))
    assert "tailrace resync FILE shop.items" in (caught.value.fix or "")


def test_a_missing_warehouse_is_waited_for_and_a_missing_table_stops(ice: IcebergDestination, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="is missing"):
        write(ice, 3, insert(id=1, name="a", price=1), is_known=True)
    (tmp_path / "ice").mkdir()
    with pytest.raises(TableError, match="earlier batches wrote this table"):
        write(ice, 3, insert(id=1, name="a", price=1), is_known=True)


# -- other writers ---------------------------------------------------------------------------------------------


def test_a_batch_is_applied_to_what_another_writer_left(
    ice: IcebergDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))
    meanwhile = [1]

    def interrupted(place: str) -> None:
        if place == "iceberg.before_commit" and meanwhile:
            meanwhile.pop()
            opened(ice, ITEMS.table).append(
                pa.table({"id": [7], "name": ["other"], "price": pa.array([7], pa.int32())})
            )

    monkeypatch.setattr(failpoint, "reach", interrupted)
    write(ice, 1, update(id=1, price=2), delete(id=7))
    assert not meanwhile
    assert rows_at(ice) == [{"id": 1, "name": "a", "price": 2}]


def test_a_runner_that_was_overtaken_stops(ice: IcebergDestination, monkeypatch: pytest.MonkeyPatch) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))
    meanwhile = [1]

    def interrupted(place: str) -> None:
        if place == "iceberg.before_commit" and meanwhile:
            meanwhile.pop()
            write(ice, 1, insert(id=2, name="theirs", price=2))

    monkeypatch.setattr(failpoint, "reach", interrupted)
    with pytest.raises(OwnedError, match="another runner wrote batch 1"):
        write(ice, 1, insert(id=2, name="ours", price=2))
    assert [row["name"] for row in rows_at(ice)] == ["a", "theirs"]


def test_a_writer_that_never_ends_stops_the_table(ice: IcebergDestination, monkeypatch: pytest.MonkeyPatch) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))

    def interrupted(place: str) -> None:
        if place == "iceberg.before_commit":
            opened(ice, ITEMS.table).append(pa.table({"id": [7], "name": ["x"], "price": pa.array([7], pa.int32())}))

    monkeypatch.setattr(failpoint, "reach", interrupted)
    with pytest.raises(TableError, match="another writer changed the Iceberg table"):
        write(ice, 1, update(id=1, price=2))


def test_a_table_that_tailrace_did_not_make_is_refused(ice: IcebergDestination, tmp_path: Path) -> None:
    (tmp_path / "ice").mkdir()
    catalog = SqlCatalog("tailrace", uri=f"sqlite:///{tmp_path}/ice/catalog.db", warehouse=f"{tmp_path}/ice")
    catalog.create_namespace(("shop",))
    theirs = catalog.create_table(("shop", "items"), Schema(NestedField(1, "id", LongType())))
    theirs.append(pa.table({"id": [1]}))
    assert [finding.level for finding in ice.check([ITEMS])] == ["ok", "ok", "error"]
    with pytest.raises(TableError, match="was not made by tailrace"):
        write(ice, 0, insert(id=2, name="a", price=1), begins_copy=True)
    assert theirs.refresh().scan().to_arrow().to_pylist() == [{"id": 1}]


def test_a_column_that_another_program_added_stays_and_is_null_in_new_rows(ice: IcebergDestination) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))
    with opened(ice, ITEMS.table).update_schema() as change:
        change.add_column("note", LongType())
    wider = with_columns(ITEMS, Column("size", pa.int64(), number=4, initial=pa.scalar(7)))
    write(ice, 1, insert(id=2, name="b", price=2, size=3), table=wider)
    assert [(row["size"], row["note"]) for row in rows_at(ice)] == [(7, None), (3, None)]


def test_a_locked_catalog_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.destination.iceberg.catalog.LOCK_SECONDS", 0)
    ice = IcebergDestination(warehouse=str(tmp_path / "ice"))
    write(ice, 0, insert(id=1, name="a", price=1))
    with sqlite3.connect(tmp_path / "ice/catalog.db") as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UnavailableError, match="the catalog failed"):
            write(ice, 1, insert(id=2, name="b", price=2))
    other.close()
    write(ice, 1, insert(id=2, name="b", price=2))
    assert [row["id"] for row in rows_at(ice)] == [1, 2]


# -- columns and values ----------------------------------------------------------------------------------------


def field_ids(destination: IcebergDestination) -> dict[str, int]:
    return {field.name: field.field_id for field in opened(destination, ITEMS.table).schema().fields}


def test_columns_are_renamed_dropped_and_widened_without_touching_a_file(ice: IcebergDestination) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))
    before, files = field_ids(ice), set(scanned(ice, ITEMS.table))
    second = altered(ITEMS, name=Column("title", pa.string(), number=2), price=Column("price", pa.int64(), number=3))
    write(ice, 1, table=second)
    assert set(scanned(ice, ITEMS.table)) == files
    assert field_ids(ice) == {"id": before["id"], "title": before["name"], "price": before["price"]}
    third = altered(second, price=None)
    write(ice, 2, insert(id=2, title="b"), table=third)
    fourth = with_columns(third, Column("price", pa.string(), number=9))
    write(ice, 3, update(id=2, title="c"), table=fourth)
    assert field_ids(ice)["price"] > max(before.values())
    assert files < set(scanned(ice, ITEMS.table))
    assert rows_at(ice) == [{"id": 1, "title": "a", "price": None}, {"id": 2, "title": "c", "price": None}]


def test_a_type_that_iceberg_cannot_promote_is_written_again(ice: IcebergDestination) -> None:
    write(ice, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    write(ice, 1, delete(id=2))
    wider = altered(ITEMS, price=Column("price", pa.decimal128(12, 2), number=3))
    write(ice, 2, update(id=1, name="A"), table=wider)
    assert rows_at(ice) == [{"id": 1, "name": "A", "price": decimal.Decimal("1.00")}]


def test_a_key_that_is_added_or_dropped_stops_the_table(ice: IcebergDestination) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))
    with pytest.raises(SchemaChangedError, match="now has none"):
        write(ice, 1, table=TableSchema(ITEMS.table, ITEMS.columns, (), 2))


def test_deleted_rows_stay_with_their_time_where_that_is_wanted(tmp_path: Path) -> None:
    soft = IcebergDestination(warehouse=str(tmp_path / "ice"), deletes="soft", metadata=True)
    write(soft, 0, *(insert(id=n, name="a", price=n) for n in range(4)))
    write(soft, 1, delete(id=1), update(id=2, name="b"))
    write(soft, 2, TRUNCATE, insert(id=9, name="c", price=9))
    rows = {row["id"]: row for row in rows_at(soft)}
    assert {n: row["_tailrace_op"] for n, row in rows.items()} == {
        0: "truncate",
        1: "delete",
        2: "truncate",
        3: "truncate",
        9: "insert",
    }
    assert [n for n, row in rows.items() if row["_tailrace_deleted_at"] is None] == [9]
    assert rows[1]["price"] == 1
    assert rows[9]["_tailrace_committed_at"] == COMMITTED


def test_a_value_that_its_column_cannot_hold_is_kept_as_text_under_the_name_of_its_column(
    ice: IcebergDestination,
) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))
    changes = with_exact(changes_of(ITEMS, update(id=1, name="b", price=None)), ['{"price": "infinity"}'])
    ice.write_changes(TableBatch(ITEMS, Batch("p", 1), changes))
    assert rows_at(ice)[0]["_tailrace_exact"] == '{"price": "infinity"}'
    renamed = altered(ITEMS, price=Column("cost", pa.int32(), number=3))
    write(ice, 2, update(id=1, name="c"), table=renamed)
    assert rows_at(ice) == [{"id": 1, "name": "c", "cost": None, "_tailrace_exact": '{"cost": "infinity"}'}]
    write(ice, 3, update(id=1, cost=5), table=renamed)
    assert rows_at(ice)[0]["_tailrace_exact"] is None


VALUES: list[tuple[pa.DataType, list[Any], str, list[Any] | None]] = [
    (pa.uint8(), [255], "int", None),
    (pa.uint32(), [2**32 - 1], "long", None),
    (pa.uint64(), [2**64 - 1], "decimal(20, 0)", [decimal.Decimal(2**64 - 1)]),
    (pa.float16(), [0.5], "float", None),
    (pa.float64(), [float("-inf"), -0.0], "double", None),
    (pa.decimal128(38, 38), [decimal.Decimal("0." + "9" * 38)], "decimal(38, 38)", None),
    (pa.decimal256(50, 0), [decimal.Decimal(10**45)], "string", ["1" + "0" * 45]),
    (pa.large_string(), ["a\x00é"], "string", None),
    (pa.binary(2), [b"\x00\xff"], "binary", None),
    (pa.time32("ms"), [datetime.time(1, 2, 3, 4000)], "time", None),
    (pa.time64("us"), [datetime.time(23, 59, 59, 999999)], "time", None),
    (pa.timestamp("ms", "Europe/Paris"), [COMMITTED], "timestamptz", None),
    (pa.duration("s"), [datetime.timedelta(seconds=90)], "long", [90]),
    (pa.list_(pa.list_(pa.int8())), [[[1], None, []]], "list<list<int>>", None),
    (pa.struct({'a "b"': pa.string(), "b": pa.binary()}), [{'a "b"': "x", "b": b"\xff"}], "", None),
    (pa.map_(pa.string(), pa.int64()), [[("k", 1), ("l", None)]], "map<string, long>", None),
]


@pytest.mark.parametrize(("kind", "values", "declared", "expected"), VALUES, ids=[str(kind) for kind, *_ in VALUES])
def test_types_that_few_sources_give_come_back_as_they_were(
    ice: IcebergDestination, kind: pa.DataType, values: list[Any], declared: str, expected: list[Any] | None
) -> None:
    column = Column('odd "name".x', kind, number=9)
    table = with_columns(ITEMS, column)
    rows = [{"id": at, "name": "n", "price": 0, column.name: value} for at, value in enumerate([*values, None])]
    write(ice, 0, *(insert(**row) for row in rows), table=table)
    write(ice, 1, *(update(id=row["id"], name="m") for row in rows), table=table)
    found = [row[column.name] for row in rows_at(ice)]
    assert found == [*(expected or values), None]
    if declared:
        assert str(opened(ice, ITEMS.table).schema().find_field(9 - 5).field_type) == declared


def test_a_list_of_structs_is_in_the_file_as_it_was(ice: IcebergDestination, tmp_path: Path) -> None:
    """PyIceberg 0.12 reads a list of structs that is null as an empty one."""
    table = with_columns(ITEMS, Column("x", pa.list_(pa.struct({"n": pa.list_(pa.float32())})), number=9))
    values = [[{"n": [1.5, None]}, None], None, []]
    write(ice, 0, *(insert(id=n, name="a", price=0, x=value) for n, value in enumerate(values)), table=table)
    [file] = (tmp_path / "ice/shop/items/data").glob("*.parquet")
    assert pq.read_table(file).column("x").to_pylist() == values


def test_dates_that_python_lacks_are_kept_and_found(ice: IcebergDestination) -> None:
    days = pa.array([-800_000, 0, 5_000_000], pa.int32()).cast(pa.date32())
    instants = pa.array([-(2**62), 0, 2**62], pa.int64()).cast(pa.timestamp("us", "UTC"))
    columns = (Column("day", pa.date32(), False, number=1), Column("at", pa.timestamp("us", "UTC"), number=2))
    table = TableSchema(ITEMS.table, columns, ("day",))
    rows = pa.StructArray.from_arrays([days, instants], fields=list(table.row_type))
    for number in range(2):
        chunk = Changes.build(table, rows, op=np.array([Op.UPDATE] * 3, np.int8), commit=number + 1)
        ice.write_changes(TableBatch(table, Batch("p", number), [chunk]))
    found = opened(ice, ITEMS.table).scan().to_arrow().sort_by("day")
    assert found.column("day").cast(pa.int32()).to_pylist() == [-800_000, 0, 5_000_000]
    assert found.column("at").cast(pa.int64()).to_pylist() == [-(2**62), 0, 2**62]


def test_bounds_of_columns_let_readers_skip_files(ice: IcebergDestination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "LEAST_ROWS", 10)
    write(ice, 0, *(insert(id=n, name=f"a name that is long {n:03}", price=n % 3) for n in range(50)))
    table = opened(ice, ITEMS.table)
    assert len(list(table.scan(row_filter="id >= 42").plan_files())) == 1
    assert len(list(table.scan(row_filter="id >= 42 and price = 7").plan_files())) == 0
    assert table.scan(row_filter="name > 'a name that is long 047'").to_arrow().num_rows == 2
