"""Handles tables between batches: operator requests, retries that are due, errors whose hold time has passed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from tailrace.errors import Finding, UnavailableError
from tailrace.option.table import TableOptions
from tailrace.state import OperatorRequest, StateStore, TableRecord, TableState
from tailrace.stream.table_failure import UNFOLLOWED, TableFailures


class Supervisor:
    """`poll` is called a few times a second while the pipeline runs. It changes only the state store, which the
    follower reads before the next batch.

    `is_stopped` tells, by upstream id, whether the follower has taken note that a table failed. A table must not
    resume before that, because it would continue after the changes that failed. `problems_since` returns, by table,
    the errors of a check that began at a time or later; None while it is under way. A table with an error is not
    retried: its record gets that error instead. `fits` tells whether the destination still has what the table
    continues from; if it has not, it stores that as the table's error.
    """

    def __init__(
        self,
        store: StateStore,
        tables: TableOptions,
        is_stopped: Callable[[str], bool],
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        problems_since: Callable[[datetime], Mapping[str, Finding] | None] = lambda at: {},
        fits: Callable[[TableRecord], bool] = lambda table: True,
    ) -> None:
        self._store = store
        self._fits = fits
        self._tables = tables
        self._is_stopped = is_stopped
        self._clock = clock
        self._problems_since = problems_since
        self._failures = TableFailures(store, tables, clock)
        self._is_checking = False

    def poll(self, *, is_full: bool = False) -> bool:
        """Handle open requests and due retries. With `is_full` the log can no longer be kept for stopped tables.

        Returns whether a retry waits for a check that is under way.
        """
        self._is_checking = False
        for request in self._store.open_requests():
            if (outcome := self._answer(request)) is not None:
                self._store.finish_request(request.id, outcome)
        # Of ten thousand tables few are in error or paused.
        for table in self._store.halted_tables():
            if table.state is TableState.ERRORED and table.retry == "timed" and self._is_due(table):
                self._try_again(table, table.next_try or table.entered_at)
            elif is_full and self._is_kept(table):
                self._give_up(table, "the journal is full")
            elif table.resume is not None and self._is_held_too_long(table):
                self._give_up(table, "its hold time has passed")
        return self._is_checking

    def _try_again(self, table: TableRecord, since: datetime) -> str | None:
        """Retry the table, unless a check made since then has an error about it. The outcome; None: it has to wait."""
        found = self._problems_since(since)
        if found is None:
            self._is_checking = True
            return None
        if (problem := found.get(table.name)) is not None:
            self._failures.refuse(table, problem, reached=table.resume)
            return f"not retried: {problem.message}"
        if table.upstream_id.startswith(UNFOLLOWED):
            self._store.forget_table(table.upstream_id)  # the follower finds it, under its own id
        else:
            self._store.recover_table(table.upstream_id)
        return "retried"

    def _is_due(self, table: TableRecord) -> bool:
        return self._is_stopped(table.upstream_id) and (table.next_try is None or table.next_try <= self._clock())

    def _is_kept(self, table: TableRecord) -> bool:
        """Whether the journal keeps a part of the log only for this table."""
        if table.state is TableState.ERRORED:
            return table.resume is not None
        return (
            table.paused_at is not None and table.state is not TableState.INIT and self._is_stopped(table.upstream_id)
        )

    def _is_held_too_long(self, table: TableRecord) -> bool:
        hold = timedelta(seconds=self._tables.settings_of(table.name).errors.hold)
        return table.state is TableState.ERRORED and self._clock() - table.since[TableState.ERRORED] > hold

    def _give_up(self, table: TableRecord, why: str) -> None:
        self._store.fail_table(
            table.upstream_id,
            f"{table.reason or 'it was paused'}; its part of the log was discarded because {why}",
            fix=f"tailrace resync FILE {table.name}",
            retry="none",
            resume=None,
            attempts=table.attempts,
        )

    def _answer(self, request: OperatorRequest) -> str | None:
        """The outcome of the request; None when it has to wait."""
        table = next((one for one in self._store.tables() if one.name == request.table), None)
        if table is None:
            return "the pipeline no longer has this table"
        match request.kind:
            case "resync" if table.upstream_id.startswith(UNFOLLOWED):
                return self._retry(table, request)
            case "resync":
                return None  # the follower starts the copy, and the progress recorder closes the request
            case "pause":
                self._store.pause_table(table.upstream_id)
                return "paused"
            case "resume":
                self._store.resume_table(table.upstream_id)
                return "resumed"
            case "retry":
                return self._retry(table, request)
            case "skip":
                return self._skip(table, request.argument)

    def _retry(self, table: TableRecord, request: OperatorRequest) -> str | None:
        if table.state is not TableState.ERRORED:
            return "the table is not in error"
        if not self._is_stopped(table.upstream_id):
            return None
        try:
            if not self._fits(table):
                return "the table at the destination still does not fit the state"
        except UnavailableError:
            return None
        return self._try_again(table, request.at)

    def _skip(self, table: TableRecord, argument: str | None) -> str | None:
        """Skip one dead letter, or all those that the table waits for now."""
        if table.state is TableState.ERRORED and not self._is_stopped(table.upstream_id):
            return None
        waiting = self._store.dead_letters(table.name, "waiting")
        chosen = [letter for letter in waiting if argument is None or letter.id == int(argument)]
        if not chosen:
            return "the table has no change to skip"
        self._store.skip_dead_letters(table.upstream_id, [letter.id for letter in chosen])
        return f"skipped {len(chosen)}"
