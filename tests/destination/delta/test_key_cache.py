"""The key files that a machine stores for tables in object stores do not grow without bound."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tailrace.destination.delta import key_index, vacuum
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.object_folder import ObjectFolder
from tailrace.destination.lake import key_cache
from tailrace.model.schema import TableName
from tailrace.testing.destination import ITEMS, insert, update
from tests.support.delta_table import forget_everything, read_back, small_measures, stored_keys
from tests.support.destination_writing import write

DAY = 86_400.0


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeltaDestination:
    """A folder that is used like an object store, on a machine whose cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(key_cache, "_swept_at", float("-inf"))
    (tmp_path / "lake/shop/items").mkdir(parents=True)

    def place(_: DeltaDestination, table: TableName) -> ObjectFolder:
        return ObjectFolder(f"file://{tmp_path}/lake/{table.schema}/{table.name}", table=str(table))

    monkeypatch.setattr(DeltaDestination, "place", place)
    forget_everything()
    return DeltaDestination(path=str(tmp_path / "lake"), updates="merge_on_read", compact=None)


def stored(folder: str, name: str, *, days: float, size: int = 10) -> Path:
    """A key file of another table, last used so many days ago."""
    path = key_cache.folder_for(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    at = time.time() - days * DAY
    os.utime(path, (at, at))
    return path


def test_what_a_dropped_table_left_is_deleted_by_whoever_next_stores_keys(lake: DeltaDestination) -> None:
    old = stored("s3://b/dropped", "part-1.parquet.keys", days=8)
    used = stored("s3://b/other", "part-1.parquet.keys", days=6)
    draft = stored("s3://b/other", "part-2.parquet.keys.0.tmp", days=0.1)
    with small_measures():
        write(lake, 0, *(insert(id=number, name="n", price=1) for number in range(6)))
        write(lake, 1, update(id=1, name="n", price=2))
        assert stored_keys(lake.place(ITEMS.table))
        assert [path.exists() for path in (old, used, draft)] == [False, True, False]
        assert not old.parent.exists()
        forget_everything()
        write(lake, 2, update(id=1, name="n", price=3))
    assert [row["price"] for row in read_back(lake, ITEMS) if row["id"] == 1] == [3]


def test_beyond_the_bound_what_was_used_least_lately_goes_first(
    lake: DeltaDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_cache, "MOST_BYTES", 25)
    files = [stored(f"s3://b/{number}", "part.parquet.keys", days=number) for number in range(4)]
    key_cache.sweep()
    assert [path.exists() for path in files] == [True, True, False, False]


def test_the_key_file_of_a_table_in_use_counts_as_used(lake: DeltaDestination) -> None:
    with small_measures():
        write(lake, 0, *(insert(id=number, name="n", price=1) for number in range(6)))
        write(lake, 1, update(id=1, name="n", price=2))
        files = list(key_index.key_folder(lake.place(ITEMS.table)).iterdir())
        for path in files:
            os.utime(path, (0, 0))
        vacuum._looked.clear()
        lake.maintain(ITEMS.table)
        key_cache.sweep()
        assert [path for path in files if path.exists()]
        for path in key_index.key_folder(lake.place(ITEMS.table)).iterdir():
            os.utime(path, (0, 0))
        forget_everything()
        write(lake, 2, update(id=2, name="n", price=2))
        key_cache.sweep()
        assert stored_keys(lake.place(ITEMS.table))


def test_the_keys_of_files_that_a_resync_replaced_are_deleted(lake: DeltaDestination) -> None:
    with small_measures():
        write(lake, 0, *(insert(id=number, name="n", price=1) for number in range(6)))
        write(lake, 1, update(id=1, name="n", price=2))
        before = stored_keys(lake.place(ITEMS.table))
        write(
            lake,
            2,
            *(insert(id=number, name="n", price=7) for number in range(6)),
            begins_copy=True,
            completes_copy=True,
        )
        write(lake, 3, update(id=1, name="n", price=8))
        folder = key_index.key_folder(lake.place(ITEMS.table))
        for path in folder.iterdir():
            os.utime(path, (0, 0))
        lake.maintain_now(ITEMS.table)
        assert before
        assert not set(before) & set(stored_keys(lake.place(ITEMS.table)))
