"""Keeps the state store in step with the stream: what batches did, where tables stand, what may be released."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tailrace.errors import TailraceError
from tailrace.schema import TableSchema
from tailrace.source import Offset, Source, TableProgress
from tailrace.state import BatchRecord, SourceStatus, StateStore, TableRecord, TableState, TableUpdate
from tailrace.state.machine import WAY
from tailrace.status import Status
from tailrace.stream.microbatch import Result

EVENT_SECONDS = 10.0

_STATE_OF = {
    "copy": TableState.DATA_SYNC,
    "catchup": TableState.FINISHED_COPY,
    "ready": TableState.READY,
    "stopped": TableState.ERRORED,
}


class Ledger:
    """`applied` is called when a batch is durable at the destination, `committed` once Spark has logged it."""

    def __init__(self, store: StateStore, source: Source) -> None:
        self._store = store
        self._source = source
        self._lock = threading.Lock()
        self._results: dict[int, list[Result]] = {}
        self._previous: Status | None = None
        last = store.last_batch()
        self.last_batch = last.id if last else -1

    @property
    def unconfirmed(self) -> bool:
        """Whether a batch was applied whose commit Spark has not yet reported."""
        with self._lock:
            return bool(self._results)

    def open_tables(self, tables: Sequence[TableSchema]) -> None:
        """Make the tables known, with their schema as it is now."""
        from tailrace.change import START

        for table in tables:
            self._store.add_table(table.upstream_id, str(table.table))
            self._store.put_schema(table, START)

    def require_owner(self) -> None:
        """Raises OwnedError when another runner has taken the pipeline over."""
        self._store.require_owner()

    def applied(self, batch_id: int, results: list[Result]) -> None:
        """Remember what a batch did. A table that failed in it is stored as such before Spark may go on."""
        failed = [result for result in results if result.error is not None]
        if failed:
            self._wait_for_commit(batch_id - 1)
            self._fail(failed)
        with self._lock:
            self._results[batch_id] = results

    def _wait_for_commit(self, batch_id: int) -> None:
        # Progress events come a moment late, and a failed table goes on from where the batch before had brought it.
        deadline = time.monotonic() + EVENT_SECONDS
        while self.unconfirmed and self.last_batch < batch_id and time.monotonic() < deadline:
            time.sleep(0.01)

    def _fail(self, results: Sequence[Result]) -> None:
        known = {table.name: table for table in self._store.tables()}
        for result in results:
            table, error = known[result.table], result.error or {}
            copying = table.state in (TableState.INIT, TableState.DATA_SYNC)
            self._store.fail_table(
                table.upstream_id,
                error.get("message", "it could not be applied"),
                fix=error.get("fix"),
                resume=None if copying else table.position,
            )

    def committed(self, batch_id: int, offset: Offset, seconds: float) -> None:
        """Record the batch and let the upstream forget it. Called again for the same batch it does nothing new."""
        with self._lock:
            results = self._results.pop(batch_id, [])
        by_id = {result.upstream_id: result for result in results}
        known = {table.upstream_id: table for table in self._store.tables()}
        standing = self._source.progress(offset)
        begun = {request.id for request in self._store.open_requests()} & {table.request for table in standing}
        updates = [
            _update(known[table.upstream_id], table, by_id.get(table.upstream_id), anew=table.request in begun)
            for table in standing
            if table.upstream_id in known
        ]
        record = BatchRecord(
            batch_id,
            offset,
            str(max((table.position for table in standing), default=None) or "") or None,
            rows=sum(result.copied + result.changes for result in results),
            seconds=seconds,
            at=datetime.now(UTC),
        )
        self._store.apply_batch(record, updates)
        for request in begun:
            self._store.finish_request(request)
        self._source.release(offset)
        self.last_batch = batch_id

    def note_source(self) -> None:
        self._store.put_source_status(SourceStatus(**self._source.status()))

    def waiting(self, error: TailraceError) -> None:
        """Something is unavailable: say so in the status until it is over."""
        status: dict[str, Any] = {**self._source.status(), "gear": "waiting", "error": error.message, "fix": error.fix}
        self._store.put_source_status(SourceStatus(**status))

    def status(self) -> Status:
        self._previous = Status.read(self._store, previous=self._previous)
        return self._previous


def _update(known: TableRecord, now: TableProgress, result: Result | None, *, anew: bool) -> TableUpdate:
    counted = result is not None and not result.repeated and result.error is None
    committed_at = result.committed_at if result is not None else None
    return TableUpdate(
        now.upstream_id,
        steps=_steps(known.state, _STATE_OF[now.phase], anew=anew),
        rows_copied=result.copied if counted and result else 0,
        changes_applied=result.changes if counted and result else 0,
        chunks_done=now.chunks_done if anew else max(0, now.chunks_done - known.chunks_done),
        chunks_total=now.chunks_total or None,
        position=str(now.position),
        last_change_committed_at=datetime.fromtimestamp(committed_at / 1e6, UTC) if committed_at else None,
    )


def _steps(start: TableState, end: TableState, *, anew: bool) -> tuple[TableState, ...]:
    """The states on the way; none when the table is there already or further. A new copy begins at Init."""
    if anew:
        return WAY[: WAY.index(end) + 1] if end is not TableState.ERRORED else ()
    if start == end or TableState.ERRORED in (start, end):
        return ()
    first, last = WAY.index(start), WAY.index(end)
    return WAY[first + 1 : last + 1]
