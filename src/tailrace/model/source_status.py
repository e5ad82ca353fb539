"""What a source says of itself, for people. The state store keeps the last one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class SourceStatus:
    """What the receiving half last said of itself. `error` holds its last error, None once it is over.

    `wal_status` is what the server says of the slot, `safe_wal_bytes` how much more it can write before it gives the
    slot up; None where it never does. Both are kept with the samples of the pipeline.
    """

    gear: str | None = None
    received: str | None = None
    journal_bytes: int | None = None
    server: str | None = None
    slot_restart: str | None = None
    slot_confirmed: str | None = None
    error: str | None = None
    fix: str | None = None
    at: datetime | None = None
    wal_status: str | None = None
    safe_wal_bytes: int | None = None
