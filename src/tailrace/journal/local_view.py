"""A reader's view of a local journal: it follows the folder's time and the size of the newest file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from tailrace.errors import DamagedError
from tailrace.journal.index import SegmentIndex
from tailrace.journal.local_storage import LocalStorage, OpenFile
from tailrace.journal.recovery import void_limits
from tailrace.journal.segment import SegmentHeader, State, list_segments, read_header
from tailrace.journal.view import JournalView, Segment
from tailrace.model.change import START, Position

_SETTLE_SECONDS = 1.0
_KEPT_INDEXES = 3


class LocalView(JournalView):
    """Keeps one file open. Opening reads one header per segment; a folder that is not there is an empty journal."""

    def __init__(self, storage: LocalStorage) -> None:
        self._storage = storage
        self._path = storage.folder
        self._segments: list[Segment] = []
        self._indexes: dict[Segment, SegmentIndex] = {}
        self._active: SegmentIndex | None = None
        self._file: OpenFile | None = None
        self._listed: list[tuple[str, int]] = []
        self._seen_size = -1
        self._seen_change = -1
        self._settled_at = 0.0
        self.refresh()

    def refresh(self) -> None:
        """Cheap (two stat calls) when there is nothing new."""
        try:
            change = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return
        # Two changes can have the same timestamp, so a listing is trusted only once it has been stable for a while.
        if change != self._seen_change:
            self._seen_change, self._settled_at = change, time.monotonic() + _SETTLE_SECONDS
            self._list()
        elif self._settled_at and self._list() and time.monotonic() > self._settled_at:
            self._settled_at = 0.0
        if self._file is not None and self._active is not None:
            size = os.fstat(self._file.handle).st_size
            if size < self._active.end:
                # An append failed after this reader had seen part of it; none of it is valid.
                self._active = SegmentIndex(self._active.name, self._active.header)
            if size != self._seen_size:
                self._active.extend(self._file, size)
                self._seen_size = size

    def poll(self) -> None:
        self.refresh()

    @property
    def state(self) -> State:
        return State() if self._active is None else self._active.state

    def origin(self) -> Position:
        return self._segments[0].header.state.tail if self._segments else START

    def segments(self, after: Position, upto: Position) -> Iterator[Segment]:
        for segment in self._segments:
            if segment.header.state.tail >= upto:
                break
            if segment.limit is None or segment.limit > after:
                yield segment

    def index(self, segment: Segment) -> SegmentIndex:
        if segment.limit is None:
            assert self._active is not None
            return self._active
        index = self._indexes.pop(segment, None) or SegmentIndex(segment.name, segment.header)
        if not index.sealed:
            with self._storage.open(segment.name) as file:
                index.seal(file, file.size, segment.limit)
        self._indexes[segment] = index
        while len(self._indexes) > _KEPT_INDEXES:
            del self._indexes[next(iter(self._indexes))]
        return index

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file.handle)
        self._file = None

    def _list(self) -> bool:
        """Update the list of segments; True when it did not change."""
        listed = list(list_segments(self._path))
        if listed == self._listed:
            return True
        self._listed = listed
        known = {(segment.name, segment.identity): segment.header for segment in self._segments}
        found: list[Segment] = []
        for name, inode in listed:
            try:
                header = known.get((name, inode)) or self._header(name)
            except (FileNotFoundError, DamagedError):
                # Removed in the meantime, or unreadable: the segments before and after it show whether frames are
                # missing.
                continue
            found.append(Segment(name, inode, header))
        limits = void_limits([segment.header for segment in found])
        self._segments = [
            Segment(segment.name, segment.identity, segment.header, limit)
            for segment, limit in zip(found, limits, strict=True)
            if limit is None or segment.header.state.tail < limit
        ]
        self._follow_last()
        return False

    def _header(self, name: str) -> SegmentHeader:
        with self._storage.open(name) as file:
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
            self._file = OpenFile(os.open(self._path / last.name, os.O_RDONLY))
            self._active = SegmentIndex(last.name, last.header)
