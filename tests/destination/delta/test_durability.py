"""A power cut takes nothing of a table whose rows are marked: vectors, checkpoints and the way back are durable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.destination import Batch, TableBatch
from tailrace.destination.delta import log
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import CompactOptions
from tailrace.model.schema import Column
from tailrace.system.failpoint import VARIABLE, FailpointError
from tailrace.testing.destination import ITEMS, RowDict, changes_of, delete, insert, read, update, with_columns
from tests.support.delta_table import forget_everything, queried, small_measures
from tests.support.destination_writing import write
from tests.support.power_loss import Disk


def rows_at(lake: Path) -> list[RowDict]:
    return sorted(queried(str(lake / "shop/items")), key=lambda row: int(row["id"]))


def test_a_power_cut_takes_nothing_that_was_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, lake = Disk(monkeypatch), tmp_path / "lake"
    lake.mkdir()
    marking = DeltaDestination(path=str(lake), updates="merge_on_read", compact=CompactOptions(files=2))
    rewriting = marking.model_copy(update={"updates": "copy_on_write"})
    wider = with_columns(ITEMS, Column("size", pa.int32(), number=9))

    def copy(number: int) -> None:
        staged = marking.write_rows(ITEMS, changes_of(ITEMS, *(read(id=n, name="copied", price=1) for n in range(20))))
        write(marking, number, staged=[staged], begins_copy=True, completes_copy=True)

    def fold(number: int) -> None:
        rewriting.maintain(ITEMS.table)
        write(rewriting, number, update(id=15, price=5), table=wider)

    steps: list[Callable[[int], Any]] = [
        copy,
        lambda number: write(marking, number, update(id=1, name="new", price=2), delete(id=2)),
        lambda number: write(marking, number, update(id=1, price=3), insert(id=30, name="more", price=3)),
        lambda number: write(marking, number, update(id=11, name="x", price=1, size=4), table=wider),
        lambda number: write(marking, number, delete(id=12), table=wider),
        fold,
        lambda number: write(marking, number, delete(id=13), table=wider),
    ]
    with small_measures(file_rows=8, checkpoint_interval=3):
        for number, step in enumerate(steps):
            step(number)
            left = disk.left(lake, tmp_path / f"left after {number}")
            assert rows_at(left) == rows_at(lake)
            after = DeltaDestination(path=str(left), updates="merge_on_read")
            assert after.write_changes(TableBatch(wider, Batch("p", number))).repeated
    assert len(rows_at(lake)) == 18


@pytest.mark.parametrize("again", [True, False], ids=["repeated", "gone on with"])
def test_a_power_cut_takes_nothing_of_a_marked_table_whose_process_was_killed_before_it_could_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    disk, lake = Disk(monkeypatch), tmp_path / "lake"
    lake.mkdir()
    destination = DeltaDestination(path=str(lake), updates="merge_on_read")
    write(destination, 0, insert(id=1, name="a", price=1), insert(id=2, name="b", price=2))
    with monkeypatch.context() as patch:
        patch.setenv(VARIABLE, "delta.before_sync:raise")
        with pytest.raises(FailpointError):
            write(destination, 1, update(id=1, name="c"))
    forget_everything()
    assert log._synced == {}
    if again:
        assert write(destination, 1, update(id=1, name="c")).repeated
    else:
        write(destination, 2, delete(id=2))
    assert rows_at(disk.left(lake, tmp_path / "left")) == rows_at(lake)
