"""A copy into a Delta table that holds rows: nothing of it shows before all of it does, whenever the process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.destination import Staged
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import VacuumOptions
from tailrace.errors import TableError
from tailrace.model.schema import Column, TableSchema
from tailrace.system.failpoint import DIRECTORY_VARIABLE, VARIABLE, FailpointError
from tailrace.testing.destination import ITEMS, TRUNCATE, changes_of, delete, insert, read, update
from tests.support.destination_writing import write
from tests.support.power_loss import Disk

OLD, NEW = [7, 8, 9], [1, 2, 3, 4]


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


def staged(destination: DeltaDestination, *ids: int) -> list[Staged]:
    rows = (read(id=number, name="copied", price=number) for number in ids)
    return [destination.write_rows(ITEMS, changes_of(ITEMS, *rows))]


def ids_at(lake: Path) -> list[int]:
    return sorted(DeltaTable(str(lake / "shop/items")).to_pyarrow_table().column("id").to_pylist())


def notes_at(lake: Path) -> list[str]:
    folder = lake / "shop/items/_tailrace"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def fill(destination: DeltaDestination) -> None:
    write(destination, 0, *(insert(id=number, name="old", price=number) for number in OLD))


def run_batch(destination: DeltaDestination, number: int) -> None:
    """One of the four batches of a copy, the last with a change after it."""
    match number:
        case 1:
            write(destination, 1, staged=staged(destination, 1), begins_copy=True)
        case 2:
            write(destination, 2, staged=staged(destination, 2, 3))
        case 3:
            write(destination, 3, delete(id=77), staged=staged(destination, 4), completes_copy=True)
        case 4:
            write(destination, 4, update(id=4, price=40))


def run_from_log(lake: Path) -> None:
    """Batch after batch, from the one after the last that was finished: what Spark does with its commit log."""
    destination, log = DeltaDestination(path=str(lake)), lake.parent / "log"
    for number in range(int(log.read_text()) + 1, 5):
        run_batch(destination, number)
        log.write_text(str(number))


@pytest.mark.parametrize(
    "place",
    [
        "delta.staged",
        "delta.staged:kill@2",
        "delta.before_hold",
        "delta.held",
        "delta.held:kill@2",
        "delta.before_commit",
        "delta.committed",
        "delta.committed:kill@2",
    ],
)
def test_a_copy_that_is_killed_anywhere_ends_with_all_its_rows_and_shows_no_mixture(lake: Path, place: str) -> None:
    fill(DeltaDestination(path=str(lake)))
    (lake.parent / "log").write_text("0")
    marks = lake.parent / "marks"
    marks.mkdir()
    order = (place if ":" in place else f"{place}:kill") + "!once"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})"]
    command[-1] += f"\nfrom {Path(__file__).stem} import *\nrun_from_log(Path({str(lake)!r}))"
    environment = {**os.environ, VARIABLE: order, DIRECTORY_VARIABLE: str(marks)}
    killed = subprocess.run(command, env=environment, start_new_session=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert ids_at(lake) in (OLD, NEW)
    run_from_log(lake)
    assert ids_at(lake) == NEW
    assert notes_at(lake) == []


@pytest.mark.parametrize("place", ["delta.before_hold", "delta.held"])
def test_a_copy_that_fails_while_it_begins_again_is_the_later_one(
    lake: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    destination = DeltaDestination(path=str(lake))
    fill(destination)
    write(destination, 1, staged=staged(destination, 100), begins_copy=True)
    write(destination, 2, staged=staged(destination, 101))
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, f"{place}:raise")
        with pytest.raises(FailpointError):
            write(destination, 3, staged=staged(destination, 1), begins_copy=True)
    write(destination, 3, staged=staged(destination, 1, 2), begins_copy=True)
    write(destination, 4, staged=staged(destination, 3, 4), completes_copy=True)
    assert ids_at(lake) == NEW


def test_a_stale_runner_neither_takes_from_a_later_copy_nor_adds_to_it(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    fill(destination)
    write(destination, 5, staged=staged(destination, 1, 2), begins_copy=True)
    write(destination, 6, staged=staged(destination, 3))
    write(destination, 2, staged=staged(destination, 98), begins_copy=True)
    write(destination, 3, staged=staged(destination, 99))
    write(destination, 7, staged=staged(destination, 4), completes_copy=True)
    assert ids_at(lake) == NEW


def test_a_power_cut_brings_back_nothing_of_a_copy_that_was_given_up(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, destination = Disk(monkeypatch), DeltaDestination(path=str(lake))
    lake.mkdir()
    fill(destination)
    write(destination, 1, staged=staged(destination, 100), begins_copy=True)
    write(destination, 2, staged=staged(destination, 101), completes_copy=True)
    write(destination, 3, TRUNCATE)
    write(destination, 4, staged=staged(destination, 1, 2), begins_copy=True)
    left = disk.left(lake, lake.with_name("left"))
    destination = DeltaDestination(path=str(left))
    write(destination, 5, staged=staged(destination, 3, 4), completes_copy=True)
    assert ids_at(left) == NEW


def test_a_vacuum_waits_for_a_copy_that_goes_on_and_for_no_other(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = DeltaDestination(path=str(lake), vacuum=VacuumOptions(every=0, retention=3600))
    fill(destination)
    write(destination, 1, staged=staged(destination, *NEW), begins_copy=True)
    for path in (lake / "shop/items").glob("*.parquet"):
        os.utime(path, (0, 0))
    destination.maintain(ITEMS.table)
    write(destination, 2, completes_copy=True)
    assert ids_at(lake) == NEW
    write(destination, 3, staged=staged(destination, 5), begins_copy=True)
    for path in (lake / "shop/items").glob("*.parquet"):
        os.utime(path, (0, 0))
    later = time.time() + 7200
    monkeypatch.setattr("time.time", lambda: later)
    destination.maintain(ITEMS.table)
    with pytest.raises(TableError, match="no longer") as caught:
        write(destination, 4, completes_copy=True)
    assert caught.value.fix
    assert ids_at(lake) == NEW


def test_a_table_is_vacuumed_when_it_is_due_however_short_the_runners_live(
    lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = DeltaDestination(path=str(lake), vacuum=VacuumOptions(every=86_400, retention=3600))
    fill(destination)
    write(destination, 1, update(id=7, price=70))
    dead = set((lake / "shop/items").glob("*.parquet")) - {
        Path(uri) for uri in DeltaTable(str(lake / "shop/items")).file_uris()
    }
    assert dead
    for path in dead:
        os.utime(path, (0, 0))
    destination.maintain(ITEMS.table)
    assert all(path.exists() for path in dead)
    later = time.time() + 90_000
    monkeypatch.setattr("time.time", lambda: later)
    destination.maintain(ITEMS.table)
    assert notes_at(lake) == ["vacuum.json"]


def test_a_copy_may_change_the_partitioning_and_the_key(lake: Path) -> None:
    before = DeltaDestination(path=str(lake))
    fill(before)
    after = before.model_copy(update={"partition_by": {"shop.items": ["name"]}})
    other = TableSchema(
        ITEMS.table, (Column("code", pa.string(), False, number=9), Column("name", pa.string(), number=2)), ("code",), 2
    )
    # One file is staged under the old settings, one under the new ones.
    one = before.write_rows(other, changes_of(other, read(code="x", name="1")))
    write(before, 1, table=other, staged=[one], begins_copy=True)
    two = after.write_rows(other, changes_of(other, read(code="y", name="2")))
    write(after, 2, table=other, staged=[two], completes_copy=True)
    write(after, 3, update(code="x", name="3"), table=other)
    table = DeltaTable(str(lake / "shop/items"))
    assert table.metadata().partition_columns == ["name"]
    rows = sorted(table.to_pyarrow_table().to_pylist(), key=lambda row: str(row["code"]))
    assert rows == [{"code": "x", "name": "3"}, {"code": "y", "name": "2"}]


def test_changes_amid_a_held_copy_are_refused(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    fill(destination)
    with pytest.raises(TableError, match="before its copy was complete"):
        write(destination, 1, delete(id=7), staged=staged(destination, 1), begins_copy=True)
    assert ids_at(lake) == OLD


def test_a_log_is_replaced_by_its_copy_as_well(lake: Path) -> None:
    destination = DeltaDestination(path=str(lake))
    log = TableSchema(ITEMS.table, ITEMS.columns, ())
    write(destination, 0, insert(id=7, name="old", price=7), table=log)
    first = destination.write_rows(log, changes_of(log, read(id=1, name="a", price=1)))
    write(destination, 1, table=log, staged=[first], begins_copy=True)
    assert ids_at(lake) == [7]
    second = destination.write_rows(log, changes_of(log, read(id=2, name="b", price=2)))
    write(destination, 2, insert(id=3, name="c", price=3), table=log, staged=[second], completes_copy=True)
    assert ids_at(lake) == [1, 2, 3]
