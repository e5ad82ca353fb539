"""What a source says of itself, for people. The state store keeps the last one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class SourceStatus:
    """What the receiving half last said of itself. `error` holds its last error, None once it is over."""

    gear: str | None = None
    received: str | None = None
    journal_bytes: int | None = None
    server: str | None = None
    slot_restart: str | None = None
    slot_confirmed: str | None = None
    error: str | None = None
    fix: str | None = None
    at: datetime | None = None
