"""Which requests rqlite keeps sending because it got no answer in time, or a refusal.

A node sends nothing else until a request is answered with 200, so one that it repeats holds up its whole cluster.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

RETRIES = 3
"""How often the same request must have come before it is reported: a failover or a restart repeats one, too."""
FORGET_SECONDS = 120.0
"""How long after its last attempt a request counts as repeated: four times rqlite's longest pause."""
REQUESTS = 256
TIMED_OUT = (
    "rqlite gave up waiting for the answer: raise transmit_timeout in its CDC configuration,"
    " or write smaller transactions"
)


@dataclass
class _Attempts:
    began: float
    last: float
    count: int = 0
    service: str | None = None
    reason: str = TIMED_OUT


class AttemptLog:
    """The latest requests by what identifies their bodies. Not for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: OrderedDict[str, _Attempts] = OrderedDict()

    def came(self, body: str) -> None:
        """A request has come, perhaps again."""
        now = self._clock()
        found = self._requests.pop(body, None)
        if found is None or now - found.last > FORGET_SECONDS:
            found = _Attempts(now, now)
        found.last, found.count = now, found.count + 1
        self._requests[body] = found
        if len(self._requests) > REQUESTS:
            self._requests.popitem(last=False)

    def answered(self, body: str, service: str | None, refusal: str | None) -> None:
        """It was answered: with this refusal, or with 200, which rqlite may still not have got."""
        if (found := self._requests.get(body)) is not None:
            found.service = service or found.service
            found.reason = refusal or TIMED_OUT

    def stored(self, body: str, service: str) -> None:
        """It is durable: the service sends what comes after it, and none of its earlier requests, or still this one."""
        self.answered(body, service, None)
        for other in [other for other, one in self._requests.items() if one.service == service and other != body]:
            del self._requests[other]

    def retrying(self) -> list[dict[str, Any]]:
        """The requests that are being repeated now: the service if it is known, how often, since when, and why."""
        now = self._clock()
        return [
            {
                "service": one.service,
                "attempts": one.count,
                "seconds": round(now - one.began, 1),
                "reason": one.reason,
            }
            for one in self._requests.values()
            if one.count >= RETRIES and now - one.last <= FORGET_SECONDS
        ]
