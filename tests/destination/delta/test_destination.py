"""What the Delta destination does beyond the contract: its own columns, other writers, faults, housekeeping."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from tailrace.destination import Batch, Stage, TableBatch
from tailrace.destination.delta import destination as delta
from tailrace.destination.delta import log
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.object_folder import ObjectFolder
from tailrace.destination.delta.option import CompactOptions, VacuumOptions
from tailrace.destination.delta.place import place_of
from tailrace.destination.delta.store_error import reaching
from tailrace.errors import (
    ConfigError,
    OwnedError,
    SchemaChangedError,
    TableError,
    UnavailableError,
    UnfitError,
)
from tailrace.model.change import Changes, Op, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.option.value import Secret
from tailrace.system.failpoint import VARIABLE, FailpointError
from tailrace.testing.destination import (
    ITEMS,
    TRUNCATE,
    changes_of,
    delete,
    insert,
    moved,
    read,
    update,
    with_columns,
)
from tailrace.testing.fault import FailAfterWrite, FaultyDestination, HoldResponse, Reject, RespondSlowly
from tests.support.delta_optimize import optimize_as_spark_does
from tests.support.destination_writing import files_of_at_most, write
from tests.support.power_loss import Disk

UTC = datetime.UTC
COMMITTED = datetime.datetime(2024, 1, 1, tzinfo=UTC)
LOG = TableSchema(TableName("shop", "log"), (Column("line", pa.string()),), ())


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def table_at(lake: Path, table: TableSchema = ITEMS) -> DeltaTable:
    return DeltaTable(str(lake / table.table.schema / table.table.name))


def rows_at(lake: Path, table: TableSchema = ITEMS) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table_at(lake, table).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row[table.key[0]]) if table.key else rows


def test_metadata_columns_describe_the_last_change_of_each_row(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), metadata=True)
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    write(destination, 1, update(id=1, name="c", price=1))
    first, second = rows_at(lake)
    assert (first["_tailrace_op"], second["_tailrace_op"]) == ("update", "insert")
    assert first["_tailrace_committed_at"] == COMMITTED
    assert second["_tailrace_position"] == str(Position(3, 0))


def test_a_soft_delete_keeps_the_row_and_says_when_until_it_is_inserted_again(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), deletes="soft")
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2), delete(id=2))
    write(destination, 1, delete(id=1), delete(id=77))
    assert rows_at(lake) == [
        {"id": 1, "name": "a", "price": 1, "_tailrace_deleted_at": COMMITTED},
        {"id": 2, "name": "b", "price": 2, "_tailrace_deleted_at": COMMITTED},
    ]
    write(destination, 2, insert(id=1, name="again", price=3))
    assert rows_at(lake)[0] == {"id": 1, "name": "again", "price": 3, "_tailrace_deleted_at": None}


def test_a_soft_truncate_marks_every_row_that_was_alive(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), deletes="soft")
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    write(destination, 1, TRUNCATE, insert(id=2, name="new", price=3))
    assert [(row["name"], row["_tailrace_deleted_at"]) for row in rows_at(lake)] == [("a", COMMITTED), ("new", None)]


def test_a_table_without_a_key_is_a_log_of_its_changes(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    staged = destination.write_rows(LOG, changes_of(LOG, read(line="copied")))
    write(destination, 0, table=LOG, staged=[staged], begins_copy=True)
    write(destination, 1, insert(line="x"), delete(line="x"), TRUNCATE, insert(line="x"), table=LOG)
    assert write(destination, 1, insert(line="x"), table=LOG).repeated
    rows = sorted(rows_at(lake, LOG), key=lambda row: (row["_tailrace_op"] != "read", row["_tailrace_position"]))
    assert [(row["line"], row["_tailrace_op"]) for row in rows] == [
        ("copied", "read"),
        ("x", "insert"),
        ("x", "delete"),
        (None, "truncate"),
        ("x", "insert"),
    ]


def with_exact(changes: list[Changes], texts: list[str | None]) -> list[Changes]:
    batch = changes[0].batch
    at = batch.schema.get_field_index("exact")
    return [Changes(changes[0].table, batch.set_column(at, batch.schema.field(at), pa.array(texts, pa.string())))]


def test_values_that_do_not_fit_bring_their_own_column_and_follow_their_row(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    assert "_tailrace_exact" not in rows_at(lake)[0]
    big = '{"price": "99999999999"}'
    odd = with_exact(changes_of(ITEMS, insert(id=2, name="b", price=None)), [big])
    destination.write_changes(TableBatch(ITEMS, Batch("p", 1), odd))
    write(destination, 2, update(id=2, name="renamed"))
    assert [row["_tailrace_exact"] for row in rows_at(lake)] == [None, big]
    write(destination, 3, update(id=2, price=5))
    assert [row["_tailrace_exact"] for row in rows_at(lake)] == [None, None]


def test_values_that_do_not_fit_are_folded_with_their_column_inside_a_batch(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    big = '{"price": "99999999999"}'
    steps = changes_of(ITEMS, insert(id=1, name="a", price=None), update(id=1, name="b"))
    destination.write_changes(TableBatch(ITEMS, Batch("p", 0), with_exact(steps, [big, None])))
    assert rows_at(lake) == [{"id": 1, "name": "b", "price": None, "_tailrace_exact": big}]


def test_copied_values_that_do_not_fit_are_kept_too(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    fits = changes_of(ITEMS, read(id=1, name="a", price=1))
    odd = with_exact(changes_of(ITEMS, read(id=2, name="b", price=None)), ['{"price": "99999999999"}'])
    write(destination, 0, staged=[destination.write_rows(ITEMS, [*fits, *odd])], begins_copy=True)
    assert [row["_tailrace_exact"] for row in rows_at(lake)] == [None, '{"price": "99999999999"}']


def test_a_renamed_column_keeps_its_values_under_the_new_name(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    columns = (ITEMS.columns[0], replace(ITEMS.columns[1], name="title"), ITEMS.columns[2])
    renamed = TableSchema(ITEMS.table, columns, ("id",), 2)
    old = changes_of(ITEMS, insert(id=3, name="c", price=3))
    new = changes_of(renamed, update(id=1, price=10), commit=9)
    destination.write_changes(TableBatch(renamed, Batch("p", 1), [*old, *new]))
    assert rows_at(lake) == [
        {"id": 1, "title": "a", "price": 10},
        {"id": 2, "title": "b", "price": 2},
        {"id": 3, "title": "c", "price": 3},
    ]
    assert write(destination, 1, delete(id=1)).repeated


def test_a_renamed_key_is_still_the_key(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    columns = (replace(ITEMS.columns[0], name="number"), *ITEMS.columns[1:])
    renamed = TableSchema(ITEMS.table, columns, ("number",), 2)
    write(destination, 1, update(number=1, name="new"), table=renamed)
    assert rows_at(lake, renamed) == [
        {"number": 1, "name": "new", "price": 1},
        {"number": 2, "name": "b", "price": 2},
    ]


def test_a_dropped_column_stays_and_is_null_in_new_rows(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    narrower = TableSchema(ITEMS.table, ITEMS.columns[:2], ("id",), 2)
    write(destination, 1, insert(id=2, name="b"), table=narrower)
    assert rows_at(lake) == [{"id": 1, "name": "a", "price": 1}, {"id": 2, "name": "b", "price": None}]


def test_a_type_is_widened_where_nothing_is_lost_and_stops_the_table_elsewhere(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))

    def with_price(kind: pa.DataType) -> TableSchema:
        return TableSchema(ITEMS.table, (*ITEMS.columns[:2], replace(ITEMS.columns[2], type=kind)), ("id",), 2)

    write(destination, 1, insert(id=2, name="b", price=2**40), table=with_price(pa.int64()))
    assert [row["price"] for row in rows_at(lake)] == [1, 2**40]
    with pytest.raises(SchemaChangedError, match="price"):
        write(destination, 2, insert(id=3, name="c", price="x"), table=with_price(pa.string()))


def test_a_copy_that_starts_may_change_every_column(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    other = TableSchema(ITEMS.table, (Column("id", pa.string(), False), Column("at", pa.timestamp("us"))), ("id",), 2)
    row = {"id": "x", "at": datetime.datetime(2024, 1, 1, 0, 0, 0, 1)}  # noqa: DTZ001
    staged = destination.write_rows(other, changes_of(other, read(**row)))
    write(destination, 1, table=other, staged=[staged], begins_copy=True, completes_copy=True)
    assert rows_at(lake, other) == [row]


def test_a_batch_that_another_runner_commits_meanwhile_is_not_written_twice(lake: Path) -> None:
    destination, other = DeltaDestination(path=str(lake)), DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))

    def overtake(table: TableSchema, keys: pa.Table) -> pa.Table:
        write(other, 1, insert(id=9, name="other", price=9))
        return pa.Table.from_pylist([{"id": 2, "name": "late", "price": 0}], table.arrow)

    with pytest.raises(OwnedError, match="batch 1"):
        write(destination, 1, update(id=2, price=2), refetch=overtake)
    assert [row["id"] for row in rows_at(lake)] == [1, 9]


def test_a_stale_runner_is_fenced_by_a_later_batch(lake: Path) -> None:
    destination, other = DeltaDestination(path=str(lake)), DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))

    def overtake(table: TableSchema, keys: pa.Table) -> pa.Table:
        write(other, 1, insert(id=9, name="other", price=9))
        write(other, 2, delete(id=9))
        return pa.Table.from_pylist([{"id": 2, "name": "late", "price": 0}], table.arrow)

    with pytest.raises(OwnedError):
        write(destination, 1, update(id=2, price=2), refetch=overtake)
    assert [row["id"] for row in rows_at(lake)] == [1]


def test_a_batch_is_computed_again_when_another_writer_optimizes_the_table(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), compact=None, partition_by={"shop.items": ["name"]})
    for number in range(3):
        write(destination, number, insert(id=number, name="x y/ü%", price=number))
    asked = 0

    def optimize(table: TableSchema, keys: pa.Table) -> pa.Table:
        nonlocal asked
        asked += 1
        table_at(lake).optimize.compact()
        return pa.Table.from_pylist([{"id": 7, "name": "fetched", "price": 0}], table.arrow)

    write(destination, 3, update(id=7, price=7), update(id=1, price=10), delete(id=2), refetch=optimize)
    write(destination, 4, update(id=0, price=5))
    assert asked == 2
    assert [(row["id"], row["price"]) for row in rows_at(lake)] == [(0, 5), (1, 10), (7, 7)]


def test_a_writer_that_never_rests_stops_the_table_in_the_end(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), compact=None)
    write(destination, 0, insert(id=1, name="a", price=1))

    def rewrite(table: TableSchema, keys: pa.Table) -> pa.Table:
        table_at(lake).delete("id = 1")
        write_deltalake(
            table_at(lake),
            pa.Table.from_pylist([{"id": 1, "name": "a", "price": 1}], table_schema(lake)),
            mode="append",
        )
        return pa.Table.from_pylist([{"id": 7, "name": "fetched", "price": 0}], table.arrow)

    with pytest.raises(TableError, match="another writer"):
        write(destination, 1, update(id=1, price=2), update(id=7, price=7), refetch=rewrite)


def table_schema(lake: Path) -> pa.Schema:
    return pa.schema(table_at(lake).schema().to_arrow())


def test_a_delta_table_of_another_program_is_refused_and_left_alone(lake: Path) -> None:
    write_deltalake(str(lake / "shop/items"), pa.table({"id": [1]}))
    destination = DeltaDestination(path=str(lake))
    (finding,) = [finding for finding in destination.check([ITEMS]) if finding.level == "error"]
    assert finding.fix
    for attempt in (
        lambda: write(destination, 0, insert(id=2, name="b", price=2)),
        lambda: destination.write_rows(ITEMS, changes_of(ITEMS, read(id=2, name="b", price=2))),
    ):
        with pytest.raises(TableError, match="not made by tailrace"):
            attempt()
    assert rows_at(lake) == [{"id": 1}]


def test_files_where_a_table_should_be_are_refused_and_left_alone(lake: Path) -> None:
    (lake / "shop").mkdir(parents=True)
    (lake / "shop/items").write_text("mine")
    destination = DeltaDestination(path=str(lake))
    with pytest.raises(TableError, match="is a file"):
        write(destination, 0, insert(id=2, name="b", price=2))
    assert [finding.level for finding in destination.check([ITEMS])] == ["ok", "error"]
    (lake / "shop/items").unlink()
    (lake / "shop/items").mkdir()
    (lake / "shop/items/notes.txt").write_text("mine")
    with pytest.raises(TableError, match="no Delta table"):
        write(destination, 0, insert(id=2, name="b", price=2))


@pytest.mark.parametrize("path", ["foo://bar/lake", "az://bar/lake"], ids=["unknown", "lacking its account"])
def test_a_store_that_delta_does_not_know_is_refused_with_the_keys_to_correct(path: str) -> None:
    with pytest.raises(ConfigError, match=path) as refused:
        DeltaDestination(path=path).check([ITEMS])
    assert "storage_options" in (refused.value.fix or "")


def test_an_error_in_an_object_store_names_the_table_by_its_address() -> None:
    place = ObjectFolder("s3://bucket/lake/shop/items")
    with pytest.raises(TableError) as caught, reaching(place, "shop.items"):
        raise DeltaError("not understood")
    assert "s3://bucket/lake/shop/items/_delta_log" in (caught.value.fix or "")


def test_an_object_store_that_does_not_answer_is_unavailable_already_at_the_check() -> None:
    options = {
        "endpoint_url": "http://127.0.0.1:1",
        "allow_http": "true",
        "access_key_id": "k",
        "secret_access_key": "CANARY",
        "region": "nowhere",
        "max_retries": "0",
    }
    with pytest.raises(UnavailableError, match="s3://bucket/lake") as caught:
        DeltaDestination(
            path="s3://bucket/lake", storage_options={name: Secret(value) for name, value in options.items()}
        ).check([ITEMS])
    assert "CANARY" not in str(caught.value)


def test_checking_finds_what_would_go_wrong_and_creates_nothing(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.items": ["nowhere"]})
    twin = TableSchema(TableName("shop", "ITEMS"), ITEMS.columns, ("id",))
    odd = TableSchema(
        TableName("shop", "odd"), (Column("id", pa.int64()), Column("ID", pa.month_day_nano_interval())), ("id",)
    )
    found = {(finding.level, finding.subject) for finding in destination.check([ITEMS, twin, odd, LOG])}
    assert {("error", "shop.items"), ("warning", "shop.ITEMS"), ("error", "shop.odd"), ("warning", "shop.log")} <= found
    assert all(finding.fix for finding in destination.check([ITEMS, odd]) if finding.level == "error")
    assert not lake.exists()
    assert DeltaDestination(path=str(lake / "50%")).check([])[0].level == "error"


def test_a_disk_that_takes_no_more_is_unavailable_and_nothing_is_half_written(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    before = sorted((lake / "shop/items").iterdir())
    with files_of_at_most(64), pytest.raises(UnavailableError) as caught:
        write(destination, 1, insert(id=2, name="b", price=2))
    assert caught.value.fix
    with files_of_at_most(64), pytest.raises(UnavailableError):
        destination.write_rows(ITEMS, changes_of(ITEMS, read(id=2, name="b", price=2)))
    assert sorted((lake / "shop/items").iterdir()) == before
    write(destination, 1, insert(id=2, name="b", price=2))
    assert [row["id"] for row in rows_at(lake)] == [1, 2]


def test_small_files_are_merged_once_there_are_many_and_batches_are_still_known(lake: Path) -> None:
    destination = DeltaDestination(
        path=str(lake), compact=CompactOptions(files=4), partition_by={"shop.items": ["name"]}
    )
    for number in range(8):
        write(destination, number, insert(id=number, name=str(number % 2), price=number))
    before = rows_at(lake)
    assert destination.maintain(ITEMS.table) == "merged 8 files into 2"
    assert destination.maintain(ITEMS.table) is None
    assert rows_at(lake) == before
    assert write(destination, 7, delete(id=0)).repeated
    write(destination, 8, delete(id=0))
    assert [row["id"] for row in rows_at(lake)] == list(range(1, 8))


def test_a_trickle_of_inserts_does_not_leave_many_files(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    for number in range(20):
        write(destination, number, insert(id=number, name="x", price=number))
    assert len(table_at(lake).file_uris()) == 1
    assert [row["id"] for row in rows_at(lake)] == list(range(20))


def test_a_vacuum_deletes_old_files_that_no_table_version_needs_and_no_others(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), vacuum=VacuumOptions(every=0, retention=3600))
    write(destination, 0, insert(id=1, name="a", price=1))
    in_flight = destination.write_rows(ITEMS, changes_of(ITEMS, read(id=3, name="c", price=3)))
    destination.write_rows(ITEMS, changes_of(ITEMS, read(id=9, name="abandoned", price=9)))
    (abandoned,) = {path for path in (lake / "shop/items").glob("*.parquet") if path.name not in in_flight.receipt} - {
        Path(uri) for uri in table_at(lake).file_uris()
    }
    os.utime(abandoned, (0, 0))
    destination.maintain(ITEMS.table)
    assert not abandoned.exists()
    write(destination, 1, staged=[in_flight])
    assert [row["id"] for row in rows_at(lake)] == [1, 3]


def test_a_vacuum_keeps_files_for_the_whole_retention_also_when_it_is_not_in_whole_hours(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), vacuum=VacuumOptions(every=0, retention=85 * 60))
    write(destination, 0, insert(id=1, name="a", price=1))
    before = set((lake / "shop/items").glob("*.parquet"))
    destination.write_rows(ITEMS, changes_of(ITEMS, read(id=9, name="in flight", price=9)))
    (in_flight,) = set((lake / "shop/items").glob("*.parquet")) - before
    age = time.time() - 70 * 60
    os.utime(in_flight, (age, age))
    destination.maintain(ITEMS.table)
    assert in_flight.exists()


def test_large_batches_are_spread_over_files_and_later_ones_touch_few(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    count = 120_000
    row = pa.StructArray.from_arrays(
        [pa.array(np.arange(count)), pa.array(["x"] * count), pa.array(np.zeros(count, np.int32))],
        fields=list(ITEMS.row_type),
    )
    staged = destination.write_rows(ITEMS, [Changes.build(ITEMS, row, op=Op.READ, commit=0)])
    write(destination, 0, staged=[staged], begins_copy=True)
    before = set(table_at(lake).file_uris())
    write(destination, 1, update(id=5, price=1), delete(id=6), insert(id=count, name="new", price=1))
    after = set(table_at(lake).file_uris())
    assert len(before) > 3
    assert len(before - after) <= 2
    assert table_at(lake).to_pyarrow_table().num_rows == count


def test_a_swap_of_keys_in_files_of_their_own_keeps_what_was_left_out(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.items": ["price"]})
    write(destination, 0, insert(id=1, name="one", price=1), insert(id=2, name="two", price=2))
    write(destination, 1, delete(id=1), moved(id=9, price=7), delete(id=2), moved(id=1), delete(id=9), moved(id=2))
    assert rows_at(lake) == [{"id": 1, "name": "two", "price": 2}, {"id": 2, "name": "one", "price": 7}]


def test_planned_faults_happen_once_each_and_a_retry_finds_the_batch(lake: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    faulty = FaultyDestination(inner=DeltaDestination(path=str(lake)), directory=faults)
    faulty.plan(Reject(), FailAfterWrite(), RespondSlowly(0.01), Reject("write_rows"))
    with pytest.raises(UnavailableError):
        write(faulty, 0, insert(id=1, name="a", price=1))
    assert not lake.exists()
    with pytest.raises(UnavailableError):
        write(faulty, 0, insert(id=1, name="a", price=1))
    assert write(faulty, 0, insert(id=1, name="a", price=1)).repeated
    with pytest.raises(UnavailableError):
        faulty.write_rows(ITEMS, [], Stage(tmp_path))
    assert faulty.pending() == 0


def test_a_held_response_comes_when_it_is_released(lake: Path, tmp_path: Path) -> None:
    import threading

    faulty = FaultyDestination(inner=DeltaDestination(path=str(lake)), directory=tmp_path)
    faulty.plan(HoldResponse())
    writer = threading.Thread(target=write, args=(faulty, 0, insert(id=1, name="a", price=1)))
    writer.start()
    while not faulty.holding():
        writer.join(0.01)
    assert rows_at(lake) == [{"id": 1, "name": "a", "price": 1}]
    assert writer.is_alive()
    faulty.release()
    writer.join()


@pytest.mark.parametrize("day", [-735_599, 3_000_000])
def test_a_day_that_readers_do_not_know_in_a_partition_column_stops_the_table(lake: Path, day: int) -> None:
    table = TableSchema(TableName("shop", "days"), (Column("id", pa.int32()), Column("day", pa.date32())), ("id",))
    rows = pa.StructArray.from_arrays(
        [pa.array([1], pa.int32()), pa.array([day], pa.int32()).view(pa.date32())], fields=list(table.row_type)
    )
    destination = DeltaDestination(path=str(lake), partition_by={"shop.days": ["day"]})
    with pytest.raises(UnfitError, match="before year 1 or after 9999"):
        destination.write_changes(
            TableBatch(table, Batch("p", 0), [Changes.build(table, rows, op=Op.INSERT, commit=1)])
        )


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.bool_(), True),
        (pa.float64(), 1.5),
        (pa.float64(), math.inf),
        (pa.string(), "not so short, but longer than a bound is kept"),
        (pa.string(), "long " * 2_000),
        (pa.string(), chr(sys.maxunicode) * 40),
        (pa.decimal128(12, 2), decimal.Decimal("0.10")),
        (pa.decimal128(38, 0), decimal.Decimal(2**60)),
        (pa.timestamp("us"), datetime.datetime(9999, 12, 31, 23, 59, 59, 999999)),  # noqa: DTZ001
    ],
)
def test_a_filter_on_any_column_finds_its_rows(lake: Path, kind: pa.DataType, value: Any) -> None:
    table = TableSchema(ITEMS.table, (Column("id", pa.int64(), False), Column("value", kind)), ("id",))
    write(DeltaDestination(path=str(lake)), 0, insert(id=1, value=value), insert(id=2, value=None), table=table)
    rows = table_at(lake).to_pyarrow_dataset().to_table(filter=pc.field("value") == pa.scalar(value, kind))
    assert rows.column("id").to_pylist() == [1]


def test_a_file_with_short_and_long_texts_and_a_sentinel_keeps_the_bounds_of_its_key(lake: Path) -> None:
    columns = (Column("id", pa.int64(), False), Column("text", pa.string()), Column("until", pa.timestamp("us", "UTC")))
    table = TableSchema(ITEMS.table, columns, ("id",))
    until = datetime.datetime(9999, 12, 31, tzinfo=UTC)
    rows = [insert(id=1, text="b", until=until), insert(id=2, text="a" * 5_000, until=until)]
    write(DeltaDestination(path=str(lake)), 0, *rows, table=table)
    found = pa.table(table_at(lake).get_add_actions(flatten=True))
    assert [found.column(f"{side}.id")[0].as_py() for side in ("min", "max")] == [1, 2]
    assert [found.column(f"{side}.text")[0].as_py() for side in ("min", "max")] == ["a" * 32, "b"]


def test_a_filter_on_a_column_with_a_dot_in_its_name_finds_its_rows(lake: Path) -> None:
    table = TableSchema(ITEMS.table, (Column("id", pa.int64(), False), Column("a.b", pa.int32())), ("id",))
    write(DeltaDestination(path=str(lake)), 0, insert(id=1, **{"a.b": 7}), insert(id=2, **{"a.b": 8}), table=table)
    rows = table_at(lake).to_pyarrow_dataset().to_table(filter=pc.field("a.b") == 7)
    assert rows.column("id").to_pylist() == [1]


def test_a_file_with_nan_is_found_by_a_filter_on_its_other_values(lake: Path) -> None:
    table = TableSchema(ITEMS.table, (Column("id", pa.int64(), False), Column("value", pa.float64())), ("id",))
    write(DeltaDestination(path=str(lake)), 0, insert(id=1, value=math.nan), insert(id=2, value=1.5), table=table)
    rows = table_at(lake).to_pyarrow_dataset().to_table(filter=pc.field("value") == 1.5)
    assert rows.column("id").to_pylist() == [2]


@pytest.mark.parametrize("number", [2**60, -(2**60) - 1, 10**20 - 1])
def test_the_bounds_of_a_decimal_are_the_number_itself_in_all_its_digits(lake: Path, number: int) -> None:
    value = decimal.Decimal(number)
    table = TableSchema(ITEMS.table, (Column("id", pa.int64(), False), Column("n", pa.decimal128(20, 0))), ("id",))
    write(DeltaDestination(path=str(lake)), 0, insert(id=1, n=value), table=table)
    log = (lake / "shop" / "items" / "_delta_log" / f"{0:020}.json").read_text()
    [add] = [action["add"] for action in map(json.loads, log.splitlines()) if "add" in action]
    stats = json.loads(add["stats"], parse_float=decimal.Decimal)
    assert (stats["minValues"]["n"], stats["maxValues"]["n"]) == (value, value)


def test_moments_far_off_are_the_same_after_spark_optimized_their_table(lake: Path) -> None:
    columns = (Column("id", pa.int64(), False), Column("at", pa.timestamp("us", "UTC")))
    table = TableSchema(ITEMS.table, columns, ("id",))
    moments = [datetime.datetime(1500, 1, 1, 0, 0, 0, 5, UTC), datetime.datetime(9998, 1, 1, tzinfo=UTC)]
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, *(insert(id=number, at=at) for number, at in enumerate(moments)), table=table)
    optimize_as_spark_does(lake / "shop" / "items", "")
    write(destination, 1, insert(id=2, at=None), delete(id=7), table=table)
    assert [row["at"] for row in rows_at(lake, table)] == [*moments, None]


def test_a_file_whose_name_is_encoded_in_the_log_is_replaced_and_doubles_no_row(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.items": ["name"]})
    write(destination, 0, insert(id=1, name="ü", price=1), insert(id=2, name="ü", price=2))
    optimize_as_spark_does(lake / "shop" / "items", "name=ü/")
    write(destination, 1, update(id=1, name="ü", price=5))
    assert [(row["id"], row["price"]) for row in rows_at(lake)] == [(1, 5), (2, 2)]


def folders_of(lake: Path) -> list[str]:
    place = lake / "shop" / "items"
    return sorted(str(file.relative_to(place).parent) for file in place.rglob("part-*.parquet"))


def test_a_plain_partition_has_a_folder_of_its_name_and_any_other_lies_with_the_table(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.items": ["name", "price"]})
    names = ["EUR", None, "a b", "ü", "x/y", "__HIVE_DEFAULT_PARTITION__", "%41"]
    write(destination, 0, *(insert(id=number, name=name, price=5) for number, name in enumerate(names)))
    folders = ["name=EUR/price=5", "name=__HIVE_DEFAULT_PARTITION__/price=5"]
    assert folders_of(lake) == sorted([*folders, *["."] * 5])
    write(destination, 1, update(id=0, name="EUR", price=6), delete(id=1), update(id=2, name="a b", price=-1))
    assert [(row["name"], row["price"]) for row in rows_at(lake)] == [
        *(("EUR", 6), ("a b", -1)),
        *((name, 5) for name in names[3:]),
    ]
    alive = pa.table(table_at(lake).get_add_actions(flatten=True)).column("size_bytes").to_pylist()
    every = [file.stat().st_size for file in (lake / "shop" / "items").rglob("part-*.parquet")]
    assert place_of(str(lake), ITEMS.table, {}).dead_bytes(sum(alive)) == sum(every) - sum(alive) > 0


def test_what_a_crash_before_the_first_commit_leaves_in_partitions_does_not_keep_a_table_from_beginning(
    lake: Path,
) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.items": ["name"]})
    left = lake / "shop" / "items" / "name=EUR"
    left.mkdir(parents=True)
    (left / "part-0.parquet").touch()
    write(destination, 0, insert(id=1, name="EUR", price=1))
    assert [row["id"] for row in rows_at(lake)] == [1]


def test_partitions_of_another_program_are_left_alone(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.items": ["name"]})
    theirs = lake / "shop" / "items" / "name=EUR"
    theirs.mkdir(parents=True)
    (theirs / "data.csv").touch()
    with pytest.raises(TableError, match="holds files that are no Delta table"):
        write(destination, 0, insert(id=1, name="EUR", price=1))


def test_a_batch_of_a_huge_transaction_is_never_in_memory_as_a_whole(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "PART_BYTES", 400_000)
    monkeypatch.setattr(delta, "HUGE_PART_BYTES", 200_000)
    rows, chunks = 100, 100
    held: list[int] = []
    empty = pa.total_allocated_bytes()

    def flow() -> Iterator[Changes]:
        for start in range(0, rows * chunks, rows):
            held.append(pa.total_allocated_bytes() - empty)
            yield from changes_of(
                ITEMS, *(insert(id=start + at, name="x" * 1000, price=1) for at in range(rows)), commit=start + 1
            )

    destination = DeltaDestination(path=str(lake))
    written = destination.write_changes(TableBatch(ITEMS, Batch("p", 0), flow(), log_bytes=rows * chunks * 1000))
    assert written.upserts == rows * chunks
    assert table_at(lake).to_pyarrow_dataset().count_rows() == rows * chunks
    assert table_at(lake).version() == 0
    assert max(held) < rows * chunks * 1000 / 2


def test_a_power_cut_takes_nothing_that_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, lake = Disk(monkeypatch), tmp_path / "lake"
    lake.mkdir()
    destination = DeltaDestination(path=str(lake))
    wider = with_columns(ITEMS, Column("size", pa.int32(), number=9))

    def copy(number: int) -> None:
        rows = [changes_of(ITEMS, read(id=key, name="copied", price=1)) for key in (1, 2, 1000)]
        staged = [destination.write_rows(ITEMS, one) for one in rows]
        destination.write_changes(
            TableBatch(ITEMS, Batch("p", number), staged=staged, begins_copy=True, completes_copy=True)
        )

    steps: list[Callable[[int], Any]] = [
        copy,
        lambda number: write(destination, number, update(id=1, name="new", price=2), delete(id=2)),
        lambda number: write(destination, number, insert(id=11, name="more", price=3)),
        lambda number: write(destination, number, update(id=1000, size=4), table=wider),
        lambda number: write(destination, number, TRUNCATE, table=wider),
    ]
    for number, step in enumerate(steps):
        step(number)
        left = disk.left(lake, tmp_path / f"left after {number}")
        assert table_at(left).to_pyarrow_table().sort_by("id") == table_at(lake).to_pyarrow_table().sort_by("id")
        assert DeltaDestination(path=str(left)).write_changes(TableBatch(wider, Batch("p", number))).repeated
    assert table_at(lake).version() == len(steps) - 1


@pytest.mark.parametrize("again", [True, False], ids=["repeated", "gone on with"])
def test_a_power_cut_takes_nothing_that_was_committed_by_a_process_killed_before_it_could_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    disk, lake = Disk(monkeypatch), tmp_path / "lake"
    lake.mkdir()
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "delta.before_sync:raise")
        with pytest.raises(FailpointError):
            write(destination, 1, update(id=1, name="b"))
    monkeypatch.setattr(log, "_synced", {})
    if again:
        assert write(destination, 1, update(id=1, name="b")).repeated
    else:
        write(destination, 2, insert(id=2, name="c", price=2))
    left = disk.left(lake, tmp_path / "left")
    assert rows_at(left) == rows_at(lake)


def test_a_power_cut_takes_nothing_where_another_writer_was_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, lake = Disk(monkeypatch), tmp_path / "lake"
    lake.mkdir()
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    DeltaTable(str(lake / "shop/items")).delete()
    write(destination, 1, insert(id=2, name="b", price=2))
    assert [row["id"] for row in rows_at(disk.left(lake, tmp_path / "left"))] == [2]


def test_a_power_cut_takes_nothing_of_a_log_that_begins_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, lake = Disk(monkeypatch), tmp_path / "lake"
    lake.mkdir()
    destination = DeltaDestination(path=str(lake))
    number = 0
    while not list(lake.rglob("*.checkpoint.parquet")):
        write(destination, number, insert(id=1, name="a", price=number))
        for entry in lake.rglob("*.json"):
            os.utime(entry, (0, 0))
        number += 1
    assert not (lake / "shop/items/_delta_log" / f"{0:020}.json").exists()
    write(destination, number, insert(id=2, name="b", price=2))
    left = disk.left(lake, tmp_path / "left")
    assert rows_at(left) == rows_at(lake)
    assert DeltaDestination(path=str(left)).write_changes(TableBatch(ITEMS, Batch("p", number))).repeated
