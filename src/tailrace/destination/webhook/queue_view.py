"""The queue as `tailrace queue` and `tailrace metrics` see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from tailrace.destination.capability import QueueStatus
from tailrace.destination.webhook.option import WebhookOptions
from tailrace.destination.webhook.queue import QueueReader, QueueWriter
from tailrace.destination.webhook.sender.leader import Leadership, open_engine
from tailrace.destination.webhook.sender.lock import claim_queue, is_claimed, queue_id
from tailrace.destination.webhook.sender.sender import Sender
from tailrace.destination.webhook.sender.status import STATUS
from tailrace.errors import DamagedError, OwnedError
from tailrace.model.change import START, Position
from tailrace.system.child_process import read_status

LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class WebhookQueue:
    """The events of one pipeline that wait for an endpoint."""

    options: WebhookOptions
    pipeline: str

    @property
    def place(self) -> str:
        return str(self._folder)

    @property
    def _folder(self) -> Path:
        return self.options.queue.path

    def status(self) -> QueueStatus:
        status, running = read_status(self._folder, STATUS), is_claimed(self._folder)
        error = status.get("error") or {}
        with closing(QueueReader(self._folder)) as reader:
            try:
                pending = _count(reader, status.get("delivered_to"))
            except DamagedError as damage:
                pending, error = None, damage.describe()
            size = reader.size()
        return QueueStatus(
            queue=self.place,
            running=running,
            leader=running and bool(status.get("leader")),
            node=status.get("node"),
            pending=pending,
            oldest=status.get("oldest") if running else None,
            bytes=size,
            delivered=status.get("delivered"),
            dropped=status.get("dropped"),
            failures=status.get("attempts"),
            error=error.get("message") or status.get("last_error"),
            fix=error.get("fix"),
        )

    def drain(self, should_stop: Callable[[], bool]) -> int:
        while not should_stop():
            if not is_claimed(self._folder):
                with suppress(OwnedError):  # a pipeline that began a moment ago sends instead
                    Sender(self.options, self.pipeline, should_stop, until_empty=True).run()
                    break
            elif self.status().pending == 0:
                break
            time.sleep(LOOK_SECONDS)
        with closing(QueueReader(self._folder)) as reader:
            return _count(reader, read_status(self._folder, STATUS).get("delivered_to"))

    def purge(self) -> None:
        queue, leader = self.options.queue, self.options.leader
        with claim_queue(queue.path):
            with QueueWriter(
                queue.path, segment_bytes=queue.segment_bytes, max_bytes=queue.max_bytes, accepts_damage=True
            ) as writer:
                head = writer.give_up()
            leadership = Leadership(
                open_engine(leader.lease.reveal()),
                self.pipeline,
                node=self.options.node_id,
                queue=queue_id(queue.path),
                seconds=leader.seconds,
            )
            with closing(leadership):
                leadership.pass_over(head)


def _count(reader: QueueReader, delivered_to: str | None) -> int:
    """How many events wait after what was delivered. Raises DamagedError when they cannot be counted."""
    place = max(reader.released, Position.parse(delivered_to) if delivered_to else START)
    return max(reader.count(Position(place.commit, 0)) - place.ordinal, 0)
