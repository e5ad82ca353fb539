"""Housekeeping of Iceberg tables: what is merged, written again and deleted, and that no row changes by it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tailrace.destination.iceberg import data_file
from tailrace.destination.iceberg.destination import IcebergDestination
from tailrace.destination.iceberg.option import IcebergCompactOptions, IcebergVacuumOptions
from tailrace.destination.lake import key_index
from tailrace.system import failpoint
from tailrace.testing.destination import ITEMS, delete, insert, update
from tests.support.destination_writing import write
from tests.support.iceberg_table import forget_everything, opened, rows_in, scanned


@pytest.fixture
def ice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IcebergDestination:
    monkeypatch.setattr(data_file, "LEAST_ROWS", 100)
    monkeypatch.setattr(key_index, "STORED_ROWS", 1)
    return IcebergDestination(
        warehouse=str(tmp_path / "ice"),
        compact=IcebergCompactOptions(files=4),
        vacuum=IcebergVacuumOptions(every=0, retention=3600),
        snapshots=2,
    )


def prices(destination: IcebergDestination) -> dict[int, Any]:
    rows = rows_in(destination, ITEMS.table)
    found = {row["id"]: row["price"] for row in rows}
    assert len(found) == len(rows)
    return found


def age(destination: IcebergDestination, seconds: float = 7200) -> None:
    """Make everything in the table's folders older."""
    for path in Path(destination.warehouse, "shop/items").rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - seconds,) * 2)


def files_on_disk(destination: IcebergDestination) -> set[str]:
    folder = Path(destination.warehouse, "shop/items")
    return {str(path) for name in ("data", "metadata") for path in (folder / name).iterdir()}


def test_small_files_are_merged_once_there_are_enough(ice: IcebergDestination) -> None:
    for number in range(3):
        write(ice, number, *(insert(id=n, name="a", price=n) for n in (number, 10 + number)))
    assert ice.maintain(ITEMS.table) is None
    write(ice, 3, insert(id=3, name="a", price=3), update(id=0, price=9))
    assert ice.maintain(ITEMS.table) == "merged 4 files into 1"
    [deletes] = scanned(ice, ITEMS.table).values()
    assert deletes == []
    assert prices(ice) == {0: 9, 1: 1, 2: 2, 3: 3, 10: 10, 11: 11, 12: 12}
    assert write(ice, 3, delete(id=1)).repeated
    write(ice, 4, update(id=1, price=8))
    assert prices(ice) == {0: 9, 1: 8, 2: 2, 3: 3, 10: 10, 11: 11, 12: 12}


def test_a_file_is_written_again_once_a_tenth_of_its_rows_is_deleted(ice: IcebergDestination) -> None:
    write(ice, 0, *(insert(id=n, name="a", price=n) for n in range(100)))
    write(ice, 1, *(delete(id=n) for n in range(9)))
    assert ice.maintain(ITEMS.table) is None
    write(ice, 2, delete(id=50))
    assert ice.maintain(ITEMS.table) == "merged 1 files into 1"
    assert scanned(ice, ITEMS.table).keys() == {
        path for path, deletes in scanned(ice, ITEMS.table).items() if not deletes
    }
    assert prices(ice) == {n: n for n in range(9, 100) if n != 50}
    current = opened(ice, ITEMS.table).current_snapshot()
    assert current is not None
    assert current.summary is not None
    assert current.summary.operation.value == "replace"


def test_by_hand_everything_is_merged_and_no_deleted_row_is_left(ice: IcebergDestination) -> None:
    write(ice, 0, *(insert(id=n, name="a", price=n) for n in range(100)))
    write(ice, 1, delete(id=1), update(id=2, price=0))
    assert ice.maintain(ITEMS.table) is None
    assert ice.maintain_now(ITEMS.table) == "merged 1 files into 1"
    assert ice.maintain_now(ITEMS.table) is None
    assert all(not deletes for deletes in scanned(ice, ITEMS.table).values())
    assert prices(ice) == {n: n for n in range(100) if n > 2} | {0: 0, 2: 0}


def test_rows_that_a_batch_deletes_meanwhile_are_marked_in_the_new_files(
    ice: IcebergDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        write(ice, number, *(insert(id=10 * number + n, name="a", price=n) for n in range(10)))
    write(ice, 4, delete(id=0), delete(id=15))
    batches = [(delete(id=1), update(id=13, price=-1)), (delete(id=39), insert(id=99, name="z", price=99))]

    def meanwhile(place: str) -> None:
        if place == "iceberg.before_rewrite_commit" and batches:
            write(ice, 7 - len(batches), *batches.pop(0))

    monkeypatch.setattr(failpoint, "reach", meanwhile)
    expected = {n: n % 10 for n in range(40) if n not in (0, 15, 1, 39)} | {13: -1, 99: 99}
    assert ice.maintain(ITEMS.table) == "merged 4 files into 1"
    assert prices(ice) == expected
    forget_everything()
    write(ice, 7, update(id=2, price=7), update(id=38, price=7), update(id=99, price=7))
    assert prices(ice) == {**expected, 2: 7, 38: 7, 99: 7}


def test_a_batch_that_removes_a_file_meanwhile_wins(ice: IcebergDestination, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        write(ice, number, insert(id=number, name="a", price=number))
    left = [1]

    def meanwhile(place: str) -> None:
        if place == "iceberg.before_rewrite_commit" and left:
            left.pop()
            write(ice, 4, delete(id=2))

    monkeypatch.setattr(failpoint, "reach", meanwhile)
    assert ice.maintain(ITEMS.table) is None
    assert prices(ice) == {0: 0, 1: 1, 3: 3}


def test_files_that_no_listed_snapshot_needs_are_deleted_after_their_time(ice: IcebergDestination) -> None:
    for number in range(6):
        write(ice, number, insert(id=number, name="a", price=number), update(id=0, price=number))
    assert ice.maintain_now(ITEMS.table) is not None
    write(ice, 6, update(id=0, price=6))
    write(ice, 7, update(id=0, price=7))
    idle = ice.model_copy(update={"compact": None})
    before = files_on_disk(ice)
    age(ice)
    assert idle.maintain(ITEMS.table) is None, "they are found only now"
    assert files_on_disk(ice) == before
    note = Path(ice.warehouse, "shop/items/_tailrace/unneeded.json")
    noted = json.loads(note.read_text())
    found = {path: since - 7200 for path, since in noted["unneeded"].items()}
    note.write_text(json.dumps({"at": 0, "unneeded": found}))
    done = idle.maintain(ITEMS.table)
    assert done is not None
    assert done.startswith("deleted ")
    assert len(files_on_disk(ice)) < len(before) // 2
    forget_everything()
    table = opened(ice, ITEMS.table)
    for snapshot in table.metadata.snapshots:
        assert len(table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()) == 6
    write(ice, 8, update(id=5, price=8))
    assert prices(ice) == {0: 7, 1: 1, 2: 2, 3: 3, 4: 4, 5: 8}
    keys = Path(ice.warehouse, "shop/items/_tailrace/keys")
    assert 0 < len(list(keys.glob("*.keys"))) <= len(scanned(ice, ITEMS.table))


def test_files_of_a_batch_that_is_being_written_are_kept(
    ice: IcebergDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(ice, 0, insert(id=1, name="a", price=1))

    def meanwhile(place: str) -> None:
        if place == "iceberg.before_commit":
            ice.maintain_now(ITEMS.table)

    with monkeypatch.context() as patch:
        patch.setattr(failpoint, "reach", meanwhile)
        write(ice, 1, insert(id=2, name="b", price=2))
    forget_everything()
    assert prices(ice) == {1: 1, 2: 2}


def test_housekeeping_can_be_off(ice: IcebergDestination) -> None:
    off = ice.model_copy(update={"compact": None, "vacuum": None})
    for number in range(6):
        write(off, number, insert(id=number, name="a", price=number))
    assert off.maintain(ITEMS.table) is None
    assert off.maintain_now(ITEMS.table) == "merged 6 files into 1"


@pytest.mark.parametrize("place", ["iceberg.before_rewrite_commit", "iceberg.before_commit", "iceberg.before_vacuum"])
def test_maintenance_that_dies_is_done_by_the_next_process(
    ice: IcebergDestination, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for number in range(5):
        write(ice, number, insert(id=number, name="a", price=number), insert(id=10 + number, name="a", price=0))
    write(ice, 5, delete(id=3))
    expected = prices(ice)
    with monkeypatch.context() as patch:
        patch.setenv(failpoint.VARIABLE, f"{place}:raise")
        with pytest.raises(failpoint.FailpointError):
            ice.maintain(ITEMS.table)
    forget_everything()
    assert prices(ice) == expected
    write(ice, 6, update(id=4, price=7))
    ice.maintain_now(ITEMS.table)
    assert prices(ice) == {**expected, 4: 7}
    assert len(scanned(ice, ITEMS.table)) == 1
