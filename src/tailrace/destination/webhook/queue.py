"""The queue of events that wait to be sent: a journal whose positions are (sequence, 0).

One process writes, the driver: a micro-batch is one transaction of the journal, and its last frame says which batch it
was, so a batch that comes again is known. Frames are small, as a frame is what counts as delivered. Reading never
deletes; a node's sender says by a cursor what it needs no more, and the writer then deletes whole segments. The last
frame is always kept: it tells the last batch.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from tailrace.change import START, Position
from tailrace.destination import Batch
from tailrace.destination.webhook.event import QUEUE_SCHEMA
from tailrace.errors import DamagedError, UnavailableError
from tailrace.failpoint import reach
from tailrace.journal import Cursor, Frame, FrameRef, Journal, JournalReader

FRAME_EVENTS = 1000
FRAME_BYTES = 4 << 20
APPEND_BYTES = 32 << 20
"""How much of a large batch is gathered for one write and one sync."""
SENDER = "sender"
_LAST = "last"
"""The cursor that keeps the last frame."""


@dataclass(frozen=True)
class QueueState:
    """How full a queue is. `events` counts what is kept, delivered or not."""

    head: Position
    start: Position
    events: int
    bytes: int


class QueueReader:
    """A view of a node's queue, for any number of processes. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._journal = JournalReader(folder)
        self._ahead: deque[FrameRef] = deque()
        self._ahead_after = START

    @property
    def head(self) -> Position:
        """The last place that is durable; everything up to it can be read."""
        self._journal.refresh()
        return self._journal.head()

    @property
    def start(self) -> Position:
        """Where the oldest kept frame begins: everything at or before is gone."""
        return self._journal.origin()

    def read(self, after: Position, limit_events: int) -> list[tuple[Position, pa.Table]]:
        """The frames behind `after`, in order, with about so many events; none when there is nothing.

        Each comes with its own place in the queue. Raises DamagedError for one that is not as it was written.
        """
        # A large batch is listed once and read in turn.
        if not self._ahead or after != self._ahead_after:
            self._ahead = deque(self._refs(after, limit_events))
        found: list[tuple[Position, pa.Table]] = []
        count = 0
        while self._ahead and count < limit_events:
            ref = self._ahead.popleft()
            found.append((ref.last, _decode(self._journal.read(ref).payload)))
            count += ref.count
        self._ahead_after = found[-1][0] if found else after
        return found

    def count(self, after: Position) -> int:
        """How many events lie behind `after`."""
        return sum(ref.count for ref in self._refs(after))

    def state(self) -> QueueState:
        """How full the queue is."""
        size = sum(file.stat().st_size for file in self.folder.glob("*.seg"))
        return QueueState(self.head, self.start, self.count(self.start), size)

    @property
    def released(self) -> Position:
        """Up to here this node needs nothing any more."""
        return Cursor(self.folder, SENDER).position

    def release(self, upto: Position) -> None:
        """This node needs nothing up to here any more; durable when it returns. Going back is ignored."""
        Cursor(self.folder, SENDER).advance(min(upto, self.head))

    def close(self) -> None:
        self._journal.close()

    def _refs(self, after: Position, limit_events: int | None = None) -> list[FrameRef]:
        head = self.head
        return self._journal.frames(max(after, self.start), head, rows=limit_events) if head > START else []


class QueueWriter:
    """The writing end, in the driver's process, for as long as the pipeline runs.

    Raises OwnedError when another process writes to this queue. A damaged queue raises DamagedError: what it held was
    acknowledged upstream, so only a new copy, or the operator's word (`accepts_damage`), can go on without it.
    """

    def __init__(self, folder: Path, *, segment_bytes: int, max_bytes: int, accepts_damage: bool = False) -> None:
        self._folder = folder
        # Several segments to a full queue: whole ones are deleted.
        segment_bytes = min(segment_bytes, max_bytes // 4)
        self._writer = Journal.open_writer(folder, segment_bytes=segment_bytes, max_bytes=max_bytes)
        if self._writer.damage and not accepts_damage:
            hole = self._writer.damage[0]
            self._writer.close()
            raise DamagedError(
                f"segment {hole.segment} of the queue {folder} is damaged at byte {hole.offset}; a copy of it is in"
                f" {folder / 'quarantine'}",
                position=str(hole.after),
                fix="tailrace queue purge FILE gives up what cannot be read; tailrace resync FILE sends the rows again",
            )
        # From now on nothing goes that the sender has not passed.
        Cursor(folder, SENDER).advance(START)
        Cursor(folder, _LAST).advance(START)
        self._last = self._find_last()

    def require_room(self) -> None:
        """Delete what the sender has passed. Raises UnavailableError while the queue is at its bound."""
        self._retain()
        if not self._writer.room() and Cursor(self._folder, SENDER).position >= self._writer.head:
            # All of it is delivered, but the last frame is in a segment that alone is too large.
            self.give_up()
        if not self._writer.room():
            raise UnavailableError(
                f"the queue {self._folder} is full: its endpoint takes less than comes in",
                fix="see `tailrace queue status FILE`; or raise destination.queue.max_bytes",
            )

    def holds(self, batch: Batch) -> bool:
        """Whether the batch is in the queue already, or has been."""
        life, number = self._last
        return life == batch.pipeline and batch.id <= number

    def append(self, batch: Batch, events: Iterable[pa.Table]) -> int:
        """Store the events of a batch, all or none; they are durable when this returns. A repeat does nothing.

        Says how many there were. Raises UnavailableError when the disk fails; the same call may be made again.
        """
        if self.holds(batch):
            return 0
        self._writer.drop_unfinished()
        count = size = 0
        frames: list[Frame] = []
        sequence = self._writer.mark.commit
        held: pa.Table | None = None
        for piece in _pieces(events):
            # The last piece is kept back, since its frame is the one that ends the batch.
            if held is not None:
                sequence += 1
                frames.append(_frame(sequence, held))
                size += len(frames[-1].payload)
                if size >= APPEND_BYTES:
                    self._writer.append(frames)
                    frames, size = [], 0
            held = piece
            count += len(piece)
        if held is None:
            return 0
        meta = json.dumps({"life": batch.pipeline, "batch": batch.id}).encode()
        frames.append(_frame(sequence + 1, held, meta))
        reach("queue.before_append")
        self._writer.append(frames)
        self._last = (batch.pipeline, batch.id)
        reach("queue.appended")
        return count

    def give_up(self) -> Position:
        """Let everything in the queue go, delivered or not; the place behind it. Batches are known as before."""
        life, number = self._last
        self._writer.drop_unfinished()
        meta = json.dumps({"life": life, "batch": number}).encode()
        # A frame without events: the one that is always kept.
        self._writer.append([_frame(self._writer.mark.commit + 1, QUEUE_SCHEMA.empty_table(), meta)])
        Cursor(self._folder, SENDER).advance(self._writer.head)
        self._retain()
        return self._writer.head

    def _retain(self) -> None:
        Cursor(self._folder, _LAST).advance(max(Position(self._writer.head.commit - 1, 0), START))
        self._writer.retain()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find_last(self) -> tuple[str, int]:
        reader = JournalReader(self._folder)
        try:
            refs = reader.frames(reader.origin(), reader.head()) if reader.head() > START else []
        except DamagedError:
            refs = []
        finally:
            reader.close()
        if not refs:
            return "", -1
        meta = json.loads(refs[-1].meta)
        return meta["life"], meta["batch"]


def _pieces(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    for table in tables:
        each = FRAME_EVENTS
        if len(table) and table.nbytes > FRAME_BYTES:
            each = max(1, min(each, len(table) * FRAME_BYTES // table.nbytes))
        for first in range(0, len(table), each):
            yield table.slice(first, each)


def _frame(sequence: int, events: pa.Table, meta: bytes = b"") -> Frame:
    at = Position(sequence, 0)
    return Frame(at, at, bool(meta), len(events), meta, _encode(events))


def _encode(events: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, QUEUE_SCHEMA) as stream:
        stream.write_table(events.combine_chunks())
    return memoryview(sink.getvalue())


def _decode(payload: Sequence[int] | memoryview | bytes) -> pa.Table:
    return pa.ipc.open_stream(pa.py_buffer(payload)).read_all()
