"""What was applied durably, and what the receiving half says of itself, in SQL."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tailrace.errors import LostError
from tailrace.state.machine import TableState
from tailrace.state.record import BatchRecord, SourceStatus, TableRecord, TableUpdate
from tailrace.state.row import STATUS_COLUMNS, now, read_batch, read_source_status, text_of, write_source_status
from tailrace.state.session import StateTransaction
from tailrace.state.table import TableStore
from tailrace.state.transition import add_up

_KEPT_BATCHES = 1000
_SAVE_STATUS = (
    f"INSERT INTO source_status (pipeline, {', '.join(STATUS_COLUMNS)})"  # noqa: S608 - names of columns, all ours
    f" VALUES (:pipeline, {', '.join(f':{name}' for name in STATUS_COLUMNS)}) ON CONFLICT (pipeline)"
    f" DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in STATUS_COLUMNS)}"
)


class ProgressStore(TableStore):
    """Implements `Progress` over a session: a batch is recorded together with what it did to its tables."""

    def apply_batch(self, batch: BatchRecord, updates: Sequence[TableUpdate] = ()) -> bool:
        offset = json.dumps(batch.offset, sort_keys=True)
        with self._session.write() as tx:
            last = tx.run("SELECT MAX(batch_id) AS id FROM progress WHERE pipeline = :pipeline")[0]["id"]
            if last is not None and batch.id <= last:
                known = tx.run(
                    'SELECT "offset" FROM progress WHERE pipeline = :pipeline AND batch_id = :id', id=batch.id
                )
                if not known or known[0]["offset"] != offset:
                    raise LostError(
                        f"batch {batch.id} comes again with another offset; batch {last} was applied before it",
                        fix="restore the checkpoint that belongs to this state, or move both away and copy again",
                    )
                return False
            tx.run(
                'INSERT INTO progress (pipeline, batch_id, "offset", position, rows, bytes, seconds, at)'
                " VALUES (:pipeline, :id, :offset, :position, :rows, :bytes, :seconds, :at)",
                id=batch.id,
                offset=offset,
                position=batch.position,
                rows=batch.rows,
                bytes=batch.bytes,
                seconds=float(batch.seconds),
                at=text_of(batch.at or now()),
            )
            tx.run(
                "DELETE FROM progress WHERE pipeline = :pipeline AND batch_id <= :oldest",
                oldest=batch.id - _KEPT_BATCHES,
            )
            self._update(tx, updates)
        return True

    def _update(self, tx: StateTransaction, updates: Sequence[TableUpdate]) -> None:
        if len(updates) > 1:
            tx.memory.tables(tx.run)  # one question instead of one for each table
        changed: dict[str, TableRecord] = {}
        for update in updates:
            before = changed.get(update.upstream_id) or self._find(tx, update.upstream_id)
            changed[update.upstream_id] = add_up(before, update, now())
        self._save(tx, changed.values())
        self._drop_dead_letters(tx, [update.upstream_id for update in updates if TableState.INIT in update.steps])

    def last_batch(self) -> BatchRecord | None:
        batches = self.recent_batches(1)
        return batches[0] if batches else None

    def recent_batches(self, count: int) -> list[BatchRecord]:
        rows = self._session.read(
            "SELECT * FROM progress WHERE pipeline = :pipeline ORDER BY batch_id DESC LIMIT :count", count=count
        )
        return [read_batch(row) for row in rows]

    def pass_over(self, position: str) -> None:
        with self._session.write() as tx:
            tx.run(
                "UPDATE progress SET position = :position WHERE pipeline = :pipeline AND position < :position"
                " AND batch_id = (SELECT MAX(batch_id) FROM progress WHERE pipeline = :pipeline)",
                position=position,
            )

    def put_source_status(self, status: SourceStatus) -> None:
        with self._session.write() as tx:
            tx.run(_SAVE_STATUS, **write_source_status(status))

    def source_status(self) -> SourceStatus | None:
        rows = self._session.read("SELECT * FROM source_status WHERE pipeline = :pipeline")
        return read_source_status(rows[0]) if rows else None
