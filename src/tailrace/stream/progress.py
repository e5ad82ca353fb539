"""Keeps the state store in step with the stream: what batches did, where tables stand, what may be released."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from tailrace.advice import advice_for
from tailrace.errors import TailraceError, UnavailableError, revive
from tailrace.model.change import Position
from tailrace.model.schema import TableSchema
from tailrace.option.table import TableOptions
from tailrace.source.follower import Offset, TableProgress
from tailrace.source.source import Source
from tailrace.state import BatchRecord, StateStore, TableRecord, TableState, TableUpdate
from tailrace.state.state_machine import WAY
from tailrace.state.status import PipelineStatus
from tailrace.stream.micro_batch import TableResult
from tailrace.system.backoff import Backoff

EVENT_SECONDS = 10.0
PRUNE_BATCHES = 50
"""How often versions that nobody needs any more are looked for."""
LONGEST_WAIT_SECONDS = 3600.0

_STATE_OF = {
    "init": TableState.INIT,
    "copy": TableState.DATA_SYNC,
    "catchup": TableState.FINISHED_COPY,
    "ready": TableState.READY,
    "stopped": TableState.ERRORED,
}


class ProgressRecorder:
    """`applied` is called when a batch is durable at the destination, `committed` once Spark has logged it."""

    def __init__(
        self,
        store: StateStore,
        source: Source,
        tables: TableOptions,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._clock = clock
        self._store = store
        self._source = source
        self._tables = tables
        self._lock = threading.Lock()
        self._results: dict[int, list[TableResult]] = {}
        self._previous: PipelineStatus | None = None
        self._passed: Sequence[str] | None = None
        last = store.last_batch()
        self.last_batch = last.id if last else -1
        self._first_batch = self.last_batch + 1
        self._failed_in: dict[str, int] = {}
        self._standing: Mapping[str, TableProgress] = _by_id(source.progress(dict(last.offset)) if last else [])

    @property
    def unconfirmed(self) -> bool:
        """Whether a batch was applied whose commit Spark has not yet reported."""
        with self._lock:
            return bool(self._results)

    def is_stopped(self, upstream_id: str) -> bool:
        """Whether a batch is done that was planned in the knowledge of the table's last failure, and leaves it out."""
        standing = self._standing.get(upstream_id)
        heard = self.last_batch > self._failed_in.get(upstream_id, -1)
        return heard and standing is not None and standing.phase == "stopped"

    def has_freed(self) -> bool:
        """Whether a table may go on that the last batch left out: it is to be tried again, or was resumed."""
        return any(
            table.state is not TableState.ERRORED and table.paused_at is None and self.is_stopped(table.upstream_id)
            for table in self._store.tables()
        )

    def open_tables(self, tables: Sequence[TableSchema]) -> None:
        """Make the tables of now known; forget those that left while nobody ran."""
        wanted = {table.upstream_id for table in tables}
        for known in self._store.tables():
            if known.upstream_id not in wanted and known.upstream_id not in self._standing:
                self._store.forget_table(known.upstream_id)
        for table in tables:
            self._store.add_table(table.upstream_id, str(table.table))

    @property
    def level(self) -> Position | None:
        """Up to where the last batch brought every table; None while some of them are behind the others."""
        if not self._standing or any(table.phase != "ready" for table in self._standing.values()):
            return None
        return min(table.position for table in self._standing.values())

    def require_owner(self) -> None:
        """Raises OwnedError when another runner has taken the pipeline over."""
        self._store.require_owner()

    def applied(self, batch_id: int, results: list[TableResult]) -> None:
        """Remember what a batch did. A table that failed in it is stored as such before Spark may go on.

        Called again for a batch that was broken off, it may find that a table did better this time, or worse.
        """
        failed = [result for result in results if result.error is not None]
        if failed:
            self._wait_for_commit(batch_id - 1)
            self._failed_in |= {result.upstream_id: batch_id for result in failed}
            self._fail(failed)
        well = {result.upstream_id for result in results if result.error is None}
        for table in self._store.tables():
            if table.state is TableState.ERRORED and table.upstream_id in well:
                # It failed in this very batch, before: those that are stopped are in none.
                self._store.recover_table(table.upstream_id)
        with self._lock:
            self._results[batch_id] = results

    def _wait_for_commit(self, batch_id: int) -> None:
        # Progress events come a moment late, and a failed table goes on from where the batch before had brought it.
        deadline = time.monotonic() + EVENT_SECONDS
        while self.unconfirmed and self.last_batch < batch_id:
            if time.monotonic() > deadline:
                raise UnavailableError(f"Spark does not say that batch {batch_id} is done; the next one is done again")
            time.sleep(0.01)

    def _fail(self, results: Sequence[TableResult]) -> None:
        for result in results:
            error = revive(result.error or {"kind": "TableError", "message": "it could not be applied"})
            # One that joins with this very batch is not known yet.
            table = self._store.table(result.upstream_id) or self._store.add_table(result.upstream_id, result.table)
            self._fail_table(table, error, copying=result.copying)

    def _fail_table(self, table: TableRecord, error: TailraceError, *, copying: bool) -> None:
        advice, settings = advice_for(type(error)), self._tables.settings_of(table.name).errors
        # The first batch of a copy that somebody asked for begins the series anew.
        attempts = 1 if copying and self._is_asked(table) else table.attempts + 1
        retry = advice.retry if settings.retry == "timed" else settings.retry
        if retry == "timed" and not advice.recopies and attempts >= settings.attempts:
            retry = "manual"
        backoff = Backoff((settings.backoff,), LONGEST_WAIT_SECONDS, factor=2.0)
        wait = 0.0 if advice.recopies else backoff.delay(attempts)
        if error.raw is not None and error.position is not None:
            self._store.put_dead_letter(
                table.upstream_id,
                table.name,
                error.position,
                kind=type(error).__name__,
                reason=error.message,
                fix=error.fix,
                raw=error.raw,
                version=table.version,
            )
        self._store.fail_table(
            table.upstream_id,
            error.message,
            fix=error.fix or advice.text,
            retry=retry,
            resume=None if copying or advice.recopies or retry == "none" else self._reached(table.upstream_id),
            attempts=attempts,
            next_try=self._clock() + timedelta(seconds=wait) if retry == "timed" else None,
        )

    def _is_asked(self, table: TableRecord) -> bool:
        return any(each.kind == "resync" and each.table == table.name for each in self._store.open_requests())

    def _reached(self, upstream_id: str) -> str | None:
        """Where the batch before this one had brought the table."""
        standing = self._standing.get(upstream_id)
        return str(standing.position) if standing is not None else None

    def committed(self, batch_id: int, offset: Offset, seconds: float) -> None:
        """Record the batch and let the upstream forget it. Called again for the same batch it does nothing new."""
        if self._first_batch <= batch_id <= self.last_batch:
            return
        with self._lock:
            told = batch_id in self._results
            results = self._results.get(batch_id, [])
        by_id = {result.upstream_id: result for result in results}
        standing = _by_id(self._source.progress(offset))
        known = self._meet(standing)
        begun = {request.id for request in self._store.open_requests() if request.kind == "resync"}
        begun &= {table.request for table in standing.values()}
        anew = {each for each, now in standing.items() if self._needs_recopy(now, begun)}
        failed = {result.upstream_id for result in results if result.error is not None}
        # Failed in this batch or before a restart: the next offset says where it goes on, and this one must not. A new
        # copy takes an error back, but not that of its own first batch; what a batch did is not known after a restart,
        # but without a chunk it cannot have failed.
        unheard = {
            each
            for each, now in standing.items()
            if each in known
            and known[each].state is TableState.ERRORED
            and now.phase != "stopped"
            and (each not in anew or each in failed or (not told and now.chunks_done > 0))
        }
        anew -= unheard
        updates = [
            _update(
                known[each],
                now,
                by_id.get(each),
                anew=each in anew,
                asked=each in anew and now.request in begun and now.phase != "stopped",
                failed=each in unheard,
            )
            for each, now in standing.items()
            # A table that stays level with the log is where the whole batch is: there is nothing to write for it.
            if each in known
            and not (now.phase == "ready" and known[each].state is TableState.READY and each not in by_id)
        ]
        record = BatchRecord(
            batch_id,
            offset,
            _furthest(standing),
            rows=sum(result.copied + result.changes for result in results),
            seconds=seconds,
            at=self._clock(),
        )
        self._store.apply_batch(record, updates)
        self._resolve_letters(standing)
        for gone in self._standing.keys() - standing.keys():
            self._store.forget_table(gone)
        # One whose table is in error is looked at again with the next batch, which tells whether the copy went on.
        for request in begun - {standing[each].request for each in unheard}:
            self._store.finish_request(request, "the copy has begun")
        self._standing = standing
        self._show_passing(standing)
        if batch_id % PRUNE_BATCHES == 0 and standing and not unheard:
            self._prune(min(table.position for table in standing.values()))
        if not unheard:
            self._source.release(offset)
        self.last_batch = batch_id
        with self._lock:
            self._results = {later: results for later, results in self._results.items() if later > batch_id}

    def _resolve_letters(self, standing: Mapping[str, TableProgress]) -> None:
        """A change that waited and was passed without an error has been applied after all."""
        for letter in self._store.dead_letters(status="waiting"):
            now = standing.get(letter.upstream_id)
            table = self._store.table(letter.upstream_id)
            if now is None or table is None or table.state is TableState.ERRORED:
                continue
            if now.phase in ("catchup", "ready") and str(now.position) >= letter.position:
                self._store.settle_dead_letter(letter.id, "resolved")

    def _meet(self, standing: Mapping[str, TableProgress]) -> dict[str, TableRecord]:
        """The records of the tables, made for those that joined and renamed for those that were."""
        known = {table.upstream_id: table for table in self._store.tables()}
        for upstream_id in standing:
            schema = self._store.schema_at(upstream_id)
            if schema is not None and (upstream_id not in known or known[upstream_id].name != str(schema.table)):
                known[upstream_id] = self._store.add_table(upstream_id, str(schema.table))
        return known

    def _needs_recopy(self, now: TableProgress, begun: set[int]) -> bool:
        """Whether a new copy of the table began with this batch, or waits to begin."""
        before = self._standing.get(now.upstream_id)
        if now.request in begun:
            return True
        return before is not None and (
            before.copy != now.copy or (now.phase == "init" and before.phase not in ("init", "stopped"))
        )

    def _show_passing(self, standing: Mapping[str, TableProgress]) -> None:
        """Between its copy and the log a table waits, then catches up: seen by who looks now, not stored."""
        for upstream_id, now in standing.items():
            passing = None
            if now.phase == "catchup":
                passing = TableState.CATCHUP if now.catching_up else TableState.SYNC_WAIT
            self._store.overlay(upstream_id, passing)

    def _prune(self, upto: Position) -> None:
        kept = [table.upstream_id for table in self._store.tables() if self._pinned(table)]
        self._store.prune_schemas(upto, keep=kept)

    def _pinned(self, table: TableRecord) -> bool:
        # The destination keeps the columns of the copy, which only the version of then can tell.
        return self._tables.settings_of(table.name).schema_changes == "ignore"

    def written(self) -> frozenset[str]:
        """The tables, by upstream id, that hold rows of earlier batches."""
        tables = self._store.tables()
        return frozenset(table.upstream_id for table in tables if table.rows_copied or table.changes_applied)

    def note_source(self) -> str | None:
        """Store what the receiving half says of itself; its gear."""
        passed = self._source.idle_until()
        # The batch after which it was found may be one that is not recorded yet, or no longer the last.
        if passed is not None and passed != self._passed and passed[0] == _furthest(self._standing):
            self._store.pass_over(passed[1])
            self._passed = passed
        status = self._source.status()
        self._store.put_source_status(status)
        return status.gear

    def waiting(self, error: TailraceError) -> None:
        """Something is unavailable: say so in the status until it is over."""
        waits = replace(self._source.status(), gear="waiting", error=error.message, fix=error.fix)
        self._store.put_source_status(waits)

    def status(self) -> PipelineStatus:
        self._previous = PipelineStatus.read(self._store, previous=self._previous)
        return self._previous


def _by_id(standing: Sequence[TableProgress]) -> dict[str, TableProgress]:
    return {table.upstream_id: table for table in standing}


def _furthest(standing: Mapping[str, TableProgress]) -> str | None:
    return str(max(table.position for table in standing.values())) if standing else None


def _update(
    known: TableRecord, now: TableProgress, result: TableResult | None, *, anew: bool, asked: bool, failed: bool
) -> TableUpdate:
    counted = result is not None and not result.repeated and result.error is None
    committed_at = result.committed_at if result is not None else None
    return TableUpdate(
        now.upstream_id,
        steps=_steps(known.state, _STATE_OF[now.phase], anew=anew, behind=now.phase in ("stopped", "catchup")),
        rows_copied=result.copied if counted and result else 0,
        changes_applied=result.changes if counted and result else 0,
        chunks_done=now.chunks_done if anew else max(0, now.chunks_done - known.chunks_done),
        chunks_total=now.chunks_total or None,
        position=str(now.position) if now.phase != "init" and not failed else None,
        last_change_committed_at=datetime.fromtimestamp(committed_at / 1e6, UTC) if committed_at else None,
        asked=asked,
    )


def _steps(start: TableState, end: TableState, *, anew: bool, behind: bool) -> tuple[TableState, ...]:
    """The states on the way; none when the table is there already or further. A new copy begins at Init.

    A Ready table that is `behind` the others, because it is paused or was, goes back.
    """
    if anew and end is not TableState.ERRORED:
        way = WAY[: WAY.index(end) + 1]
        return way[1:] if start is TableState.INIT else way
    if start is TableState.READY and behind:
        return (TableState.FINISHED_COPY,)
    if start == end or TableState.ERRORED in (start, end):
        return ()
    first, last = WAY.index(start), WAY.index(end)
    return WAY[first + 1 : last + 1]
