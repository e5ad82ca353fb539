"""The reader of a journal, for any number of processes; it never writes and never waits for the writer."""

from __future__ import annotations

import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tailrace.errors import RESYNC, DamagedError, LostError, UnavailableError
from tailrace.journal.frame import HEADER_BYTES, Frame, FrameRef, decode, is_sound
from tailrace.journal.index import SegmentIndex
from tailrace.journal.recovery import open_segment, void_limits
from tailrace.journal.segment import SegmentHeader, State, list_segments, read_header
from tailrace.model.change import START, Position

_AGAIN = f"start again: the receiver takes them in again if the upstream still has them; if that fails, {RESYNC}"
_SETTLE_SECONDS = 1.0
_KEPT_INDEXES = 3


@dataclass(frozen=True, slots=True)
class _Segment:
    name: str
    inode: int
    header: SegmentHeader
    limit: Position | None = None  # frames after it are void; None: the segment being written


class JournalReader:
    """A view of the journal as of the last `refresh`. Not thread-safe. Keeps one file open.

    Opening reads one header per segment and indexes the newest segment; older segments are indexed when `frames` needs
    them. A directory that does not exist yet is an empty journal.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._segments: list[_Segment] = []
        self._indexes: dict[_Segment, SegmentIndex] = {}
        self._active: SegmentIndex | None = None
        self._file: int | None = None
        self._listed: list[tuple[str, int]] = []
        self._seen_size = -1
        self._seen_change = -1
        self._settled_at = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Find what was appended since the last call. Cheap (two stat calls) when there is nothing new."""
        try:
            change = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return
        # Two changes can have the same timestamp, so a listing is trusted only once it has been stable for a while.
        if change != self._seen_change:
            self._seen_change, self._settled_at = change, time.monotonic() + _SETTLE_SECONDS
            self._list()
        elif self._settled_at and self._list() and time.monotonic() > self._settled_at:
            self._settled_at = 0.0
        if self._file is not None and self._active is not None:
            size = os.fstat(self._file).st_size
            if size < self._active.end:
                # An append failed after this reader had seen part of it; none of it is valid.
                self._active = SegmentIndex(self._active.name, self._active.header)
            if size != self._seen_size:
                self._active.extend(self._file, size)
                self._seen_size = size

    def head(self) -> Position:
        """The last commit boundary; START when there is none."""
        return self._state.head

    def mark(self) -> Position:
        """The highest commit boundary or note: the upstream was read up to here."""
        return self._state.mark

    def origin(self) -> Position:
        """Where the journal begins. Changes at or before this position were removed or never received."""
        return self._segments[0].header.state.tail if self._segments else START

    def frames(
        self, after: Position, upto: Position, *, rows: int | None = None, size: int | None = None
    ) -> list[FrameRef]:
        """The frames with changes in (after, upto], in order, of finished transactions only.

        The first may begin before `after` and the last may end after `upto`. With `rows` or `size` (bytes) the list
        ends at the first commit boundary at which either limit is reached: the `last` of its last element.

        The same range always gives the same frames, or an error: LostError when retention has passed `after`,
        DamagedError when stored frames of the range cannot be found, UnavailableError when the journal does not reach
        `upto` (not yet, or because a crash lost its unacknowledged end, which the upstream will send again).
        """
        if upto > self.mark():
            self.refresh()
        if upto > self.mark():
            raise UnavailableError(
                f"journal {self.path} reaches only to {self.mark()}",
                position=str(upto),
                fix="none needed while the receiver runs: the upstream sends the rest",
            )
        if after >= upto:
            return []
        if after < self.origin():
            raise LostError(
                f"journal {self.path} begins at {self.origin()}; earlier changes were removed",
                position=str(after),
                fix=RESYNC,
            )
        return self._collect(after, upto, rows, size)

    def read(self, ref: FrameRef) -> Frame:
        """The frame that a ref points to, with checksums verified. The payload is a view of 8-byte aligned memory.

        Repeatable, in any process that can read the path. Raises DamagedError when the bytes differ from those
        written, LostError when retention removed the segment, UnavailableError when the frame has been cut off.
        """
        try:
            with open_segment(self.path, ref.segment) as (file, size):
                if ref.offset + ref.length > size:
                    raise self._cut(ref)
                seed = read_header(file, ref.segment).seed
                stored = memoryview(np.empty(ref.length, np.uint8).data)
                done = 0
                while done < ref.length:
                    count = os.preadv(file, [stored[done:]], ref.offset + done)
                    if not count:
                        raise self._cut(ref)
                    done += count
        except FileNotFoundError as error:
            raise LostError(
                f"journal segment {ref.segment} was removed while it was needed",
                position=str(ref.last),
                fix=RESYNC,
            ) from error
        header = decode(bytes(stored[:HEADER_BYTES]))
        record = bytes(stored[: HEADER_BYTES + header.meta_length])
        # The ref's meta may be a part of the stored one, which has its own checksum.
        if header.length != ref.length or not is_sound(record, header.meta_length, seed):
            raise self._damaged(ref, "header")
        payload = stored[header.payload_at : header.payload_at + header.payload_length]
        if zlib.crc32(payload) != header.payload_crc:
            raise self._damaged(ref, "payload")
        if (header.first, header.last) != (ref.first, ref.last):
            raise self._cut(ref)
        return Frame(ref.first, ref.last, ref.complete, ref.count, record[HEADER_BYTES:], payload)

    def close(self) -> None:
        """Close the open file. A repeat does nothing."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    @property
    def _state(self) -> State:
        return State() if self._active is None else self._active.state

    def _list(self) -> bool:
        """Update the list of segments; True when it did not change."""
        listed = list(list_segments(self.path))
        if listed == self._listed:
            return True
        self._listed = listed
        known = {(segment.name, segment.inode): segment.header for segment in self._segments}
        found: list[_Segment] = []
        for name, inode in listed:
            try:
                header = known.get((name, inode)) or self._header(name)
            except (FileNotFoundError, DamagedError):
                # Removed in the meantime, or unreadable: the segments before and after it show whether frames are
                # missing.
                continue
            found.append(_Segment(name, inode, header))
        limits = void_limits([segment.header for segment in found])
        self._segments = [
            _Segment(segment.name, segment.inode, segment.header, limit)
            for segment, limit in zip(found, limits, strict=True)
            if limit is None or segment.header.state.tail < limit
        ]
        self._follow_last()
        return False

    def _header(self, name: str) -> SegmentHeader:
        with open_segment(self.path, name) as (file, _):
            return read_header(file, name)

    def _follow_last(self) -> None:
        # An index is valid for one segment and limit: a cut changes the limit and makes some indexed frames void.
        self._indexes = {segment: self._indexes[segment] for segment in self._segments if segment in self._indexes}
        last = self._segments[-1] if self._segments else None
        if self._active is not None:
            if last is not None and self._active.header == last.header:
                return
            finished = next((one for one in self._segments if one.header == self._active.header), None)
            if finished is not None:
                self._indexes[finished] = self._active
        self.close()
        self._active, self._seen_size = None, -1
        if last is not None:
            self._file = os.open(self.path / last.name, os.O_RDONLY)
            self._active = SegmentIndex(last.name, last.header)

    def _collect(self, after: Position, upto: Position, rows: int | None, size: int | None) -> list[FrameRef]:
        refs: list[FrameRef] = []
        counted = measured = 0
        for segment in self._segments:
            if segment.header.state.tail >= upto:
                break
            if segment.limit is not None and segment.limit <= after:
                continue
            index = self._index(segment)
            gap = next((gap for gap in index.gaps if after < gap.last and gap.after < upto), None)
            for ref in index.refs(after, upto):
                if gap is not None and ref.first > gap.after:
                    break
                if ref.last > self.head():
                    return refs
                refs.append(ref)
                counted, measured = counted + ref.count, measured + ref.length
                full = (rows is not None and counted >= rows) or (size is not None and measured >= size)
                if full and ref.complete:
                    return refs
            if gap is not None:
                raise DamagedError(
                    f"journal segment {segment.name} is damaged at byte {gap.offset}: "
                    f"changes after {gap.after}, up to {gap.last}, cannot be read",
                    position=str(gap.after),
                    fix=_AGAIN,
                )
        return refs

    def _index(self, segment: _Segment) -> SegmentIndex:
        if segment.limit is None:
            assert self._active is not None
            return self._active
        index = self._indexes.pop(segment, None) or SegmentIndex(segment.name, segment.header)
        if not index.sealed:
            try:
                with open_segment(self.path, segment.name) as (file, size):
                    index.seal(file, size, segment.limit)
            except FileNotFoundError as error:
                raise LostError(
                    f"journal segment {segment.name} was removed while it was needed",
                    position=str(segment.header.state.tail),
                    fix=RESYNC,
                ) from error
        self._indexes[segment] = index
        while len(self._indexes) > _KEPT_INDEXES:
            del self._indexes[next(iter(self._indexes))]
        return index

    def _cut(self, ref: FrameRef) -> UnavailableError:
        return UnavailableError(
            f"journal segment {ref.segment} no longer holds the frame at byte {ref.offset}: it was cut back",
            position=str(ref.last),
            fix="plan the batch again: the upstream sends the changes again that were cut off",
        )

    def _damaged(self, ref: FrameRef, part: str) -> DamagedError:
        return DamagedError(
            f"journal segment {ref.segment} is damaged at byte {ref.offset}: the {part} does not match its checksum",
            position=str(ref.first),
            fix=_AGAIN,
        )
