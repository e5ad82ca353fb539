"""Delta tables that are gone, damaged or unusual: nothing is passed over, and nothing is waited for in vain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.destination import Batch, Refetch, TableBatch
from tailrace.destination.delta import destination as delta
from tailrace.destination.delta import file_writer, upsert
from tailrace.destination.delta.commit import TableChange, commit
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import CompactOptions
from tailrace.destination.delta.place import place_of
from tailrace.destination.lake import key_index as lake_keys
from tailrace.errors import TableError, UnavailableError, UnfitError
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.testing.destination import ITEMS, RowChange, changes_of, delete, insert, moved, read, update
from tests.support.destination_writing import TREE, write

BIG = '{"price": "99999999999"}'
TENANTS = TableSchema(
    TableName("shop", "tenants"),
    (Column("tenant", pa.string(), number=1), Column("id", pa.int64(), False, number=2)),
    ("id",),
)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def rows_at(lake: Path, table: TableSchema = ITEMS) -> list[dict[str, Any]]:
    found = DeltaTable(str(lake / table.table.schema / table.table.name)).to_pyarrow_table().to_pylist()
    return sorted(found, key=lambda row: [row[name] for name in table.key])


def copied(destination: DeltaDestination, number: int, *rows: RowChange) -> None:
    """What a resync does, in one batch."""
    staged = destination.write_rows(ITEMS, changes_of(ITEMS, *rows))
    write(destination, number, staged=[staged], begins_copy=True, completes_copy=True)


def test_a_table_that_was_written_before_and_is_gone_is_not_recreated_without_its_rows(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    table = replace(ITEMS, upstream_id="7")
    write(destination, 0, insert(id=1, name="a", price=1), table=table)
    place, away = lake / "shop" / "items", lake / "unmounted"
    place.rename(away)
    later = Batch("p", 1)
    changes = changes_of(table, insert(id=2, name="b", price=2))
    with pytest.raises(TableError, match="missing from"):
        destination.write_changes(TableBatch(table, later, changes, is_known=True))
    assert not place.exists()
    away.rename(place)
    destination.write_changes(TableBatch(table, later, changes, is_known=True))
    assert [row["id"] for row in rows_at(lake)] == [1, 2]


def test_a_copy_brings_a_table_back_that_is_gone(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    table = replace(ITEMS, upstream_id="7")
    staged = destination.write_rows(table, changes_of(table, read(id=1, name="a", price=1)))
    destination.write_changes(
        TableBatch(table, Batch("p", 1), staged=[staged], is_known=True, begins_copy=True, completes_copy=True)
    )
    assert [row["id"] for row in rows_at(lake)] == [1]


def test_a_data_file_that_is_gone_stops_its_table_and_is_not_waited_for(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    [data] = (lake / "shop/items").glob("part-*.parquet")
    away = data.rename(lake / "away")
    with pytest.raises(TableError, match="no longer in") as caught:
        write(destination, 1, update(id=1, price=2))
    assert "restore it" in (caught.value.fix or "")
    away.rename(data)
    write(destination, 1, update(id=1, price=2))
    assert rows_at(lake) == [{"id": 1, "name": "a", "price": 2}]


def test_a_whole_table_that_goes_in_the_middle_of_a_batch_is_waited_for(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))

    def unmount(table: TableSchema, keys: pa.Table) -> pa.Table:
        lake.rename(lake.with_name("unmounted"))
        raise FileNotFoundError(lake)

    with pytest.raises(UnavailableError):
        write(destination, 1, update(id=7, price=2), refetch=unmount)


def test_the_fix_in_the_error_of_a_damaged_log_repairs_it(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    write(destination, 1, insert(id=2, name="b", price=1))
    *_, last = sorted((lake / "shop/items/_delta_log").glob("*.json"))
    last.write_bytes(last.read_bytes()[:40])
    with pytest.raises(TableError) as caught:
        write(destination, 2, update(id=1, price=2))
    fix = f"move {lake / 'shop/items'} away, then copy the table again: tailrace resync FILE shop.items"
    assert fix in (caught.value.fix or "")
    (lake / "shop/items").rename(lake / "away")
    copied(destination, 3, read(id=1, name="a", price=2))
    assert rows_at(lake) == [{"id": 1, "name": "a", "price": 2}]


def test_files_that_are_full_by_the_bytes_of_their_rows_are_not_merged_again(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "MOST_BYTES", 100_000)
    destination = DeltaDestination(path=str(lake), compact=CompactOptions(files=4), vacuum=None)
    for number in range(10):
        rows = (read(id=number * 10 + at, name="x" * 10_000, price=1) for at in range(10))
        staged = destination.write_rows(ITEMS, changes_of(ITEMS, *rows))
        write(destination, number, staged=[staged], begins_copy=number == 0, completes_copy=number == 9)
    assert (destination.maintain(ITEMS.table) or "").startswith("merged")
    assert destination.maintain(ITEMS.table) is None
    assert [row["id"] for row in rows_at(lake)] == list(range(100))


def test_an_empty_text_in_a_partition_column_is_refused(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake), partition_by={"shop.tenants": ["tenant"]})
    write(destination, 0, insert(tenant=None, id=1), insert(tenant=" ", id=2), table=TENANTS)
    with pytest.raises(UnfitError, match="column tenant holds an empty text") as caught:
        write(destination, 1, insert(tenant="", id=3), table=TENANTS)
    assert caught.value.fix
    with pytest.raises(UnfitError):
        destination.write_rows(TENANTS, changes_of(TENANTS, read(tenant="", id=3)))
    assert rows_at(lake, TENANTS) == [{"tenant": None, "id": 1}, {"tenant": " ", "id": 2}]


def test_a_key_that_is_an_array_finds_its_rows(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, *(insert(path=path, name="old") for path in ([1], [1, 2], [12], [])), table=TREE)
    write(destination, 1, update(path=[1, 2], name="new"), delete(path=[12]), update(path=[], name="n"), table=TREE)
    assert rows_at(lake, TREE) == [
        {"path": [], "name": "n"},
        {"path": [1], "name": "old"},
        {"path": [1, 2], "name": "new"},
    ]


def test_changes_that_left_values_out_are_the_same_in_parts(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = DeltaDestination(path=str(lake))
    copied(destination, 0, *(read(id=number, name=f"{number}" * 100, price=1) for number in range(100)))
    monkeypatch.setattr(delta, "PART_BYTES", 1000)
    moves = [half for number in range(50, 60) for half in (delete(id=number), moved(id=number + 1000, price=3))]
    written = write(destination, 1, *(update(id=number, price=2) for number in range(100)), *moves)
    assert written.changes == 120
    expected = {
        (number + 1000 if 50 <= number < 60 else number): (f"{number}" * 100, 3 if 50 <= number < 60 else 2)
        for number in range(100)
    }
    assert {row["id"]: (row["name"], row["price"]) for row in rows_at(lake)} == expected


@pytest.mark.parametrize(("weight", "times"), [(0, 1), (100_000, 1), (100_001, 2)])
def test_a_batch_is_written_in_one_go_unless_it_grew_for_a_huge_transaction(
    lake: Path, monkeypatch: pytest.MonkeyPatch, weight: int, times: int
) -> None:
    monkeypatch.setattr(delta, "PART_BYTES", 100_000)
    monkeypatch.setattr(delta, "HUGE_PART_BYTES", 50_000)
    applied = Mock(wraps=upsert.apply)
    monkeypatch.setattr(upsert, "apply", applied)
    chunks = [chunk for at in range(2) for chunk in changes_of(ITEMS, insert(id=at, name="x" * 60_000, price=1))]
    DeltaDestination(path=str(lake)).write_changes(TableBatch(ITEMS, Batch("p", 0), chunks, log_bytes=weight))
    assert applied.call_count == times
    assert len(rows_at(lake)) == 2


def fetched_with(exact: str) -> Refetch:
    """An upstream whose only row holds a price that does not fit."""

    def refetch(table: TableSchema, keys: pa.Table) -> pa.Table:
        rows = pa.Table.from_pylist([{"id": 7, "name": "fetched", "price": None}], table.arrow)
        return rows.append_column("_tailrace_exact", pa.array([exact]))

    return refetch


def test_a_value_that_does_not_fit_keeps_its_text_when_its_row_is_read_again_upstream(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    rows = changes_of(ITEMS, insert(id=1, name="a", price=None))
    at = rows[0].batch.schema.get_field_index("exact")
    unfit = rows[0].batch.set_column(at, rows[0].batch.schema.field(at), pa.array([BIG]))
    destination.write_changes(TableBatch(ITEMS, Batch("p", 0), [replace(rows[0], batch=unfit)]))
    write(destination, 1, update(id=7, name="new"), refetch=fetched_with(BIG))
    assert rows_at(lake)[1] == {"id": 7, "name": "new", "price": None, "_tailrace_exact": BIG}


def test_a_value_read_again_upstream_that_does_not_fit_is_refused_where_its_text_has_no_column(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    with pytest.raises(UnfitError) as caught:
        write(destination, 1, update(id=7, name="new"), refetch=fetched_with(BIG))
    assert caught.value.fix == "tailrace resync FILE shop.items"
    # The price of the change itself fits, and the one upstream is not needed.
    write(destination, 1, update(id=7, price=5), refetch=fetched_with(BIG))
    assert rows_at(lake)[1] == {"id": 7, "name": "fetched", "price": 5}


@pytest.mark.parametrize(
    "name", ["orders", "connections", "timed out", "os error 5", "permission denied", "generic s3 error", "dns error"]
)
def test_a_gap_in_the_log_stops_its_table_whatever_the_table_is_called(lake: Path, name: str) -> None:
    destination = DeltaDestination(path=str(lake))
    table = replace(ITEMS, table=TableName("public", name))
    for number in range(3):
        write(destination, number, insert(id=number, name="a", price=1), table=table)
    log = next(lake.glob("public/*/_delta_log"))
    (log / f"{1:020}.json").unlink()
    with pytest.raises(TableError, match="version 1 is missing"):
        write(destination, 3, insert(id=9, name="a", price=1), table=table)


def test_a_log_that_cannot_be_reached_is_waited_for(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    log = lake / "shop" / "items" / "_delta_log"
    log.rename(log.with_name("away"))
    log.write_text("no folder")
    with pytest.raises(UnavailableError):
        write(destination, 1, insert(id=2, name="a", price=1))


def flip(file: Path, at: int) -> bytes:
    """Change one bit of a file; returns what it was."""
    before = file.read_bytes()
    file.write_bytes(before[:at] + bytes([before[at] ^ 0x10]) + before[at + 1 :])
    return before


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
def test_a_flipped_bit_in_a_data_file_stops_its_table_instead_of_becoming_another_row(lake: Path, share: float) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, *(insert(id=number, name=f"name {number}", price=number) for number in range(5000)))
    before = rows_at(lake)
    [data] = (lake / "shop/items").glob("part-*.parquet")
    sound = flip(data, int(data.stat().st_size * share))
    lake_keys._kept.clear()  # as in a new worker process
    with pytest.raises(TableError, match="is damaged") as caught:
        write(destination, 1, update(id=7, name="new", price=7))
    assert data.name in caught.value.message
    assert f"tailrace resync FILE {ITEMS.table}" in (caught.value.fix or "")
    data.write_bytes(sound)
    assert rows_at(lake) == before
    write(destination, 1, update(id=7, name="new", price=7))
    assert [row for row in rows_at(lake) if row["id"] != 7] == [row for row in before if row["id"] != 7]


def test_a_flipped_bit_in_the_name_of_a_column_stops_its_table_instead_of_making_the_column_null(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1))
    [data] = (lake / "shop/items").glob("part-*.parquet")
    flip(data, data.read_bytes().index(b"price"))
    with pytest.raises(TableError, match="its columns are not those that were written"):
        write(destination, 1, insert(id=2, name="b", price=2))


def test_a_data_file_of_before_there_were_checksums_is_read(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    [data] = (lake / "shop/items").glob("part-*.parquet")
    rows = pq.read_table(data)
    pq.write_table(rows, data, compression="zstd", write_page_checksum=False)
    write(destination, 1, update(id=2, price=3))
    assert [row["price"] for row in rows_at(lake)] == [1, 3]


def test_columns_that_no_delta_table_can_have_stop_their_table(tmp_path: Path) -> None:
    twins = pa.schema([("a", pa.int64()), ("A", pa.int64())])
    place = place_of(str(tmp_path), TableName("public", "t"), {})
    with pytest.raises(TableError, match="cannot have these columns") as stopped:
        commit(place, "public.t", None, TableChange(twins), None)
    assert stopped.value.table == "public.t"
