"""When a failed request is made again. Pure: no clock, no sleep, no randomness of its own."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from tailrace.destination.webhook.option import RetryOptions
from tailrace.system.backoff import Backoff

PATIENCE_SECONDS = 300.0
"""The longest wait an endpoint may ask for, unless `max` is longer: a mistake of the endpoint must not stop sending."""
_SPREAD = 0.25


def pause_seconds(retry: RetryOptions, attempts: int, chance: float, asked_seconds: float | None = None) -> float:
    """How long to wait after so many failed attempts, at least one.

    `chance`, from 0 to 1, spreads the pauses of many senders; `asked_seconds` is what the endpoint asked for.
    """
    if retry.policy == "linear":
        pause = Backoff((retry.min * attempts,), retry.max, spread=_SPREAD).delay(1, chance)
    else:
        pause = Backoff((retry.min,), retry.max, factor=2.0, spread=_SPREAD).delay(attempts, chance)
    pause = min(max(pause, retry.min), retry.max)
    if asked_seconds is None:
        return pause
    return max(pause, min(asked_seconds, max(PATIENCE_SECONDS, retry.max)))


def is_over(retry: RetryOptions, attempts: int) -> bool:
    """Whether a request is given up after this many failed attempts."""
    return retry.limit is not None and attempts >= retry.limit


def is_delivered(status: int) -> bool:
    """Whether an answer means that the endpoint has the events. After any other answer, even a redirect, we retry."""
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
