"""The replication slot: what the server keeps for it, when that becomes too much, and what to do then. Pure."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from tailrace.dashboard.fix import fix_of
from tailrace.errors import PipelinePlace
from tailrace.state.status import PipelineStatus, SlotForecast

SOON_SECONDS = 24 * 3600.0
"""A slot that is full sooner than that is one to look after."""
_GB = 1_000_000_000


def slot_to_dict(status: PipelineStatus, name: str | None, file: Path | PipelinePlace) -> dict[str, Any] | None:
    """The slot of a pipeline; None where its upstream has none."""
    slot, source = status.slot, status.source
    if slot is None:
        return None
    return {
        **asdict(slot),
        "name": name,
        "limit_bytes": limit_of(slot),
        "full_at": (status.at + timedelta(seconds=slot.full_in)).isoformat() if slot.full_in is not None else None,
        "restart": source.slot_restart if source else None,
        "confirmed": source.slot_confirmed if source else None,
        "fix": fix_of(slot_fix(slot), file) if is_at_risk(slot) else None,
    }


def limit_of(slot: SlotForecast) -> int | None:
    """How much log the server keeps at most; None: without a limit, or not known."""
    is_limited = slot.kept_bytes is not None and slot.safe_bytes is not None
    return (slot.kept_bytes or 0) + max(slot.safe_bytes or 0, 0) if is_limited else None


def is_at_risk(slot: SlotForecast) -> bool:
    """Whether the server may give the slot up before someone looks again."""
    return slot.status in ("unreserved", "lost") or (slot.full_in is not None and slot.full_in < SOON_SECONDS)


def slot_fix(slot: SlotForecast) -> str:
    """What helps."""
    if slot.status == "lost":
        return "tailrace reset FILE, then tailrace run FILE: every table is copied again"
    doubled = -(-2 * (limit_of(slot) or _GB) // _GB)
    return (
        "let the pipeline run, and retry or resume what stands still; or let the server keep more:\n"
        f"ALTER SYSTEM SET max_slot_wal_keep_size = '{doubled}GB';\nSELECT pg_reload_conf();"
    )
