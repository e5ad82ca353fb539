"""A reader's view of a journal in an object store: it asks for the next piece by its number.

Nothing is listed while pieces arrive. The list is made once, when the view opens, and again only where the numbers do
not tell: when nothing was found for a while, because pieces without changes are removed out of order, and from time to
time, to forget what retention has removed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from tailrace.errors import DamagedError
from tailrace.journal.index import SegmentIndex
from tailrace.journal.object_storage import PARALLEL, ObjectStorage, OpenObject
from tailrace.journal.segment import SegmentHeader, State, read_header, segment_name, sequence_of
from tailrace.journal.view import JournalView, Segment
from tailrace.model.change import START, Position

_IDLE_SECONDS = 10.0
"""After this long without a new piece the view looks whether it waits for a number that will not come."""
_FORGET_SECONDS = 60.0
_SOONEST_SECONDS = 0.05
_LATEST_SECONDS = 0.5
_KEPT_INDEXES = 4096


@dataclass(slots=True)
class _Piece:
    name: str
    header: SegmentHeader | None = None
    index: SegmentIndex | None = None
    is_damaged: bool = False


class ObjectView(JournalView):
    """Headers of earlier pieces are fetched when they are needed, from the end backwards, many at once."""

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self._pieces: list[_Piece] = []
        self._news_at = self._listed_at = self._forgot_at = self._asked_at = time.monotonic()
        self._list(None)

    def refresh(self) -> None:
        """One request when there is nothing new."""
        self._asked_at = time.monotonic()
        if not self._pieces:
            self._list(None)
            return
        # A reader that keeps up needs one request for a new piece and one to see that there is no other. One that is
        # behind fetches more and more at once.
        ahead = [1, 1, 2, 4, 8, PARALLEL]
        while self._follow(ahead[0]):
            ahead = ahead[1:] or ahead
        now = time.monotonic()
        if now - max(self._news_at, self._listed_at) > _IDLE_SECONDS:
            self._list(self._pieces[-1].name)
        if now - self._forgot_at > _FORGET_SECONDS:
            self._forget()

    def poll(self) -> None:
        # A quiet journal is asked less often: each request has its price.
        idle = time.monotonic() - self._news_at
        if time.monotonic() - self._asked_at >= min(max(idle / 20, _SOONEST_SECONDS), _LATEST_SECONDS):
            self.refresh()

    @property
    def state(self) -> State:
        last = next((piece.index for piece in reversed(self._pieces) if piece.index is not None), None)
        return State() if last is None else last.state

    def origin(self) -> Position:
        while self._pieces:
            self._load_headers(self._pieces[:1])
            if not self._pieces:
                break
            header = self._pieces[0].header
            if header is not None:
                return header.state.tail
            del self._pieces[0]
        return START

    def segments(self, after: Position, upto: Position) -> Iterator[Segment]:
        chosen: list[Segment] = []
        limit: Position | None = None
        for piece, header in self._backwards():
            if (limit is None or header.state.tail < limit) and header.state.tail < upto:
                chosen.append(Segment(piece.name, 0, header, limit))
            limit = header.state.tail if limit is None else min(limit, header.state.tail)
            if limit <= after:
                break
        chosen.reverse()
        known = {piece.name: piece for piece in self._pieces}
        for at, segment in enumerate(chosen):
            if known[segment.name].index is None:
                self._load_indexes([known[one.name] for one in chosen[at : at + PARALLEL]])
            yield segment

    def index(self, segment: Segment) -> SegmentIndex:
        piece = next(one for one in reversed(self._pieces) if one.name == segment.name)
        if piece.index is None:
            raise FileNotFoundError(segment.name)
        if segment.limit is not None:
            piece.index.limit(segment.limit)
        return piece.index

    def close(self) -> None:
        """Nothing is open."""

    def _list(self, after: str | None) -> None:
        self._listed_at = time.monotonic()
        found = [_Piece(name) for name in self._storage.sizes_after(after)]
        if not found:
            return
        self._pieces += found
        self._news_at = time.monotonic()
        # Its end is the journal's. A damaged last piece is left to the receiver, which sets it aside.
        for piece in reversed(found):
            self._load_indexes([piece])
            if piece.index is not None:
                break

    def _follow(self, ahead: int) -> bool:
        """Take in the next pieces, as far as they are there; whether all were."""
        number = sequence_of(self._pieces[-1].name)
        pieces = [_Piece(segment_name(number + 1 + step)) for step in range(ahead)]
        found = 0
        for piece, opened in zip(pieces, self._storage.begin_all([one.name for one in pieces]), strict=True):
            if opened is None:
                break
            self._take(piece, opened)
            self._pieces.append(piece)
            self._news_at, found = time.monotonic(), found + 1
        self._bound_indexes()
        return found == ahead

    def _take(self, piece: _Piece, opened: OpenObject) -> None:
        try:
            piece.header = read_header(opened, piece.name)
        except DamagedError:
            piece.is_damaged = True
            return
        piece.index = SegmentIndex(piece.name, piece.header)
        piece.index.seal(opened, opened.size, None)

    def _load_headers(self, pieces: list[_Piece]) -> None:
        """Fetch the headers that are not here yet. A piece that is gone was removed by retention."""
        wanted = {piece.name: piece for piece in pieces if piece.header is None and not piece.is_damaged}
        if not wanted:
            return
        gone: set[str] = set()
        for name, opened in zip(wanted, self._storage.begin_all(list(wanted)), strict=True):
            if opened is None:
                gone.add(name)
            elif opened.is_whole:
                self._take(wanted[name], opened)
            else:
                try:
                    wanted[name].header = read_header(opened, name)
                except DamagedError:
                    wanted[name].is_damaged = True
        self._pieces = [piece for piece in self._pieces if piece.name not in gone]

    def _load_indexes(self, pieces: list[_Piece]) -> None:
        wanted = [piece for piece in pieces if piece.index is None]
        for piece, opened in zip(wanted, self._storage.begin_all([one.name for one in wanted]), strict=True):
            if opened is not None:
                self._take(piece, opened)

    def _backwards(self) -> Iterator[tuple[_Piece, SegmentHeader]]:
        """The pieces from the last to the first, with their headers."""
        pieces = self._pieces[::-1]
        for at, piece in enumerate(pieces):
            if piece.header is None and not piece.is_damaged:
                self._load_headers(pieces[at : at + 4 * PARALLEL])
            if piece.header is not None:
                yield piece, piece.header

    def _bound_indexes(self) -> None:
        for piece in self._pieces[-_KEPT_INDEXES - PARALLEL : -_KEPT_INDEXES]:
            piece.index = None

    def _forget(self) -> None:
        self._forgot_at = time.monotonic()
        first = self._storage.first_name()
        if first is not None:
            self._pieces = [piece for piece in self._pieces if piece.name >= first]
