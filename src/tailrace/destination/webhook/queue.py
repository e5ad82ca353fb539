"""The queue of events that wait to be sent: a journal whose positions are (sequence, 0).

One process writes, the driver: a micro-batch is one transaction of the journal, and its last frame names the batch, so
a repeated batch is recognized. Frames are small, because delivery is counted in frames. Reading never deletes; a node's
sender moves a cursor past what it no longer needs, and the writer then deletes whole segments. The last frame is always
kept: it names the last batch.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from tailrace.destination import Batch
from tailrace.destination.staging import writing_to
from tailrace.destination.webhook.format.event import QUEUE_SCHEMA
from tailrace.errors import DamagedError, UnavailableError
from tailrace.journal import Cursor, Frame, FrameRef, Journal, JournalReader
from tailrace.model.change import START, Position
from tailrace.model.last_batch import LastBatch
from tailrace.system.failpoint import reach

FRAME_EVENTS = 1000
FRAME_BYTES = 4 << 20
APPEND_BYTES = 32 << 20
"""How much of a large batch is gathered for one write and one sync."""
READ_BYTES = 32 << 20
"""How much is read at once, however few events that is."""
COUNT_EVENTS = 200_000
"""How many are counted at once."""
SENDER = "sender"
_LAST = "last"
"""The cursor that keeps the last frame."""
_QUARANTINE = "quarantine"
_PURGE = (
    "tailrace queue drain FILE sends what can be read, tailrace queue purge FILE gives up the rest;"
    " tailrace resync FILE TABLE sends its rows again"
)


@dataclass(frozen=True)
class _Last:
    """The last batch in a queue, and the tables it had events of. Stored in the batch's last frame."""

    life: str
    number: int
    tables: frozenset[str]
    end: int | None = None
    purged: bool = False
    """Whether an operator gave up a queue of which the last batch was not known any more."""

    @classmethod
    def of_meta(cls, meta: bytes) -> _Last:
        fields = json.loads(meta)
        tables, purged = frozenset(fields["tables"]), fields.get("purged", False)
        return cls(fields["life"], fields["batch"], tables, fields.get("end"), purged)

    def to_meta(self) -> bytes:
        fields = {"life": self.life, "batch": self.number, "tables": sorted(self.tables)}
        added = {"end": self.end, "purged": self.purged or None}
        return json.dumps(fields | {name: value for name, value in added.items() if value is not None}).encode()

    def of_life(self, life: str) -> LastBatch | None:
        return LastBatch(self.number, self.end) if self.life == life else None


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
        """Where the oldest kept frame begins: everything up to here is deleted."""
        return self._journal.origin()

    def read(self, after: Position, limit_events: int) -> list[tuple[Position, pa.Table]]:
        """The frames after `after`, in order, with about that many events; none when the queue has no more.

        Each comes with its own place in the queue. Raises DamagedError for a frame that is not as it was written, or
        when frames are missing that were never released.
        """
        # A large batch is listed once and read in turn.
        if not self._ahead or after != self._ahead_after:
            self._ahead = deque(self._refs(after, limit_events))
        found: list[tuple[Position, pa.Table]] = []
        count = size = 0
        while self._ahead and count < limit_events and size < READ_BYTES:
            ref = self._ahead.popleft()
            with _damage():
                found.append((ref.last, _decode(self._journal.read(ref).payload)))
            count += ref.count
            size += ref.length
        self._ahead_after = found[-1][0] if found else after
        return found

    def count(self, after: Position) -> int:
        """How many events come after `after`. Raises DamagedError as `read` does."""
        total = 0
        # Not all at once: a queue can hold millions of small frames.
        while refs := self._refs(after, COUNT_EVENTS):
            total += sum(ref.count for ref in refs)
            after = refs[-1].last
        return total

    def size(self) -> int:
        """Bytes on disk."""
        return sum(size for file in self.folder.glob("*.seg") if (size := _size_of(file)))

    @property
    def released(self) -> Position:
        """The place up to which this node needs nothing any more."""
        return Cursor(self.folder, SENDER).position

    def release(self, upto: Position) -> None:
        """Record that this node needs nothing up to here any more; durable when it returns. Never goes back.

        Raises UnavailableError when the disk fails.
        """
        with writing_to(self.folder):
            Cursor(self.folder, SENDER).advance(min(upto, self.head))

    def close(self) -> None:
        self._journal.close()

    def _refs(self, after: Position, limit_events: int) -> list[FrameRef]:
        head = self.head
        # Only what was released is ever deleted. Nothing else reveals a file that is missing or lost its header.
        if after < self.start and self.released < self.start:
            raise DamagedError(
                f"the queue {self.folder} begins at {self.start}; the events before it are gone and were not delivered",
                position=str(max(after, self.released)),
                fix=_PURGE,
            )
        with _damage():
            return self._journal.frames(max(after, self.start), head, rows=limit_events) if head > START else []


class QueueWriter:
    """The writing end, in the driver's process, for as long as the pipeline runs.

    Raises OwnedError when another process writes to this queue. A damaged queue raises DamagedError: what it held was
    acknowledged upstream, so only a new copy, or the operator's consent (`accepts_damage`), can go on without it.
    """

    def __init__(self, folder: Path, *, segment_bytes: int, max_bytes: int, accepts_damage: bool = False) -> None:
        self._folder = folder
        self._writer = Journal.open_writer(folder, segment_bytes=segment_bytes, max_bytes=max_bytes)
        try:
            if not accepts_damage:
                self._require_sound()
            with writing_to(folder):
                # From now on nothing is deleted that the sender has not passed.
                Cursor(folder, SENDER).advance(START)
                Cursor(folder, _LAST).advance(START)
            # No number is ever used twice: after damage the journal may end before what was delivered, and what a
            # failing disk took back may have been seen, and sent.
            self._used = max(Cursor(folder, SENDER).position, Cursor(folder, _LAST).position).commit
            self._last = self._find_last()
        except BaseException:
            self._writer.close()
            raise

    def require_room(self) -> None:
        """Delete what the sender has passed. Raises UnavailableError while the queue is at its bound."""
        self._retain()
        if not self._writer.room() and Cursor(self._folder, SENDER).position >= self._writer.head:
            # Everything is delivered, but the segment with the last frame alone is larger than the bound.
            self.give_up()
        if not self._writer.room():
            raise UnavailableError(
                f"the queue {self._folder} is full: the endpoint accepts events more slowly than they arrive",
                fix="see `tailrace queue status FILE`; or raise destination.queue.max_bytes",
            )

    def last_batch(self, pipeline: str) -> LastBatch | None:
        """The last batch of a pipeline that the queue holds, or held before it was delivered."""
        return self._last.of_life(pipeline)

    def holds(self, batch: Batch) -> bool:
        """Whether the batch is in the queue already, or has been.

        Raises LostError when the queue is older or newer than the state.
        """
        return (replace(batch, known=None) if self._last.purged else batch).is_repeat(self.last_batch(batch.pipeline))

    def lacks(self, batch: Batch, tables: Set[str]) -> Set[str]:
        """Those of these tables that the queue has nothing of from this batch.

        A batch that is repeated after a crash may bring a table that failed the first time.
        """
        if not self.holds(batch):
            return tables
        return tables - self._last.tables

    def append(self, batch: Batch, events: Iterable[pa.Table], tables: Set[str] = frozenset()) -> int:
        """Store the events of a batch, all or none; they are durable when this returns.

        A repeat does nothing, unless it brings `tables` that the queue lacks; then `events` are those of them alone.
        Returns how many there were. Raises UnavailableError when the disk fails; the same call may be made again.
        """
        if self.holds(batch) and not self.lacks(batch, tables):
            return 0
        known = self._last.tables if self.holds(batch) else frozenset[str]()
        last = _Last(batch.pipeline, batch.id, known | tables, batch.end)
        self._writer.drop_unfinished()
        count = size = 0
        frames: list[Frame] = []
        sequence = self._sequence
        held: pa.Table | None = None
        for piece in _pieces(events):
            # The last piece is kept back, since its frame is the one that ends the batch.
            if held is not None:
                sequence += 1
                frames.append(_frame(sequence, held))
                size += len(frames[-1].payload)
                if size >= APPEND_BYTES:
                    self._used = sequence
                    self._writer.append(frames)
                    frames, size = [], 0
            held = piece
            count += len(piece)
        if held is None:
            return 0
        frames.append(_frame(sequence + 1, held, last.to_meta()))
        reach("queue.before_append")
        self._used = sequence + 1
        self._writer.append(frames)
        self._last = last
        reach("queue.appended")
        return count

    def give_up(self) -> Position:
        """Discard everything, delivered or not, and return the place after it. Repeats are still recognized."""
        self._writer.drop_unfinished()
        # A frame without events: the one that is always kept.
        self._last = replace(self._last, purged=self._last.number < 0)
        frame = _frame(self._sequence + 1, QUEUE_SCHEMA.empty_table(), self._last.to_meta())
        self._writer.append([frame])
        with writing_to(self._folder):
            Cursor(self._folder, SENDER).advance(self._writer.head)
        self._retain()
        with writing_to(self._folder):
            for file in self._set_aside():
                file.rename(file.with_suffix(".given-up"))
        return self._writer.head

    @property
    def _sequence(self) -> int:
        return max(self._writer.mark.commit, self._used)

    def _retain(self) -> None:
        with writing_to(self._folder):
            Cursor(self._folder, _LAST).advance(max(Position(self._writer.head.commit - 1, 0), START))
        self._writer.retain()

    def _set_aside(self) -> list[Path]:
        return sorted((self._folder / _QUARANTINE).glob("*.seg"))

    def _require_sound(self) -> None:
        """Raises DamagedError, at every start until someone decides: the files set aside remain as evidence."""
        where = f"the queue {self._folder} is damaged"
        kept = f"; what is left of it is in {self._folder / _QUARANTINE}"
        if self._writer.damage:
            hole = self._writer.damage[0]
            message = f"{where} at byte {hole.offset} of segment {hole.segment}{kept}"
            raise DamagedError(message, position=str(hole.after), fix=_PURGE)
        if aside := self._set_aside():
            raise DamagedError(f"{where} in segment {aside[0].name}{kept}", fix=_PURGE)

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find_last(self) -> _Last:
        reader = JournalReader(self._folder)
        try:
            # The frames before the cursor cannot be the last one, and there may be very many.
            after = max(reader.origin(), Cursor(self._folder, _LAST).position)
            refs = reader.frames(after, reader.head()) if reader.head() > START else []
        except DamagedError:
            refs = []
        finally:
            reader.close()
        return _Last.of_meta(refs[-1].meta) if refs else _Last("", -1, frozenset())


@contextmanager
def _damage() -> Iterator[None]:
    """Damage in a journal that no upstream can send again."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(error.message, position=error.position, fix=_PURGE) from error


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # gone since
        return 0


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
