"""What a reader knows of a journal's segments: which there are, up to where each is valid, and the frames of some."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from tailrace.journal.index import SegmentIndex
from tailrace.journal.segment import SegmentHeader, State
from tailrace.model.change import Position


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of which some frames are valid: those up to `limit`; all where it is None, in the last one."""

    name: str
    identity: int
    header: SegmentHeader
    limit: Position | None = None


class JournalView(ABC):
    """The segments as of the last `refresh`. Not thread-safe."""

    @abstractmethod
    def refresh(self) -> None:
        """Find what was appended since the last call."""

    @abstractmethod
    def poll(self) -> None:
        """`refresh`, but no more often than is worth its cost."""

    @property
    @abstractmethod
    def state(self) -> State:
        """The state at the end of the journal."""

    @abstractmethod
    def origin(self) -> Position:
        """Where the journal begins."""

    @abstractmethod
    def segments(self, after: Position, upto: Position) -> Iterator[Segment]:
        """The segments that may hold frames in (after, upto], in order."""

    @abstractmethod
    def index(self, segment: Segment) -> SegmentIndex:
        """The frames of a segment. Raises FileNotFoundError when it is no longer there."""

    @abstractmethod
    def close(self) -> None: ...
