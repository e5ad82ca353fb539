"""What batches leave in the state store, with a source whose offsets show the position of each table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest

from tailrace.destination import Batch
from tailrace.errors import (
    Finding,
    SchemaChangedError,
    StaleCopyError,
    TableError,
    TailraceError,
    UnavailableError,
    UnfitError,
)
from tailrace.model.change import START, Changes, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.model.source_status import SourceStatus
from tailrace.option.table import TableOptions
from tailrace.source.follower import Follower, Offset, SchemaVersions, TableProgress
from tailrace.source.option import SourceOptions
from tailrace.source.source import Source
from tailrace.source.split import Split
from tailrace.state import SqliteStore, StateStore, TableRecord, TableState
from tailrace.state.record import ChangeCounts
from tailrace.stream.micro_batch import TableResult
from tailrace.stream.progress import ProgressRecorder

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class PlainOptions(SourceOptions):
    type: Literal["plain"] = "plain"


@dataclass(frozen=True)
class PlainSource(Source):
    """An upstream whose offset is what `progress` answers, by upstream id; it notes what it may forget."""

    Options = PlainOptions

    released: list[Offset] = field(default_factory=list)
    passed: list[tuple[str, str]] = field(default_factory=list)
    gears: list[str] = field(default_factory=lambda: ["streaming"])
    slowest: list[str] = field(default_factory=list)

    def tables(self) -> list[TableSchema]:
        return []

    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> Follower:
        raise LookupError("no one follows it")

    def read(self, split: Split) -> Iterator[Changes]:
        return iter(())

    def slowest_reader(self) -> str | None:
        return self.slowest[-1] if self.slowest else None

    def release(self, upto: Offset) -> None:
        self.released.append(upto)

    def progress(self, offset: Offset) -> list[TableProgress]:
        return [
            TableProgress(upstream_id, **{**each, "position": Position.parse(each["position"])})
            for upstream_id, each in offset.items()
        ]

    def status(self) -> SourceStatus:
        return SourceStatus(self.gears[-1], journal_bytes=7)

    def idle_until(self) -> tuple[str, str] | None:
        return self.passed[-1] if self.passed else None


class Scene:
    """A store, its ledger, and the batches that go through it. `at` is the offset of the last one."""

    def __init__(self, store: StateStore, options: Mapping[str, Any] = {}) -> None:
        self.store = store
        self.source = PlainSource(PlainOptions())
        self.options = TableOptions.model_validate({"defaults": {"errors": dict(options)}})
        self.at: dict[str, dict[str, Any]] = {}
        self.recorder = self.open()
        for upstream_id, name in (("1", "a"), ("2", "b")):
            store.add_table(upstream_id, f"public.{name}")

    def open(self) -> ProgressRecorder:
        """The ledger of a new start."""
        self.recorder = ProgressRecorder(self.store, self.source, self.options, lambda: NOW)
        return self.recorder

    def place(self, upstream_id: str, phase: str, position: int = 0, **more: Any) -> None:
        """Where the next batch leaves a table."""
        self.at = {**self.at, upstream_id: {"phase": phase, "position": str(Position(position, 0)), **more}}

    def passes(self, after: int, upto: int) -> None:
        """The follower finds nothing between two positions."""
        self.source.passed.append((str(Position(after, 0)), str(Position(upto, 0))))
        self.recorder.note_source()

    def reached(self) -> int:
        return Position.parse(self.recorder.status().position or "").commit

    def batch(self, *results: TableResult) -> None:
        """One batch that is applied and committed."""
        number = self.recorder.last_batch + 1
        self.recorder.applied(Batch("p", number), list(results))
        self.recorder.committed(number, self.at, 0.1)

    def follow(self, *upstream_ids: str, position: int = 10) -> None:
        """Bring tables to Ready."""
        for phase in ("init", "copy", "catchup", "ready"):
            for upstream_id in upstream_ids:
                self.place(upstream_id, phase, position, copy=1)
            self.batch()

    def table(self, upstream_id: str = "1") -> TableRecord:
        found = self.store.table(upstream_id)
        assert found is not None
        return found

    def state(self, upstream_id: str = "1") -> TableState:
        return self.table(upstream_id).state


def done(upstream_id: str = "1", changes: int = 1) -> TableResult:
    return TableResult("public.a", upstream_id, False, 0, changes, changes, 0, 0, False, None, 0.1, None)


def copied(upstream_id: str = "1", rows: int = 5) -> TableResult:
    return replace(done(upstream_id, 0), copying=True, copied=rows)


def failed(error: TailraceError, upstream_id: str = "1", *, copying: bool = False) -> TableResult:
    return replace(done(upstream_id, 0), copying=copying, error=error.describe())


def poison(position: int) -> UnfitError:
    error = UnfitError("a value does not fit", table="public.a", position=str(Position(position, 0)))
    error.raw = b"I\0\0"
    return error


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with SqliteStore("shop", tmp_path).open() as store:
        store.claim_run()
        yield store


@pytest.fixture
def scene(store: StateStore) -> Scene:
    return Scene(store)


def test_a_table_goes_through_its_states_and_its_rows_are_counted(scene: Scene) -> None:
    scene.place("1", "init")
    scene.batch()
    assert scene.state() is TableState.INIT
    scene.place("1", "copy", 9, copy=7, chunks_done=1, chunks_total=3)
    scene.batch(copied())
    assert (scene.state(), scene.table().chunks_done, scene.table().chunks_total) == (TableState.DATA_SYNC, 1, 3)
    scene.place("1", "catchup", 9, copy=7, chunks_done=3, chunks_total=3)
    scene.batch(copied())
    assert (scene.state(), scene.table().rows_copied) == (TableState.SYNC_WAIT, 10)
    scene.place("1", "catchup", 12, copy=7, catching_up=True)
    scene.batch(done(changes=4))
    assert scene.state() is TableState.CATCHUP
    scene.place("1", "ready", 20, copy=7)
    scene.batch(done(changes=2))
    assert (scene.state(), scene.table().changes_applied) == (TableState.READY, 6)
    assert scene.source.released[-1] == scene.at


def test_a_batch_is_recorded_with_the_rows_and_bytes_of_all_its_tables(scene: Scene) -> None:
    scene.follow("1", "2")
    scene.batch(replace(done(changes=3), bytes=700), replace(done("2", changes=1), bytes=80))
    last = scene.store.last_batch()
    assert last is not None
    assert (last.rows, last.bytes) == (4, 780)


def test_a_batch_that_is_reported_again_changes_nothing(scene: Scene) -> None:
    scene.follow("1")
    scene.place("1", "ready", 20, copy=1)
    scene.batch(done(changes=3))
    before = scene.table()
    scene.recorder.committed(scene.recorder.last_batch, scene.at, 0.1)
    assert scene.table() == before
    assert not scene.recorder.unconfirmed


def test_a_failure_is_retried_ever_later_and_then_waits_for_an_operator(store: StateStore) -> None:
    scene = Scene(store, {"attempts": 3, "backoff": "4s"})
    scene.follow("1", "2")
    for attempt, (retry, wait) in enumerate([("timed", 4), ("timed", 8), ("manual", None)], 1):
        scene.batch(failed(TableError("no", table="public.a")), done("2"))
        table = scene.table()
        assert (table.state, table.retry, table.attempts) == (TableState.ERRORED, retry, attempt)
        assert table.next_try == (NOW + timedelta(seconds=wait) if wait else None)
        assert table.resume == str(Position(10, 0))
        assert scene.state("2") is TableState.READY
        store.recover_table("1")
    scene.batch(done())
    assert scene.table().attempts == 0


def test_a_table_may_fail_any_number_of_times(store: StateStore) -> None:
    scene = Scene(store, {"attempts": 5_000, "backoff": "4s"})
    scene.follow("1")
    scene.batch(failed(TableError("no", table="public.a")))
    store.fail_table("1", "no", fix=None, retry="timed", resume=None, attempts=1_100, next_try=NOW)
    store.recover_table("1")
    scene.batch(failed(TableError("no", table="public.a")))
    assert (scene.table().attempts, scene.table().next_try) == (1_101, NOW + timedelta(hours=1))


@pytest.mark.parametrize("policy", ["manual", "none"])
def test_a_table_whose_policy_is_not_to_be_tried_again_is_not(store: StateStore, policy: str) -> None:
    scene = Scene(store, {"retry": policy})
    scene.follow("1")
    scene.batch(failed(TableError("no", table="public.a")))
    table = scene.table()
    assert (table.retry, table.next_try) == (policy, None)
    # Nothing is kept for a table that only a new copy can bring back.
    assert table.resume == (str(Position(10, 0)) if policy == "manual" else None)


def test_an_error_that_a_retry_cannot_fix_waits_whatever_the_policy(scene: Scene) -> None:
    scene.follow("1")
    scene.batch(failed(SchemaChangedError("other columns", table="public.a")))
    assert (scene.table().retry, scene.table().next_try) == ("manual", None)
    assert "schema_changes" in (scene.table().fix or "")


def test_a_copy_that_failed_or_went_stale_begins_again(scene: Scene) -> None:
    scene.follow("1", "2")
    scene.batch(
        failed(TableError("no", table="public.a"), copying=True),
        failed(StaleCopyError("altered", table="public.b"), "2"),
    )
    assert scene.table("1").resume is scene.table("2").resume is None
    assert scene.table("2").next_try == NOW


def test_a_table_that_nothing_waits_for_does_not_lag(scene: Scene) -> None:
    scene.follow("1")
    scene.passes(10, 50)
    assert scene.reached() == 50
    scene.recorder.waiting(UnavailableError("gone"))
    assert scene.reached() == 50


def test_positions_passed_over_after_a_batch_count_once_that_batch_is_recorded(scene: Scene) -> None:
    scene.follow("1")
    scene.passes(20, 50)
    assert scene.reached() == 10
    scene.place("1", "ready", 20, copy=1)
    scene.batch()
    scene.passes(20, 50)
    assert scene.reached() == 50


def test_positions_passed_over_after_an_earlier_batch_do_not_count(scene: Scene) -> None:
    scene.follow("1")
    scene.place("1", "ready", 30, copy=1)
    scene.batch()
    scene.open()
    scene.passes(10, 50)
    assert scene.reached() == 30


def test_a_table_counts_as_stopped_once_a_batch_left_it_out_for_its_last_failure(scene: Scene) -> None:
    scene.follow("1")
    assert not scene.recorder.is_stopped("1")
    scene.place("1", "ready", 20, copy=1)
    scene.batch(failed(TableError("no", table="public.a")))
    assert not scene.recorder.is_stopped("1")
    scene.place("1", "stopped", 10, copy=1)
    scene.batch()
    assert scene.recorder.is_stopped("1")
    assert scene.open().is_stopped("1")
    assert not scene.recorder.has_freed()

    scene.store.recover_table("1")
    assert scene.recorder.has_freed()
    scene.store.pause_table("1")
    assert not scene.recorder.has_freed()
    scene.store.resume_table("1")
    scene.place("1", "catchup", 20, copy=1)
    scene.recorder.applied(Batch("p", scene.recorder.last_batch + 1), [failed(TableError("again", table="public.a"))])
    assert not scene.recorder.is_stopped("1"), "the batch before left it out for another failure"
    assert scene.table().resume == str(Position(10, 0))


@pytest.mark.parametrize("restarts", [False, True])
def test_nothing_is_released_and_no_position_moves_past_a_failure_before_the_follower_knows_of_it(
    scene: Scene, restarts: bool
) -> None:
    scene.follow("1", "2")
    released = list(scene.source.released)
    scene.place("1", "ready", 20, copy=1)
    scene.place("2", "ready", 20, copy=1)
    number = scene.recorder.last_batch + 1
    scene.recorder.applied(Batch("p", number), [failed(poison(15)), done("2")])
    if restarts:
        scene.open()
    scene.recorder.committed(number, scene.at, 0.1)
    assert scene.source.released == released
    assert scene.table().position == str(Position(10, 0))
    scene.place("1", "stopped", 10, copy=1)
    scene.batch()
    assert scene.source.released[-1] == scene.at
    assert scene.store.dead_letters(status="waiting") != []


def test_a_batch_that_is_done_again_and_goes_well_takes_its_failure_back(scene: Scene) -> None:
    scene.follow("1")
    number = scene.recorder.last_batch + 1
    scene.recorder.applied(Batch("p", number), [failed(TableError("no", table="public.a"))])
    scene.open().applied(Batch("p", number), [done()])
    assert scene.state() is not TableState.ERRORED
    scene.place("1", "ready", 20, copy=1)
    scene.recorder.committed(number, scene.at, 0.1)
    assert (scene.state(), scene.table().attempts) == (TableState.READY, 0)


def test_a_copy_that_fails_again_when_its_batch_is_repeated_still_starts_over(scene: Scene) -> None:
    scene.place("1", "copy", 9, copy=7, chunks_done=1, chunks_total=3)
    scene.batch(copied())
    for _ in range(2):
        scene.open().applied(
            Batch("p", scene.recorder.last_batch + 1), [failed(TableError("no", table="public.a"), copying=True)]
        )
        assert scene.table().resume is None


@pytest.mark.parametrize("resync", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_copy_that_fails_in_the_batch_it_begins_with_stays_in_error(
    scene: Scene, resync: bool, restarts: bool
) -> None:
    request = 0
    if resync:
        scene.follow("1")
        request = scene.store.ask("resync", "public.a").id
    else:
        scene.place("1", "init")
        scene.batch()
    released = list(scene.source.released)
    scene.place("1", "copy", 20, copy=7, request=request, chunks_done=1, chunks_total=3)
    number = scene.recorder.last_batch + 1
    scene.recorder.applied(Batch("p", number), [failed(TableError("no", table="public.a"), copying=True)])
    if restarts:
        scene.open()
    scene.recorder.committed(number, scene.at, 0.1)
    assert (scene.state(), scene.table().reason) == (TableState.ERRORED, "no")
    assert scene.source.released == released


def test_a_copy_that_always_fails_after_its_first_batch_waits_for_an_operator_in_the_end(store: StateStore) -> None:
    scene = Scene(store, {"attempts": 3})
    for attempt, retry in enumerate(["timed", "timed", "manual"], 1):
        scene.place("1", "init")
        scene.batch()
        scene.place("1", "copy", 9, copy=attempt, chunks_done=1, chunks_total=3)
        scene.batch(copied())
        scene.place("1", "copy", 9, copy=attempt, chunks_done=2, chunks_total=3)
        scene.batch(failed(TableError("no", table="public.a"), copying=True))
        assert (scene.state(), scene.table().retry, scene.table().attempts) == (TableState.ERRORED, retry, attempt)
        scene.place("1", "stopped", 9)
        scene.batch()
        store.recover_table("1")
    scene.place("1", "copy", 9, copy=4, chunks_done=1, chunks_total=2)
    scene.batch(copied())
    assert scene.table().attempts == 3
    scene.place("1", "catchup", 9, copy=4, chunks_done=2, chunks_total=2)
    scene.batch(copied())
    assert scene.table().attempts == 0


def test_a_change_that_cannot_be_read_is_a_dead_letter_until_it_is_applied_after_all(scene: Scene) -> None:
    scene.follow("1")
    for tries in (1, 2):
        scene.place("1", "ready", 20, copy=1)
        scene.batch(failed(poison(15)))
        (letter,) = scene.store.dead_letters()
        assert (letter.status, letter.tries, letter.raw) == ("waiting", tries, b"I\0\0")
        scene.place("1", "stopped", 10, copy=1)
        scene.batch()
        assert scene.store.dead_letters(status="waiting") == [letter]
        scene.store.recover_table("1")
    scene.place("1", "catchup", 12, copy=1)
    scene.batch(done())
    assert scene.store.dead_letters(status="waiting") == [letter]
    scene.place("1", "ready", 20, copy=1)
    scene.batch(done())
    assert [one.status for one in scene.store.dead_letters()] == ["resolved"]


def test_a_paused_table_lags_until_it_has_caught_up(scene: Scene) -> None:
    scene.follow("1", "2")
    scene.store.pause_table("1")
    scene.place("1", "stopped", 10, copy=1)
    scene.place("2", "ready", 30, copy=1)
    scene.batch(done("2"))
    assert (scene.state(), scene.state("2")) == (TableState.FINISHED_COPY, TableState.READY)
    scene.store.resume_table("1")
    scene.place("1", "catchup", 20, copy=1, catching_up=True)
    scene.batch(done())
    assert scene.state() is TableState.CATCHUP
    scene.place("1", "ready", 30, copy=1)
    scene.batch(done())
    assert scene.state() is TableState.READY


def test_a_resync_is_finished_when_its_copy_has_begun_and_the_counts_start_from_zero(scene: Scene) -> None:
    scene.follow("1")
    scene.place("1", "ready", 20, copy=1)
    scene.batch(done(changes=5))
    request = scene.store.ask("resync", "public.a")
    scene.batch()
    assert scene.store.open_requests() == [request]
    scene.place("1", "copy", 20, copy=2, request=request.id, chunks_done=1, chunks_total=2)
    scene.batch(copied())
    assert scene.store.open_requests() == []
    assert (scene.state(), scene.table().changes_applied, scene.table().rows_copied) == (TableState.DATA_SYNC, 0, 5)


def test_a_resync_that_began_without_a_chunk_survives_a_kill_before_its_batch_was_reported(store: StateStore) -> None:
    scene = Scene(store, {"retry": "manual"})
    scene.follow("1")
    scene.batch(failed(TableError("no", table="public.a")))
    scene.place("1", "stopped", 10, copy=1)
    scene.batch()
    request = store.ask("resync", "public.a")
    # Other tables used up the batch: the copy has begun and took nothing.
    scene.place("1", "copy", 20, copy=20, request=request.id, chunks_done=0, chunks_total=3)
    number = scene.recorder.last_batch + 1
    scene.recorder.applied(Batch("p", number), [])
    scene.open()
    scene.recorder.committed(number, scene.at, 0.0)
    assert scene.state() is TableState.DATA_SYNC


def test_a_resync_brings_a_table_back_that_is_in_error(scene: Scene) -> None:
    scene.follow("1")
    scene.batch(failed(TableError("no", table="public.a")))
    request = scene.store.ask("resync", "public.a")
    scene.place("1", "copy", 20, copy=2, request=request.id)
    scene.batch(copied())
    assert (scene.state(), scene.table().reason) == (TableState.DATA_SYNC, None)


@pytest.mark.parametrize("batches", [0, 1], ids=["in its first batch", "later"])
def test_a_requested_copy_has_all_its_attempts(store: StateStore, batches: int) -> None:
    scene = Scene(store, {"attempts": 3})
    scene.follow("1")
    for _ in range(3):
        scene.batch(failed(TableError("no", table="public.a")))
        scene.place("1", "stopped", 10, copy=1)
        scene.batch()
        store.recover_table("1")
    request = store.ask("resync", "public.a")
    for attempt, retry in enumerate(["timed", "timed", "manual"], 1):
        for chunk in range(batches):
            scene.place("1", "copy", 20, copy=1 + attempt, request=request.id, chunks_done=1 + chunk, chunks_total=3)
            scene.batch(copied())
        scene.place("1", "copy", 20, copy=1 + attempt, request=request.id, chunks_done=1 + batches, chunks_total=3)
        scene.batch(failed(TableError("no", table="public.a"), copying=True))
        assert (scene.table().retry, scene.table().attempts) == (retry, attempt)
        scene.place("1", "stopped", 20, request=request.id)
        scene.batch()
        assert scene.table().attempts == attempt
        store.recover_table("1")


def test_tables_that_leave_are_forgotten_and_new_or_renamed_ones_are_recorded(scene: Scene) -> None:
    scene.follow("1", "2")

    def named(upstream_id: str, name: str) -> TableSchema:
        return TableSchema(TableName("public", name), (Column("id", pa.int64()),), ("id",), upstream_id=upstream_id)

    scene.store.put_schema(named("3", "new"), START)
    scene.store.put_schema(named("1", "other"), Position(15, 0))
    scene.at.pop("2")
    scene.place("3", "copy", 20, copy=3)
    scene.batch(copied("3"))
    assert [(table.upstream_id, table.name) for table in scene.store.tables()] == [
        ("3", "public.new"),
        ("1", "public.other"),
    ]
    assert scene.state("3") is TableState.DATA_SYNC


def test_tables_that_left_while_the_pipeline_was_down_are_forgotten_at_the_start(scene: Scene) -> None:
    scene.follow("1")
    table = TableSchema(TableName("public", "a"), (Column("id", pa.int64()),), ("id",), upstream_id="1")
    scene.open().open_tables([table])
    assert [known.upstream_id for known in scene.store.tables()] == ["1"]


def test_while_something_is_out_of_reach_the_status_says_so(scene: Scene) -> None:
    assert scene.recorder.note_source() == "streaming"
    scene.recorder.waiting(UnavailableError("out of reach", fix="wait"))
    status = scene.store.source_status()
    assert status is not None
    assert (status.gear, status.journal_bytes, status.error, status.fix) == ("waiting", 7, "out of reach", "wait")


def finding(table: str, message: str = "the role may not read it") -> dict[str, Finding]:
    return {table: Finding("error", table, message, "GRANT …;", table)}


def test_a_finding_stops_its_table_at_the_start_where_it_is_and_the_next_start_retries_it(scene: Scene) -> None:
    scene.follow("1", "2")
    scene.open().stop_tables(finding("public.a"))
    table = scene.table()
    assert (table.state, table.reason, table.fix) == (TableState.ERRORED, "the role may not read it", "GRANT …;")
    assert (table.resume, table.retry) == (str(Position(10, 0)), "timed")
    assert scene.state("2") is TableState.READY
    scene.place("1", "stopped", 10, copy=1)
    scene.batch()
    scene.open().stop_tables(finding("public.a", "another reason"))
    assert scene.table().resume == str(Position(10, 0))
    scene.open().stop_tables({})
    assert scene.state() is TableState.FINISHED_COPY


def test_a_finding_stops_its_table_after_a_batch_that_was_planned_before_the_start(scene: Scene) -> None:
    scene.follow("1", "2")
    scene.place("1", "ready", 20, copy=1)
    scene.open().stop_tables(finding("public.a"), scene.at)
    scene.batch(done())
    assert (scene.state(), scene.table().resume) == (TableState.ERRORED, str(Position(20, 0)))
    scene.place("1", "stopped", 20, copy=1)
    scene.batch()
    assert scene.recorder.is_stopped("1")
    scene.recorder.stop_tables({})
    scene.place("1", "ready", 30, copy=1)
    scene.batch(done())
    assert scene.state() is TableState.READY


def test_a_table_that_is_copied_when_a_finding_stops_it_begins_its_copy_again(scene: Scene) -> None:
    scene.place("1", "copy", 10, copy=1)
    scene.batch(copied())
    scene.open().stop_tables(finding("public.a"))
    assert (scene.state(), scene.table().resume) == (TableState.ERRORED, None)


def test_a_table_that_the_source_cannot_follow_is_in_error_until_it_follows_it(scene: Scene) -> None:
    scene.follow("1", "2")
    scene.open().stop_tables(finding("main.odd", "it has no rowid"))
    odd = next(table for table in scene.store.tables() if table.name == "main.odd")
    assert (odd.state, scene.recorder.is_stopped(odd.upstream_id)) == (TableState.ERRORED, True)
    assert not scene.recorder.has_freed()
    scene.store.add_table("7", "main.odd")
    scene.place("7", "init", 10)
    scene.batch()
    assert [table.upstream_id for table in scene.store.tables() if table.name == "main.odd"] == ["7"]


def test_what_the_source_leaves_out_is_logged_once_and_kept(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    notice = Finding("warning", "publication", "lacks public.c", "ALTER PUBLICATION …;")
    scene.recorder.note_notices([notice])
    scene.recorder.note_notices([notice])
    assert [record.getMessage() for record in caplog.records] == [
        "publication: lacks public.c. Fix: ALTER PUBLICATION …;"
    ]
    assert scene.recorder.status().notices == (notice,)


def test_a_full_journal_names_the_destination_that_it_waits_for(scene: Scene) -> None:
    scene.place("1", "copy", 20, chunks_done=1, chunks_total=9, copy=1)
    scene.batch()
    scene.source.gears.append("full")
    scene.source.slowest.append("pipeline search")
    scene.recorder.note_source()
    assert scene.recorder.waits_for_another()
    source = scene.recorder.status().source
    assert source is not None
    assert "for the destination search" in (source.error or "")
    scene.source.slowest.append("pipeline")
    scene.recorder.note_source()
    assert not scene.recorder.waits_for_another()
    source = scene.recorder.status().source
    assert source is not None
    assert "the copy of" in (source.error or "")


def test_a_full_journal_names_the_table_whose_copy_needs_it_and_the_key_to_raise(scene: Scene) -> None:
    scene.place("1", "ready", 90)
    scene.place("2", "copy", 20, chunks_done=1, chunks_total=9, copy=1)
    scene.batch()
    scene.source.gears.append("full")
    assert scene.recorder.note_source() == "full"
    source = scene.recorder.status().source
    assert source is not None
    assert "the copy of public.b" in (source.error or "")
    assert "journal.max_bytes" in (source.fix or "")
    scene.place("2", "ready", 90, chunks_done=9, chunks_total=9, copy=1)
    scene.batch()
    scene.recorder.note_source()
    source = scene.recorder.status().source
    assert source is not None
    assert "public.b" not in (source.error or "")
    scene.source.gears.append("streaming")
    scene.recorder.note_source()
    source = scene.recorder.status().source
    assert source is not None
    assert source.error is None


def test_rates_and_lags_are_recorded_once_in_a_while(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.follow("1")
    scene.batch(replace(done(), inserts=2, updates=3, deletes=4))
    scene.batch(replace(done(), inserts=1, repeated=True))
    scene.recorder.note_source()
    assert scene.store.samples(NOW) == []
    monkeypatch.setattr("tailrace.stream.progress.SAMPLE_SECONDS", 0.0)
    scene.recorder.note_source()
    [sample] = scene.store.samples(NOW)
    # A batch that is repeated was counted when it was applied.
    assert (sample.counts, sample.journal_bytes) == (ChangeCounts(0, 2, 3, 4), 7)
    assert scene.store.totals() == {"1": ChangeCounts(0, 2, 3, 4)}
    scene.recorder.note_source()
    assert not scene.store.samples(NOW)[-1].counts


def test_a_rate_is_measured_over_some_seconds(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches come in turns: from one second to the next, a table's rate would jump between 0 and a lot."""
    scene.follow("1")
    now = [NOW]
    monkeypatch.setattr("tailrace.state.status._now", lambda: now[0])
    scene.recorder._clock = lambda: now[0]
    rates = []
    for second in range(40):
        now[0] = NOW + timedelta(seconds=second)
        if second % 5 == 0:
            scene.batch(done(changes=50))
        rates.append(scene.recorder.status().tables[0].rows_per_second)
    assert set(rates[15:]) <= {10.0, 100 / 11, 50 / 10}
    assert len(scene.recorder._status._readings) <= 12


def test_the_status_has_the_code_of_the_error_that_stopped_a_table(scene: Scene) -> None:
    scene.follow("1")
    scene.batch(failed(poison(7)))
    scene.open().stop_tables(finding("public.b"))
    assert {table.name: table.code for table in scene.recorder.status().tables} == {
        "public.a": "unfit",
        "public.b": "preflight",
    }
    scene.store.recover_table("1")
    assert scene.recorder.status().tables[0].code is None
