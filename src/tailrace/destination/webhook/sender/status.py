"""The sender's status, for `tailrace status` and for processes that wait for it. Can be used from several threads."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from tailrace.destination.webhook.queue import QueueReader
from tailrace.errors import TailraceError
from tailrace.model.change import START, Position
from tailrace.system.child_process import read_status, write_status

STATUS = "sender"
"""The name of the sender's status and log in the folder of its queue."""

PUBLISH_SECONDS = 0.5
_COUNTING_SHARE = 0.05


class Report:
    """Counts since the process began, and the current state. Holds no event, no header and no secret.

    Dropped events are counted since the queue was created: a restart must not hide them.
    """

    def __init__(self, folder: Path, node: str) -> None:
        self._folder = folder
        self._node = node
        self._lock = threading.Lock()
        self._publishing = threading.Lock()
        self._reader = QueueReader(folder)
        self._epoch: int | None = None
        self._follows = False
        self._place = START
        self._oldest: datetime | None = None
        self._delivered = self._requests = self._failures = self._attempts = 0
        self._dropped = int(read_status(folder, STATUS).get("dropped") or 0)
        self._error: TailraceError | None = None
        self._last_error: str | None = None
        self._published_at = 0.0
        self._pending = 0
        self._count_at = 0.0

    def leads(self, epoch: int | None) -> None:
        """The node leads, in this epoch, or it does not; whether another one does is not known yet."""
        with self._lock:
            self._epoch, self._follows = epoch, False

    def follows(self) -> None:
        """Another node leads."""
        with self._lock:
            self._epoch, self._follows, self._oldest, self._error = None, True, None, None

    def reached(self, place: Position) -> None:
        """Everything of the queue up to here is delivered."""
        with self._lock:
            self._place = place

    def waits(self, oldest: datetime | None) -> None:
        """When the event that is to be sent next was committed."""
        with self._lock:
            self._oldest = oldest

    def delivered(self, events: int) -> None:
        """A request was delivered."""
        with self._lock:
            self._delivered, self._requests, self._attempts = self._delivered + events, self._requests + 1, 0
            self._error = None

    def dropped(self, events: int) -> None:
        """A request was given up."""
        with self._lock:
            self._dropped, self._attempts = self._dropped + events, 0

    def attempted(self, attempts: int, error: TailraceError) -> None:
        """A request failed, for so many times in a row."""
        with self._lock:
            self._attempts, self._failures = attempts, self._failures + 1
        self.failed(error)

    def failed(self, error: TailraceError) -> None:
        """Something keeps the sender waiting, or has ended it."""
        with self._lock:
            self._error, self._last_error = error, error.message

    def publish_in_turn(self) -> None:
        """Publish when it is time to."""
        if time.monotonic() - self._published_at >= PUBLISH_SECONDS:
            self.publish()

    def publish(self) -> None:
        """Write the status file."""
        with self._publishing:
            self._published_at = time.monotonic()
            head = self._reader.head
            self._count(head)
            with self._lock:
                status = {
                    "at": time.time(),
                    "node": self._node,
                    "leader": self._epoch is not None,
                    "follows": self._follows,
                    "epoch": self._epoch,
                    "head": str(head),
                    "delivered_to": str(self._place),
                    "pending": self._pending,
                    "oldest": self._oldest.isoformat() if self._oldest else None,
                    "delivered": self._delivered,
                    "dropped": self._dropped,
                    "requests": self._requests,
                    "failures": self._failures,
                    "attempts": self._attempts,
                    "error": self._error.describe() if self._error else None,
                    "last_error": self._last_error,
                }
            write_status(self._folder, STATUS, status)

    def close(self) -> None:
        """Nothing more is published."""
        self._reader.close()

    def _count(self, head: Position) -> None:
        """Count what waits; a long queue is not counted all the time."""
        began = time.monotonic()
        place = self._place
        if place >= head:
            self._pending = 0
        elif began >= self._count_at:
            # Files may be deleted while they are counted, and damage is reported by the sender when it reads them.
            with suppress(TailraceError):
                self._pending = max(self._reader.count(Position(place.commit, 0)) - place.ordinal, 0)
            self._count_at = time.monotonic() + (time.monotonic() - began) / _COUNTING_SHARE
