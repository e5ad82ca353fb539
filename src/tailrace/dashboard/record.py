"""Records of the state store as JSON values. No row value is in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from tailrace.dashboard.fix import fix_of
from tailrace.errors import PipelinePlace, TailraceError, name_file
from tailrace.state import BatchRecord, OperatorRequest
from tailrace.state.activity import BatchDetail, HourlyActivity
from tailrace.state.record import ChangeCounts, DeadLetter


def iso(at: datetime | None) -> str | None:
    return at.isoformat() if at else None


def request_to_dict(request: OperatorRequest) -> dict[str, Any]:
    return {**asdict(request), "at": iso(request.at), "done_at": iso(request.done_at)}


def letter_to_dict(letter: DeadLetter, file: Path | PipelinePlace) -> dict[str, Any]:
    """Without the change itself."""
    return {
        "id": letter.id,
        "table": letter.table,
        "position": letter.position,
        "kind": letter.kind,
        "reason": letter.reason,
        "fix": fix_of(letter.fix, file, letter.table),
        "status": letter.status,
        "tries": letter.tries,
        "version": letter.version,
        "first_at": iso(letter.first_at),
        "last_at": iso(letter.last_at),
    }


def batch_to_dict(batch: BatchRecord, detail: BatchDetail | None) -> dict[str, Any]:
    counts = detail.counts if detail else ChangeCounts()
    return {
        "id": batch.id,
        "at": iso(batch.at),
        "seconds": round(batch.seconds, 3),
        "rows": batch.rows,
        "bytes": batch.bytes,
        **asdict(counts),
        "phases": rounded_phases(detail.phases if detail else {}),
    }


def rounded_phases(phases: Mapping[str, float]) -> dict[str, float]:
    return {name: round(seconds, 3) for name, seconds in phases.items()}


def hour_to_dict(hour: HourlyActivity) -> dict[str, Any]:
    return {"hour": iso(hour.hour), **asdict(hour.counts)}


def error_to_dict(error: TailraceError, file: Path | PipelinePlace) -> dict[str, Any]:
    return {
        "code": error.code,
        "docs": error.docs,
        "message": name_file(error.message, file),
        "table": error.table,
        "fix": fix_of(error.fix, file, error.table),
    }
