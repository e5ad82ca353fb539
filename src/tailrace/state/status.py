"""How a pipeline stands, derived from its state store alone: no Spark, no connection to anything else."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from tailrace.errors import Finding
from tailrace.model.delivery_status import DeliveryStatus
from tailrace.state import BatchRecord, RunRecord, SourceStatus, StateStore, TableRecord, TableState
from tailrace.state.record import Owner

_RATE_BATCHES = 50
_RATE_SECONDS = 60.0


@dataclass(frozen=True)
class TableStatus(TableRecord):
    """One table. `lag_bytes` is how much of the server's log it has not applied, where the upstream counts in bytes;
    `lag_seconds` how old its last applied change is while more is waiting, 0 when nothing is. None: not known.
    `letters` of its changes wait as dead letters."""

    lag_bytes: int | None = None
    lag_seconds: float | None = None
    rows_per_second: float | None = None
    letters: int = 0

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
            "position": self.position,
            "lag_bytes": self.lag_bytes,
            "lag_seconds": self.lag_seconds,
            "rows_per_second": self.rows_per_second,
            "last_change_committed_at": _iso(self.last_change_committed_at),
            "last_applied_at": _iso(self.last_applied_at),
            "reason": self.reason,
            "fix": self.fix,
            "retry": self.retry,
            "attempts": self.attempts,
            "next_try": _iso(self.next_try),
            "paused_at": _iso(self.paused_at),
            "version": self.version,
            "letters": self.letters,
        }


@dataclass(frozen=True)
class PipelineStatus:
    """The pipeline, its tables and its receiving half at one moment."""

    pipeline: str
    at: datetime
    runner: Owner | None
    tables: tuple[TableStatus, ...]
    batch: int | None = None
    position: str | None = None
    rows_per_second: float = 0.0
    lag_bytes: int | None = None
    source: SourceStatus | None = None
    requests: tuple[str, ...] = field(default=())
    last_run: RunRecord | None = None
    notices: tuple[Finding, ...] = ()
    delivery: DeliveryStatus | None = None

    @classmethod
    def read(
        cls, store: StateStore, *, previous: PipelineStatus | None = None, at: datetime | None = None
    ) -> PipelineStatus:
        """The status now. With the `previous` one, each table's rate since then is known as well."""
        at = at or datetime.now(UTC)
        batches, source = store.recent_batches(_RATE_BATCHES), store.source_status()
        applied = batches[0].position if batches else None
        before = {table.name: table for table in previous.tables} if previous else {}
        seconds = (at - previous.at).total_seconds() if previous else 0.0
        letters = Counter(letter.upstream_id for letter in store.dead_letters(status="waiting"))
        return cls(
            pipeline=store.pipeline().name,
            at=at,
            runner=store.runner(),
            tables=tuple(
                _status_of(table, applied, source, at, before.get(table.name), seconds, letters[table.upstream_id])
                for table in store.tables()
            ),
            batch=batches[0].id if batches else None,
            position=applied,
            rows_per_second=_rate(batches, at),
            lag_bytes=_distance(source.server if source else None, applied),
            source=source,
            requests=tuple(
                " ".join(filter(None, (request.kind, request.table, request.argument)))
                for request in store.open_requests()
            ),
            last_run=store.last_run(),
            notices=tuple(store.notices()),
            delivery=store.delivery(),
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
            "lag_bytes": self.lag_bytes,
            "source": _source_of(self.source) if self.source else None,
            "requests": list(self.requests),
            "last_run": self.last_run.to_dict() if self.last_run else None,
            "notices": [notice.to_dict() for notice in self.notices],
            "delivery": {**asdict(self.delivery), "lag_seconds": self.delivery_lag} if self.delivery else None,
        }

    @property
    def errored(self) -> tuple[TableStatus, ...]:
        return tuple(table for table in self.tables if table.state is TableState.ERRORED)

    @property
    def delivery_lag(self) -> float | None:
        """How old the oldest event is that is not delivered, in seconds; 0 when none waits, None when not known."""
        delivery = self.delivery
        if delivery is None or delivery.pending == 0:
            return None if delivery is None else 0.0
        if delivery.oldest is None:
            return None
        return max(0.0, (self.at - datetime.fromisoformat(delivery.oldest)).total_seconds())


def _runner_of(owner: Owner) -> dict[str, Any]:
    # Without the machine, which tells people nothing.
    return {"pid": owner.pid, "host": owner.host, "started": owner.started.isoformat()}


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


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at else None


def _status_of(
    table: TableRecord,
    applied: str | None,
    source: SourceStatus | None,
    at: datetime,
    before: TableStatus | None,
    seconds: float,
    letters: int,
) -> TableStatus:
    # A table that follows the log with the others has everything up to the common position, changed or not.
    common = applied if table.state in (TableState.READY, TableState.SYNC_DONE) else None
    reached = max((position for position in (table.position, common) if position), default=None)
    done = table.rows_copied + table.changes_applied
    return TableStatus(
        **vars(table),
        lag_bytes=_distance(source.server if source else None, reached),
        lag_seconds=_age(table, reached, source, at),
        rows_per_second=_growth(done, before, seconds),
        letters=letters,
    )


def _growth(done: int, before: TableStatus | None, seconds: float) -> float | None:
    if before is None or seconds <= 0:
        return None
    # A resync sets the counts back; that is not a negative rate.
    return max(0.0, (done - before.rows_copied - before.changes_applied) / seconds)


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


def _rate(batches: list[BatchRecord], at: datetime) -> float:
    recent = [batch for batch in batches if batch.at and (at - batch.at).total_seconds() < _RATE_SECONDS]
    if not recent or recent[-1].at is None:
        return 0.0
    window = (at - recent[-1].at).total_seconds() + recent[-1].seconds
    return sum(batch.rows for batch in recent) / max(window, 1.0)
