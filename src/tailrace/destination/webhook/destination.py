"""`WebhookDestination`: every change as an event for an endpoint, through a durable queue.

Executors turn changes into events and stage them; the driver puts a batch into the queue in the order of its commits;
a separate process sends what is in the queue. So a slow or dead endpoint makes the queue grow, and delays nothing else
before the queue is full.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import ClassVar, Literal

import pyarrow as pa

from tailrace.destination import (
    Batch,
    Committer,
    CopyMode,
    Event,
    EventDestination,
    Stage,
    Staged,
    TableBatch,
    Written,
)
from tailrace.destination.chunking import whole
from tailrace.destination.webhook.address import WebhookTarget
from tailrace.destination.webhook.batch_file import EventStage, Piece, as_copied, markers
from tailrace.destination.webhook.format.event import EVERY, Format, format_of, stream_format_of
from tailrace.destination.webhook.option import WebhookOptions
from tailrace.destination.webhook.queue import QueueReader, QueueWriter
from tailrace.destination.webhook.queue_view import WebhookQueue
from tailrace.destination.webhook.sender.lock import is_claimed
from tailrace.destination.webhook.sender.status import STATUS
from tailrace.destination.webhook.transaction import encode_events
from tailrace.destination.webhook.transport import open_transport
from tailrace.errors import Finding, TailraceError, UnavailableError
from tailrace.model.change import Changes, Position
from tailrace.model.delivery_status import DeliveryStatus
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableSchema
from tailrace.system.child_process import Child, read_status

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
LEVEL_SECONDS = 10.0
DRAIN_SECONDS = 60.0
"""How long a run with `--once` waits for an endpoint that accepts nothing at all."""


class WebhookDestination(WebhookOptions, EventDestination):
    """An endpoint. Its repr shows no secret."""

    type: Literal["webhook"] = "webhook"
    copy_mode: ClassVar[CopyMode] = "stream"

    def shared_folders(self) -> dict[str, Path]:
        return {"destination.queue.path": self.queue.path}

    @property
    def takes_events(self) -> bool:  # type: ignore[override]
        return self.events

    @property
    def lanes(self) -> int | None:  # type: ignore[override]
        return 1 if self.events else None

    @property
    def name(self) -> str:
        return f"webhook {self.url.masked}"

    @cached_property
    def _format(self) -> Format:
        return format_of(self.format)

    @property
    def _event_stage(self) -> EventStage:
        return EventStage(self.queue.path)

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Check whether requests to the endpoint are allowed. Sends nothing."""
        subject = self.url.masked
        try:
            open_transport(self).close()
            if subject != "stdout":
                WebhookTarget.of(self.url.reveal()).addresses(allow_private=self.allow_private)
        except UnavailableError as error:
            return [Finding("warning", subject, error.message, error.fix)]
        except TailraceError as error:
            return [Finding("error", subject, error.message, error.fix)]
        return [Finding("ok", subject, f"events go there in the format {self.format}")]

    def write_rows(self, table: TableSchema, rows: Iterable[Changes], stage: Stage) -> Staged:
        """Stage copied rows as events next to the queue, if they are wanted."""
        if not self.copied_rows:
            # Read them even so: some sources record the rows they return, to find deleted ones later.
            deque(rows, maxlen=0)
            rows = ()
        if self.events:
            return stage.write(table, rows)
        piece = self._event_stage.write(as_copied(self._encode(chunk, stage)) for chunk in rows if len(chunk))
        return Staged(json.dumps(piece.to_json()), piece.events, piece.bytes)

    def write_changes(self, batch: TableBatch) -> Written:
        """Stage the changes as events, uncollapsed. The driver puts them into the queue with all others of the batch.

        A column that the upstream left out, because it did not change, is left out of the event.
        """
        assert batch.stage is not None, "events name the pipeline"
        log = self._event_stage.write(self._encode(chunk, batch.stage) for chunk in whole(batch.log))
        copied = [Piece.from_json(json.loads(one.receipt)) for one in batch.staged]
        if copied or log.events or batch.completes_copy:
            self._event_stage.enter(
                batch.batch, str(batch.table.table), copied=copied, log=[log], completes=batch.completes_copy
            )
        return Written(changes=log.events, upserts=log.events)

    def write_events(self, events: Iterator[Event], batch: Batch) -> Written:
        """With `events`: stage the changes of all tables, with the boundaries of transactions and the columns."""
        form = stream_format_of(self.format)
        tables = encode_events(events, form, batch.pipeline.rpartition("/")[0] or batch.pipeline)
        written = Written()
        for name, found in tables.items():
            copied, log = self._event_stage.write(found.copied), self._event_stage.write(found.log)
            self._event_stage.enter(batch, name, copied=[copied], log=[log], completes=found.completes_copy)
            written += Written(changes=log.events, upserts=log.events)
        return written

    @contextmanager
    def committer(self, pipeline: str) -> Iterator[WebhookCommitter]:
        queue = QueueWriter(self.queue.path, segment_bytes=self.queue.segment_bytes, max_bytes=self.queue.max_bytes)
        with queue as writer, self.start_sender(pipeline) as sender:
            yield WebhookCommitter(self.queue.path, writer, self._event_stage, sender)

    def start_sender(self, pipeline: str) -> Child:
        """The process that sends, while this node has the lease."""
        return Child(
            "tailrace.destination.webhook.sender",
            self.to_text(pipeline),
            self.queue.path,
            STATUS,
            is_busy=partial(is_claimed, self.queue.path),
            shows_output=self.url.masked == "stdout",
        )

    def open_queue(self, pipeline: str) -> WebhookQueue:
        return WebhookQueue(self, pipeline)

    def _encode(self, changes: Changes, stage: Stage) -> pa.RecordBatch:
        return self._format.encode(changes, source=stage.pipeline)


class WebhookCommitter(Committer):
    """The driver's part: puts batches into the queue and supervises the sender."""

    def __init__(self, folder: Path, writer: QueueWriter, stage: EventStage, sender: Child) -> None:
        self._folder = folder
        self._writer = writer
        self._stage = stage
        self._sender = sender
        self._levels: deque[tuple[float, Position]] = deque()
        self._settling = threading.Lock()
        self._began = time.time()

    @contextmanager
    def batch(self, batch: Batch) -> Iterator[None]:
        self.poll()
        # Raises before anything is staged when the queue does not fit the state.
        self._writer.holds(batch)
        self._writer.require_room()
        # These files are left from failed attempts and tasks; there may be many, and nothing else would delete them.
        self._stage.clear()
        yield
        tables = self._writer.lacks(batch, self._stage.tables(batch))
        level = [] if self._writer.holds(batch) else self._level()
        self._writer.append(batch, chain(level, self._stage.gather(batch, tables)), tables)
        self._stage.clear()

    def require_fit(self, batch: Batch) -> None:
        self._writer.holds(batch)

    def last_batch(self, pipeline: str) -> LastBatch | None:
        return self._writer.last_batch(pipeline)

    def poll(self) -> None:
        try:
            self._sender.require_alive()
        except UnavailableError as error:
            _log.warning("%s; another one is started", error.message)

    def delivery(self) -> DeliveryStatus:
        """From the sender's status: to count a long queue takes time."""
        status = read_status(self._folder, STATUS)
        error = status.get("error") or {}
        return DeliveryStatus(
            pending=status.get("pending"),
            oldest=status.get("oldest"),
            delivered=status.get("delivered"),
            dropped=status.get("dropped"),
            failures=int(status.get("attempts") or 0),
            error=error.get("message"),
            fix=error.get("fix"),
        )

    def settled(self, position: Position | None) -> None:
        with self._settling:
            if position is None:
                self._levels.clear()
            else:
                self._levels.append((time.monotonic(), position))

    def _level(self) -> list[pa.Table]:
        """A marker for all tables, so that other nodes need not keep what they copied of a table that never changes.

        A table that was just added may not be known yet, so a position is published only after a while.
        """
        reached: Position | None = None
        with self._settling:
            while self._levels and time.monotonic() - self._levels[0][0] > LEVEL_SECONDS:
                reached = self._levels.popleft()[1]
        return [] if reached is None else [markers([(EVERY, reached)])]

    def drain(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        with closing(QueueReader(self._folder)) as reader:
            self._drain(reader, should_stop)

    def _drain(self, reader: QueueReader, should_stop: Callable[[], bool]) -> None:
        head, seen, since = reader.head, None, time.monotonic()
        while not should_stop():
            self.poll()
            status = read_status(self._folder, STATUS)
            if status.get("at", 0) < self._began:
                status = {}  # written by the sender of another run
            place = status.get("delivered_to")
            if status.get("follows") or (place and Position.parse(place) >= head):
                return
            if place != seen:
                seen, since = place, time.monotonic()
            if time.monotonic() - since > DRAIN_SECONDS:
                waiting = reader.count(Position.parse(place)) if place else reader.count(reader.start)
                raise UnavailableError(
                    f"the endpoint accepts nothing: {waiting} events wait in the queue {self._folder}",
                    fix="tailrace queue status FILE shows why; tailrace queue drain FILE sends them",
                )
            time.sleep(LOOK_SECONDS)
