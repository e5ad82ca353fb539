"""Rows of `state.db` as values, and times as the text that is stored."""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime
from typing import Any

from tailrace.state.machine import TableState, TransitionError
from tailrace.state.record import BatchRecord, Request, SourceStatus, TableRecord


def find_table(db: sqlite3.Connection, upstream_id: str) -> TableRecord:
    row = db.execute("SELECT * FROM table_state WHERE upstream_id = ?", (upstream_id,)).fetchone()
    if row is None:
        raise TransitionError(f"table {upstream_id} is not known; add_table comes first")
    return read_table(row)


def read_table(row: sqlite3.Row) -> TableRecord:
    values: dict[str, Any] = dict(zip(row.keys(), row, strict=True))
    since = {TableState(state): time_of(at) for state, at in json.loads(values["since"]).items()}
    values |= {
        "state": TableState(values["state"]),
        "since": since,
        "failed_in": TableState(values["failed_in"]) if values["failed_in"] else None,
    }
    for key in ("last_change_committed_at", "last_applied_at"):
        values[key] = time_of(values[key]) if values[key] else None
    return TableRecord(**values)


def read_request(row: sqlite3.Row) -> Request:
    done_at = time_of(row["done_at"]) if row["done_at"] else None
    return Request(row["id"], row["kind"], row["table"], time_of(row["at"]), done_at)


def now() -> datetime:
    return datetime.now(UTC)


def text_of(at: datetime) -> str:
    return at.astimezone(UTC).isoformat()


def time_of(text: str) -> datetime:
    return datetime.fromisoformat(text)


def read_batch(row: sqlite3.Row) -> BatchRecord:
    return BatchRecord(
        row["batch_id"],
        json.loads(row["offset"]),
        row["position"],
        row["rows"],
        row["bytes"],
        row["seconds"],
        time_of(row["at"]),
    )


def read_source_status(row: sqlite3.Row) -> SourceStatus:
    values: dict[str, Any] = dict(zip(row.keys(), row, strict=True))
    del values["only"]
    return SourceStatus(**{**values, "at": time_of(values["at"])})
