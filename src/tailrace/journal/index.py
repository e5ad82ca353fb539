"""An index of the frames of one segment, built by reading headers only, not payloads."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from tailrace.journal.frame import HEADER_BYTES, MAGIC, FrameRef, Header, decode, is_sound, last_of
from tailrace.journal.segment import RangeReadable, SegmentHeader, State
from tailrace.model.change import Position

_NEAR = 1 << 16  # read ahead this much while frames are small,
_FAR = 1 << 12  # and this much when the next header comes after a big payload
_SEARCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions in (after, last] were stored at `offset` and can no longer be found."""

    after: Position
    last: Position
    offset: int


class SegmentIndex:
    """The known frames of one segment. `extend` adds what was appended to the file and reads no byte twice.

    `state` is the journal's state after the last frame found, `end` the offset after it, and `durable` an offset
    before which every byte was once durable. Notes change `state` but are not indexed.
    """

    def __init__(self, name: str, header: SegmentHeader) -> None:
        self.name = name
        self.header = header
        self.state: State = header.state
        self.end = header.end
        self.durable = header.end
        self.gaps: list[Gap] = []
        self.sealed = False
        self._noted = header.state.mark
        self._offsets = array("Q")
        self._records: list[bytes] = []  # header and meta as stored: a third of the memory of FrameRefs

    def extend(self, file: RangeReadable, size: int) -> None:
        """Index the frames between `end` and `size`; stop at the first that is incomplete or fails its checksum."""
        for offset, record, header in _walk(file, self.end, size, self.header.seed):
            self._add(offset, record, header)

    def seal(self, file: RangeReadable, size: int, limit: Position | None) -> None:
        """Index the rest of a segment that will not grow any more, up to the frame that ends at `limit`.

        Bytes that are not a frame are skipped, and the positions they held are recorded in `gaps`. Frames after
        `limit` are void and are dropped. Without a limit every intact frame is valid: a writer uses this to find the
        end of the journal.
        """
        at: int | None = self.end
        while at is not None and (limit is None or self.state.tail < limit):
            for offset, record, header in _walk(file, at, size, self.header.seed):
                if limit is not None and header.previous >= limit:
                    at = None
                    break
                self._add(offset, record, header)
            else:
                at = _search(file, self.end + 8, size, self.header.seed)
        if limit is not None:
            self.limit(limit)
        self.sealed = True

    def limit(self, limit: Position) -> None:
        """Drop the frames after `limit`, which are void; a limit after the last frame shows that some are missing.

        A later call may give an earlier limit.
        """
        self.gaps = [gap for gap in self.gaps if gap.after < limit]
        if self.state.tail < limit and (not self.gaps or self.gaps[-1].last < limit):
            self.gaps.append(Gap(self.state.tail, limit, self.end))
        void = bisect_right(self._records, limit, key=last_of)
        del self._records[void:], self._offsets[void:]

    def refs(self, after: Position, upto: Position) -> Iterator[FrameRef]:
        """The frames with `last` in (after, upto], in order, and the frame that contains `upto`."""
        for at in range(bisect_right(self._records, after, key=last_of), len(self._records)):
            ref = self._ref(at)
            if ref.first > upto:
                return
            yield ref

    def _ref(self, at: int) -> FrameRef:
        record = self._records[at]
        header = decode(record)
        meta = record[HEADER_BYTES : HEADER_BYTES + header.meta_length]
        return FrameRef(
            self.name,
            self._offsets[at],
            header.length,
            header.first,
            header.last,
            header.complete,
            header.changes,
            meta,
            self.header.seed,
        )

    def stored(self) -> Iterator[tuple[int, Header]]:
        """Offset and header of each frame."""
        return zip(self._offsets, map(decode, self._records), strict=True)

    def state_before(self, offset: int) -> State:
        """The journal's state if only the frames before `offset` are valid. Every note is assumed to be before it."""
        tail, head, mark = self.header.state
        for at, header in self.stored():
            if at < offset:
                tail = header.last
                head = tail if header.complete else head
        return State(tail, head, max(head, mark, self._noted))

    def _add(self, offset: int, record: bytes, header: Header) -> None:
        before, self.end = self.end, offset + header.length
        self.durable = max(self.durable, header.group)
        tail, head, mark = self.state
        if header.previous > tail:
            self.gaps.append(Gap(tail, header.previous, before))
        if header.note:
            self._noted = max(self._noted, header.last)
            # A note is always between transactions, so the frame before it was complete.
            self.state = State(header.previous, max(head, header.previous), max(mark, header.last))
            return
        self._offsets.append(offset)
        self._records.append(record)
        if header.complete:
            head = header.last
        self.state = State(header.last, head, max(mark, head))


def _walk(file: RangeReadable, offset: int, size: int, seed: int) -> Iterator[tuple[int, bytes, Header]]:
    """Offset, record and header of each frame from `offset` on, until one is incomplete or fails its checksum."""
    window, start, ahead = b"", offset, _NEAR
    while offset + HEADER_BYTES <= size:
        if offset + HEADER_BYTES > start + len(window):
            window, start = file.read(ahead, offset), offset
        found = _frame_at(window, offset - start, file, offset, size, seed)
        if found is None:
            return
        record, header = found
        yield offset, record, header
        offset += header.length
        ahead = _NEAR if header.length < _NEAR else _FAR


def _frame_at(
    window: bytes, within: int, file: RangeReadable, offset: int, size: int, seed: int
) -> tuple[bytes, Header] | None:
    """The frame at `offset` of the file (`within` in the window); None if it is incomplete or fails its checksum."""
    if len(window) < within + HEADER_BYTES or window[within : within + 4] != MAGIC:
        return None
    header = decode(window[within : within + HEADER_BYTES])
    if offset + header.length > size:
        return None
    length = HEADER_BYTES + header.meta_length
    record = window[within : within + length]
    if len(record) < length:
        record = file.read(length, offset)
    if len(record) < length or not is_sound(record, header.meta_length, seed):
        return None
    return record, header


def _search(file: RangeReadable, offset: int, size: int, seed: int) -> int | None:
    """The offset of the next intact frame at or after `offset`."""
    while offset + HEADER_BYTES <= size:
        window = file.read(_SEARCH + HEADER_BYTES, offset)
        at = window.find(MAGIC)
        while 0 <= at < _SEARCH:
            if at % 8 == 0 and _frame_at(window, at, file, offset + at, size, seed) is not None:
                return offset + at
            at = window.find(MAGIC, at + 1)
        offset += _SEARCH
    return None
