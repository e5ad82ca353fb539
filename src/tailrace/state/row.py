"""Rows of the store as values and values as rows. Times are stored as text: ISO 8601 in UTC."""

from __future__ import annotations

import json
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from tailrace.state.engine import Row
from tailrace.state.lock import Owner
from tailrace.state.machine import TableState
from tailrace.state.record import BatchRecord, Letter, PipelineRecord, Request, SourceStatus, TableRecord

_TABLE_TIMES = ("next_try", "paused_at", "last_change_committed_at", "last_applied_at")
_TABLE_FIELDS = tuple(field.name for field in fields(TableRecord))


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
    values = {name: row[name] for name in _TABLE_FIELDS}
    values |= {name: _time_or_none(row[name]) for name in _TABLE_TIMES}
    values["state"] = TableState(row["state"])
    values["since"] = {TableState(state): time_of(at) for state, at in json.loads(row["since"]).items()}
    values["failed_in"] = TableState(row["failed_in"]) if row["failed_in"] else None
    return TableRecord(**values)


def write_table(table: TableRecord) -> dict[str, Any]:
    values = {name: getattr(table, name) for name in _TABLE_FIELDS}
    values |= {name: text_of(values[name]) if values[name] else None for name in _TABLE_TIMES}
    values["state"] = table.state.value
    values["since"] = json.dumps({state.value: text_of(at) for state, at in table.since.items()})
    values["failed_in"] = table.failed_in.value if table.failed_in else None
    return values


def read_request(row: Row) -> Request:
    return Request(
        row["id"],
        row["kind"],
        row["table"],
        time_of(row["at"]),
        row["argument"],
        _time_or_none(row["done_at"]),
        row["outcome"],
    )


def read_letter(row: Row) -> Letter:
    values = {field.name: row[field.name] for field in fields(Letter)}
    return Letter(**values | {name: time_of(row[name]) for name in ("first_at", "last_at")})


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
    values = {field.name: row[field.name] for field in fields(SourceStatus)}
    return SourceStatus(**values | {"at": time_of(row["at"])})


def _time_or_none(value: str | None) -> datetime | None:
    return time_of(value) if value else None
