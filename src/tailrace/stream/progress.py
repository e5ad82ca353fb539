"""Records the stream's progress in the state store: results of batches, states of tables, what may be released."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime

from tailrace.destination import Batch
from tailrace.errors import Finding, TableError, TailraceError, UnavailableError, revive
from tailrace.model.change import Position
from tailrace.model.delivery_status import DeliveryStatus
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableSchema
from tailrace.option.table import TableOptions
from tailrace.source.follower import Offset, TableProgress
from tailrace.source.source import Source, name_reader
from tailrace.state import BatchRecord, SourceStatus, StateStore, TableRecord, TableState, TableUpdate
from tailrace.state.applied import WHOLE
from tailrace.state.record import ChangeCounts
from tailrace.state.state_machine import WAY
from tailrace.state.status import PipelineStatus, StatusReader, take_sample
from tailrace.stream.micro_batch import KnownTables, TableResult
from tailrace.stream.table_failure import UNFOLLOWED, TableFailures

_log = logging.getLogger(__name__)

EVENT_SECONDS = 10.0
SAMPLE_SECONDS = 10.0
"""How often rates and lags are recorded."""
PRUNE_BATCHES = 50
"""Schema versions that are no longer needed are removed once in this number of batches."""

_STATE_OF = {
    "init": TableState.INIT,
    "copy": TableState.DATA_SYNC,
    "catchup": TableState.FINISHED_COPY,
    "ready": TableState.READY,
    "stopped": TableState.ERRORED,
}


class ProgressRecorder:
    """Records batches: `applied` when a batch is durable at the destination, `committed` once Spark has logged it."""

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
        self._failures = TableFailures(store, tables, clock)
        self._lock = threading.Lock()
        self._results: dict[int, list[TableResult]] = {}
        self._status = StatusReader()
        self._counts = ChangeCounts()
        self._sampled_at = time.monotonic()
        self._passed: Sequence[str] | None = None
        last = store.last_batch()
        self.last_batch = last.id if last else -1
        self._first_batch = self.last_batch + 1
        self._failed_in: dict[str, int] = {}
        self._held = store.held_batches()
        self._refused: set[str] = set()
        self._progress: Mapping[str, TableProgress] = _by_id(source.progress(dict(last.offset)) if last else [])

    @property
    def unconfirmed(self) -> bool:
        """Whether a batch was applied but Spark has not reported its commit yet."""
        with self._lock:
            return bool(self._results)

    def is_stopped(self, upstream_id: str) -> bool:
        """Whether a batch has been committed that was planned after the table's last failure and leaves it out.

        A table that the source cannot follow is in no batch at all.
        """
        if upstream_id.startswith(UNFOLLOWED):
            return True
        progress = self._progress.get(upstream_id)
        is_known = self.last_batch > self._failed_in.get(upstream_id, -1)
        return is_known and progress is not None and progress.phase == "stopped"

    def has_freed(self) -> bool:
        """Whether a table that the last batch left out may continue, because it is retried or was resumed."""
        return any(
            table.state is not TableState.ERRORED and table.paused_at is None and self.is_stopped(table.upstream_id)
            for table in self._store.tables()
            if not table.upstream_id.startswith(UNFOLLOWED)
        )

    def open_tables(self, tables: Sequence[TableSchema]) -> None:
        """Add the current tables to the store, and remove those that went away while the pipeline was stopped."""
        wanted = {table.upstream_id for table in tables}
        for known in self._store.tables():
            if known.upstream_id not in wanted and known.upstream_id not in self._progress:
                self._store.forget_table(known.upstream_id)
        for table in tables:
            self._store.add_table(table.upstream_id, str(table.table))

    def stop_tables(self, found: Mapping[str, Finding], planned: Offset | None = None) -> None:
        """Before the first batch: stop the tables that a check found an error about, and retry others that are due to
        be retried at some later time.

        `planned` is where a batch ends that was planned before the start. It is repeated first, with all its tables, so
        a table that is stopped now continues after it.
        """
        progress = self._progress if planned is None else _by_id(self._source.progress(planned))
        known = {table.name: table for table in self._store.tables()}
        for name, finding in found.items():
            table = known.get(name) or self._store.add_table(f"{UNFOLLOWED}{name}", name)
            if table.state is not TableState.ERRORED:
                _log.warning("%s is stopped: %s", name, finding.message)
                self._failures.refuse(table, finding, reached=_resumable(progress.get(table.upstream_id)))
                self._refused.add(table.upstream_id)
        for name, table in known.items():
            if table.retry == "timed" and name not in found and self.is_stopped(table.upstream_id):
                self._store.recover_table(table.upstream_id)

    @property
    def level(self) -> Position | None:
        """The position that every table reached with the last batch; None while some tables lag."""
        if not self._progress or any(table.phase != "ready" for table in self._progress.values()):
            return None
        return min(table.position for table in self._progress.values())

    def require_owner(self) -> None:
        """Raise OwnedError when another runner has taken over the pipeline."""
        self._store.require_owner()

    def applied(self, batch: Batch, results: list[TableResult], whole: LastBatch | None = None) -> None:
        """Keep the results of a batch, and store what the destination holds now, before Spark continues: `whole` is
        its last batch if it stores batches as a whole. A table that failed in it is stored as failed.

        When an interrupted batch is repeated, this is called again, and a table's result may differ from the first.
        """
        batch_id = batch.id
        failed = [result for result in results if result.error is not None]
        if failed:
            self._wait_for_commit(batch_id - 1)
            self._failed_in |= {result.upstream_id: batch_id for result in failed}
            self._fail(failed)
        succeeded = {result.upstream_id for result in results if result.error is None} - self._refused
        for table in self._store.tables():
            if table.state is TableState.ERRORED and table.upstream_id in succeeded:
                # It failed in an earlier attempt of this same batch: stopped tables are in no batch.
                self._store.recover_table(table.upstream_id)
        held = {each.upstream_id: replace(each.last, table=each.table) for each in results if each.last is not None}
        held |= {WHOLE: whole} if whole is not None else {}
        news = {each: last for each, last in held.items() if self._held.get(each) != last}
        self._store.record_applied(batch.last, news)
        self._held |= news
        with self._lock:
            self._results[batch_id] = results

    def _wait_for_commit(self, batch_id: int) -> None:
        # Spark's progress events come with a delay, and a failed table resumes at the position of the previous batch.
        deadline = time.monotonic() + EVENT_SECONDS
        while self.unconfirmed and self.last_batch < batch_id:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"Spark has not reported that batch {batch_id} is committed; the batch after it is repeated"
                )
            time.sleep(0.01)

    def _fail(self, results: Sequence[TableResult]) -> None:
        for result in results:
            error = revive(result.error or {"kind": "TableError", "message": "the table could not be written"})
            # A table that is new in this batch is not in the store yet.
            table = self._store.table(result.upstream_id) or self._store.add_table(result.upstream_id, result.table)
            self._fail_table(table, error, copying=result.copying)

    def _fail_table(self, table: TableRecord, error: TailraceError, *, copying: bool) -> None:
        # The first batch of a copy that an operator asked for starts the count of attempts again.
        attempts = 1 if copying and self._is_asked(table) else table.attempts + 1
        reached = None if copying else self._reached(table.upstream_id)
        self._failures.fail(table, error, reached=reached, attempts=attempts)

    def _is_asked(self, table: TableRecord) -> bool:
        return any(each.kind == "resync" and each.table == table.name for each in self._store.open_requests())

    def _reached(self, upstream_id: str) -> str | None:
        """The position of the table after the previous batch."""
        progress = self._progress.get(upstream_id)
        return str(progress.position) if progress is not None else None

    def committed(
        self, batch_id: int, offset: Offset, seconds: float, phases: Mapping[str, float] | None = None
    ) -> None:
        """Record the batch and let the upstream discard it. A repeat for the same batch does nothing."""
        if self._first_batch <= batch_id <= self.last_batch:
            return
        with self._lock:
            known_results = batch_id in self._results
            results = self._results.get(batch_id, [])
        by_id = {result.upstream_id: result for result in results}
        progress = _by_id(self._source.progress(offset))
        known = self._table_records(progress)
        begun = {request.id for request in self._store.open_requests() if request.kind == "resync"}
        begun &= {table.request for table in progress.values()}
        recopied = {each for each, now in progress.items() if self._needs_recopy(now, begun)}
        failed = {result.upstream_id for result in results if result.error is not None}
        # Tables whose failure this offset does not reflect yet: they failed in this batch or before a restart. The next
        # offset stops them at the position where they resume, so this one must not advance them. A new copy clears an
        # error, except one of its own first batch. After a restart the results of a batch are unknown, but a batch
        # without a copied chunk cannot have failed.
        unplanned = {
            each
            for each, now in progress.items()
            if each in known
            and known[each].state is TableState.ERRORED
            and now.phase != "stopped"
            and (each not in recopied or each in failed or (not known_results and now.chunks_done > 0))
        }
        recopied -= unplanned
        updates = [
            _update(
                known[each],
                now,
                by_id.get(each),
                recopied=each in recopied,
                asked=each in recopied and now.request in begun and now.phase != "stopped",
                failed=each in unplanned,
            )
            for each, now in progress.items()
            # A table that stays ready has the position of the batch, so nothing needs to be written for it.
            if each in known
            and not (now.phase == "ready" and known[each].state is TableState.READY and each not in by_id)
        ]
        record = BatchRecord(
            batch_id,
            offset,
            _furthest(progress),
            rows=sum(result.copied + result.changes for result in results),
            bytes=sum(result.bytes for result in results),
            seconds=seconds,
            at=self._clock(),
            phases=_added_up([phases or {}, *(result.phases for result in results)]),
        )
        self._store.apply_batch(record, updates)
        with self._lock:
            self._counts = sum((update.counts for update in updates), self._counts)
        self._resolve_letters(progress)
        self._forget(self._progress.keys() - progress.keys())
        # If the table is in error, keep its request open: the next batch shows whether the copy continued.
        for request in begun - {progress[each].request for each in unplanned}:
            self._store.finish_request(request, "the copy has begun")
        self._progress = progress
        self._refused.clear()
        self._show_transient_states(progress)
        if batch_id % PRUNE_BATCHES == 0 and progress and not unplanned:
            self._prune(min(table.position for table in progress.values()))
        if not unplanned:
            self._source.release(offset)
        self.last_batch = batch_id
        with self._lock:
            self._results = {later: results for later, results in self._results.items() if later > batch_id}

    def _forget(self, gone: Set[str]) -> None:
        for table in self._store.tables():
            if table.upstream_id in gone:
                _log.warning(
                    "%s is no longer followed: it was dropped, or the pipeline no longer selects it, or the upstream no"
                    " longer sends it. Its rows stay at the destination",
                    table.name,
                )
        for upstream_id in gone:
            self._store.forget_table(upstream_id)

    def _resolve_letters(self, progress: Mapping[str, TableProgress]) -> None:
        """Mark waiting dead letters as resolved if their table has passed their position without an error."""
        for letter in self._store.dead_letters(status="waiting"):
            now = progress.get(letter.upstream_id)
            table = self._store.table(letter.upstream_id)
            if now is None or table is None or table.state is TableState.ERRORED:
                continue
            if now.phase in ("catchup", "ready") and str(now.position) >= letter.position:
                self._store.settle_dead_letter(letter.id, "resolved")

    def _table_records(self, progress: Mapping[str, TableProgress]) -> dict[str, TableRecord]:
        """The records of the tables. Adds records for new tables and renames those of renamed ones."""
        known = {table.upstream_id: table for table in self._store.tables()}
        followed = {known[each].name for each in progress if each in known}
        for table in list(known.values()):
            if table.upstream_id.startswith(UNFOLLOWED) and table.name in followed:
                self._store.forget_table(known.pop(table.upstream_id).upstream_id)
        for upstream_id in progress:
            schema = self._store.schema_at(upstream_id)
            if schema is not None and (upstream_id not in known or known[upstream_id].name != str(schema.table)):
                known[upstream_id] = self._store.add_table(upstream_id, str(schema.table))
        return known

    def _needs_recopy(self, now: TableProgress, begun: set[int]) -> bool:
        """Whether a new copy of the table began with this batch, or is about to begin."""
        before = self._progress.get(now.upstream_id)
        if now.request in begun:
            return True
        return before is not None and (
            before.copy != now.copy or (now.phase == "init" and before.phase not in ("init", "stopped"))
        )

    def _show_transient_states(self, progress: Mapping[str, TableProgress]) -> None:
        """Between its copy and the log a table waits, then catches up. The status shows this; the store does not keep
        it."""
        for upstream_id, now in progress.items():
            state = None
            if now.phase == "catchup":
                state = TableState.CATCHUP if now.catching_up else TableState.SYNC_WAIT
            self._store.overlay(upstream_id, state)

    def _prune(self, upto: Position) -> None:
        kept = [table.upstream_id for table in self._store.tables() if self._pinned(table)]
        self._store.prune_schemas(upto, keep=kept)

    def _pinned(self, table: TableRecord) -> bool:
        # The destination keeps the columns of the copy, and only the schema version of that time describes them.
        return self._tables.settings_of(table.name).schema_changes == "ignore"

    def known_tables(self) -> KnownTables:
        """What the destination must hold: the tables with rows from earlier batches, and the last batch of each."""
        tables = self._store.tables()
        written = frozenset(table.upstream_id for table in tables if table.rows_copied or table.changes_applied)
        return KnownTables(written, dict(self._held))

    def held(self, upstream_id: str = WHOLE) -> LastBatch | None:
        """The last batch of a table at the destination, or of the destination as a whole, as far as it is known."""
        return self._held.get(upstream_id)

    def stop_table(self, table: TableRecord, error: TableError) -> None:
        """Store that a table cannot go on, between two batches."""
        now = self._progress.get(table.upstream_id)
        self._failed_in[table.upstream_id] = self.last_batch
        self._fail_table(table, error, copying=now is None or now.phase in ("init", "copy"))

    def note_source(self) -> str | None:
        """Store the source's status, and return its gear."""
        passed = self._source.idle_until()
        # Only if it refers to the last recorded batch: that batch may not be recorded yet, or no longer be the last.
        if passed is not None and passed != self._passed and passed[0] == _furthest(self._progress):
            self._store.pass_over(passed[1])
            self._passed = passed
        status = self._source.status()
        if status.gear == "full" and status.error is None:
            message, fix = self._why_full()
            status = replace(status, error=message, fix=fix)
        self._store.put_source_status(status)
        self._note_sample(status)
        return status.gear

    def _note_sample(self, source: SourceStatus) -> None:
        """Record rates and lags once in a while."""
        seconds = time.monotonic() - self._sampled_at
        if seconds < SAMPLE_SECONDS:
            return
        self._sampled_at += seconds
        with self._lock:
            counts, self._counts = self._counts, ChangeCounts()
        self._store.put_sample(take_sample(self._store, source, self._clock(), seconds, counts))

    def waits_for_another(self) -> bool:
        """Whether what the journal keeps is kept for another reader of it."""
        return self._source.slowest_reader() not in (None, self._source.context.reader)

    def _why_full(self) -> tuple[str, str]:
        """Why the journal has no room, and what to do. It keeps the log of a copy until the table has read it."""
        raise_it = "raise `journal.max_bytes` of the source and start the pipeline again"
        if self.waits_for_another():
            who = name_reader(str(self._source.slowest_reader()))
            return (
                f"the journal is full: it keeps the log for {who}",
                f"let that one go on, or remove it; or, if the disk has room, {raise_it}",
            )
        held = [one for one in self._progress.values() if one.phase in ("copy", "catchup")]
        first = min(held, key=lambda one: one.position, default=None)
        table = self._store.table(first.upstream_id) if first is not None else None
        if table is None:
            return "the journal is full: changes come faster than they are applied", f"wait, or {raise_it}"
        return (
            f"the journal is full: it keeps the log since the copy of {table.name} began, and no table gets changes"
            " until that copy has caught up",
            f"wait for the copy, which goes on; or, if the disk has room, {raise_it}",
        )

    def note_notices(self, notices: Sequence[Finding]) -> None:
        """Store what the source leaves out, and log what is new of it."""
        before = self._store.notices()
        for notice in notices:
            if notice not in before:
                _log.warning("%s: %s. Fix: %s", notice.subject, notice.message, notice.fix or "none")
        self._store.put_notices(notices)

    def note_delivery(self, delivery: DeliveryStatus | None) -> None:
        if delivery is not None:
            self._store.put_delivery(delivery)

    def waiting(self, error: TailraceError) -> None:
        """Show in the status that the pipeline waits for something unavailable, until the next `note_source`."""
        waits = replace(self._source.status(), gear="waiting", error=error.message, fix=error.fix)
        self._store.put_source_status(waits)

    def status(self) -> PipelineStatus:
        return self._status.read(self._store)


def _counts(result: TableResult) -> ChangeCounts:
    return ChangeCounts(result.copied, result.inserts, result.updates, result.deletes)


def _added_up(phases: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for each in phases:
        for name, seconds in each.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def _by_id(progress: Sequence[TableProgress]) -> dict[str, TableProgress]:
    return {table.upstream_id: table for table in progress}


def _resumable(progress: TableProgress | None) -> str | None:
    """The position from which a table can continue without a new copy."""
    return str(progress.position) if progress is not None and progress.phase in ("catchup", "ready") else None


def _furthest(progress: Mapping[str, TableProgress]) -> str | None:
    return str(max(table.position for table in progress.values())) if progress else None


def _update(
    known: TableRecord, now: TableProgress, result: TableResult | None, *, recopied: bool, asked: bool, failed: bool
) -> TableUpdate:
    counted = result is not None and not result.repeated and result.error is None
    committed_at = result.committed_at if result is not None else None
    return TableUpdate(
        now.upstream_id,
        steps=_steps(known.state, _STATE_OF[now.phase], recopied=recopied, lags=now.phase in ("stopped", "catchup")),
        rows_copied=result.copied if counted and result else 0,
        changes_applied=result.changes if counted and result else 0,
        counts=_counts(result) if counted and result else ChangeCounts(),
        chunks_done=now.chunks_done if recopied else max(0, now.chunks_done - known.chunks_done),
        chunks_total=now.chunks_total or None,
        position=str(now.position) if now.phase != "init" and not failed else None,
        last_change_committed_at=datetime.fromtimestamp(committed_at / 1e6, UTC) if committed_at else None,
        asked=asked,
    )


def _steps(start: TableState, end: TableState, *, recopied: bool, lags: bool) -> tuple[TableState, ...]:
    """The states to go through from `start` to `end`; none if the table is at `end` already or further.

    A new copy begins at Init. A Ready table that lags, because it is paused or was, goes back to FinishedCopy.
    """
    if recopied and end is not TableState.ERRORED:
        way = WAY[: WAY.index(end) + 1]
        return way[1:] if start is TableState.INIT else way
    if start is TableState.READY and lags:
        return (TableState.FINISHED_COPY,)
    if start == end or TableState.ERRORED in (start, end):
        return ()
    first, last = WAY.index(start), WAY.index(end)
    return WAY[first + 1 : last + 1]
