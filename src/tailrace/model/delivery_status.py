"""How the delivery of queued events stands, for people. The state store keeps the last one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeliveryStatus:
    """The events that a destination with a queue has accepted and not delivered. None: not known.

    pending     how many wait
    oldest      when the oldest of them was committed, ISO 8601 in UTC
    delivered   events, since the sender started
    dropped     events that were given up, since the queue was created
    failures    failed requests in a row
    error, fix  why nothing is delivered now, and how to fix it; None while deliveries succeed
    """

    pending: int | None = None
    oldest: str | None = None
    delivered: int | None = None
    dropped: int | None = None
    failures: int = 0
    error: str | None = None
    fix: str | None = None
