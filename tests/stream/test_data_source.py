"""What a stream asks its state store for, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.destination import Destination
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, Offset, TableDirectives
from tailrace.source.split import Split
from tailrace.state import SqliteStore
from tailrace.stream import data_source
from tailrace.stream.block import Pickled, rows_of
from tailrace.stream.data_source import BlockReader, Feed, LogPartition, lanes_for, note_cores
from tests.support.source_making import make_sqlite

LIMIT = Limit(1, 1)


class Scripted:
    """A follower that finds something only where the test says so, and records its calls."""

    def __init__(self) -> None:
        self.seen: list[TableDirectives] = []
        self.next: Offset | None = None
        self.asked_whether_done = 0

    def target(self) -> Offset:
        return {"log": 9}

    def done(self, start: Offset, target: Offset) -> bool:
        self.asked_whether_done += 1
        return True

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        self.seen.append(directives)
        return self.next or start

    def plan(self, start: Offset, end: Offset) -> list[Split]:
        return [Split(weights={f"public.t{number}": number for number in range(30)})]

    def stop(self) -> None:
        pass


class CountingReader(BlockReader):
    reads = 0

    def _read_directives(self) -> TableDirectives:
        self.reads += 1
        return super()._read_directives()


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingReader]:
    """One that answers at once; some tests make it wait."""
    monkeypatch.setattr(BlockReader, "answer_seconds", 0.0)
    source = make_sqlite(tmp_path / "app.db", tmp_path, TableOptions())
    made = CountingReader(Feed(source, LIMIT, lanes=1))
    made._follower = Scripted()  # type: ignore[assignment]
    yield made
    made.stop()


def latest(reader: BlockReader, start: Offset) -> Any:
    return reader.latestOffset(start, reader.getDefaultReadLimit())


def test_an_idle_stream_does_not_ask_its_store_again_and_again(reader: CountingReader) -> None:
    for _ in range(100):
        assert latest(reader, {"log": 1}) == {"log": 1}
    assert reader.reads < 100


def test_directives_are_read_again_after_a_while(reader: CountingReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_source, "IDLE_SECONDS", 0.0)
    for _ in range(3):
        latest(reader, {"log": 1})
    assert reader.reads == 3


def test_after_a_batch_directives_are_read_before_anything_else_is_planned(reader: CountingReader) -> None:
    follower: Any = reader.follower
    latest(reader, {"log": 1})
    follower.next = {"log": 2}
    assert latest(reader, {"log": 1}) == {"log": 2}
    before = reader.reads
    latest(reader, {"log": 2})
    assert reader.reads == before + 1


def test_a_follower_is_asked_whether_it_is_done_only_when_it_found_nothing(reader: CountingReader) -> None:
    follower: Any = reader.follower
    reader.prepareForTriggerAvailableNow()
    follower.next = {"log": 2}
    latest(reader, {"log": 1})
    assert follower.asked_whether_done == 0
    latest(reader, {"log": 2})
    assert follower.asked_whether_done == 1


@pytest.fixture
def sleeps(reader: CountingReader, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What an idle search slept, on a clock that only its sleep moves."""
    slept: list[float] = []
    monkeypatch.setattr(BlockReader, "answer_seconds", 2.0)
    monkeypatch.setattr("time.sleep", slept.append)
    monkeypatch.setattr("time.monotonic", lambda: 1000.0 + sum(slept))
    return slept


def test_an_idle_stream_waits_for_changes_before_it_answers(reader: CountingReader, sleeps: list[float]) -> None:
    assert latest(reader, {"log": 1}) == {"log": 1}
    assert sum(sleeps) == pytest.approx(2.0, abs=0.1)
    assert reader.reads <= 2.0 / data_source.IDLE_SECONDS + 1


def test_changes_end_the_wait_at_once(reader: CountingReader, sleeps: list[float]) -> None:
    follower: Any = reader.follower

    def come(start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        return {"log": 2} if sum(sleeps) > 0.5 else start

    follower.latest = come
    assert latest(reader, {"log": 1}) == {"log": 2}
    assert sum(sleeps) < 0.6


def test_a_pipeline_that_drains_ends_the_wait_at_once(
    tmp_path: Path, sleeps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = SqliteStore("p", tmp_path)
    with address.open() as store:
        run = store.claim_run()
        waiting = BlockReader(
            Feed(make_sqlite(tmp_path / "b.db", tmp_path, TableOptions()), LIMIT, 2, state=address, run=run)
        )
        waiting._follower = Scripted()  # type: ignore[assignment]

        def sleep(seconds: float) -> None:
            sleeps.append(seconds)
            if sum(sleeps) > 0.5:
                data_source.drain_file(tmp_path).touch()

        monkeypatch.setattr("time.sleep", sleep)
        assert latest(waiting, {"log": 1}) == {"log": 1}
        assert sum(sleeps) < 0.6
        waiting.stop()


def test_a_run_with_once_never_waits(reader: CountingReader, sleeps: list[float]) -> None:
    reader.prepareForTriggerAvailableNow()
    latest(reader, {"log": 1})
    assert sleeps == []


def test_lanes_follow_executors_that_come_late_and_go(tmp_path: Path) -> None:
    source = make_sqlite(tmp_path / "app.db", tmp_path, TableOptions())
    unread: Pickled[Destination] = Pickled(b"")
    reader = BlockReader(Feed(source, LIMIT, 2, unread, SqliteStore("p", tmp_path), follows_cores=True))
    reader._follower = Scripted()  # type: ignore[assignment]
    for cores in (0, 1, 16, 3):
        if cores:
            note_cores(tmp_path, cores)
        [part] = reader.partitions({}, {})
        assert isinstance(part, LogPartition)
        assert set(part.lanes.values()) == set(range(lanes_for(cores)))
        blocks = [(batch.column("lane")[0].as_py(), row) for batch in part.rows() for row in rows_of(batch)]
        found = {table: lane for lane, row in blocks for table in row.log().weights}
        assert found == part.lanes
    reader.stop()


def test_directives_name_the_few_tables_that_are_stopped_paused_or_asked_for(tmp_path: Path) -> None:
    address = SqliteStore("p", tmp_path)
    source = make_sqlite(tmp_path / "app.db", tmp_path, TableOptions())
    with address.open() as store:
        run = store.claim_run()
        for number in range(20):
            store.add_table(str(number), f"public.t{number}")
        store.fail_table("3", "it broke", resume="here")
        store.pause_table("4")
        request = store.ask("resync", "public.t5")
        found = BlockReader(Feed(source, LIMIT, 2, state=address, run=run))._read_directives()
        assert (found.stopped, list(found.paused), found.resync) == ({"3": "here"}, ["4"], {"5": request.id})
        assert {one.upstream_id for one in store.halted_tables()} == {"3", "4"}
