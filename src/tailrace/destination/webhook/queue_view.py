"""The queue as `tailrace queue` and `tailrace metrics` see it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from tailrace.destination.capability import QueueStatus
from tailrace.destination.webhook.queue import QueueReader, QueueWriter
from tailrace.destination.webhook.sender.leader import Leadership, open_engine
from tailrace.destination.webhook.sender.lock import claim_queue, is_claimed, queue_id
from tailrace.destination.webhook.sender.sender import Sender
from tailrace.destination.webhook.sender.status import STATUS
from tailrace.destination.webhook.setting import SenderOptions
from tailrace.errors import DamagedError, OwnedError
from tailrace.model.change import START, Position
from tailrace.system.child_process import read_status

LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class WebhookQueue:
    """The events of one pipeline that wait for an endpoint."""

    sender: SenderOptions
    segment_bytes: int
    max_bytes: int

    @property
    def place(self) -> str:
        return self.sender.queue

    @property
    def _folder(self) -> Path:
        return Path(self.sender.queue)

    def status(self) -> QueueStatus:
        said, running = read_status(self._folder, STATUS), is_claimed(self._folder)
        error = said.get("error") or {}
        with closing(QueueReader(self._folder)) as reader:
            try:
                pending = _count(reader, said.get("delivered_to"))
            except DamagedError as damage:
                pending, error = None, damage.describe()
            size = reader.size()
        return QueueStatus(
            queue=self.place,
            running=running,
            leader=running and bool(said.get("leader")),
            node=said.get("node"),
            pending=pending,
            oldest=said.get("oldest") if running else None,
            bytes=size,
            delivered=said.get("delivered"),
            dropped=said.get("dropped"),
            failures=said.get("failures"),
            error=error.get("message") or said.get("last_error"),
            fix=error.get("fix"),
        )

    def drain(self, should_stop: Callable[[], bool]) -> int:
        while not should_stop():
            if not is_claimed(self._folder):
                with suppress(OwnedError):  # a pipeline that began a moment ago sends instead
                    Sender(self.sender, should_stop, until_empty=True).run()
                    break
            elif self.status().pending == 0:
                break
            time.sleep(LOOK_SECONDS)
        with closing(QueueReader(self._folder)) as reader:
            return _count(reader, read_status(self._folder, STATUS).get("delivered_to"))

    def purge(self) -> None:
        sender = self.sender
        with claim_queue(self._folder):
            with QueueWriter(
                self._folder, segment_bytes=self.segment_bytes, max_bytes=self.max_bytes, accepts_damage=True
            ) as writer:
                head = writer.give_up()
            leadership = Leadership(
                open_engine(sender.lease),
                sender.pipeline,
                node=sender.node_id,
                queue=queue_id(self._folder),
                seconds=sender.lease_seconds,
            )
            with closing(leadership):
                leadership.pass_over(head)


def _count(reader: QueueReader, delivered_to: str | None) -> int:
    """How many events wait after what was delivered. Raises DamagedError when they cannot be counted."""
    place = max(reader.released, Position.parse(delivered_to) if delivered_to else START)
    return max(reader.count(Position(place.commit, 0)) - place.ordinal, 0)
