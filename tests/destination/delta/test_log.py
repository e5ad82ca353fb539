"""The log of a Delta table whose rows are marked: checkpoints, damage, other writers, and the way back."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.destination.delta import commit, log
from tailrace.destination.delta.commit import CONFIGURATION, ConflictError, TableChange
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.option import CompactOptions
from tailrace.errors import MismatchError, OwnedError, TableError
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import ITEMS, RowDict, delete, insert, update
from tests.support.delta_table import forget_everything, queried, small_measures, snapshot_of
from tests.support.destination_writing import write

ROWS = [insert(id=number, name=str(number), price=number) for number in range(30)]


@pytest.fixture
def lake(tmp_path: Path) -> DeltaDestination:
    """A table of several files, some with vectors, at version 3."""
    destination = DeltaDestination(
        path=str(tmp_path / "lake"), updates="merge_on_read", compact=CompactOptions(files=2)
    )
    with small_measures(file_rows=10, checkpoint_interval=50):
        write(destination, 0, *ROWS)
        write(destination, 1, update(id=1, price=100), delete(id=2))
        write(destination, 2, update(id=1, price=101), update(id=11, price=111))
        write(destination, 3, delete(id=12))
    return destination


EXPECTED = {number: number for number in range(30) if number not in (2, 12)} | {1: 101, 11: 111}


def uri_of(destination: DeltaDestination) -> str:
    return f"{destination.path}/shop/items"


def folder_of(destination: DeltaDestination) -> Path:
    return Path(uri_of(destination), "_delta_log")


def rows_at(destination: DeltaDestination) -> list[RowDict]:
    return sorted(queried(uri_of(destination)), key=lambda row: int(row["id"]))


def prices(destination: DeltaDestination) -> dict[int, int]:
    rows = rows_at(destination)
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["price"] for row in rows}


def read_again(destination: DeltaDestination) -> DeltaSnapshot:
    forget_everything()
    return snapshot_of(destination, ITEMS.table)


def drop_entries(destination: DeltaDestination, up_to: int) -> None:
    for number in range(up_to + 1):
        (folder_of(destination) / f"{number:020}.json").unlink()


def in_parts(checkpoint: Path) -> None:
    """Replace a checkpoint by one in two parts, as other writers make them of a large table."""
    rows = pq.read_table(checkpoint)
    for part, piece in enumerate((rows.slice(0, 3), rows.slice(3)), start=1):
        name = checkpoint.name.replace(".checkpoint.", f".checkpoint.{part:010}.{2:010}.")
        pq.write_table(piece, checkpoint.with_name(name))
    checkpoint.unlink()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_log_that_begins_with_a_checkpoint_is_the_one_of_all_its_entries(lake: DeltaDestination, parts: int) -> None:
    before = read_again(lake)
    assert any(file.vector for file in before.files())
    DeltaTable(uri_of(lake)).create_checkpoint()
    [checkpoint] = folder_of(lake).glob("*.checkpoint.parquet")
    if parts == 2:
        in_parts(checkpoint)
    drop_entries(lake, 2)
    after = read_again(lake)
    assert after.by_path == before.by_path
    assert (after.version, after.protocol, after.metadata) == (before.version, before.protocol, before.metadata)
    assert after.transactions == before.transactions
    assert write(lake, 3, delete(id=1)).repeated
    write(lake, 4, update(id=1, price=7), update(id=13, price=8))
    if parts == 1:
        assert prices(lake) == EXPECTED | {1: 7, 13: 8}


def test_a_checkpoint_of_which_a_part_is_missing_is_passed_over(lake: DeltaDestination) -> None:
    before = read_again(lake)
    DeltaTable(uri_of(lake)).create_checkpoint()
    [checkpoint] = folder_of(lake).glob("*.checkpoint.parquet")
    in_parts(checkpoint)
    next(folder_of(lake).glob(f"*.checkpoint.{2:010}.*")).unlink()
    assert read_again(lake) == before


def flipped(body: bytes) -> bytes:
    return body[:200] + bytes([body[200] ^ 0xFF]) + body[201:]


@pytest.mark.parametrize("damage", [lambda _: b"", lambda body: body[: len(body) // 2], flipped])
def test_the_fix_for_a_damaged_checkpoint_brings_the_table_back_without_a_copy(
    lake: DeltaDestination, damage: Callable[[bytes], bytes]
) -> None:
    DeltaTable(uri_of(lake)).create_checkpoint()
    [checkpoint] = folder_of(lake).glob("*.checkpoint.parquet")
    checkpoint.write_bytes(damage(checkpoint.read_bytes()))
    forget_everything()
    with pytest.raises(TableError, match="checkpoint 3 is damaged") as caught:
        write(lake, 4, update(id=1, price=7))
    files = (caught.value.fix or "").removeprefix("delete ").partition(",")[0].split()
    assert [Path(file).name for file in files] == [checkpoint.name, "_last_checkpoint"]
    for file in files:
        Path(file).unlink()
    write(lake, 4, update(id=1, price=7))
    assert prices(lake) == EXPECTED | {1: 7}


def test_a_damaged_checkpoint_without_its_entries_stops_the_table(lake: DeltaDestination) -> None:
    DeltaTable(uri_of(lake)).create_checkpoint()
    [checkpoint] = folder_of(lake).glob("*.checkpoint.parquet")
    checkpoint.write_bytes(b"")
    drop_entries(lake, 0)
    forget_everything()
    with pytest.raises(TableError, match="checkpoint 3 is damaged") as caught:
        write(lake, 4, update(id=1, price=7))
    assert "tailrace resync FILE shop.items" in (caught.value.fix or "")


@pytest.mark.parametrize("line", ['{"add": {}}', '{"add": 7}', '{"txn": {"appId": 1}}', "[]", "{"])
def test_an_entry_that_is_no_delta_stops_the_table(lake: DeltaDestination, line: str) -> None:
    (folder_of(lake) / f"{4:020}.json").write_text(line)
    with pytest.raises(TableError, match="version 4 is damaged"):
        write(lake, 4, update(id=1, price=7))


def test_a_missing_vector_stops_the_table_and_none_of_its_rows_comes_back(lake: DeltaDestination) -> None:
    shutil.rmtree(Path(uri_of(lake), "_dv"))
    forget_everything()
    with pytest.raises(TableError, match="its file is missing"):
        write(lake, 4, update(id=1, price=7))
    assert read_again(lake).version == 3


def test_every_checkpoint_interval_the_log_begins_later_and_is_read_by_all(tmp_path: Path) -> None:
    destination = DeltaDestination(path=str(tmp_path), updates="merge_on_read")
    with small_measures(file_rows=10, checkpoint_interval=5):
        for number in range(23):
            write(destination, number, *ROWS[:20] if not number else [update(id=number % 20, price=-number)])
        forget_everything()
        write(destination, 23, delete(id=0))
    names = [path.name for path in folder_of(destination).glob("*.checkpoint.parquet")]
    assert f"{20:020}.checkpoint.parquet" in names
    expected = {number: -max(n for n in range(23) if n % 20 == number) for number in range(1, 20)}
    assert prices(destination) == expected


def test_maintenance_makes_checkpoints_so_that_batches_need_not(tmp_path: Path) -> None:
    destination = DeltaDestination(path=str(tmp_path), updates="merge_on_read", compact=None, vacuum=None)
    made: list[int] = []
    with small_measures(file_rows=10, checkpoint_interval=5):
        for number in range(30):
            write(destination, number, *ROWS[:20] if not number else [update(id=number % 20, price=-number)])
            if number % 4 == 3:
                destination.maintain(ITEMS.table)
            made = sorted(int(path.name[:20]) for path in folder_of(destination).glob("*.checkpoint.parquet"))
    # Maintenance came at versions 3, 7, 11 and so on; the last checkpoint was five versions old at every second one.
    assert made == [7, 15, 23]


def test_a_checkpoint_of_another_thread_does_not_make_a_batch_read_the_log_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = DeltaDestination(path=str(tmp_path), updates="merge_on_read", compact=None, vacuum=None)
    with small_measures(file_rows=10, checkpoint_interval=5):
        for number in range(8):
            write(destination, number, *ROWS[:20] if not number else [update(id=number % 20, price=-number)])
        thread = threading.Thread(target=destination.maintain, args=[ITEMS.table])
        thread.start()
        thread.join()
        assert [path.name for path in folder_of(destination).glob("*.checkpoint.parquet")]

        def refuse(*_: object) -> None:
            raise AssertionError("the whole log was read")

        monkeypatch.setattr(log, "_read", refuse)
        write(destination, 8, update(id=3, price=33))
    monkeypatch.undo()
    assert prices(destination)[3] == 33


def test_of_writers_that_race_exactly_one_commits_each_version(tmp_path: Path) -> None:
    destination = DeltaDestination(path=str(tmp_path), updates="merge_on_read")
    write(destination, 0, *ROWS)
    place, before = destination.place(ITEMS.table), snapshot_of(destination, ITEMS.table)
    change = TableChange(before.schema, has_vectors=True)
    outcomes: list[str] = []
    start = threading.Barrier(6)

    def race() -> None:
        start.wait()
        try:
            commit.commit(place, "shop.items", before, change, None)
            outcomes.append("won")
        except ConflictError:
            outcomes.append("lost")

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["lost"] * 5 + ["won"]
    assert read_again(destination).version == 1
    assert not list(folder_of(destination).glob(".*"))


def test_two_runners_that_race_lose_and_double_no_row(tmp_path: Path) -> None:
    """Both apply the same batches, as two runs of one pipeline do until one of them is stopped."""
    with small_measures(file_rows=10, checkpoint_interval=4):
        write(DeltaDestination(path=str(tmp_path), updates="merge_on_read"), 0, *ROWS)
        stopped: list[Exception] = []

        def run() -> None:
            destination = DeltaDestination(path=str(tmp_path), updates="merge_on_read")
            for number in range(1, 12):
                changes = [update(id=number, price=1000 + number), delete(id=number + 15)]
                try:
                    write(destination, number, *changes, insert(id=100 + number, name="new", price=number))
                except (OwnedError, MismatchError) as error:
                    stopped.append(error)
                    return

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(stopped) <= 1
    expected = {number: number for number in (0, 12, 13, 14, 15, 27, 28, 29)}
    expected |= {number: 1000 + number for number in range(1, 12)} | {100 + number: number for number in range(1, 12)}
    assert prices(DeltaDestination(path=str(tmp_path))) == expected


def test_a_batch_is_computed_again_when_the_table_is_optimized_meanwhile(lake: DeltaDestination) -> None:
    def interrupt(table: TableSchema, keys: Any) -> Any:
        if len(list(folder_of(lake).glob("*.json"))) == 4:
            DeltaTable(uri_of(lake)).optimize.compact()
        return ITEMS.arrow.empty_table()

    write(lake, 4, update(id=1, price=7), delete(id=3), update(id=99, price=1), refetch=interrupt)
    assert read_again(lake).version == 5
    assert prices(lake) == {number: price for number, price in EXPECTED.items() if number != 3} | {1: 7}


def test_files_whose_statistics_another_program_left_out_can_be_marked(lake: DeltaDestination) -> None:
    with small_measures(file_rows=10, checkpoint_interval=50):
        DeltaTable(uri_of(lake)).optimize.compact()
        last = max(folder_of(lake).glob("*.json"))
        actions = [json.loads(line) for line in last.read_text().splitlines()]
        for action in actions:
            action.get("add", {}).pop("stats", None)
        last.write_text("\n".join(map(json.dumps, actions)))
        forget_everything()
        write(lake, 4, update(id=1, price=7), delete(id=29))
    entry = max(folder_of(lake).glob("*.json")).read_text().splitlines()
    [marked] = [action for line in entry if "deletionVector" in (action := json.loads(line).get("add") or {})]
    assert json.loads(marked["stats"]) == {"numRecords": 28, "tightBounds": False}
    assert prices(lake) == {number: price for number, price in EXPECTED.items() if number != 29} | {1: 7}


def test_what_another_writer_adds_while_the_log_is_read_is_seen_the_next_time(
    lake: DeltaDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = log._read

    def slowly(*arguments: Any) -> Any:
        found = read(*arguments)
        (folder_of(lake) / f"{4:020}.json").write_text('{"txn": {"appId": "x", "version": 5}}')
        return found

    forget_everything()
    with monkeypatch.context() as patch:
        patch.setattr(log, "_read", slowly)
        assert snapshot_of(lake, ITEMS.table).version == 3
    assert snapshot_of(lake, ITEMS.table).version == 4


def test_copy_on_write_leads_back_to_a_table_that_everything_reads(lake: DeltaDestination) -> None:
    back = lake.model_copy(update={"updates": "copy_on_write"})
    write(back, 4, update(id=1, price=7), insert(id=50, name="x", price=50))
    assert prices(back) == EXPECTED | {1: 7, 50: 50}
    assert any(file.vector for file in snapshot_of(back, ITEMS.table).files())
    back.maintain(ITEMS.table)
    assert not any(file.vector for file in snapshot_of(back, ITEMS.table).files())
    write(back, 5, update(id=3, price=33))
    expected = EXPECTED | {1: 7, 3: 33, 50: 50}
    found = DeltaTable(uri_of(back)).to_pyarrow_table().to_pylist()
    assert {row["id"]: row["price"] for row in found} == expected
    now = read_again(back)
    assert (now.protocol["minReaderVersion"], now.has_vectors) == (1, False)
    assert now.configuration == CONFIGURATION
    assert f"{now.version:020}.checkpoint.parquet" in {path.name for path in folder_of(back).iterdir()}
    write(lake, 6, delete(id=1))
    assert read_again(lake).has_vectors
    assert prices(lake) == {number: price for number, price in expected.items() if number != 1}


def test_a_table_keeps_the_properties_that_someone_else_set(tmp_path: Path) -> None:
    first = DeltaDestination(path=str(tmp_path), updates="copy_on_write")
    write(first, 0, *ROWS)
    DeltaTable(uri_of(first)).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"})
    write(first.model_copy(update={"updates": "merge_on_read"}), 1, delete(id=1))
    found = read_again(first).configuration
    assert found["delta.enableDeletionVectors"] == "true"
    assert found["delta.logRetentionDuration"] == "interval 9 days"
    assert found["delta.deletedFileRetentionDuration"] == "interval 15 minutes"


def test_under_auto_a_table_is_marked_from_the_first_batch_that_would_rewrite_too_much(tmp_path: Path) -> None:
    destination = DeltaDestination(path=str(tmp_path))
    with small_measures(file_rows=10, checkpoint_interval=50):
        write(destination, 0, *ROWS)
        write(destination, 1, *(update(id=number, price=-1) for number in range(9)))
        assert not snapshot_of(destination, ITEMS.table).has_vectors
        write(destination, 2, update(id=1, price=-2), update(id=11, price=-2))
        assert snapshot_of(destination, ITEMS.table).has_vectors
    write(destination, 3, update(id=2, price=-3))
    assert sum(file.dead for file in snapshot_of(destination, ITEMS.table).files()) == 3
