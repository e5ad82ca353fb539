"""What the follower says of itself, for `tailrace status` and `check`: a small file in the state folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tailrace.source.slatedb.offset import SlateDbOffset
from tailrace.statusfile import write_file

_EVERY_SECONDS = 1.0
_WARN_FRACTION = 0.5
"""From this part of `min_age` on, the age of the oldest file that is still needed is a reason to warn."""


class Watch:
    """Writes the status at most once a second. `min_age` is None where WAL files are kept."""

    def __init__(self, file: Path, min_age_seconds: float | None) -> None:
        self._file = file
        self._min_age = min_age_seconds
        self._written = 0.0

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._written >= _EVERY_SECONDS

    def write(self, now: SlateDbOffset, tail: int, oldest_ms: int | None, kept_bytes: int | None) -> None:
        """`oldest_ms` is when the oldest file that is still needed was written; None when nothing is unread."""
        self._written = time.monotonic()
        age = 0.0 if oldest_ms is None else max(0.0, time.time() - oldest_ms / 1000)
        status: dict[str, Any] = {
            "gear": "tail" if now.low_water.wal >= tail else "behind",
            "received": str(now.log.position),
            "journal_bytes": kept_bytes,
            "wal": now.low_water.wal,
            "tail": tail,
            "age": age,
            **self._warning(now, age),
        }
        write_file(self._file, status)

    def _warning(self, now: SlateDbOffset, age: float) -> dict[str, str]:
        if self._min_age is None or age < self._min_age * _WARN_FRACTION:
            return {}
        return {
            "error": f"WAL file {now.low_water.wal + 1} is still needed and {age:.0f} s old; SlateDB may delete it from"
            f" {self._min_age:.0f} s on",
            "fix": "raise min_age of the writer's WAL garbage collection, or set keep_wal",
        }
