"""`WebhookDestination`: every change as an event for somebody's endpoint, through a durable queue.

Executors turn changes into events and stage them; the driver puts a batch into the queue in the order of its commits;
a process of its own sends what is in the queue. So a slow or dead endpoint makes the queue grow and holds nobody up
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
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from tailrace.destination import Batch, Refetch, Staged, Written
from tailrace.destination.part import belong_together
from tailrace.destination.webhook.batch_file import Piece, Stage, as_copied, markers
from tailrace.destination.webhook.format.event import EVERY, Format, format_of
from tailrace.destination.webhook.option import WebhookOptions
from tailrace.destination.webhook.queue import QueueReader, QueueWriter
from tailrace.destination.webhook.queue_view import WebhookQueue
from tailrace.destination.webhook.sender.lock import is_claimed
from tailrace.destination.webhook.sender.status import STATUS
from tailrace.destination.webhook.setting import SenderOptions
from tailrace.errors import Finding, UnavailableError
from tailrace.model.change import Changes, Position
from tailrace.model.schema import TableName, TableSchema
from tailrace.system.child_process import Child, read_status

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
LEVEL_SECONDS = 10.0
DRAIN_SECONDS = 60.0
"""How long a run with `--once` waits for an endpoint that takes nothing at all."""


@dataclass(frozen=True)
class WebhookDestination:
    """An endpoint. Frozen and picklable; what the sender needs to know, secrets included, never shows in its repr."""

    options: ClassVar[type[WebhookOptions]] = WebhookOptions

    pipeline: str
    format_name: str
    queue: str
    max_bytes: int
    segment_bytes: int
    sender: SenderOptions = field(repr=False)
    copied_rows: bool = True

    @classmethod
    def from_options(cls, options: WebhookOptions, *, name: str) -> WebhookDestination:
        return cls(
            pipeline=name,
            format_name=options.format,
            queue=str(options.queue.path),
            max_bytes=options.queue.max_bytes,
            segment_bytes=options.queue.segment_bytes,
            sender=SenderOptions.of(options, name=name),
            copied_rows=options.copied_rows,
        )

    @property
    def name(self) -> str:
        return f"webhook {self.sender.shown_url}"

    @cached_property
    def _format(self) -> Format:
        return format_of(self.format_name)

    @property
    def _stage(self) -> Stage:
        return Stage(Path(self.queue))

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        return self.sender.check()

    def write_rows(self, table: TableSchema, rows: Iterable[Changes]) -> Staged:
        """Stage copied rows as events, where they are wanted."""
        if not self.copied_rows:
            # They are read all the same: some sources note what they gave, to know later what is gone.
            deque(rows, maxlen=0)
            rows = ()
        piece = self._stage.write(as_copied(self._encode(chunk)) for chunk in rows if len(chunk))
        return Staged(json.dumps(piece.to_json()), piece.events, piece.bytes)

    def write_changes(
        self,
        table: TableSchema,
        changes: Iterable[Changes],
        batch: Batch,
        *,
        staged: Sequence[Staged] = (),
        starts: bool = False,
        completes: bool = False,
        refetch: Refetch | None = None,
        weight: int = 0,
    ) -> Written:
        """Stage the changes as events, uncollapsed. The driver puts them into the queue with all others of the batch.

        A column that the upstream left out, because it did not change, is left out of the event.
        """
        log = self._stage.write(self._encode(chunk) for chunk in _whole(changes))
        copied = [Piece.from_json(json.loads(one.receipt)) for one in staged]
        if copied or log.events or completes:
            self._stage.enter(batch, str(table.table), copied=copied, log=[log], completes=completes)
        return Written(changes=log.events, upserts=log.events)

    def drop_table_for_copy(self, table: TableSchema) -> None:
        """Nothing: what was sent is sent, and what waits in the queue stays in it."""

    def maintain(self, table: TableName) -> str | None:
        return None

    @contextmanager
    def committer(self) -> Iterator[WebhookCommitter]:
        folder = Path(self.queue)
        queue = QueueWriter(folder, segment_bytes=self.segment_bytes, max_bytes=self.max_bytes)
        with queue as writer, self.start_sender() as sender:
            yield WebhookCommitter(folder, writer, self._stage, sender)

    def start_sender(self) -> Child:
        """The process that sends, while this node has the lease."""
        folder = Path(self.queue)
        return Child(
            "tailrace.destination.webhook.sender",
            self.sender.to_json(),
            folder,
            STATUS,
            is_busy=partial(is_claimed, folder),
            shows_output=self.sender.shown_url == "stdout",
        )

    def open_queue(self, pipeline: str) -> WebhookQueue:
        return WebhookQueue(replace(self.sender, pipeline=pipeline), self.segment_bytes, self.max_bytes)

    def shutdown(self) -> None:
        pass

    def _encode(self, changes: Changes) -> pa.RecordBatch:
        return self._format.encode(changes, source=self.pipeline)


class WebhookCommitter:
    """The driver's part: batches into the queue, and a look at the sender."""

    def __init__(self, folder: Path, writer: QueueWriter, stage: Stage, sender: Child) -> None:
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
        self._writer.require_room()
        # What is there is of attempts and tasks that failed; they may be many, and nobody else would ever remove it.
        self._stage.clear()
        yield
        tables = self._writer.lacks(batch, self._stage.tables(batch))
        level = [] if self._writer.holds(batch) else self._level()
        self._writer.append(batch, chain(level, self._stage.gather(batch, tables)), tables)
        self._stage.clear()

    def poll(self) -> None:
        try:
            self._sender.require_alive()
        except UnavailableError as error:
            _log.warning("%s; another one is started", error.message)

    def settled(self, position: Position | None) -> None:
        with self._settling:
            if position is None:
                self._levels.clear()
            else:
                self._levels.append((time.monotonic(), position))

    def _level(self) -> list[pa.Table]:
        """A marker for all tables, so that other nodes need not keep what they copied of a table that never changes.

        A table that came a moment ago may not be known yet, so only what was level for a while is said.
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
                status = {}  # what the sender of another run said
            place = status.get("delivered_to")
            if status.get("follows") or (place and Position.parse(place) >= head):
                return
            if place != seen:
                seen, since = place, time.monotonic()
            if time.monotonic() - since > DRAIN_SECONDS:
                waiting = reader.count(Position.parse(place)) if place else reader.count(reader.start)
                raise UnavailableError(
                    f"the endpoint takes nothing: {waiting} events wait in the queue {self._folder}",
                    fix="tailrace queue status FILE says why; tailrace queue drain FILE sends them",
                )
            time.sleep(LOOK_SECONDS)


def _whole(changes: Iterable[Changes]) -> Iterator[Changes]:
    """The chunks, with the two halves of a changed key in the same one."""
    held: Changes | None = None
    for chunk in changes:
        if not len(chunk):
            continue
        if held is not None and belong_together(held, chunk):
            both = pa.Table.from_batches([held.batch, chunk.batch]).combine_chunks().to_batches()
            held = Changes(held.table, both[0])
            continue
        if held is not None:
            yield held
        held = chunk
    if held is not None:
        yield held
