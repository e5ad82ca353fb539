"""Looks after tables between batches: what operators ask, retries that are due, errors that were held long enough."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from tailrace.selection import TableOptions
from tailrace.state import Request, StateStore, TableRecord, TableState


class Attendant:
    """`tend` is called a few times a second while the pipeline runs. All it does is in the state store, where the
    follower finds it before the next batch."""

    def __init__(
        self, store: StateStore, tables: TableOptions, clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._store = store
        self._tables = tables
        self._clock = clock

    def tend(self, *, is_full: bool = False) -> None:
        """Do what is asked and what is due. With `is_full` the log cannot be kept for stopped tables any longer."""
        for request in self._store.open_requests():
            if request.kind != "resync":  # the follower begins the copy, the ledger sees it begun
                self._store.finish_request(request.id, self._answer(request))
        for table in self._store.tables():
            if table.state is TableState.ERRORED and table.retry == "timed" and self._is_due(table):
                self._store.recover_table(table.upstream_id)
            elif table.resume is not None and (is_full or self._is_held_too_long(table)):
                self._give_up(table, "the journal is full" if is_full else "it was held as long as its policy says")

    def _is_due(self, table: TableRecord) -> bool:
        return table.next_try is None or table.next_try <= self._clock()

    def _is_held_too_long(self, table: TableRecord) -> bool:
        hold = timedelta(seconds=self._tables.settings_of(table.name).errors.hold)
        return table.state is TableState.ERRORED and self._clock() - table.since[TableState.ERRORED] > hold

    def _give_up(self, table: TableRecord, why: str) -> None:
        self._store.fail_table(
            table.upstream_id,
            f"{table.reason}; its part of the log was let go because {why}",
            fix=f"tailrace resync FILE {table.name}",
            retry="none",
            resume=None,
            attempts=table.attempts,
        )

    def _answer(self, request: Request) -> str:
        table = next((one for one in self._store.tables() if one.name == request.table), None)
        if table is None:
            return "the pipeline has no such table any more"
        match request.kind:
            case "pause":
                self._store.pause_table(table.upstream_id)
                return "paused"
            case "resume":
                self._store.resume_table(table.upstream_id)
                return "resumed"
            case "retry":
                return self._retry(table)
            case "skip":
                return self._skip(table, request.argument)
        return "not known here"

    def _retry(self, table: TableRecord) -> str:
        if table.state is not TableState.ERRORED:
            return "it is not in error"
        self._store.recover_table(table.upstream_id)
        return "tried again"

    def _skip(self, table: TableRecord, argument: str | None) -> str:
        """Pass over one dead letter, or over those the table waits for now."""
        waiting = self._store.letters(table.name, "waiting")
        chosen = [letter for letter in waiting if argument is None or letter.id == int(argument)]
        if not chosen:
            return "no change of it waits to be skipped"
        for letter in chosen:
            self._store.settle_letter(letter.id, "skipped")
        if table.state is TableState.ERRORED:
            self._store.recover_table(table.upstream_id)
        return f"skipped {len(chosen)}"
