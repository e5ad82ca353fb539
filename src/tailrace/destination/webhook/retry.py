"""When a request that failed is made again. Pure: no clock, no sleep, no chance of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal

from tailrace.system.backoff import Backoff

Policy = Literal["linear", "exponential"]

PATIENCE_SECONDS = 300.0
"""How long an endpoint may ask us to wait, unless `max` is longer still: a slip of its pen must not stop the feed."""
_SPREAD = 0.25


@dataclass(frozen=True)
class RetrySchedule:
    """The pauses between attempts. `limit` is how many attempts a request gets before it is dropped; None: no end."""

    policy: Policy = "exponential"
    min_seconds: float = 1.0
    max_seconds: float = 30.0
    limit: int | None = None

    def pause(self, attempts: int, chance: float, asked_seconds: float | None = None) -> float:
        """Seconds to wait after so many failed attempts, at least one.

        `chance`, from 0 to 1, spreads the pauses of many senders; `asked_seconds` is what the endpoint asked for.
        """
        if self.policy == "linear":
            pause = Backoff((self.min_seconds * attempts,), self.max_seconds, spread=_SPREAD).delay(1, chance)
        else:
            pause = Backoff((self.min_seconds,), self.max_seconds, factor=2.0, spread=_SPREAD).delay(attempts, chance)
        pause = min(max(pause, self.min_seconds), self.max_seconds)
        if asked_seconds is None:
            return pause
        return max(pause, min(asked_seconds, max(PATIENCE_SECONDS, self.max_seconds)))

    def is_over(self, attempts: int) -> bool:
        """Whether a request that failed so often is given up."""
        return self.limit is not None and attempts >= self.limit


def is_delivered(status: int) -> bool:
    """Whether an answer means that the endpoint has the events. Everything else is tried again, redirects too."""
    return 200 <= status < 300


def asked_pause(retry_after: str | None, now: datetime | None = None) -> float | None:
    """Seconds that a Retry-After header asks for, in either of its forms; None for one that cannot be read."""
    text = (retry_after or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())
