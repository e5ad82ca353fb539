"""Rows of the store as values and values as rows. Times are stored as text: ISO 8601 in UTC."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from tailrace.state.engine import Row
from tailrace.state.lock import Owner
from tailrace.state.machine import TableState
from tailrace.state.record import BatchRecord, DeadLetter, OperatorRequest, PipelineRecord, SourceStatus, TableRecord

TABLE_COLUMNS = (
    "upstream_id",
    "name",
    "state",
    "since",
    "reason",
    "fix",
    "retry",
    "attempts",
    "next_try",
    "paused_at",
    "resume",
    "failed_in",
    "rows_copied",
    "rows_total",
    "chunks_done",
    "chunks_total",
    "changes_applied",
    "position",
    "last_change_committed_at",
    "last_applied_at",
)
"""The columns of `table_state` that `write_table` fills."""

STATUS_COLUMNS = (
    "gear",
    "received",
    "journal_bytes",
    "server",
    "slot_restart",
    "slot_confirmed",
    "error",
    "fix",
    "at",
)
"""The columns of `source_status` that `write_source_status` fills."""


def now() -> datetime:
    return datetime.now(UTC)


def text_of(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()


def time_of(value: str | datetime) -> datetime:
    at = value if isinstance(value, datetime) else datetime.fromisoformat(value)
    return at.astimezone(UTC)


def storable(text: str) -> str:
    """An error's text without what not every database takes in a text."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def read_pipeline(row: Row) -> PipelineRecord:
    owner = None
    if row["owner_pid"] is not None:
        owner = Owner(row["owner_pid"], row["owner_host"], time_of(row["owner_started"]), row["owner_machine"])
    return PipelineRecord(
        row["name"],
        time_of(row["created_at"]),
        row["epoch"],
        row["fingerprint"],
        row["run"],
        owner,
        _time_or_none(row["lease_until"]),
    )


def read_table(row: Row) -> TableRecord:
    return TableRecord(
        upstream_id=row["upstream_id"],
        name=row["name"],
        state=TableState(row["state"]),
        since={TableState(state): time_of(at) for state, at in json.loads(row["since"]).items()},
        reason=row["reason"],
        fix=row["fix"],
        retry=row["retry"],
        attempts=row["attempts"],
        next_try=_time_or_none(row["next_try"]),
        paused_at=_time_or_none(row["paused_at"]),
        resume=row["resume"],
        failed_in=TableState(row["failed_in"]) if row["failed_in"] else None,
        rows_copied=row["rows_copied"],
        rows_total=row["rows_total"],
        chunks_done=row["chunks_done"],
        chunks_total=row["chunks_total"],
        changes_applied=row["changes_applied"],
        position=row["position"],
        last_change_committed_at=_time_or_none(row["last_change_committed_at"]),
        last_applied_at=_time_or_none(row["last_applied_at"]),
        version=row["version"],
    )


def write_table(table: TableRecord) -> dict[str, Any]:
    return {
        "upstream_id": table.upstream_id,
        "name": table.name,
        "state": table.state.value,
        "since": json.dumps({state.value: text_of(at) for state, at in table.since.items()}),
        "reason": table.reason,
        "fix": table.fix,
        "retry": table.retry,
        "attempts": table.attempts,
        "next_try": _text_or_none(table.next_try),
        "paused_at": _text_or_none(table.paused_at),
        "resume": table.resume,
        "failed_in": table.failed_in.value if table.failed_in else None,
        "rows_copied": table.rows_copied,
        "rows_total": table.rows_total,
        "chunks_done": table.chunks_done,
        "chunks_total": table.chunks_total,
        "changes_applied": table.changes_applied,
        "position": table.position,
        "last_change_committed_at": _text_or_none(table.last_change_committed_at),
        "last_applied_at": _text_or_none(table.last_applied_at),
    }


def read_request(row: Row) -> OperatorRequest:
    return OperatorRequest(
        row["id"],
        row["kind"],
        row["table"],
        time_of(row["at"]),
        row["argument"],
        _time_or_none(row["done_at"]),
        row["outcome"],
    )


def read_dead_letter(row: Row) -> DeadLetter:
    return DeadLetter(
        id=row["id"],
        upstream_id=row["upstream_id"],
        table=row["table"],
        position=row["position"],
        kind=row["kind"],
        reason=row["reason"],
        fix=row["fix"],
        raw=row["raw"],
        version=row["version"],
        tries=row["tries"],
        first_at=time_of(row["first_at"]),
        last_at=time_of(row["last_at"]),
        status=row["status"],
    )


def read_batch(row: Row) -> BatchRecord:
    return BatchRecord(
        row["batch_id"],
        json.loads(row["offset"]),
        row["position"],
        row["rows"],
        row["bytes"],
        row["seconds"],
        time_of(row["at"]),
    )


def read_source_status(row: Row) -> SourceStatus:
    return SourceStatus(
        gear=row["gear"],
        received=row["received"],
        journal_bytes=row["journal_bytes"],
        server=row["server"],
        slot_restart=row["slot_restart"],
        slot_confirmed=row["slot_confirmed"],
        error=row["error"],
        fix=row["fix"],
        at=time_of(row["at"]),
    )


def write_source_status(status: SourceStatus) -> dict[str, Any]:
    return {
        "gear": status.gear,
        "received": status.received,
        "journal_bytes": status.journal_bytes,
        "server": status.server,
        "slot_restart": status.slot_restart,
        "slot_confirmed": status.slot_confirmed,
        "error": storable(status.error) if status.error else status.error,
        "fix": status.fix,
        "at": text_of(status.at or now()),
    }


def _text_or_none(at: datetime | None) -> str | None:
    return text_of(at) if at else None


def _time_or_none(value: str | None) -> datetime | None:
    return time_of(value) if value else None
