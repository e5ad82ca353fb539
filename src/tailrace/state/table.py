"""Where each table stands: what a move does to its record, and the SQL that keeps it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from tailrace.state.record import TABLE_COLUMNS, Retry, TableRecord, TableUpdate, now, storable, write_table
from tailrace.state.report import drop_failure_code, put_failure_code
from tailrace.state.state_machine import PASSING, TableState, TransitionError, check_move, durable, resumed
from tailrace.state.transaction import StateSession, StateTransaction

# What becomes of a table's record when something happens to the table. Pure: records in, records out.


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
        # A copy that begins again has done nothing for good before it is complete.
        attempts=0 if succeeded and table.state is not TableState.DATA_SYNC else attempts,
    )


_SAVE = (
    f"INSERT INTO table_state (pipeline, {', '.join(TABLE_COLUMNS)})"  # noqa: S608 - names of columns, all of them ours
    f" VALUES (:pipeline, {', '.join(f':{name}' for name in TABLE_COLUMNS)}) ON CONFLICT (pipeline, upstream_id)"
    f" DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in TABLE_COLUMNS[1:])}"
)


class TableStore:
    """Where each table stands, from its discovery to its end. Every move is checked against `machine.TRANSITIONS`.

    Methods that change a table raise TransitionError for one that was never added.
    """

    _session: StateSession

    def tables(self) -> list[TableRecord]:
        """All tables, by name."""
        with self._session.lock:
            known = self._session.cache.tables(self._session.read).values()
            # By code points, in whatever order the database would have put the names.
            return sorted(map(self._shown, known), key=lambda table: (table.name, table.upstream_id))

    def halted_tables(self) -> list[TableRecord]:
        """The tables that are in error or paused, in no order. Of many tables these are few."""
        with self._session.lock:
            return self._session.cache.halted_tables(self._session.read)

    def tables_named(self, names: Collection[str]) -> list[TableRecord]:
        """The tables with these names, in no order."""
        if not names:
            return []
        with self._session.lock:
            return [table for name in names for table in self._session.cache.tables_named(self._session.read, name)]

    def table(self, upstream_id: str) -> TableRecord | None:
        with self._session.lock:
            known = self._session.cache.table(self._session.read, upstream_id)
            return self._shown(known) if known else None

    def overlay(self, upstream_id: str, state: TableState | None) -> None:
        """Show SyncWait or Catchup in this store while the table is stored as FinishedCopy; None ends it."""
        if state is not None and state not in PASSING:
            raise TransitionError(f"{state} is stored, not shown over another state; move the table there")
        with self._session.lock:
            if state is None:
                self._session.overlay.pop(upstream_id, None)
            elif self._session.overlay.get(upstream_id, (None,))[0] is not state:
                self._session.overlay[upstream_id] = (state, now())

    def add_table(self, upstream_id: str, name: str) -> TableRecord:
        """Make a table known, in Init. A repeat changes nothing but the name: here, in its dead letters, and in what is
        asked for it."""
        with self._session.write() as tx:
            known = tx.memory.table(tx.run, upstream_id)
            if known is not None:
                table = replace(self._shown(known), name=name)
            else:
                table = TableRecord(upstream_id, name, TableState.INIT, {TableState.INIT: now()})
                # Its schema may have been stored before it was added.
                versions = tx.memory.versions(tx.run, upstream_id)
                table = replace(table, version=versions[-1][1] if versions else None)
            if known is None or known.name != name:
                self._save(tx, [table])
                tx.run(
                    'UPDATE dead_letter SET "table" = :name WHERE pipeline = :pipeline AND upstream_id = :upstream_id',
                    name=name,
                    upstream_id=upstream_id,
                )
            if known is not None and known.name != name:
                tx.run(
                    'UPDATE request SET "table" = :name'
                    ' WHERE pipeline = :pipeline AND "table" = :before AND done_at IS NULL',
                    name=name,
                    before=known.name,
                )
        return table

    def fail_table(
        self,
        upstream_id: str,
        reason: str,
        *,
        fix: str | None = None,
        retry: Retry = "manual",
        resume: str | None = None,
        attempts: int | None = None,
        next_try: datetime | None = None,
        code: str | None = None,
    ) -> None:
        """Errored, with what people need to know. `resume` is the position where the table goes on after the fix.

        `attempts` is how often it failed since its last success (None: as before), `next_try` when to try again, `code`
        that of the error (None: as before).
        """
        with self._session.write() as tx:
            before = self._find(tx, upstream_id)
            after = fail(
                before, now(), reason, fix=fix, retry=retry, resume=resume, attempts=attempts, next_try=next_try
            )
            if after != before:
                self._save(tx, [after])
            if code is not None:
                put_failure_code(tx, upstream_id, code)

    def recover_table(self, upstream_id: str) -> None:
        """From Errored back to the state it failed in, or to FinishedCopy from a later one: it has to catch up.

        `attempts` stays until a batch of the table succeeds. A table that is not errored stays as it is.
        """
        with self._session.write() as tx:
            self._recover(tx, upstream_id)

    def skip_dead_letters(self, upstream_id: str, letter_ids: Sequence[int]) -> None:
        """Pass over these changes, and go on if the table is in error: both or neither."""
        with self._session.write() as tx:
            tx.run_many(
                "UPDATE dead_letter SET status = 'skipped' WHERE pipeline = :pipeline AND id = :id",
                [{"id": letter_id} for letter_id in letter_ids],
            )
            self._recover(tx, upstream_id)

    def _recover(self, tx: StateTransaction, upstream_id: str) -> None:
        before = self._find(tx, upstream_id)
        after = recover(before, now())
        if after != before:
            self._save(tx, [after])
            self._drop_dead_letters(tx, [upstream_id] if after.state is TableState.INIT else [])

    def pause_table(self, upstream_id: str) -> None:
        """Set `paused_at`; the state stays. A repeat changes nothing."""
        self._change(upstream_id, lambda table: replace(table, paused_at=table.paused_at or now()))

    def resume_table(self, upstream_id: str) -> None:
        """Clear `paused_at`. A repeat changes nothing."""
        self._change(upstream_id, lambda table: replace(table, paused_at=None))

    def forget_table(self, upstream_id: str) -> None:
        """Drop a table that is gone, with its versions and waiting dead letters. A repeat changes nothing."""
        with self._session.write() as tx:
            for table in ("table_state", "schema_version", "held_batch", "activity"):
                tx.run(
                    f"DELETE FROM {table} WHERE pipeline = :pipeline AND upstream_id = :upstream_id",  # noqa: S608
                    upstream_id=upstream_id,
                )
            drop_failure_code(tx, upstream_id)
            self._drop_dead_letters(tx, [upstream_id])
            tx.then(lambda: tx.memory.drop_table(upstream_id))
            tx.then(lambda: self.overlay(upstream_id, None))

    def _change(self, upstream_id: str, change: Callable[[TableRecord], TableRecord]) -> None:
        with self._session.write() as tx:
            before = self._find(tx, upstream_id)
            after = change(before)
            if after != before:
                self._save(tx, [after])

    def _find(self, tx: StateTransaction, upstream_id: str) -> TableRecord:
        found = tx.memory.table(tx.run, upstream_id)
        if found is None:
            raise TransitionError(f"table {upstream_id} is not known; add_table comes first")
        return self._shown(found)

    def _shown(self, table: TableRecord) -> TableRecord:
        passing = self._session.overlay.get(table.upstream_id)
        if passing is None or table.state is not TableState.FINISHED_COPY:
            return table
        state, at = passing
        return replace(table, state=state, since={**table.since, state: at})

    def _save(self, tx: StateTransaction, tables: Iterable[TableRecord]) -> None:
        """Store the records; a state that only passes stays in memory, and shows over the stored one."""
        tables = list(tables)
        stored = [replace(table, state=durable(table.state)) for table in tables]
        tx.run_many(_SAVE, [write_table(table) for table in stored])

        def remember() -> None:
            for table, kept in zip(tables, stored, strict=True):
                tx.memory.put_table(kept)
                self.overlay(table.upstream_id, table.state if table.state in PASSING else None)

        tx.then(remember)

    def _drop_dead_letters(self, tx: StateTransaction, upstream_ids: Sequence[str]) -> None:
        # What waited belongs to a copy that is thrown away: the new one holds the rows as they are.
        tx.run_many(
            "DELETE FROM dead_letter WHERE pipeline = :pipeline AND upstream_id = :upstream_id AND status = 'waiting'",
            [{"upstream_id": upstream_id} for upstream_id in upstream_ids],
        )
