"""The writer of a journal: one process, one append at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice, pairwise
from types import TracebackType

from tailrace.errors import RESYNC, LostError, UnavailableError
from tailrace.journal.cursor import cursors
from tailrace.journal.frame import Frame, encode, frame_bytes
from tailrace.journal.index import SegmentIndex
from tailrace.journal.recovery import Damage, Recovered
from tailrace.journal.segment import SegmentHeader, State, new_header, segment_name
from tailrace.journal.storage import Buffer, JournalStorage, Pace, SegmentSink
from tailrace.model.change import START, Position
from tailrace.system.failpoint import reach

_log = logging.getLogger(__name__)

_NOTE_BYTES = 256 << 10  # the most that notes may take in one segment
_JOINED_BYTES = (
    64 << 10
)  # payloads below this size are copied into one buffer, which is cheaper than one vector entry each
KEPT_PIECES = 16
"""Objects that retention leaves, so that a reader finds the next one by its number even if it is a little late."""
_WARNING_LEVEL = 0.8


class JournalWriter:
    """Appends frames and notes. Created by `Journal.open_writer`, which takes the lock for it. Not thread-safe.

    `damage` lists the ranges that recovery found lost. The caller must handle them: either `cut_back` and receive the
    changes again, or stop. Until then readers raise DamagedError for those positions. Damage that every reader has
    already passed does no harm.
    """

    def __init__(
        self, storage: JournalStorage, sink: SegmentSink, found: Recovered, *, segment_bytes: int, max_bytes: int
    ) -> None:
        self._storage = storage
        self.damage: list[Damage] = found.damage
        self.max_bytes = max_bytes
        self.segment_bytes = segment_bytes
        self._sink: SegmentSink | None = sink
        self._segments = found.segments
        self._sizes = found.sizes
        self._sequence = found.next_sequence
        self._name = ""
        self._noted_bytes = 0
        self._dataless = True
        self._dataless_pieces: deque[str] = deque()
        self._suspect = False
        self._warned = False
        self._state: State = found.state
        _, head, mark = found.state
        # Always a new segment. A torn append was never acknowledged and an unfinished transaction will be sent again,
        # so the new segment makes both void. And a file that may have shrunk in a crash must never grow again while
        # readers have it open.
        self._roll(State(head, head, mark))
        self._drop_void()

    @property
    def is_fenced(self) -> bool:
        """Whether another writer has taken over: this one can store nothing any more."""
        return self._sink is not None and self._sink.is_fenced

    @property
    def pace(self) -> Pace:
        """How often the storage should be asked for something; the caller paces itself."""
        return self._storage.pace

    @property
    def head(self) -> Position:
        """The last commit boundary that is durable; START when there is none."""
        return self._state.head

    @property
    def mark(self) -> Position:
        """The highest durable position of a complete frame or a note. The upstream may discard its log up to here."""
        return self._state.mark

    @property
    def within_transaction(self) -> bool:
        """True while frames of a transaction are durable but its end is not. Readers do not see such frames."""
        return self._state.tail != self._state.head

    def append(self, frames: Sequence[Frame]) -> None:
        """Store frames with one write and one sync; they are durable when this returns.

        Positions must increase from frame to frame and be after `mark`; otherwise ValueError. Raises UnavailableError
        when the disk is full or fails: then none of these frames is stored, earlier ones stay, and the caller may
        retry the same call.
        """
        if not frames:
            return
        self._check_order(frames)
        self._store(frames, sum(map(frame_bytes, frames)), note=False)
        tail, head, mark = self._state
        for frame in frames:
            tail = frame.last
            head = frame.last if frame.complete else head
        self._dataless = False
        self._state = State(tail, head, max(mark, head))
        reach("journal.appended")

    def note(self, position: Position) -> None:
        """Record durably that the upstream was read up to `position` without a change to store.

        Does nothing for a position at or before `mark`. Raises ValueError between the frames of one transaction, whose
        remaining frames would then be before the mark, and UnavailableError as `append` does.
        """
        if position <= self.mark:
            return
        tail, head, _ = self._state
        if self.within_transaction:
            raise ValueError(f"a note at {position} inside an unfinished transaction whose last frame is at {tail}")
        frame = Frame(position, position, True, 0)
        length = frame_bytes(frame)
        if self._noted_bytes + length > _NOTE_BYTES:
            self._guarded_roll()
        self._store([frame], length, note=True)
        self._noted_bytes += length
        self._state = State(tail, head, position)
        reach("journal.noted")

    def size(self) -> int:
        """Bytes in all segments."""
        return sum(self._sizes.values())

    def usage(self) -> float:
        """`size` as a fraction of `max_bytes`. Receivers should report 0.8 and more; `room` logs it."""
        return self.size() / self.max_bytes

    def room(self) -> bool:
        """Whether the receiver may continue reading. False above `max_bytes`; the upstream then retains the rest."""
        usage = self.usage()
        if usage < _WARNING_LEVEL:
            self._warned = False
        elif not self._warned:
            self._warned = True
            _log.warning(
                "journal %s is %d%% full; the slowest of its readers is %s",
                self._storage,
                usage * 100,
                min(cursors(self._storage).items(), key=lambda item: item[1], default=("none", None))[0],
            )
        return usage < 1

    def retain(self) -> list[str]:
        """Delete the segments that every cursor has passed, and return their names. Without a cursor all stay.

        The active segment is never deleted. But if it is full and every cursor has passed it, a new one is started,
        because a journal at its size limit gets no append that would start one. Safe to interrupt and to repeat.
        Raises UnavailableError when the disk fails, DamagedError when a cursor cannot be read.
        """
        if self._sink is not None:
            self._sink.renew()
        positions = cursors(self._storage).values()
        if not positions:
            return []
        slowest = min(positions)
        if self._storage.grows and self._sizes[self._name] >= self.segment_bytes and slowest >= self._state.tail:
            self._guarded_roll()
        removed: list[str] = []
        names = list(self._segments)
        kept = 0 if self._storage.grows else KEPT_PIECES
        for name, following in islice(pairwise(names), max(len(names) - 1 - kept, 0)):
            if self._segments[following].state.tail > slowest:
                break
            reach("journal.before_retain")
            try:
                self._storage.remove(name)
            except OSError as error:
                raise self._unavailable(f"cannot remove segment {name}", error) from error
            # Only now: one that could not be removed is removed by the next call.
            del self._segments[name], self._sizes[name]
            removed.append(name)
        return removed

    def cut_back(self, position: Position) -> None:
        """Make the journal end at its last commit boundary at or before `position`; everything after it is void.

        For a caller that will receive those changes again, after damage. `mark` goes back to `position` too. Durable
        on return. Raises LostError when retention has already passed `position`, UnavailableError as `append` does.
        """
        head = self._boundary(position)
        reach("journal.before_cut")
        self._guarded_roll(State(head, head, max(head, min(position, self.mark))))
        self._drop_void()
        self.damage = [damage for damage in self.damage if damage.after < head]

    def drop_unfinished(self) -> None:
        """Drop the frames of an unfinished transaction, because the upstream will send it again from its beginning.

        Called each time the receiver reconnects; does nothing between transactions. `mark` does not change.
        """
        if self.within_transaction:
            self.cut_back(self.mark)

    def close(self) -> None:
        """Release the journal, so that another writer can open it. A repeat does nothing."""
        if self._sink is not None:
            self._sink.close()
        self._sink = None

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_order(self, frames: Sequence[Frame]) -> None:
        before = self._state.tail
        for frame in frames:
            if frame.first > frame.last or (frame.first <= before and before != START):
                raise ValueError(f"a frame of {frame.first} to {frame.last} cannot come after {before}")
            if frame.last <= self.mark:
                raise ValueError(f"a frame that ends at {frame.last} is not after the mark {self.mark}")
            before = frame.last

    def _store(self, frames: Sequence[Frame], length: int, *, note: bool) -> None:
        if self._sink is None:
            raise ValueError(f"the writer of journal {self._storage} is closed")
        if not self._storage.grows:
            self._roll(self._state, frames, note=note)
            return
        size = self._sizes[self._name]
        if self._suspect or (size + length > self.segment_bytes and not self._is_bare()):
            self._guarded_roll()
            size = self._sizes[self._name]
        # An interruption here leaves bytes that readers may see but must not trust; only a new segment makes them void.
        self._suspect = True
        try:
            self._sink.append(self._pieces(frames, size, self._segments[self._name].seed, note=note), size)
        except OSError as error:
            raise self._unavailable("cannot append", error) from error
        self._suspect = False
        self._sizes[self._name] = size + length

    def _pieces(self, frames: Sequence[Frame], offset: int, seed: int, *, note: bool) -> list[Buffer]:
        """The frames as few buffers: big payloads without a copy, everything else copied together."""
        pieces: list[Buffer] = []
        joined = bytearray()
        previous = self._state.tail
        for frame in frames:
            record, payload = encode(frame, previous=previous, group=offset, seed=seed, note=note)
            joined += record
            if payload.nbytes < _JOINED_BYTES:
                joined += payload
            else:
                pieces += [joined, payload]
                joined = bytearray()
            joined += bytes(-payload.nbytes % 8)
            previous = frame.last
        return [*pieces, joined] if joined else pieces

    def _is_bare(self) -> bool:
        return self._sizes[self._name] == self._segments[self._name].end

    def _guarded_roll(self, state: State | None = None) -> None:
        try:
            self._roll(state or self._state)
        except OSError as error:
            raise self._unavailable("cannot start a new segment", error) from error

    def _roll(self, state: State, frames: Sequence[Frame] = (), *, note: bool = False) -> None:
        """Continue in a new segment, whose header holds `state`. If the old one holds no changes, drop it.

        A segment that cannot grow holds the `frames` of one append. An append that failed may be there all the same;
        the next segment begins where the failed one did, which makes it void.
        """
        assert self._sink is not None
        self._suspect, old, was_dataless = True, self._name, self._dataless
        while True:
            name = segment_name(self._sequence)
            stored, header = new_header(state)
            content = [stored, *self._pieces(frames, header.end, header.seed, note=note)]
            if self._storage.grows:
                self._sequence += 1
            taken = self._sink.create(name, content)
            if taken is None:
                break
            self._segments[name], self._sizes[name] = header, taken
            self._sequence += 1
        if not self._storage.grows:
            self._sequence += 1
        self._name, self._state = name, state
        self._segments[name], self._sizes[name] = header, sum(memoryview(each).nbytes for each in content)
        self._noted_bytes, self._suspect = 0, False
        self._dataless = note or not frames
        if self._storage.grows:
            if old and was_dataless:
                self._forget(old)
        else:
            self._drop_dataless()
        reach("journal.rolled")

    def _drop_dataless(self) -> None:
        """Bound the number of pieces that hold no changes: notes come all day long while a reader is stopped."""
        if self._dataless:
            self._dataless_pieces.append(self._name)
        while len(self._dataless_pieces) > KEPT_PIECES:
            name = self._dataless_pieces[0]
            if name in self._segments:
                try:
                    self._storage.remove(name)
                except UnavailableError:
                    return  # what was to be stored is stored; the next piece tries this again
                del self._segments[name], self._sizes[name]
            self._dataless_pieces.popleft()

    def _forget(self, name: str) -> None:
        # Forget it before the file is removed: should that fail, the file is void or has been passed by all cursors,
        # so it does no harm; the next recovery removes it if it is void.
        del self._segments[name], self._sizes[name]
        self._storage.remove(name)

    def _drop_void(self) -> None:
        """Remove the segments that a cut made void, newest first, so that an interruption leaves no gap.

        Objects stay until retention comes to them: their numbers have no gaps.
        """
        if not self._storage.grows:
            return
        tail = self._segments[self._name].state.tail
        for name in reversed([name for name in self._segments if name != self._name]):
            if self._segments[name].state.tail < tail:
                break
            with suppress(OSError):  # the segment is void even if its file stays; the next recovery removes it
                self._forget(name)

    def _boundary(self, position: Position) -> Position:
        for name, header in reversed(self._segments.items()):
            if header.state.head <= position:
                return self._boundary_in(name, header, position)
        raise LostError(
            f"journal {self._storage} cannot be cut back: it begins after that position",
            position=str(position),
            fix=RESYNC,
        )

    def _boundary_in(self, name: str, header: SegmentHeader, position: Position) -> Position:
        index = SegmentIndex(name, header)
        with self._storage.open(name) as file:
            index.seal(file, file.size, min(position, self._state.tail))
        complete = [
            ref.last for ref in index.refs(header.state.tail, position) if ref.complete and ref.last <= position
        ]
        return complete[-1] if complete else header.state.head

    def _unavailable(self, what: str, error: OSError) -> UnavailableError:
        return UnavailableError(
            f"journal {self._storage}: {what}: {error.strerror}",
            position=str(self.head),
            fix="free space on the journal's disk, or move the journal to another path",
        )
