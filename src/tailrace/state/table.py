"""Where each table stands, in SQL. What a move does to a record is in `transition`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime

from tailrace.state.machine import PASSING, TableState, TransitionError, durable
from tailrace.state.record import Retry, TableRecord
from tailrace.state.row import TABLE_COLUMNS, now, write_table
from tailrace.state.session import StateSession, StateTransaction
from tailrace.state.transition import fail, recover, walk

_SAVE = (
    f"INSERT INTO table_state (pipeline, {', '.join(TABLE_COLUMNS)})"  # noqa: S608 - names of columns, all of them ours
    f" VALUES (:pipeline, {', '.join(f':{name}' for name in TABLE_COLUMNS)}) ON CONFLICT (pipeline, upstream_id)"
    f" DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in TABLE_COLUMNS[1:])}"
)


class TableStore:
    """Implements `TableStates` and `TableLifecycle` over a session."""

    _session: StateSession

    def tables(self) -> list[TableRecord]:
        with self._session.lock:
            known = self._session.cache.tables(self._session.read).values()
            # By code points, in whatever order the database would have put the names.
            return sorted(map(self._shown, known), key=lambda table: (table.name, table.upstream_id))

    def table(self, upstream_id: str) -> TableRecord | None:
        with self._session.lock:
            known = self._session.cache.table(self._session.read, upstream_id)
            return self._shown(known) if known else None

    def overlay(self, upstream_id: str, state: TableState | None) -> None:
        if state is not None and state not in PASSING:
            raise TransitionError(f"{state} is stored, not shown over another state; move the table there")
        with self._session.lock:
            if state is None:
                self._session.overlay.pop(upstream_id, None)
            elif self._session.overlay.get(upstream_id, (None,))[0] is not state:
                self._session.overlay[upstream_id] = (state, now())

    def add_table(self, upstream_id: str, name: str) -> TableRecord:
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

    def move_table(self, upstream_id: str, *steps: TableState) -> None:
        with self._session.write() as tx:
            self._save(tx, [walk(self._find(tx, upstream_id), steps, now())])
            self._drop_dead_letters(tx, [upstream_id] if TableState.INIT in steps else [])

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
    ) -> None:
        self._change(
            upstream_id,
            lambda table: fail(
                table, now(), reason, fix=fix, retry=retry, resume=resume, attempts=attempts, next_try=next_try
            ),
        )

    def recover_table(self, upstream_id: str) -> None:
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
        self._change(upstream_id, lambda table: replace(table, paused_at=table.paused_at or now()))

    def resume_table(self, upstream_id: str) -> None:
        self._change(upstream_id, lambda table: replace(table, paused_at=None))

    def reset_table(self, upstream_id: str) -> None:
        with self._session.write() as tx:
            table = self._find(tx, upstream_id)
            if table.state is not TableState.INIT:
                self._save(tx, [walk(table, (TableState.INIT,), now())])
            self._drop_dead_letters(tx, [upstream_id])

    def forget_table(self, upstream_id: str) -> None:
        with self._session.write() as tx:
            for table in ("table_state", "schema_version"):
                tx.run(
                    f"DELETE FROM {table} WHERE pipeline = :pipeline AND upstream_id = :upstream_id",  # noqa: S608
                    upstream_id=upstream_id,
                )
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
