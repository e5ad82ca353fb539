"""The key index of a Delta table: never trusted beyond what it covers, replaced by itself, and bounded in memory."""

from __future__ import annotations

import datetime
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.destination import Staged
from tailrace.destination.delta import key_index
from tailrace.destination.delta.data_file import DataFile
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import CompactOptions
from tailrace.destination.delta.projection import AS_IS
from tailrace.destination.lake import key_index as lake_keys
from tailrace.model import key as keys
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.testing.destination import ITEMS, RowDict, changes_of, delete, insert, read, update
from tests.support.delta_table import forget_everything, queried, small_measures, snapshot_of, stored_keys
from tests.support.destination_writing import files_of_at_most, write

WORDS = TableSchema(
    TableName("shop", "words"),
    (Column("word", pa.string(), False, number=1), Column("count", pa.int32(), number=2)),
    ("word",),
)


@pytest.fixture(autouse=True)
def _few_rows_are_many() -> Iterator[None]:
    with small_measures(file_rows=10, checkpoint_interval=50):
        yield


@pytest.fixture
def lake(tmp_path: Path) -> DeltaDestination:
    """A table of four files, whose keys are stored."""
    destination = DeltaDestination(path=str(tmp_path / "lake"), updates="merge_on_read")
    write(destination, 0, *(insert(id=number, name=str(number), price=number) for number in range(40)))
    write(destination, 1, *(update(id=number, price=0) for number in range(0, 40, 10)))
    return destination


def prices(destination: DeltaDestination) -> dict[int, int]:
    rows = queried(f"{destination.path}/shop/items")
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["price"] for row in rows}


def key_paths(destination: DeltaDestination) -> list[Path]:
    return sorted(key_index.key_folder(destination.place(ITEMS.table)).glob("*.keys"))


def require_every_key_is_found(destination: DeltaDestination, number: int = 2) -> None:
    """Each row is replaced by a batch of a new process, none is there twice."""
    forget_everything()
    write(destination, number, *(update(id=number, price=-1) for number in range(40)))
    assert prices(destination) == dict.fromkeys(range(40), -1)


def flipped(body: bytes) -> bytes:
    at = len(body) // 2
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def exchange(paths: list[Path]) -> None:
    first, second, *_ = paths
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


@pytest.mark.parametrize(
    "damage",
    [
        lambda paths: shutil.rmtree(paths[0].parent),
        lambda paths: [path.write_bytes(path.read_bytes()[:-1]) for path in paths],
        lambda paths: [path.write_bytes(b"") for path in paths],
        lambda paths: [path.write_bytes(flipped(path.read_bytes())) for path in paths],
        exchange,
    ],
    ids=["missing", "cut", "empty", "flipped", "of another file"],
)
def test_key_files_that_are_missing_or_damaged_are_written_again(
    lake: DeltaDestination, damage: Callable[[list[Path]], Any]
) -> None:
    paths = key_paths(lake)
    before = {path: path.read_bytes() for path in paths}
    assert len(paths) == 4
    damage(paths)
    forget_everything()
    write(lake, 2, *(update(id=number, price=1) for number in range(1, 40, 10)))
    assert {path: path.read_bytes() for path in paths} == before
    require_every_key_is_found(lake, 3)


def test_a_file_that_another_program_wrote_is_indexed_before_a_batch_is_applied(lake: DeltaDestination) -> None:
    known = set(stored_keys(lake.place(ITEMS.table)))
    DeltaTable(f"{lake.path}/shop/items").optimize.compact()
    [merged] = snapshot_of(lake, ITEMS.table).files()
    assert key_index.key_name(merged) not in known
    require_every_key_is_found(lake)
    assert key_index.key_name(merged) in stored_keys(lake.place(ITEMS.table))


def test_without_a_folder_for_key_files_the_keys_are_held_in_memory(
    lake: DeltaDestination, caplog: pytest.LogCaptureFixture
) -> None:
    folder = key_index.key_folder(lake.place(ITEMS.table))
    shutil.rmtree(folder)
    folder.write_text("no folder")
    require_every_key_is_found(lake)
    assert "shop.items: the keys of a file are held in memory" in caplog.text


def test_without_a_home_the_keys_of_an_object_store_are_held_in_memory(
    lake: DeltaDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(place: object) -> Path:
        raise OSError("this user has no home directory")

    monkeypatch.setattr(key_index, "key_folder", homeless)
    require_every_key_is_found(lake)


def test_on_a_disk_that_is_full_for_key_files_the_keys_are_held_in_memory(tmp_path: Path) -> None:
    destination = DeltaDestination(path=str(tmp_path / "lake"), updates="merge_on_read")
    with small_measures(file_rows=100_000):
        rows = [read(id=number, name=None, price=None) for number in range(20_000)]
        staged = destination.write_rows(ITEMS, changes_of(ITEMS, *rows))
        write(destination, 0, staged=[staged], begins_copy=True, completes_copy=True)
        # The keys of 20,000 rows take 160 kB, the data files of this table less.
        with files_of_at_most(150_000):
            write(destination, 1, update(id=7, price=1), delete(id=8))
    assert stored_keys(destination.place(ITEMS.table)) == []
    found = prices(destination)
    assert (len(found), found[7], 8 in found) == (19_999, 1, False)


def test_a_key_file_that_is_deleted_while_it_is_written_is_done_without(
    lake: DeltaDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(key_index.key_folder(lake.place(ITEMS.table)))
    replace = Path.replace

    def collected(self: Path, target: Path) -> Path:
        if self.suffix == ".tmp":
            self.unlink()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", collected)
    require_every_key_is_found(lake)


def test_after_a_schema_change_keys_are_those_of_the_new_columns(tmp_path: Path) -> None:
    """The files hold both columns, and the key becomes the other one under the same name."""
    columns = (Column("a", pa.int64(), False, number=1), Column("b", pa.int64(), False, number=2))
    before = TableSchema(TableName("shop", "items"), columns, ("a",))
    swapped = (Column("b", pa.int64(), False, number=1), Column("a", pa.int64(), False, number=2))
    after = TableSchema(before.table, swapped, ("b",), before.version + 1)
    destination = DeltaDestination(path=str(tmp_path / "lake"), updates="merge_on_read")
    write(destination, 0, *(insert(a=number, b=100 - number) for number in range(30)), table=before)
    write(destination, 1, update(a=1, b=99), table=before)
    write(destination, 2, update(b=5, a=-5), delete(b=95), table=after)
    write(destination, 3, update(b=6, a=-6), table=after)
    found = {row["b"]: row["a"] for row in queried(f"{destination.path}/shop/items")}
    assert found == {number: 100 - number for number in range(30)} | {5: -5, 6: -6}


@pytest.mark.parametrize("updates", ["copy_on_write", "merge_on_read"])
def test_more_keys_than_fit_into_memory_are_found_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: Any
) -> None:
    monkeypatch.setattr(lake_keys, "STORED_ROWS", 1_000_000)
    monkeypatch.setattr(lake_keys, "MOST_BYTES", 1_000)
    destination = DeltaDestination(path=str(tmp_path), updates=updates)
    words = [f"word {number:030}" for number in range(400)]
    write(destination, 0, *(insert(word=word, count=1) for word in words), table=WORDS)
    held: list[int] = []
    kept = lake_keys.FileKeys.match

    def match(self: lake_keys.FileKeys, wanted: lake_keys.KeyProbe) -> Any:
        held.append(sum(one.nbytes for one in list(lake_keys._kept.values())))
        return kept(self, wanted)

    monkeypatch.setattr(lake_keys.FileKeys, "match", match)
    write(destination, 1, *(update(word=word, count=2) for word in words[::7]), table=WORDS)
    found = {row["word"]: row["count"] for row in queried(f"{destination.path}/shop/words")}
    assert found == dict.fromkeys(words, 1) | dict.fromkeys(words[::7], 2)
    assert len(held) == 40
    assert max(held) <= 1_000
    assert lake_keys._kept_bytes <= 1_000


def test_keys_of_a_batch_are_not_held_beyond_the_bound_while_it_is_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_keys, "STORED_ROWS", 1_000_000)
    monkeypatch.setattr(lake_keys, "MOST_BYTES", 1_000)
    destination = DeltaDestination(path=str(tmp_path), updates="merge_on_read")
    write(destination, 0, *(insert(word=f"{number:030}", count=1) for number in range(400)), table=WORDS)
    alive = 0
    most = 0
    lock = threading.Lock()

    class Counted(lake_keys.FileKeys):
        def __init__(self, key: Any) -> None:
            nonlocal alive, most
            super().__init__(key)
            with lock:
                alive += 1
                most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= 1

    forget_everything()
    monkeypatch.setattr(lake_keys, "FileKeys", Counted)
    write(destination, 1, *(update(word=f"{number:030}", count=2) for number in range(0, 400, 7)), table=WORDS)
    assert most <= 2 + 2 * (os.cpu_count() or 1)


@pytest.mark.parametrize(("updates", "is_stored"), [("auto", True), ("copy_on_write", False)])
def test_keys_of_a_table_that_is_not_marked_are_stored_under_auto_once_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: Any, is_stored: bool
) -> None:
    destination = DeltaDestination(path=str(tmp_path), updates=updates)
    write(destination, 0, *(insert(word=f"word {number}", count=1) for number in range(40)), table=WORDS)
    write(destination, 1, insert(word="one", count=1), table=WORDS)
    place = destination.place(WORDS.table)
    assert stored_keys(place) == []
    monkeypatch.setattr(key_index, "MANY_ROWS", 30)
    forget_everything()
    write(destination, 2, insert(word="another", count=1), table=WORDS)
    assert bool(stored_keys(place)) == is_stored
    assert not snapshot_of(destination, WORDS.table).has_vectors
    assert len(queried(f"{destination.path}/shop/words")) == 42


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int16(), lambda number: number - 20),
        (pa.uint64(), lambda number: 2**63 + number),
        (pa.string(), lambda number: f"k{number}"),
        (pa.binary(), lambda number: bytes([number, 255])),
        (pa.decimal128(30, 4), lambda number: Decimal(number) / 4),
        (pa.float64(), lambda number: number / 8),
        (pa.date32(), lambda number: datetime.date(2024, 1, 1) + datetime.timedelta(number)),
        (pa.timestamp("us", "UTC"), lambda number: datetime.datetime(2024, 1, 1, 0, 0, number, number, datetime.UTC)),
        (pa.timestamp("us"), lambda number: datetime.datetime(1, 1, 1, 0, 0, number, number)),  # noqa: DTZ001
        (pa.list_(pa.int32()), lambda number: [number, number % 3]),
    ],
    ids=lambda one: "by number" if callable(one) else str(one),
)
def test_stored_keys_of_any_type_are_found_by_the_next_process(
    tmp_path: Path, kind: pa.DataType, value: Callable[[int], Any]
) -> None:
    columns = (Column("key", kind, False, number=1), Column("price", pa.int32(), number=2))
    table = TableSchema(TableName("shop", "items"), columns, ("key",))
    destination = DeltaDestination(path=str(tmp_path), updates="merge_on_read")
    write(destination, 0, *(insert(key=value(number), price=number) for number in range(40)), table=table)
    for number in (1, 2):
        forget_everything()
        write(destination, number, *(update(key=value(n), price=-number) for n in range(0, 40, 3)), table=table)
    assert stored_keys(destination.place(table.table)) != []
    rows: list[RowDict] = queried(f"{destination.path}/shop/items")
    assert sorted(row["price"] for row in rows) == sorted(-2 if n % 3 == 0 else n for n in range(40))


def test_two_threads_that_look_for_the_same_keys_find_them(lake: DeltaDestination) -> None:
    place, kinds = lake.place(ITEMS.table), {"id": pa.int64()}
    shutil.rmtree(key_index.key_folder(place))
    forget_everything()
    files = snapshot_of(lake, ITEMS.table).files()
    wanted = lake_keys.KeyProbe(keys.comparable([pa.array(range(40), pa.int64())]))
    found: list[int] = []

    def look(file: DataFile) -> None:
        found.append(len(key_index.keys_of(place, file, kinds, AS_IS, is_stored=True).match(wanted)[0]))

    threads = [threading.Thread(target=look, args=(file,)) for file in files for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(found) == 4 * sum(file.rows for file in files)
    assert lake_keys._kept_bytes == sum(one.nbytes for one in lake_keys._kept.values())
    assert not list(key_index.key_folder(place).glob("*.tmp"))


def test_maintenance_deletes_the_keys_of_files_that_are_gone_and_no_others(lake: DeltaDestination) -> None:
    tidy = lake.model_copy(update={"compact": CompactOptions(files=2)})
    tidy.maintain(ITEMS.table)
    write(lake, 2, update(id=3, price=3))
    names = {key_index.key_name(file) for file in snapshot_of(lake, ITEMS.table).files()}
    assert names & set(stored_keys(lake.place(ITEMS.table)))
    require_every_key_is_found(lake, 3)


def test_a_long_name_of_a_file_has_keys_too(tmp_path: Path) -> None:
    columns = (Column("id", pa.int64(), False, number=1), Column("part", pa.string(), number=2))
    table = TableSchema(TableName("shop", "items"), columns, ("id",))
    destination = DeltaDestination(path=str(tmp_path), updates="merge_on_read", partition_by={"shop.items": ["part"]})
    long = "x" * 200
    write(destination, 0, *(insert(id=number, part=long) for number in range(10)), table=table)
    write(destination, 1, delete(id=3), table=table)
    [name] = stored_keys(destination.place(table.table))
    assert len(name) < 100
    assert len(queried(f"{destination.path}/shop/items")) == 9


@pytest.mark.parametrize("updates", ["copy_on_write", "merge_on_read"])
def test_copied_files_are_compared_with_the_table_at_once_and_not_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: Any
) -> None:
    monkeypatch.setattr(lake_keys, "STORED_ROWS", 1_000_000)
    monkeypatch.setattr(lake_keys, "MOST_BYTES", 1)
    destination = DeltaDestination(path=str(tmp_path), updates=updates)

    def copied(count: int, *numbers: int) -> Staged:
        rows = (read(word=f"word {number}", count=count) for number in numbers)
        return destination.write_rows(WORDS, changes_of(WORDS, *rows))

    write(destination, 0, table=WORDS, staged=[copied(1, *range(50))], begins_copy=True)
    files = {file.path for file in snapshot_of(destination, WORDS.table).files()}
    looked: list[str] = []
    keys_of = key_index.keys_of

    def look(place: Any, file: DataFile, *more: Any, **options: Any) -> Any:
        looked.append(file.path)
        return keys_of(place, file, *more, **options)

    forget_everything()
    monkeypatch.setattr(key_index, "keys_of", look)
    write(destination, 1, table=WORDS, staged=[copied(2, 1, 2, 60), copied(3, 2, 3, 61), copied(4, 61, 62)])
    assert len(files) == (2 if updates == "merge_on_read" else 5)
    assert sorted(path for path in looked if path in files) == sorted(files)
    found = {row["word"]: row["count"] for row in queried(f"{destination.path}/shop/words")}
    expected = dict.fromkeys(range(50), 1) | {1: 2, 60: 2, 2: 3, 3: 3, 61: 4, 62: 4}
    assert found == {f"word {number}": count for number, count in expected.items()}
    assert len(queried(f"{destination.path}/shop/words")) == len(expected)
