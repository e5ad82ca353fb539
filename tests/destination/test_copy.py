"""Copies that are held until they are complete, and tables that should be there and are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import pyarrow as pa
import pytest

from tailrace.destination import Batch, CopyMode, Destination, Stage, Staged, TableBatch, Written, staging
from tailrace.destination.copy import require_unknown, write_batch
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.errors import TableError, UnavailableError
from tailrace.model.schema import Column
from tailrace.testing.destination import ITEMS, changes_of, read


class Sink(Destination):
    """Notes the calls, and the ids of rows that a batch brings."""

    type: Literal["sink"] = "sink"
    calls: list[str] = []  # noqa: RUF012 - a field, which each instance has a copy of

    def write_changes(self, batch: TableBatch) -> Written:
        ids = [row["id"] for chunk in batch.copied() for row in chunk.row.to_pylist()]
        self.calls.append(f"{batch.id}{' replaces' if batch.replaces else ''} {ids}")
        return Written(upserts=len(ids))

    def drop_table_for_copy(self, table: object) -> None:
        self.calls.append("drop")


class StreamSink(Sink):
    copy_mode: ClassVar[CopyMode] = "stream"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "staged", "shop")


def copied(stage: Stage, *ids: int) -> list[Staged]:
    return [stage.write(ITEMS, changes_of(ITEMS, *(read(id=number) for number in ids)))]


def write(
    sink: Sink, stage: Stage, number: int, staged: Sequence[Staged], *, begins: bool = False, completes: bool = False
) -> None:
    batch = TableBatch(ITEMS, Batch("shop/1", number), (), staged, begins, completes, stage=stage)
    write_batch(sink, batch)


def files(stage: Stage) -> int:
    return len(list(stage.folder.glob("*.arrow")))


def test_a_whole_copy_is_written_once_with_its_last_batch_and_its_files_go(stage: Stage) -> None:
    sink = Sink()
    write(sink, stage, 1, copied(stage, 1), begins=True)
    write(sink, stage, 2, copied(stage, 2))
    assert sink.calls == []
    write(sink, stage, 3, copied(stage, 3), completes=True)
    assert sink.calls == ["3 replaces [1, 2, 3]"]
    assert files(stage) == 0


def test_the_last_batch_of_a_whole_copy_may_come_again_after_its_files_are_gone(stage: Stage) -> None:
    sink = Sink()
    write(sink, stage, 1, copied(stage, 1), begins=True)
    write(sink, stage, 2, copied(stage, 2), completes=True)
    repeat = TableBatch(ITEMS, Batch("shop/1", 2), (), copied(stage, 2), completes_copy=True, stage=stage)

    class Repeating(Sink):
        def write_changes(self, batch: TableBatch) -> Written:
            assert batch.is_repeat(2)
            return Written(repeated=True)

    assert write_batch(Repeating(), repeat).repeated
    assert files(stage) == 0


def test_a_whole_copy_that_begins_again_gives_up_the_files_of_the_one_before(stage: Stage) -> None:
    sink = Sink()
    write(sink, stage, 1, copied(stage, 1), begins=True)
    write(sink, stage, 2, copied(stage, 2), begins=True)
    assert files(stage) == 1
    write(sink, stage, 3, [], completes=True)
    assert sink.calls == ["3 replaces [2]"]


def test_a_whole_copy_whose_earlier_rows_are_lost_is_not_shown_as_if_it_were_complete(stage: Stage) -> None:
    sink = Sink()
    with pytest.raises(TableError, match="no longer in") as caught:
        write(sink, stage, 2, copied(stage, 2), completes=True)
    assert "tailrace resync" in (caught.value.fix or "")
    write(sink, stage, 1, copied(stage, 1), begins=True)
    for file in stage.folder.glob("*.arrow"):
        file.unlink()
    with pytest.raises(TableError, match="no longer in"):
        write(sink, stage, 2, [], completes=True)


def test_files_that_are_held_outlive_a_day_and_abandoned_ones_do_not(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Sink()
    write(sink, stage, 1, copied(stage, 1), begins=True)
    copied(stage, 9)
    assert stage.discard_abandoned() == 0
    monkeypatch.setattr(staging, "ABANDONED_SECONDS", -1.0)
    assert stage.discard_abandoned() == 1
    write(sink, stage, 2, [], completes=True)
    assert sink.calls == ["2 replaces [1]"]


@pytest.mark.parametrize("receipt", ["mine", "[]", "7", "{}", '{"file": null}', '{"file": ""}', '{"file": "a.arrow"}'])
def test_receipts_of_a_destination_that_stages_rows_by_itself_are_left_alone(stage: Stage, receipt: str) -> None:
    copied(stage, 1)
    stage.discard([Staged(receipt, 1, 1)])
    assert files(stage) == 1


def test_a_streamed_copy_drops_the_table_first_and_then_writes_each_batch(stage: Stage) -> None:
    sink = StreamSink()
    write(sink, stage, 1, copied(stage, 1), begins=True)
    write(sink, stage, 2, copied(stage, 2), completes=True)
    assert sink.calls == ["drop", "1 [1]", "2 [2]"]
    assert files(stage) == 0


def test_a_table_that_earlier_batches_wrote_is_not_made_again() -> None:
    require_unknown(TableBatch(ITEMS, Batch("p", 1)), "/lake")
    with pytest.raises(TableError, match="missing from /lake") as caught:
        require_unknown(TableBatch(ITEMS, Batch("p", 1), is_known=True), "/lake")
    assert caught.value.table == "shop.items"
    assert "tailrace resync" in (caught.value.fix or "")


def test_a_table_is_waited_for_where_the_folder_of_all_tables_is_away(tmp_path: Path) -> None:
    batch = TableBatch(ITEMS, Batch("p", 1), is_known=True)
    with pytest.raises(UnavailableError, match="is missing"):
        require_unknown(batch, "/lake/shop/items", root=tmp_path / "lake")
    with pytest.raises(TableError, match="missing from"):
        require_unknown(batch, "/lake/shop/items", root=tmp_path)


@pytest.mark.parametrize("kind", [DeltaDestination, SqliteDestination])
@pytest.mark.parametrize(
    ("column", "reason"), [("ID", "differ only in case"), ("_tailrace_exact", "a name that tailrace uses")]
)
def test_columns_that_a_destination_cannot_keep_stop_their_table_with_what_a_check_says(
    kind: type[DeltaDestination | SqliteDestination], column: str, reason: str, tmp_path: Path
) -> None:
    destination = kind.model_validate({"type": kind.model_fields["type"].default, "path": str(tmp_path / "there")})
    table = replace(ITEMS, columns=(*ITEMS.columns, Column(column, pa.int64())))
    with pytest.raises(TableError, match=reason) as stopped:
        write_batch(destination, TableBatch(table, Batch("shop/1", 1)))
    assert stopped.value.table == str(table.table)
    assert f"tailrace retry FILE {table.table}" in (stopped.value.fix or "")
    [found] = [finding for finding in destination.check([table]) if finding.level == "error"]
    assert (found.table, found.message) == (str(table.table), stopped.value.message)
