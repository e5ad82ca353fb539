"""What the demo prints where there is no terminal: few lines, each with something new."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tailrace.cli.story_view import StoryView
from tailrace.model.change import end_of
from tailrace.state import BatchRecord, SourceStatus, SqliteStore, StateStore, TableUpdate
from tailrace.state.record import ChangeCounts
from tailrace.state.state_machine import WAY
from tailrace.state.status import PipelineStatus


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with SqliteStore("demo", tmp_path).open() as store:
        store.add_table("1", "public.orders")
        yield store


class Story:
    """The lines of a view with a clock that is set, without their times."""

    def __init__(self, store: StateStore, *, is_continued: bool = False) -> None:
        self.store = store
        self.now = 0.0
        self.batches = 0
        self.written: list[str] = []
        self.view = StoryView(self.written.append, is_continued=is_continued, clock=lambda: self.now)

    def apply(self, **update: object) -> None:
        self.batches += 1
        position = str(end_of(self.batches))
        change = TableUpdate("1", position=position, **update)  # type: ignore[arg-type]
        self.store.apply_batch(BatchRecord(self.batches, {}, position, at=datetime.now(UTC)), [change])
        self.store.put_source_status(SourceStatus("streaming", position, 0, position))

    def look(self, seconds: float = 10.0) -> list[str]:
        self.now += seconds
        before = len(self.written)
        self.view.show(PipelineStatus.read(self.store))
        return [line[9:] for line in self.written[before:]]


def test_a_copy_is_a_bar_then_a_line_and_changes_are_counted_from_line_to_line(store: StateStore) -> None:
    story = Story(store)
    assert story.look() == []
    story.apply(steps=WAY[1:2], rows_copied=250, rows_total=1000)
    assert story.look() == ["copying    ██████░░░░░░░░░░░░░░░░░░ 250 of ~1,000 rows"]
    assert story.look() == []
    story.apply(steps=WAY[2:], rows_copied=750)
    assert story.look() == ["copied     1,000 rows in 1 table; from now on every change follows"]
    story.apply(counts=ChangeCounts(inserts=3, updates=20, deletes=1))
    assert story.look() == ["following  +3 ~20 -1            █                 level with the shop"]
    story.apply(counts=ChangeCounts(inserts=12))
    assert story.look() == ["following  +12 ~0 -0            █▄                level with the shop"]


def test_a_quiet_pipeline_is_quiet(store: StateStore) -> None:
    story = Story(store)
    story.apply(steps=WAY[1:], rows_copied=5)
    assert story.look() == ["continuing 5 rows in 1 table were copied before"]
    looks = [line for _ in range(100) for line in story.look(0.5)]
    assert len(looks) <= 4


def test_after_another_view_nothing_is_said_of_a_copy_that_is_done(store: StateStore) -> None:
    story = Story(store, is_continued=True)
    story.apply(steps=WAY[1:], rows_copied=5, counts=ChangeCounts(5, inserts=7))
    assert story.look() == []
    story.apply(counts=ChangeCounts(inserts=3))
    assert story.look() == ["following  +3 ~0 -0             █                 level with the shop"]


def test_an_error_is_told_once(store: StateStore) -> None:
    story = Story(store)
    story.apply(steps=WAY[1:])
    store.fail_table("1", "the key is gone")
    assert story.look() == ["error      public.orders: the key is gone"]
    assert story.look() == []
