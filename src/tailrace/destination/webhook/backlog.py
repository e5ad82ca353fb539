"""What the leader has read of its queue and not sent yet, cut into requests.

A place in the queue is (frame, rows): everything up to that frame, and that many rows of the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.webhook.format.event import EVERY
from tailrace.destination.webhook.queue import QueueReader
from tailrace.model.change import START, Position

_READ_EVENTS = 1000
_READ_REQUESTS = 4
_BODY_BYTES = 256
"""The bytes a body may have around all of its events,"""
_EVENT_BYTES = 80
"""and around each of them."""


@dataclass(frozen=True)
class Parcel:
    """The events of one request, in order. Once they are delivered, `place` and `watermarks` hold.

    Without an event there is nothing to send, and both hold at once.
    """

    events: pa.Table
    place: Position
    watermarks: dict[str, Position]


class QueuedRows:
    """Rows of one frame as columns, to be compared with watermarks all at once."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        names = table.column("table").combine_chunks().dictionary_encode()
        self._names: list[str] = names.dictionary.to_pylist()
        self._codes: npt.NDArray[Any] = names.indices.to_numpy(zero_copy_only=False)
        self._commit: npt.NDArray[Any] = table.column("commit").to_numpy()
        self._ordinal: npt.NDArray[Any] = table.column("ordinal").to_numpy()
        self.marker: npt.NDArray[Any] = table.column("marker").to_numpy()
        self._copied: npt.NDArray[Any] = table.column("copied").to_numpy()
        self.sizes: npt.NDArray[Any] = pc.binary_length(table.column("event")).to_numpy() + _EVENT_BYTES

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def at(self, row: int) -> tuple[str, Position]:
        """Table and position of one row."""
        return self._names[self._codes[row]], Position(int(self._commit[row]), int(self._ordinal[row]))

    def due(self, watermarks: Mapping[str, Position]) -> npt.NDArray[np.int64]:
        """Which rows are events after the watermarks of their tables."""
        if not watermarks or not len(self):
            return np.flatnonzero(~self.marker)
        marks = [watermark_of(name, watermarks) for name in self._names]
        commit, ordinal = (np.array(half, np.int64)[self._codes] for half in zip(*marks, strict=True))
        passed = (self._commit < commit) | ((self._commit == commit) & (self._ordinal <= ordinal))
        return np.flatnonzero(~(passed | self.marker))

    def watermarks(self, first: int, end: int) -> dict[str, Position]:
        """How far each table is once the rows from `first` to before `end` are delivered.

        A copied row moves no watermark: only the marker after the last one does.
        """
        moving = np.flatnonzero(self.marker[first:end] | ~self._copied[first:end])[::-1] + first
        _, last = np.unique(self._codes[moving], return_index=True)
        return dict(self.at(int(row)) for row in moving[last])


class _Piece:
    """A frame, and how much of it was taken."""

    def __init__(self, before: Position, last: Position, rows: QueuedRows, due: npt.NDArray[np.int64]) -> None:
        self.before = before
        self.last = last
        self.rows = rows
        self.due = due[due >= before.ordinal]
        self.row = before.ordinal
        self.taken = 0
        # Where in the events that are due each of them begins, and where the last one ends.
        self._begin = np.concatenate([[0], np.cumsum(rows.sizes[self.due], dtype=np.int64)])
        self.read_at = time.monotonic()

    def __len__(self) -> int:
        return len(self.due) - self.taken

    @property
    def bytes(self) -> int:
        return int(self._begin[-1] - self._begin[self.taken])

    def fitting(self, events: int, size: int) -> int:
        """How many of the next events fit, with at most `events` of them and at most `size` bytes."""
        end = int(np.searchsorted(self._begin, self._begin[self.taken] + size, side="right")) - 1
        return max(min(events, end - self.taken), 0)

    def take(self, count: int) -> tuple[pa.Table, Position, dict[str, Position]]:
        """The next events, together with the rows after them that are not due."""
        chosen = self.due[self.taken : self.taken + count]
        self.taken += len(chosen)
        end = int(self.due[self.taken]) if len(self) else len(self.rows)
        marks = self.rows.watermarks(self.row, end)
        self.row = end
        return self.rows.table.take(chosen), self.place, marks

    @property
    def place(self) -> Position:
        return self.last if self.row >= len(self.rows) else Position(self.before.commit, self.row)


class Backlog:
    """Reads ahead when it runs short, and returns parcels in the order of the queue. Never goes back."""

    def __init__(
        self,
        reader: QueueReader,
        place: Position,
        watermarks: Mapping[str, Position],
        *,
        max_events: int,
        max_bytes: int,
    ) -> None:
        self._reader = reader
        self._watermarks = watermarks
        self._max_events = max_events
        self._max_bytes = max(max_bytes - _BODY_BYTES, 1)
        self._end = place
        self._pieces: deque[_Piece] = deque()

    def __len__(self) -> int:
        """How many events were read and not taken."""
        return sum(map(len, self._pieces))

    @property
    def oldest(self) -> datetime | None:
        """When the next event was committed."""
        piece = next((piece for piece in self._pieces if len(piece)), None)
        moment: datetime | None = piece.rows.table.column("at")[int(piece.due[piece.taken])].as_py() if piece else None
        return moment

    def fill(self) -> None:
        """Read further, unless there is enough for a request. Raises what reading the queue raises."""
        if self._is_full():
            return
        limit = max(_READ_EVENTS, _READ_REQUESTS * self._max_events)
        for last, table in self._reader.read(frame_of(self._end), limit):
            rows = QueuedRows(table)
            self._pieces.append(_Piece(self._end, last, rows, rows.due(self._watermarks)))
            self._end = last

    def is_ready(self, max_delay_seconds: float) -> bool:
        """Whether a parcel is full, or has waited long enough for more, or costs no request."""
        if not self._pieces:
            return False
        if self._is_full() or not len(self):
            return True
        first = next(piece for piece in self._pieces if len(piece))
        return time.monotonic() - first.read_at >= max_delay_seconds

    def take(self) -> Parcel:
        """The next events, as many as one request may hold, together with the rows among and after them.

        One that is larger than a request may be goes alone.
        """
        parts: list[pa.Table] = []
        place, marks = self._pieces[0].place, dict[str, Position]()
        count, size = self._max_events, self._max_bytes
        while self._pieces:
            piece = self._pieces[0]
            fitting = piece.fitting(count, size)
            if len(piece) and not fitting:
                if count < self._max_events:
                    break
                fitting = 1
            before = piece.bytes
            events, place, reached = piece.take(fitting)
            count, size = count - len(events), size - (before - piece.bytes)
            parts.append(events)
            merge(marks, reached)
            if place != piece.last:
                break
            self._pieces.popleft()
        return Parcel(pa.concat_tables(parts), place, marks)

    def _is_full(self) -> bool:
        return len(self) >= self._max_events or sum(piece.bytes for piece in self._pieces) >= self._max_bytes


def watermark_of(table: str, watermarks: Mapping[str, Position]) -> Position:
    """Up to where a table is delivered. The watermark of EVERY counts only for tables a leader has sent from."""
    own = watermarks.get(table)
    return Position(-1, -1) if own is None else max(own, watermarks.get(EVERY, own))


def merge(marks: dict[str, Position], reached: Mapping[str, Position]) -> None:
    """Move watermarks on; none goes back."""
    for table, position in reached.items():
        marks[table] = max(position, marks.get(table, START))


def frame_of(place: Position) -> Position:
    """The last frame that lies completely before a place."""
    return Position(place.commit, 0)
