"""How a pipeline stands, derived from its state store alone: no Spark, no connection to anything else."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tailrace.errors import Finding
from tailrace.model.delivery_status import DeliveryStatus
from tailrace.state import BatchRecord, RunRecord, SourceStatus, StateStore, TableRecord, TableState
from tailrace.state.activity import Sample
from tailrace.state.record import ChangeCounts, OperatorRequest, Owner
from tailrace.state.report import AlertRecord

_RATE_BATCHES = 50
_RATE_SECONDS = 60.0
_TABLE_RATE_SECONDS = 10.0
"""Over how long the rate of a table is measured: batches come in turns, and a shorter time would show 0 in between."""
_SHOWN_REQUESTS = 20
_SLOT_MINUTES = 10
"""Over how long the growth of a slot is measured."""


@dataclass(frozen=True)
class TableStatus(TableRecord):
    """One table. `lag_bytes` is how much of the server's log it has not applied, where the upstream counts in bytes;
    `lag_seconds` how old its last applied change is while more is waiting, 0 when nothing is. None: not known.
    `letters` of its changes wait as dead letters. `counts` are since its last copy began. `code` is that of the error
    that stopped it."""

    lag_bytes: int | None = None
    lag_seconds: float | None = None
    rows_per_second: float | None = None
    letters: int = 0
    counts: ChangeCounts = field(default_factory=ChangeCounts)
    code: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state.value,
            "since": self.entered_at.isoformat(),
            "rows_copied": self.rows_copied,
            "rows_total": self.rows_total,
            "chunks_done": self.chunks_done,
            "chunks_total": self.chunks_total,
            "changes_applied": self.changes_applied,
            "inserts": self.counts.inserts,
            "updates": self.counts.updates,
            "deletes": self.counts.deletes,
            "position": self.position,
            "lag_bytes": self.lag_bytes,
            "lag_seconds": self.lag_seconds,
            "rows_per_second": self.rows_per_second,
            "last_change_committed_at": _iso(self.last_change_committed_at),
            "last_applied_at": _iso(self.last_applied_at),
            "reason": self.reason,
            "code": self.code,
            "fix": self.fix,
            "retry": self.retry,
            "attempts": self.attempts,
            "next_try": _iso(self.next_try),
            "paused_at": _iso(self.paused_at),
            "version": self.version,
            "letters": self.letters,
        }


@dataclass(frozen=True)
class SlotForecast:
    """A replication slot: the log that the server keeps for it, and when that becomes too much.

    `growth` is in bytes per second, None before two samples are there. `full_in` seconds the server gives the slot up,
    if it grows on like that; None: never, or not known.
    """

    status: str
    kept_bytes: int | None
    safe_bytes: int | None
    growth: float | None
    full_in: float | None

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SlotForecast | None:
        """What the samples say, oldest first. Pure."""
        last = samples[-1] if samples else None
        if last is None or last.wal_status is None:
            return None
        known = [(one.at, one.slot_bytes) for one in samples if one.slot_bytes is not None]
        growth = None
        if len(known) > 1 and (seconds := (known[-1][0] - known[0][0]).total_seconds()) > 0:
            growth = (known[-1][1] - known[0][1]) / seconds
        full_in = last.safe_wal_bytes / growth if growth and growth > 0 and last.safe_wal_bytes is not None else None
        return cls(last.wal_status, last.slot_bytes, last.safe_wal_bytes, growth, full_in)


@dataclass(frozen=True)
class TableReading:
    """How much each table had done at one moment, by name: what a rate is measured from."""

    at: datetime
    done: Mapping[str, int]

    @classmethod
    def of(cls, status: PipelineStatus) -> TableReading:
        return cls(status.at, {table.name: table.rows_copied + table.changes_applied for table in status.tables})

    def is_older(self, seconds: float, now: datetime) -> bool:
        return (now - self.at).total_seconds() >= seconds


@dataclass(frozen=True)
class PipelineStatus:
    """The pipeline, its tables and its receiving half at one moment.

    Rates are those of the last minute, rows of copies and changes apart. `last_batch` is the one of the number `batch`,
    `phases` are its seconds of work. `recent_requests` are the newest, with their outcome.
    """

    pipeline: str
    at: datetime
    runner: Owner | None
    tables: tuple[TableStatus, ...]
    batch: int | None = None
    position: str | None = None
    copied_per_second: float = 0.0
    changes_per_second: float = 0.0
    bytes_per_second: float = 0.0
    last_batch: BatchRecord | None = None
    lag_bytes: int | None = None
    source: SourceStatus | None = None
    requests: tuple[str, ...] = field(default=())
    last_run: RunRecord | None = None
    notices: tuple[Finding, ...] = ()
    delivery: DeliveryStatus | None = None
    slot: SlotForecast | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    recent_requests: tuple[OperatorRequest, ...] = ()
    alerts: tuple[AlertRecord, ...] = ()

    @classmethod
    def read(
        cls, store: StateStore, *, before: TableReading | None = None, at: datetime | None = None
    ) -> PipelineStatus:
        """The status now. With a reading of `before`, each table's rate since then is known as well."""
        at = at or _now()
        batches, source = store.recent_batches(_RATE_BATCHES), store.source_status()
        applied = batches[0].position if batches else None
        details = store.batch_details(_RATE_BATCHES)
        totals = store.totals()
        counts = {detail.id: detail.counts for detail in details}
        letters, codes = store.letter_counts(), store.failure_codes()
        return cls(
            pipeline=store.pipeline().name,
            at=at,
            runner=store.runner(),
            tables=tuple(
                replace(
                    _status_of(table, applied, source, at, before),
                    letters=letters.get(table.upstream_id, 0),
                    code=codes.get(table.upstream_id) if table.state is TableState.ERRORED else None,
                    counts=totals.get(table.upstream_id, ChangeCounts()),
                )
                for table in store.tables()
            ),
            batch=batches[0].id if batches else None,
            position=applied,
            copied_per_second=_rate(batches, at, {each: count.copied for each, count in counts.items()}),
            changes_per_second=_rate(batches, at, {each: count.changes for each, count in counts.items()}),
            bytes_per_second=_rate(batches, at, {batch.id: batch.bytes for batch in batches}),
            last_batch=batches[0] if batches else None,
            lag_bytes=_distance(source.server if source else None, applied),
            source=source,
            requests=tuple(
                " ".join(filter(None, (request.kind, request.table, request.argument)))
                for request in store.open_requests()
            ),
            last_run=store.last_run(),
            notices=tuple(store.notices()),
            delivery=store.delivery(),
            slot=SlotForecast.of(store.samples(at - timedelta(minutes=_SLOT_MINUTES))),
            phases=details[0].phases if details else {},
            recent_requests=tuple(store.recent_requests(_SHOWN_REQUESTS)),
            alerts=tuple(store.alerts()),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values: times are ISO 8601 in UTC."""
        return {
            "pipeline": self.pipeline,
            "at": self.at.isoformat(),
            "runner": _runner_of(self.runner) if self.runner else None,
            "tables": [table.to_dict() for table in self.tables],
            "batch": self.batch,
            "position": self.position,
            "rows_per_second": self.rows_per_second,
            "copied_per_second": self.copied_per_second,
            "changes_per_second": self.changes_per_second,
            "bytes_per_second": self.bytes_per_second,
            "last_batch": _batch_of(self.last_batch) if self.last_batch else None,
            "lag_bytes": self.lag_bytes,
            "lag_seconds": self.lag_seconds,
            "source": _source_of(self.source) if self.source else None,
            "requests": list(self.requests),
            "recent_requests": [_request_of(request) for request in self.recent_requests],
            "last_run": self.last_run.to_dict() if self.last_run else None,
            "notices": [notice.to_dict() for notice in self.notices],
            "delivery": {**asdict(self.delivery), "lag_seconds": self.delivery_lag} if self.delivery else None,
            "slot": asdict(self.slot) if self.slot else None,
            "phases": dict(self.phases),
            "alerts": [alert.to_dict() for alert in self.alerts],
        }

    @property
    def rows_per_second(self) -> float:
        """Rows of copies and changes together."""
        return self.copied_per_second + self.changes_per_second

    @property
    def errored(self) -> tuple[TableStatus, ...]:
        return tuple(table for table in self.tables if table.state is TableState.ERRORED)

    @property
    def lag_seconds(self) -> float | None:
        """How old the newest applied change is while more is waiting, 0 when nothing is. None: not known.

        Where the upstream has no commit times: how long ago a table was last written.
        """
        if self.source is None or self.source.received is None or self.position is None:
            return None
        if self.position >= self.source.received:
            return 0.0
        committed = [table.last_change_committed_at for table in self.tables if table.last_change_committed_at]
        written = [table.last_applied_at for table in self.tables if table.last_applied_at]
        newest = max(committed or written, default=None)
        return max(0.0, (self.at - newest).total_seconds()) if newest else None

    @property
    def delivery_lag(self) -> float | None:
        """How old the oldest event is that is not delivered, in seconds; 0 when none waits, None when not known."""
        delivery = self.delivery
        if delivery is None or delivery.pending == 0:
            return None if delivery is None else 0.0
        if delivery.oldest is None:
            return None
        return max(0.0, (self.at - datetime.fromisoformat(delivery.oldest)).total_seconds())


class StatusReader:
    """Reads the status again and again: tables have the rate of the ten seconds before, or since the reading before."""

    def __init__(self) -> None:
        self._readings: deque[TableReading] = deque()

    def read(self, store: StateStore) -> PipelineStatus:
        now = _now()
        while len(self._readings) > 1 and self._readings[1].is_older(_TABLE_RATE_SECONDS, now):
            self._readings.popleft()
        if self._readings and self._readings[-1].is_older(_RATE_SECONDS, now):
            self._readings.clear()
        status = PipelineStatus.read(store, before=self._readings[0] if self._readings else None, at=now)
        self._readings.append(TableReading.of(status))
        return status


def _runner_of(owner: Owner) -> dict[str, Any]:
    # Without the machine, which tells people nothing.
    return {"pid": owner.pid, "host": owner.host, "started": owner.started.isoformat()}


def _batch_of(batch: BatchRecord) -> dict[str, Any]:
    return {
        "at": _iso(batch.at),
        "seconds": batch.seconds,
        "rows": batch.rows,
        "bytes": batch.bytes,
    }


def _request_of(request: OperatorRequest) -> dict[str, Any]:
    return {**asdict(request), "at": request.at.isoformat(), "done_at": _iso(request.done_at)}


def _source_of(status: SourceStatus) -> dict[str, Any]:
    return {
        "gear": status.gear,
        "received": status.received,
        "journal_bytes": status.journal_bytes,
        "server": status.server,
        "slot_restart": status.slot_restart,
        "slot_confirmed": status.slot_confirmed,
        "error": status.error,
        "fix": status.fix,
        "at": _iso(status.at),
    }


def _now() -> datetime:
    return datetime.now(UTC)


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at else None


def _status_of(
    table: TableRecord,
    applied: str | None,
    source: SourceStatus | None,
    at: datetime,
    before: TableReading | None,
) -> TableStatus:
    # A table that follows the log with the others has everything up to the common position, changed or not.
    common = applied if table.state in (TableState.READY, TableState.SYNC_DONE) else None
    reached = max((position for position in (table.position, common) if position), default=None)
    done = table.rows_copied + table.changes_applied
    return TableStatus(
        **vars(table),
        lag_bytes=_distance(source.server if source else None, reached),
        lag_seconds=_age(table, reached, source, at),
        rows_per_second=_growth(done, before, table.name, at),
    )


def _growth(done: int, before: TableReading | None, table: str, at: datetime) -> float | None:
    if before is None or table not in before.done or (seconds := (at - before.at).total_seconds()) <= 0:
        return None
    # A resync sets the counts back; that is not a negative rate.
    return max(0.0, (done - before.done[table]) / seconds)


def _age(table: TableRecord, reached: str | None, source: SourceStatus | None, at: datetime) -> float | None:
    if source is None or source.received is None or reached is None:
        return None
    if reached >= source.received:
        return 0.0
    committed_at = table.last_change_committed_at
    return max(0.0, (at - committed_at).total_seconds()) if committed_at else None


def _distance(server: str | None, reached: str | None) -> int | None:
    if server is None or reached is None:
        return None
    return max(0, _commit(server) - _commit(reached))


def _commit(position: str) -> int:
    """The commit in a position's text. Read here because `tailrace.model.change` would load pyarrow."""
    return int(position[:16], 16)


def _rate(batches: list[BatchRecord], at: datetime, counts: Mapping[int, int]) -> float:
    recent = [batch for batch in batches if batch.at and (at - batch.at).total_seconds() < _RATE_SECONDS]
    if not recent or recent[-1].at is None:
        return 0.0
    window = (at - recent[-1].at).total_seconds() + recent[-1].seconds
    return sum(counts.get(batch.id, 0) for batch in recent) / max(window, 1.0)


def take_sample(store: StateStore, source: SourceStatus, at: datetime, seconds: float, counts: ChangeCounts) -> Sample:
    """The pipeline at this moment, with what it did in the `seconds` before."""
    last = store.last_batch()
    applied = last.position if last else None
    delivery = store.delivery()
    return Sample(
        at,
        seconds,
        counts,
        lag_bytes=_distance(source.server, applied),
        lag_seconds=_lag_of(last, source, at),
        journal_bytes=source.journal_bytes,
        slot_bytes=_distance(source.server, source.slot_restart),
        safe_wal_bytes=source.safe_wal_bytes,
        wal_status=source.wal_status,
        pending=delivery.pending if delivery else None,
    )


def _lag_of(last: BatchRecord | None, source: SourceStatus, at: datetime) -> float | None:
    """How long ago the last batch was, while more is waiting than it applied."""
    if last is None or last.position is None or source.received is None:
        return None
    if last.position >= source.received or last.at is None:
        return 0.0
    return max(0.0, (at - last.at).total_seconds())
