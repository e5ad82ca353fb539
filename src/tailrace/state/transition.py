"""What becomes of a table's record when something happens to the table. Pure: records in, records out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from tailrace.state.machine import TableState, check_move, resumed
from tailrace.state.record import Retry, TableRecord, TableUpdate
from tailrace.state.row import storable


def walk(table: TableRecord, steps: Sequence[TableState], at: datetime) -> TableRecord:
    """The table after all steps. Raises TransitionError for one that is not allowed."""
    for step in steps:
        check_move(table.state, step)
        table = _restart(table) if step is TableState.INIT else table
        table = replace(table, state=step, since={**table.since, step: at})
    if steps and table.state is not TableState.ERRORED:
        table = replace(table, reason=None, fix=None, retry=None, next_try=None, resume=None, failed_in=None)
    return table


def _restart(table: TableRecord) -> TableRecord:
    # A copy from nothing: what was counted begins again, and so do the times of its states.
    return TableRecord(
        table.upstream_id,
        table.name,
        table.state,
        {},
        paused_at=table.paused_at,
        last_applied_at=table.last_applied_at,
        version=table.version,
    )


def fail(
    table: TableRecord,
    at: datetime,
    reason: str,
    *,
    fix: str | None,
    retry: Retry,
    resume: str | None,
    attempts: int | None,
    next_try: datetime | None,
) -> TableRecord:
    """Errored; a table that is so already keeps the state it goes back to."""
    failed_in = table.failed_in
    if table.state is not TableState.ERRORED:
        failed_in = resumed(table.state)
        table = walk(table, (TableState.ERRORED,), at)
    return replace(
        table,
        reason=storable(reason),
        fix=storable(fix) if fix else fix,
        retry=retry,
        resume=resume,
        attempts=table.attempts if attempts is None else attempts,
        next_try=next_try,
        failed_in=failed_in,
    )


def recover(table: TableRecord, at: datetime) -> TableRecord:
    """Back where it goes on, `failed_in`; a table that is not errored stays as it is."""
    if table.state is not TableState.ERRORED:
        return table
    recovered = walk(table, (table.failed_in or TableState.INIT,), at)
    # Only a success ends the series of failures.
    return replace(recovered, attempts=table.attempts)


def add_up(table: TableRecord, update: TableUpdate, at: datetime) -> TableRecord:
    """The table after a batch."""
    attempts = 0 if update.asked else table.attempts
    table = walk(table, update.steps, at)
    succeeded = bool(update.rows_copied or update.changes_applied)
    return replace(
        table,
        rows_copied=table.rows_copied + update.rows_copied,
        rows_total=table.rows_total if update.rows_total is None else update.rows_total,
        chunks_done=table.chunks_done + update.chunks_done,
        chunks_total=table.chunks_total if update.chunks_total is None else update.chunks_total,
        changes_applied=table.changes_applied + update.changes_applied,
        position=update.position or table.position,
        last_change_committed_at=update.last_change_committed_at or table.last_change_committed_at,
        last_applied_at=at if succeeded else table.last_applied_at,
        # A copy that begins anew has done nothing for good before it is complete.
        attempts=0 if succeeded and table.state is not TableState.DATA_SYNC else attempts,
    )
