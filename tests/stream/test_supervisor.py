"""What is done between batches about tables that wait, on a store of its own and with a clock that is set."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tailrace.errors import Finding, TailraceError
from tailrace.option.table import TableOptions
from tailrace.state import SqliteStore, StateStore, TableRecord, TableState
from tailrace.state.record import RequestKind
from tailrace.state.state_machine import WAY
from tailrace.stream.supervisor import Supervisor
from tailrace.stream.table_failure import UNFOLLOWED
from tailrace.testing.standing import move

HOLD = timedelta(hours=24)
RESUME = "0" * 31 + "5"


class Scene:
    """A store with the tables a and b, both Ready, their supervisor, and the failures that the follower knows of."""

    def __init__(self, store: StateStore) -> None:
        self.store = store
        self.now = datetime.now(UTC)
        self.stopped: set[str] = {"1", "2"}
        self.problems: dict[str, Finding] | None = {}
        self.supervisor = Supervisor(
            store, TableOptions(), self.stopped.__contains__, lambda: self.now, lambda at: self.problems
        )
        for upstream_id, name in (("1", "public.a"), ("2", "public.b")):
            store.add_table(upstream_id, name)
            move(store, upstream_id, *WAY[1:])

    def fail(self, upstream_id: str = "1", *, retry: str = "timed", wait_seconds: float = 5.0) -> None:
        self.store.fail_table(
            upstream_id,
            "no",
            retry=retry,  # type: ignore[arg-type]
            resume=RESUME,
            attempts=1,
            next_try=self.now + timedelta(seconds=wait_seconds) if retry == "timed" else None,
        )

    def ask(self, kind: RequestKind, table: str = "public.a", argument: str | None = None) -> str | None:
        """Make a request, let the supervisor poll once, and return the outcome."""
        request = self.store.ask(kind, table, argument)
        self.supervisor.poll()
        done = self.store.request(request.id)
        assert done is not None
        return done.outcome

    def table(self, upstream_id: str = "1") -> TableRecord:
        table = self.store.table(upstream_id)
        assert table is not None
        return table

    def state(self, upstream_id: str = "1") -> TableState:
        return self.table(upstream_id).state


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with SqliteStore("shop", tmp_path).open() as store:
        store.claim_run()
        yield Scene(store)


def test_a_table_is_tried_again_when_its_time_has_come_and_not_before(scene: Scene) -> None:
    scene.fail(wait_seconds=5)
    scene.supervisor.poll()
    assert scene.state() is TableState.ERRORED
    scene.now += timedelta(seconds=5)
    scene.supervisor.poll()
    assert scene.state() is TableState.FINISHED_COPY
    assert scene.table().attempts == 1
    assert scene.state("2") is TableState.READY


def test_tables_that_go_on_are_not_looked_at(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.fail(wait_seconds=0)
    monkeypatch.setattr(scene.store, "tables", None, raising=False)
    scene.supervisor.poll(is_full=True)
    assert scene.state() is TableState.FINISHED_COPY


@pytest.mark.parametrize("retry", ["manual", "none"])
def test_a_table_that_waits_for_an_operator_is_not_retried_by_itself(scene: Scene, retry: str) -> None:
    scene.fail(retry=retry)
    scene.now += HOLD / 2
    scene.supervisor.poll()
    assert (scene.state(), scene.table().resume) == (TableState.ERRORED, RESUME)


@pytest.mark.parametrize("way", ["by itself", "when asked", "by a skip"])
def test_nothing_lets_a_table_continue_before_the_follower_knows_that_it_failed(scene: Scene, way: str) -> None:
    scene.stopped.clear()
    scene.fail(wait_seconds=0, retry="timed" if way == "by itself" else "manual")
    scene.store.put_dead_letter("1", "public.a", RESUME, kind="UnfitError", reason="no")
    if way != "by itself":
        assert scene.ask("retry" if way == "when asked" else "skip") is None
    scene.supervisor.poll()
    assert scene.state() is TableState.ERRORED
    assert scene.store.skips() == {}

    scene.stopped.add("1")
    scene.supervisor.poll()
    assert scene.state() is TableState.FINISHED_COPY
    assert scene.store.open_requests() == []


def test_the_log_of_a_table_in_error_is_let_go_when_its_policy_says_so(scene: Scene) -> None:
    scene.fail(retry="manual")
    scene.now += HOLD
    scene.supervisor.poll()
    assert scene.table().resume == RESUME
    scene.now += timedelta(minutes=1)
    for _ in range(2):
        scene.supervisor.poll()
        table = scene.table()
        assert (table.state, table.resume, table.retry) == (TableState.ERRORED, None, "none")
        assert table.reason == "no; its part of the log was discarded because its hold time has passed"
        assert table.fix == "tailrace resync FILE public.a"


def test_a_full_journal_lets_go_of_tables_that_stand_still_and_of_no_other(scene: Scene) -> None:
    scene.store.add_table("3", "public.c")
    move(scene.store, "3", *WAY[1:])
    scene.fail("1", retry="manual")
    scene.ask("pause", "public.b")
    scene.supervisor.poll(is_full=True)
    for upstream_id, reason in (("1", "no"), ("2", "it was paused")):
        table = scene.table(upstream_id)
        assert (table.state, table.resume, table.retry) == (TableState.ERRORED, None, "none")
        assert table.reason == f"{reason}; its part of the log was discarded because the journal is full"
    assert scene.state("3") is TableState.READY


def test_pause_and_resume_are_done_and_reported(scene: Scene) -> None:
    assert scene.ask("pause") == "paused"
    assert scene.table().paused_at is not None
    assert scene.table("2").paused_at is None
    assert scene.ask("resume") == "resumed"
    assert scene.table().paused_at is None


def test_a_retry_reports_whether_there_was_anything_to_retry(scene: Scene) -> None:
    assert scene.ask("retry") == "the table is not in error"
    scene.fail(retry="manual")
    assert scene.ask("retry") == "retried"
    assert scene.state() is TableState.FINISHED_COPY
    assert scene.ask("retry", "public.gone") == "the pipeline no longer has this table"


def test_a_skip_leaves_out_all_dead_letters_of_a_table_or_one_of_them(scene: Scene) -> None:
    assert scene.ask("skip") == "the table has no change to skip"
    scene.fail(retry="manual")
    first, second, third = (
        scene.store.put_dead_letter("1", "public.a", f"{number:032}", kind="UnfitError", reason="no").id
        for number in (6, 7, 8)
    )
    assert scene.ask("skip", argument=str(second)) == "skipped 1"
    assert scene.state() is TableState.FINISHED_COPY
    assert scene.store.skips() == {"1": [f"{7:032}"]}
    assert scene.ask("skip", argument=str(second)) == "the table has no change to skip"
    assert scene.ask("skip") == "skipped 2"
    assert [letter.id for letter in scene.store.dead_letters(status="skipped")] == [first, second, third]


def test_a_skip_that_is_broken_off_has_done_nothing_and_is_done_the_next_time(scene: Scene, tmp_path: Path) -> None:
    scene.store.put_dead_letter("1", "public.a", RESUME, kind="UnfitError", reason="no")
    scene.fail(retry="manual")
    request = scene.store.ask("skip", "public.a")
    with closing(sqlite3.connect(tmp_path / "state.db", isolation_level=None)) as file:
        file.execute("CREATE TRIGGER broken BEFORE UPDATE ON table_state BEGIN SELECT RAISE(ABORT, 'broken off'); END")
        with pytest.raises(TailraceError, match="broken off"):
            scene.supervisor.poll()
        file.execute("DROP TRIGGER broken")
    assert (scene.state(), scene.store.skips()) == (TableState.ERRORED, {})
    scene.supervisor.poll()
    done = scene.store.request(request.id)
    assert done is not None
    assert (scene.state(), done.outcome) == (TableState.FINISHED_COPY, "skipped 1")


def test_a_skip_that_leads_to_a_new_copy_leaves_no_other_change_waiting(scene: Scene) -> None:
    move(scene.store, "1", TableState.INIT)
    scene.fail(retry="manual")
    first, _ = (
        scene.store.put_dead_letter("1", "public.a", f"{number:032}", kind="UnfitError", reason="no").id
        for number in (6, 7)
    )
    assert scene.ask("skip", argument=str(first)) == "skipped 1"
    assert scene.state() is TableState.INIT
    assert [(letter.id, letter.status) for letter in scene.store.dead_letters()] == [(first, "skipped")]


def test_a_resync_is_left_to_the_follower(scene: Scene) -> None:
    scene.fail(retry="none")
    assert scene.ask("resync") is None
    assert scene.state() is TableState.ERRORED
    assert [request.kind for request in scene.store.open_requests()] == ["resync"]


def test_a_resync_of_a_table_that_is_gone_is_answered(scene: Scene) -> None:
    scene.store.forget_table("1")
    assert scene.ask("resync") == "the pipeline no longer has this table"
    assert scene.store.open_requests() == []


def test_the_dead_letters_of_a_table_that_was_renamed_can_be_skipped(scene: Scene) -> None:
    scene.fail(retry="manual")
    scene.store.put_dead_letter("1", "public.a", RESUME, kind="UnfitError", reason="no")
    scene.store.add_table("1", "public.renamed")
    assert scene.ask("skip", "public.renamed") == "skipped 1"
    assert scene.state() is TableState.FINISHED_COPY


def test_what_was_asked_for_a_table_before_it_was_renamed_still_waits_for_it(scene: Scene) -> None:
    request = scene.store.ask("resync", "public.a")
    scene.store.add_table("3", "public.a")
    scene.store.add_table("1", "public.renamed")
    scene.supervisor.poll()
    assert [(each.id, each.table) for each in scene.store.open_requests()] == [(request.id, "public.renamed")]


def test_a_table_is_retried_only_after_a_check_that_has_nothing_against_it(scene: Scene) -> None:
    scene.fail(wait_seconds=0)
    scene.problems = None
    assert scene.supervisor.poll()
    assert scene.state() is TableState.ERRORED
    scene.problems = {"public.a": Finding("error", "public.a", "the role may not read it", "GRANT …;", "public.a")}
    assert not scene.supervisor.poll()
    table = scene.table()
    assert (table.state, table.reason, table.fix) == (TableState.ERRORED, "the role may not read it", "GRANT …;")
    assert (table.attempts, table.resume, table.retry) == (2, RESUME, "timed")
    assert table.next_try is not None
    assert table.next_try > scene.now
    scene.problems = {}
    scene.now = table.next_try
    scene.supervisor.poll()
    assert scene.state() is TableState.FINISHED_COPY


def test_a_retry_that_is_asked_for_says_what_the_check_has_against_it(scene: Scene) -> None:
    scene.fail(retry="manual")
    scene.problems = {"public.a": Finding("error", "public.a", "the role may not read it", None, "public.a")}
    assert scene.ask("retry") == "not retried: the role may not read it"
    scene.problems = {}
    assert scene.ask("retry") == "retried"


@pytest.mark.parametrize("kind", ["retry", "resync"])
def test_a_table_that_the_source_could_not_follow_is_left_to_it_once_nothing_is_wrong(
    scene: Scene, kind: RequestKind
) -> None:
    scene.store.add_table(f"{UNFOLLOWED}public.c", "public.c")
    scene.stopped.add(f"{UNFOLLOWED}public.c")
    scene.store.fail_table(f"{UNFOLLOWED}public.c", "it has no rowid")
    assert scene.ask(kind, "public.c") == "retried"
    assert scene.store.table(f"{UNFOLLOWED}public.c") is None
