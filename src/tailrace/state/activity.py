"""What a pipeline did over time, in SQL: changes by table and hour, phases of batches, samples of rates and lags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tailrace.state.record import BatchRecord, ChangeCounts, TableUpdate, now, text_of, time_of
from tailrace.state.state_machine import TableState
from tailrace.state.transaction import StateSession, StateTransaction

KEPT_HOURS = 48
"""For how long the counts of an hour are kept."""
KEPT_SAMPLES = timedelta(hours=24)
"""For how long samples are kept."""

_FIRST_FORMAT = 6
"""Older stores lack the tables, and have recorded nothing."""
_TOTAL = ""
"""The hour of the counts since the table's last copy began."""
_COUNTS = ("copied", "inserts", "updates", "deletes")


@dataclass(frozen=True)
class HourlyActivity:
    """What happened to one table in the hour that begins at `hour`."""

    upstream_id: str
    hour: datetime
    counts: ChangeCounts


@dataclass(frozen=True)
class BatchDetail:
    """What one batch did, and the seconds of work in each phase of it. Tables are written in parallel, and what comes
    next is decoded meanwhile, so the sum may be longer than the batch."""

    id: int
    counts: ChangeCounts = field(default_factory=ChangeCounts)
    phases: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"counts": asdict(self.counts), "phases": {name: round(self.phases[name], 4) for name in self.phases}}


@dataclass(frozen=True)
class Sample:
    """A pipeline at one moment, and what it did in the `seconds` before.

    `slot_bytes` is the log that the upstream keeps for the slot, `safe_wal_bytes` how much more it can write before it
    gives the slot up, `wal_status` what it says of the slot. None: not known, or the upstream has none of it.
    """

    at: datetime
    seconds: float
    counts: ChangeCounts = field(default_factory=ChangeCounts)
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    journal_bytes: int | None = None
    slot_bytes: int | None = None
    safe_wal_bytes: int | None = None
    wal_status: str | None = None
    pending: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "at": text_of(self.at)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        return cls(**{**values, "at": time_of(values["at"]), "counts": ChangeCounts(**values["counts"])})


class ActivityStore:
    """What a pipeline did over time. Bounded: old hours, batches and samples go."""

    _session: StateSession
    _is_kept: bool | None = None

    def totals(self) -> dict[str, ChangeCounts]:
        """By the tables' upstream ids, what happened since their last copy began."""
        if not self._keeps_activity():
            return {}
        rows = self._session.read("SELECT * FROM activity WHERE pipeline = :pipeline AND hour = :total", total=_TOTAL)
        return {row["upstream_id"]: _counts_of(row) for row in rows}

    def activity(self, since: datetime, upstream_id: str | None = None) -> list[HourlyActivity]:
        """Hours that began at `since` or later, oldest first; of one table, or of all."""
        if not self._keeps_activity():
            return []
        wanted = "SELECT * FROM activity WHERE pipeline = :pipeline AND hour >= :since"
        wanted += " AND upstream_id = :upstream_id" if upstream_id is not None else ""
        rows = self._session.read(f"{wanted} ORDER BY hour, upstream_id", since=text_of(since), upstream_id=upstream_id)
        return [HourlyActivity(row["upstream_id"], time_of(row["hour"]), _counts_of(row)) for row in rows]

    def batch_details(self, count: int) -> list[BatchDetail]:
        """Of the newest batches, newest first."""
        if not self._keeps_activity():
            return []
        rows = self._session.read(
            "SELECT batch_id, detail FROM batch_detail WHERE pipeline = :pipeline ORDER BY batch_id DESC LIMIT :count",
            count=count,
        )
        found = [(row["batch_id"], json.loads(row["detail"])) for row in rows]
        return [BatchDetail(number, ChangeCounts(**one["counts"]), one["phases"]) for number, one in found]

    def put_sample(self, sample: Sample) -> None:
        with self._session.write() as tx:
            tx.run(
                "INSERT INTO sample (pipeline, at, value) VALUES (:pipeline, :at, :value)"
                " ON CONFLICT (pipeline, at) DO UPDATE SET value = excluded.value",
                at=text_of(sample.at),
                value=json.dumps(sample.to_dict()),
            )
            tx.run(
                "DELETE FROM sample WHERE pipeline = :pipeline AND at < :oldest",
                oldest=text_of(sample.at - KEPT_SAMPLES),
            )

    def samples(self, since: datetime) -> list[Sample]:
        """Those of this time or later, oldest first."""
        if not self._keeps_activity():
            return []
        rows = self._session.read(
            "SELECT value FROM sample WHERE pipeline = :pipeline AND at >= :since ORDER BY at", since=text_of(since)
        )
        return [Sample.from_dict(json.loads(row["value"])) for row in rows]

    def _record_activity(
        self, tx: StateTransaction, batch: BatchRecord, updates: Sequence[TableUpdate], kept_batches: int
    ) -> None:
        at = (batch.at or now()).replace(minute=0, second=0, microsecond=0)
        tx.run_many(
            "DELETE FROM activity WHERE pipeline = :pipeline AND upstream_id = :upstream_id AND hour = :total",
            [
                {"upstream_id": update.upstream_id, "total": _TOTAL}
                for update in updates
                if TableState.INIT in update.steps
            ],
        )
        tx.run_many(
            "INSERT INTO activity (pipeline, upstream_id, hour, copied, inserts, updates, deletes)"
            " VALUES (:pipeline, :upstream_id, :hour, :copied, :inserts, :updates, :deletes)"
            " ON CONFLICT (pipeline, upstream_id, hour) DO UPDATE SET copied = activity.copied + excluded.copied,"
            " inserts = activity.inserts + excluded.inserts, updates = activity.updates + excluded.updates,"
            " deletes = activity.deletes + excluded.deletes",
            [
                {"upstream_id": update.upstream_id, "hour": hour, **asdict(update.counts)}
                for update in updates
                if update.counts
                for hour in (_TOTAL, text_of(at))
            ],
        )
        tx.run(
            "DELETE FROM activity WHERE pipeline = :pipeline AND hour < :oldest AND hour <> :total",
            oldest=text_of(at - timedelta(hours=KEPT_HOURS)),
            total=_TOTAL,
        )
        counts = sum((update.counts for update in updates), ChangeCounts())
        detail = BatchDetail(batch.id, counts, batch.phases)
        tx.run(
            "INSERT INTO batch_detail (pipeline, batch_id, detail) VALUES (:pipeline, :id, :detail)",
            id=batch.id,
            detail=json.dumps(detail.to_dict()),
        )
        tx.run(
            "DELETE FROM batch_detail WHERE pipeline = :pipeline AND batch_id <= :oldest",
            oldest=batch.id - kept_batches,
        )

    def _keeps_activity(self) -> bool:
        database = self._session.database
        with self._session.lock:
            if not self._is_kept:
                self._is_kept = database.format(database.read) >= _FIRST_FORMAT
            return self._is_kept


def _counts_of(row: Mapping[str, Any]) -> ChangeCounts:
    return ChangeCounts(*(row[name] for name in _COUNTS))
