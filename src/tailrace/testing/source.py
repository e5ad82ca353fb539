"""What every source must do, as tests to inherit.

    class TestMine(SourceContract):
        @pytest.fixture
        def upstream(self, tmp_path): return MyUpstream(tmp_path)   # see `Upstream`

`tests/contract/test_custom_source.py` runs it against `examples/custom_source.py`.

A source that reads a log inherits `LogContract`, and one whose log contains transactions `TransactionContract`: they
require more. Configure chunks and pages of about ten rows, so that the tests see more than one of each.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest

from tailrace.errors import TableError
from tailrace.model.change import Changes, Op, Position
from tailrace.model.schema import TableSchema
from tailrace.source.follower import Limit, Offset, TableDirectives, TableProgress
from tailrace.source.source import Source
from tailrace.source.split import ScanSplit, Split
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until

PLENTY = Limit(rows=100_000, bytes=1 << 30)
LITTLE = Limit(rows=3, bytes=1_000)
WAY = ("init", "copy", "catchup", "ready")
ODD = {-1: "", 0: "ünï 🦆 \"'\\\n\t", 2**31 - 1: "NULL", 7: "x" * 5_000}


class Upstream(Protocol):
    """One table, empty at first, and a source that follows it and no other.

    Its first two columns are an integer, which is the key, and a text; there may be more. What the source keeps in
    files is in the test's `tmp_path`.
    """

    @property
    def source(self) -> Source: ...

    def put(self, rows: Mapping[int, str]) -> None:
        """Insert or update these rows, in one transaction where there are any. Returns once they are committed."""
        ...

    def remove(self, *ids: int) -> None:
        """Delete these rows, likewise."""
        ...

    def rows(self) -> dict[int, str]:
        """Every row, read from the upstream itself."""
        ...


def texts(ids: Iterable[int], text: str) -> dict[int, str]:
    """Rows long enough for some of them to fill a page."""
    return {number: f"{text} {number} ".ljust(300, ".") for number in ids}


def table_of(source: Source) -> TableSchema:
    [table] = source.tables()
    return table


def table_progress(replay: SourceReplay) -> TableProgress:
    assert replay.offset is not None
    [table] = replay.source.progress(replay.offset)
    return table


def held(replay: SourceReplay) -> dict[int, str]:
    """The rows that have arrived."""
    found: dict[int, str] = {}
    for table in replay.tables.values():
        number, text = (column.name for column in table.schema.columns[:2])
        found |= {row[number]: row[text] for row in table.rows.values()}
    return found


def planned(replay: SourceReplay) -> list[Split]:
    """The splits of the next batch with any change, which is waited for."""
    wait_until(replay.plan)
    assert replay.offset is not None
    assert replay.planned is not None
    return replay.follower.plan(replay.offset, replay.planned)


Blocks = list[tuple[TableSchema, list[dict[str, Any]]]]


def read(source: Source, splits: Iterable[Split]) -> Blocks:
    return [_block(changes) for split in splits for changes in source.read(split)]


def _block(changes: Changes) -> tuple[TableSchema, list[dict[str, Any]]]:
    return changes.table, changes.batch.to_pylist()


def through_text(offset: Offset | None) -> Offset:
    """The offset as Spark gives it back."""
    found: Offset = json.loads(json.dumps(offset))
    return found


def files_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


class SourceContract:
    """Inherit it, give an `upstream` fixture, and pass."""

    def equal(self, replay: SourceReplay, upstream: Upstream) -> None:
        replay.catch_up()
        assert held(replay) == upstream.rows()

    def following(self, upstream: Upstream, limit: Limit = PLENTY) -> SourceReplay:
        """A pipeline that has copied what there is, to be entered as a context."""
        replay = SourceReplay(upstream.source, limit)
        try:
            self.equal(replay, upstream)
        except BaseException:
            replay.crash()
            raise
        return replay

    # -- what it is ---------------------------------------------------------------------------------------

    def test_its_table_is_named_with_its_key(self, upstream: Upstream) -> None:
        table = table_of(upstream.source)
        number, text = table.columns[:2]
        assert table.key == (number.name,)
        assert pa.types.is_integer(number.type)
        assert text.type == pa.string()
        assert table.upstream_id

    def test_checking_makes_nothing_and_finds_nothing_wrong(self, upstream: Upstream, tmp_path: Path) -> None:
        before = files_below(tmp_path)
        findings = upstream.source.check()
        assert not [finding for finding in findings if finding.level == "error"]
        assert upstream.source.check() == findings
        assert files_below(tmp_path) == before

    def test_it_is_frozen_and_travels_to_another_process(self, upstream: Upstream) -> None:
        with pytest.raises(AttributeError):
            upstream.source.anything = 1  # type: ignore[attr-defined]
        there: Source = pickle.loads(pickle.dumps(upstream.source))  # noqa: S301
        assert there == upstream.source
        upstream.put(texts(range(3), "copied"))
        with SourceReplay(there, PLENTY) as replay:
            self.equal(replay, upstream)

    # -- copy and changes ---------------------------------------------------------------------------------

    def test_rows_that_are_there_are_copied_and_changes_followed(self, upstream: Upstream) -> None:
        upstream.put({**texts(range(20), "copied"), **ODD})
        with self.following(upstream) as replay:
            upstream.put(texts(range(10, 30), "changed"))
            upstream.remove(1, 2, 29)
            self.equal(replay, upstream)
            upstream.put({1: "again", 2: "", **{number: text[::-1] for number, text in ODD.items()}})
            upstream.put({2: "twice"})
            upstream.remove(*ODD)
            upstream.put({7: "back"})
            self.equal(replay, upstream)
            upstream.remove(*upstream.rows())
            self.equal(replay, upstream)

    def test_an_empty_table_is_ready_and_followed(self, upstream: Upstream) -> None:
        with self.following(upstream) as replay:
            assert (table_progress(replay).phase, held(replay)) == ("ready", {})
            upstream.put({1: "first"})
            self.equal(replay, upstream)

    def test_many_rows_and_small_batches_lose_nothing(self, upstream: Upstream) -> None:
        upstream.put(texts(range(60), "copied"))
        with self.following(upstream, LITTLE) as replay:
            batches = replay.batch
            for first in range(0, 20, 2):
                upstream.put(texts(range(first, first + 3), "changed"))
                upstream.remove(first + 1, 59 - first)
                if first == 10:
                    # What arrives while a source is busy may come as one.
                    self.equal(replay, upstream)
            upstream.put(texts(range(100, 120), "in one transaction"))
            self.equal(replay, upstream)
            assert replay.batch > batches + 1

    def test_rows_are_fetched_again_as_they_are_now(self, upstream: Upstream) -> None:
        upstream.put({**texts(range(3), "old"), **ODD})
        with self.following(upstream) as replay:
            upstream.put({1: "new"})
            upstream.remove(2)
            [table] = replay.tables.values()
            [key] = table.schema.key
            layout = pa.schema([(key, table.schema.column(key).type)])
            wanted = pa.Table.from_pylist([{key: number} for number in (1, 2, 12345, *ODD)], layout)
            if type(replay.source).refetch is Source.refetch:
                # A source that sends whole rows need not read any again, and says so.
                with pytest.raises(TableError):
                    replay.source.refetch(table.schema, wanted)
                return
            found = replay.source.refetch(table.schema, wanted).to_pylist()
            text = table.schema.columns[1].name
            assert {row[key]: row[text] for row in found} == {**ODD, 1: "new"}

    # -- offsets, plans, splits ---------------------------------------------------------------------------

    def test_offsets_survive_as_text(self, upstream: Upstream) -> None:
        upstream.put(texts(range(30), "copied"))
        with SourceReplay(upstream.source, LITTLE) as replay:
            for number in range(6):
                wait_until(replay.plan)
                assert through_text(replay.planned) == replay.planned
                assert through_text(replay.offset) == replay.offset
                replay.offset, replay.planned = through_text(replay.offset), through_text(replay.planned)
                replay.write()
                replay.commit()
                upstream.put({number: "changed"})
            self.equal(replay, upstream)

    def test_what_is_planned_reads_the_same_again(self, upstream: Upstream) -> None:
        upstream.put(texts(range(30), "copied"))
        with SourceReplay(upstream.source, LITTLE) as replay:
            for number in range(10):
                splits = planned(replay)
                self.reads_again(replay, splits)
                self.is_placed(replay, splits)
                replay.write()
                replay.commit()
                if table_progress(replay).phase == "ready":
                    upstream.put({number: "changed", 100 + number: "new"})
                    upstream.remove(20 + number)
            self.equal(replay, upstream)

    def reads_again(self, replay: SourceReplay, splits: list[Split]) -> None:
        assert replay.offset is not None
        assert replay.planned is not None
        blocks = read(replay.source, splits)
        assert read(replay.source, replay.follower.plan(replay.offset, replay.planned)) == blocks
        there: tuple[Source, list[Split]] = pickle.loads(pickle.dumps((replay.source, splits)))  # noqa: S301
        assert read(*there) == blocks
        run = [split.run(replay.source.read) if isinstance(split, ScanSplit) else split for split in splits]
        assert read(replay.source, run) == blocks
        name = str(table_of(replay.source).table)
        log = [split for split in splits if split.copies is None]
        assert all(split.weights.keys() == split.schemas.keys() == {name} for split in log)
        assert read(replay.source, [split.only([name]) for split in log]) == read(replay.source, log)

    def is_placed(self, replay: SourceReplay, splits: list[Split]) -> None:
        """Copied rows are reads. Other changes come in order, after the table's current position."""
        assert replay.planned is not None
        reads = read(replay.source, [split for split in splits if split.copies is not None])
        assert {change["op"] for _, changes in reads for change in changes} <= {Op.READ}
        log = [split for split in splits if split.copies is None]
        changes = [change for _, changes in read(replay.source, log) for change in changes]
        assert {change["op"] for change in changes} <= {Op.INSERT, Op.UPDATE, Op.DELETE}
        if changes:
            places = [Position(change["commit"], change["ordinal"]) for change in changes]
            [then] = replay.source.progress(replay.planned)
            assert places == sorted(set(places))
            assert table_progress(replay).position < places[0]
            assert places[-1] <= then.position

    # -- crashes and restarts -----------------------------------------------------------------------------

    @pytest.mark.parametrize("place", ["plan", "half", "write", "commit"])
    def test_a_crash_loses_nothing(self, upstream: Upstream, place: str) -> None:
        upstream.put(texts(range(40), "copied"))
        with SourceReplay(upstream.source, LITTLE) as replay:
            for number in range(4):
                upstream.put({number: "changed", 100 + number: "new"})
                upstream.remove(39 - number)
                wait_until(replay.plan)
                replay.live(place)
                # Rows that are read again after a restart may have changed since.
                upstream.put({number: "changed again", 200 + number: "newer"})
                upstream.remove(100 + number)
                replay.step()
                if number == 1:
                    self.equal(replay, upstream)
            self.equal(replay, upstream)

    def test_who_crashes_before_the_first_batch_begins_again(self, upstream: Upstream) -> None:
        upstream.put({1: "copied", 2: "removed"})
        with SourceReplay(upstream.source, PLENTY) as replay:
            replay.follower.start()
            upstream.put({3: "new"})
            replay.crash()
            upstream.remove(2)
            self.equal(replay, upstream)

    def test_what_is_released_is_not_needed_again(self, upstream: Upstream) -> None:
        upstream.put(texts(range(20), "copied"))
        with self.following(upstream) as replay:
            for number in range(2):
                upstream.put({number: "changed", 100 + number: "new"})
                upstream.remove(10 + number)
                wait_until(replay.plan)
                assert replay.offset is not None
                # The next batch may have begun before the end of this one is reported to the pipeline.
                replay.source.release(replay.offset)
                replay.write(0)
                replay.source.release(replay.offset)
                replay.crash()
                upstream.put({number: "changed again"})
                self.equal(replay, upstream)

    def test_it_begins_anew_once_it_is_reset(self, upstream: Upstream) -> None:
        upstream.put(texts(range(5), "copied"))
        with self.following(upstream):
            upstream.put({1: "changed"})
        for _ in range(2):
            upstream.source.reset()
        upstream.remove(2)
        with self.following(upstream) as replay:
            upstream.put({3: "changed"})
            self.equal(replay, upstream)

    def test_another_reader_has_a_place_of_its_own(self, upstream: Upstream) -> None:
        upstream.put(texts(range(5), "copied"))
        with self.following(upstream) as replay:
            other = SourceReplay(
                upstream.source.for_reader("another: one", str(table_of(upstream.source).table)), PLENTY
            )
            with other:
                self.equal(other, upstream)
                upstream.put({1: "changed"})
                self.equal(replay, upstream)
                upstream.remove(2)
                self.equal(replay, upstream)
                self.equal(other, upstream)

    # -- single runs --------------------------------------------------------------------------------------

    def test_a_single_run_ends_although_a_row_is_written_before_each_batch(self, upstream: Upstream) -> None:
        self.run_twice(upstream, PLENTY)

    def run_twice(self, upstream: Upstream, limit: Limit) -> None:
        """A run that copies, then one that follows."""
        upstream.put(texts(range(30), "copied"))
        numbers = itertools.count(1_000)
        with SourceReplay(upstream.source, limit) as replay:
            for number in range(2):
                upstream.put({number: "changed"})
                upstream.remove(10 + number)
                before = upstream.rows()
                self.run_once(replay, upstream, numbers)
                assert before.items() <= held(replay).items()
                assert not {10, 10 + number} & held(replay).keys()
            self.equal(replay, upstream)

    def run_once(self, replay: SourceReplay, upstream: Upstream, numbers: Iterator[int]) -> None:
        target = replay.follower.target()

        def ends() -> bool:
            upstream.put({next(numbers): "late"})
            if replay.step():
                return False
            assert replay.offset is not None
            return replay.follower.done(replay.offset, target)

        wait_until(ends, 30)

    # -- progress and orders ------------------------------------------------------------------------------

    def test_progress_goes_the_way_of_every_table(self, upstream: Upstream) -> None:
        upstream.put(texts(range(40), "copied"))
        seen: list[TableProgress] = []

        def is_ready() -> bool:
            if replay.step():
                seen.extend(replay.source.progress(replay.offset or {}))
            return bool(seen) and seen[-1].phase == "ready"

        with SourceReplay(upstream.source, LITTLE) as replay:
            wait_until(is_ready)
            assert {one.upstream_id for one in seen} == {table_of(upstream.source).upstream_id}
            assert [one.phase for one in seen] == sorted((one.phase for one in seen), key=WAY.index)
            copies = [one for one in seen if one.phase != "init"]
            assert len({one.copy for one in copies}) == 1
            assert copies[0].copy > 0
            assert all(0 < one.chunks_done <= one.chunks_total for one in seen if one.phase in ("copy", "catchup"))
            assert [one.position for one in copies] == sorted(one.position for one in copies)
            upstream.put({1: "changed"})
            at = table_progress(replay).position
            self.equal(replay, upstream)
            assert table_progress(replay).position > at
            assert table_progress(replay).phase == "ready"
            assert upstream.source.status().gear

    def stop(self, replay: SourceReplay, upstream: Upstream) -> TableProgress:
        """Let some changes fail and stop the table. Returns its progress before them, where it waits to resume."""
        before = table_progress(replay)
        upstream.put({1: "fails", 50: "fails too"})
        upstream.remove(2)
        wait_until(replay.plan)
        replay.fail()
        replay.directives = TableDirectives(stopped={before.upstream_id: str(before.position)})
        wait_until(replay.step)
        assert table_progress(replay).phase == "stopped"
        return before

    def test_a_stopped_table_goes_on_behind_its_place(self, upstream: Upstream) -> None:
        upstream.put(texts(range(5), "copied"))
        with self.following(upstream) as replay:
            before, rows = self.stop(replay, upstream), held(replay)
            upstream.put({3: "while it is stopped"})
            upstream.remove(4)
            replay.catch_up()
            replay.crash()
            replay.catch_up()
            assert held(replay) == rows
            assert table_progress(replay).position <= before.position
            replay.directives = TableDirectives()
            self.equal(replay, upstream)
            assert (table_progress(replay).phase, table_progress(replay).copy) == ("ready", before.copy)

    def test_a_table_that_cannot_go_on_is_copied_anew(self, upstream: Upstream) -> None:
        upstream.put(texts(range(5), "copied"))
        with self.following(upstream) as replay:
            before = self.stop(replay, upstream)
            replay.directives = TableDirectives(stopped={before.upstream_id: None})
            replay.catch_up()
            replay.directives = TableDirectives()
            self.equal(replay, upstream)
            assert table_progress(replay).phase == "ready"
            assert table_progress(replay).copy != before.copy

    def test_a_paused_table_waits_and_goes_on(self, upstream: Upstream) -> None:
        upstream.put(texts(range(5), "copied"))
        with self.following(upstream) as replay:
            before, rows = table_progress(replay), held(replay)
            replay.directives = TableDirectives(paused=[before.upstream_id])
            wait_until(replay.step)
            upstream.put({1: "while it is paused"})
            upstream.remove(2)
            replay.catch_up()
            assert held(replay) == rows
            replay.directives = TableDirectives()
            self.equal(replay, upstream)
            assert table_progress(replay).copy == before.copy

    def test_a_table_is_copied_anew_once_for_each_request(self, upstream: Upstream) -> None:
        upstream.put(texts(range(5), "copied"))
        with self.following(upstream) as replay:
            copies = [table_progress(replay).copy]
            for request in (4, 9):
                for table in replay.tables.values():
                    table.clear()
                replay.directives = TableDirectives(resync={table_progress(replay).upstream_id: request})
                upstream.put({request: "changed"})
                for _ in range(2):
                    self.equal(replay, upstream)
                assert table_progress(replay).request == request
                copies.append(table_progress(replay).copy)
            assert len(set(copies)) == 3

    def test_a_stopped_table_is_copied_anew_when_somebody_asks(self, upstream: Upstream) -> None:
        upstream.put(texts(range(5), "copied"))
        with self.following(upstream) as replay:
            before = self.stop(replay, upstream)
            replay.directives = TableDirectives(stopped=replay.directives.stopped, resync={before.upstream_id: 1})
            wait_until(lambda: replay.step() and table_progress(replay).request == 1)
            replay.directives = TableDirectives()
            self.equal(replay, upstream)
            assert table_progress(replay).copy != before.copy


class LogContract(SourceContract):
    """In addition, for a source with a log, which keeps past changes."""

    def test_what_is_planned_reads_the_same_after_its_rows_have_changed_again(self, upstream: Upstream) -> None:
        upstream.put(texts(range(10), "copied"))
        with self.following(upstream) as replay:
            upstream.put(texts(range(5, 15), "changed"))
            upstream.remove(1, 2)
            splits = planned(replay)
            blocks = read(replay.source, splits)
            for _ in range(2):
                upstream.remove(*range(5, 10))
                upstream.put({1: "back", 12: "changed again"})
                assert read(replay.source, splits) == blocks
                assert read(replay.source, planned(replay)) == blocks
                replay.crash()
            self.equal(replay, upstream)

    def test_a_single_run_with_small_batches_ends_although_a_row_is_written_before_each(
        self, upstream: Upstream
    ) -> None:
        self.run_twice(upstream, LITTLE)


class TransactionContract(LogContract):
    """In addition, for a log that contains transactions."""

    def test_a_transaction_comes_whole_whatever_its_size(self, upstream: Upstream) -> None:
        with self.following(upstream, LITTLE) as replay:
            for first in range(0, 100, 20):
                upstream.put(texts(range(first, first + 20), "together"))
                upstream.put({first: "alone"})
            while held(replay).keys() != upstream.rows().keys():
                wait_until(replay.step)
                assert len(held(replay)) % 20 == 0
            self.equal(replay, upstream)
