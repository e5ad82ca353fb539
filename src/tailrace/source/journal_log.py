"""A log that is stored as frames of a journal: how far a batch goes, and which frames a task reads for which tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from tailrace.journal import FrameRef, JournalReader, grouped
from tailrace.model.change import Position
from tailrace.source.follower import Limit
from tailrace.source.split import Split
from tailrace.source.table_range import TableRange

RECEIVER_SECONDS = 5.0
"""How long the receiver that the pipeline started may take to come up before the follower starts one."""
STEP_ASIDE_BYTES = 64 * 1024 * 1024
"""After this much log without changes of a followed table, or a part of the journal's `max_bytes` if that is less,
the offset advances so that the journal can delete it."""


def find_boundary(journal: JournalReader, after: Position, upto: Position, limit: Limit) -> Position:
    """The end of the frame in (after, upto] that reaches the limit, or `upto` if no frame follows it.

    The first frame is taken whatever its size: a batch must make progress. A table may wait for the log at a position
    after the last frame, which only a batch up to there reaches.
    """
    refs = journal.frames(after, upto, rows=limit.rows, size=limit.bytes)
    full = sum(ref.count for ref in refs) >= limit.rows or sum(ref.length for ref in refs) >= limit.bytes
    if refs and full and journal.frames(refs[-1].last, upto, rows=1, size=1):
        return refs[-1].last
    return upto


def is_worth_passing(frames: Sequence[FrameRef], max_bytes: int) -> bool:
    """Whether frames that hold no change of a followed table are large enough to advance past them."""
    return sum(ref.length for ref in frames) > min(STEP_ASIDE_BYTES, max_bytes // 4)


@dataclass(frozen=True)
class FrameSplit(Split, ABC):
    """Some journal frames and the ranges to read from them, keyed by what identifies a table in the log."""

    frames: tuple[FrameRef, ...] = ()
    ranges: Mapping[Any, TableRange] = field(default_factory=dict)

    @staticmethod
    @abstractmethod
    def weigh(ref: FrameRef) -> Mapping[Any, int]:
        """The tables that a frame holds changes of, each with the bytes of its changes."""

    @staticmethod
    def trim(ref: FrameRef, names: Collection[Any]) -> FrameRef:
        """The reference with no more meta than `weigh` needs for these tables. Sources with large metas override it."""
        return ref

    def only(self, tables: Collection[str]) -> Self:
        kept = {name: wanted for name, wanted in self.ranges.items() if str(wanted.schema.table) in tables}
        frames = tuple(self.trim(ref, kept) for ref in self.frames if not kept.keys().isdisjoint(self.weigh(ref)))
        return replace(super().only(tables), ranges=kept, frames=frames)

    def concerned(self, ref: FrameRef) -> list[Any]:
        """The tables whose range overlaps a frame that holds changes of them."""
        return _concerned(type(self), ref, self.ranges)


Pieces = TypeVar("Pieces", bound=FrameSplit)


def split_frames(
    kind: type[Pieces],
    refs: Sequence[FrameRef],
    wanted: Mapping[Any, TableRange],
    share: Callable[[int], int],
    **more: Any,
) -> list[Split]:
    """Split the frames that hold changes of the tables. `share` gives the size of one split from the total bytes. Pure.

    A table with a new version is in a split even when no frame holds rows of it, so that its destination follows.
    """
    concerned = [ref for ref in refs if _concerned(kind, ref, wanted)]
    size = share(sum(ref.length for ref in concerned))
    splits: list[Split] = [_split(kind, group, wanted, more) for group in grouped(concerned, size)]
    if news := {name: one for name, one in wanted.items() if one.has_news}:
        splits.append(without_frames(kind, news, **more))
    return splits


def without_frames(kind: type[Pieces], wanted: Mapping[Any, TableRange], **more: Any) -> Pieces:
    """A split without rows: it carries a new version of its tables, or raises their error."""
    weights = {str(one.schema.table): 0 for one in wanted.values()}
    return kind(weights=weights, schemas=_schemas(wanted), ranges=wanted, **more)


def _concerned(kind: type[FrameSplit], ref: FrameRef, wanted: Mapping[Any, TableRange]) -> list[Any]:
    return [
        name
        for name in kind.weigh(ref)
        if name in wanted and ref.last > wanted[name].after and ref.first <= wanted[name].upto
    ]


def _split(
    kind: type[Pieces], group: Sequence[FrameRef], wanted: Mapping[Any, TableRange], more: Mapping[str, Any]
) -> Pieces:
    weights: dict[str, int] = {}
    own: dict[Any, TableRange] = {}
    for ref in group:
        bytes_of = kind.weigh(ref)
        for name in _concerned(kind, ref, wanted):
            own[name] = wanted[name]
            table = str(wanted[name].schema.table)
            weights[table] = weights.get(table, 0) + bytes_of[name]
    return kind(weights=weights, schemas=_schemas(own), frames=tuple(group), ranges=own, **more)


def _schemas(wanted: Mapping[Any, TableRange]) -> dict[str, Any]:
    return {str(one.schema.table): one.schema for one in wanted.values()}
