"""Remembers a cluster's latest events, to recognise them when they are sent again.

rqlite delivers at least once: a node retries until it gets 200, and a new leader starts some entries back, with
its own node id and its own commit times. Raft indexes never fall, so an index at or below the last one is either such a
repeat, with the events that are already known, or it comes from a cluster that was rebuilt or restored.

Later statements of a request without `?transaction` come with index 0 and belong to the entry before them. rqlite
drops batches that hold nothing else, and each node makes its own batches, so any of them may arrive for the first time
when the others are repeated. They are compared one by one with the known ones of their entry: forwards if they follow
it, backwards if they are at the head of a request, before a known index. One that is not the next known one is new. At
the head before a new index they are new as well, unless another node repeats the last ones with their images.

A new one is appended at the end, like every new event. It is late if events that belong after it came first.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tailrace.errors import LostError
from tailrace.model.change import START, Position
from tailrace.source.rqlite.request import CdcEvent, EventId, PostedRequest, RaftEntry
from tailrace.source.source import RESYNC
from tailrace.system.atomic_file import replace_durably

WINDOW_EVENTS = 65_536
"""How many of the latest events are remembered. A new leader repeats what the old one delivered in about a second."""


class Zero(NamedTuple):
    """Where an event with index 0 belongs: after the entry `behind`, as number `place` of the events there."""

    behind: int
    place: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A new event with its position. `zero` is set if it came with index 0."""

    position: Position
    at: int
    event: CdcEvent
    zero: Zero | None
    late: bool


@dataclass(slots=True)
class _Group:
    """The known events of one index: the entry's own, and those with index 0 after it, in the cluster's order."""

    own: list[EventId] = field(default_factory=list)
    zeros: list[EventId] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.own) + len(self.zeros)


class DeduplicationWindow:
    """The latest events of one cluster, and the position of the next one. Only `admit` and `remember` change it."""

    def __init__(self, *, events: int = WINDOW_EVENTS) -> None:
        # No event has (0, 0): that is the position before everything.
        self.next = Position(0, 2)
        self._request = self._node = ""
        self._groups: dict[int, _Group] = {}
        self._count = 0
        self._bound = events

    @property
    def mark(self) -> Position:
        """The position up to which every event has its place: the second half of the last event."""
        return START if self.next == (0, 2) else Position(self.next.commit, self.next.ordinal - 1)

    def admit(self, request: PostedRequest) -> list[Placed]:
        """The events of a request that are new, with their positions. They are known from then on.

        Raises LostError for different events at a known index, or an index that is no longer remembered. The window may
        then hold a part of the request and must be rebuilt.
        """
        if request.digest == self._request:
            return []
        placed: list[Placed] = []
        first = next((at for at, entry in enumerate(request.entries) if entry.index), len(request.entries))
        placed += self._admit_head(request, first)
        index, place = 0, 0
        for entry in request.entries[first:]:
            if entry.index:
                index, place = entry.index, 0
                placed += self._admit_own(entry)
            else:
                placed += self._admit_zeros(entry, Zero(self._home(index), place))
                place += len(entry.events)
        if placed:
            self._request, self._node = request.digest, request.node
        return placed

    def remember(self, position: Position, known: EventId, zero: Zero | None, request: str, node: str) -> None:
        """Add an event that the journal holds, in the journal's order."""
        self.next = position
        self._add(zero, known)
        self._request, self._node = request, node

    def resume(self, mark: Position) -> None:
        """Continue after `mark` without knowing the events before it."""
        self.next = Position(mark.commit, mark.ordinal + 1)

    def _admit_own(self, entry: RaftEntry) -> Iterator[Placed]:
        if not entry.events:
            return
        if entry.index > self.next.commit:
            self.next = Position(entry.index, 0)
            for event in entry.events:
                yield self._place(entry.at, event, None)
            return
        group = self._groups.get(entry.index)
        if group is None and entry.index < self._oldest:
            raise self._lost(entry.index, "which is older than anything remembered")
        known = group.own if group is not None else []
        if len(known) != len(entry.events) or not all(map(CdcEvent.is_same, entry.events, known)):
            raise self._lost(entry.index, "with other events than those that came with it before")

    def _admit_head(self, request: PostedRequest, first: int) -> Iterator[Placed]:
        head = [(entry.at, event) for entry in request.entries[:first] for event in entry.events]
        following = request.entries[first].index if first < len(request.entries) else None
        is_repeated = following is not None and following <= self.next.commit
        # No known entry precedes the oldest one: they are assigned to the oldest.
        home = self._home(max((following or 0) - 1, self._oldest)) if is_repeated else self.next.commit
        known = self._zeros(home)
        place = len(known)
        is_known = [False] * len(head)
        if is_repeated or request.node != self._node:
            for at in reversed(range(len(head))):
                event = head[at][1]
                # Before a new index, only images distinguish a repeat from the same change made again.
                comparable = is_repeated or (event.image and place and known[place - 1][1])
                if place and comparable and event.is_same(known[place - 1]):
                    place, is_known[at] = place - 1, True
        for (at, event), skipped in zip(head, is_known, strict=True):
            if not skipped:
                yield self._place(at, event, Zero(home, place))
            place += 1

    def _admit_zeros(self, entry: RaftEntry, zero: Zero) -> Iterator[Placed]:
        home, first = zero
        for place, event in enumerate(entry.events, start=first):
            known = self._zeros(home)
            if place >= len(known) or not event.is_same(known[place]):
                yield self._place(entry.at, event, Zero(home, place))

    def _zeros(self, index: int) -> list[EventId]:
        group = self._groups.get(index)
        return group.zeros if group is not None else []

    def _home(self, index: int) -> int:
        """The index that zeros after `index` belong to: itself, or the last one before it that has events."""
        if not self._groups:
            return max(index, self.next.commit)
        if index >= self.next.commit or index in self._groups:
            return index
        if index < self._oldest:
            raise self._lost(index, "which is older than anything remembered")
        indexes = list(self._groups)
        return indexes[bisect_left(indexes, index) - 1]

    def _place(self, at: int, event: CdcEvent, zero: Zero | None) -> Placed:
        late = False
        if zero is not None:
            if zero.behind > self.next.commit:
                self.next = Position(zero.behind, 0)
            late = zero.behind < self.next.commit or zero.place < len(self._zeros(zero.behind))
        placed = Placed(self.next, at, event, zero, late)
        self._add(zero, event.known)
        return placed

    def _add(self, zero: Zero | None, known: EventId) -> None:
        """Add an event at `next`, and advance `next`."""
        home = self.next.commit if zero is None else zero.behind
        self.next = Position(self.next.commit, self.next.ordinal + 2)
        if home not in self._groups and home < self._newest:
            return  # a late one from the journal, whose entry is no longer remembered
        group = self._groups.setdefault(home, _Group())
        if zero is None:
            group.own.append(known)
        else:
            group.zeros.insert(zero.place, known)
        self._count += 1
        while self._count > self._bound and len(self._groups) > 1:
            oldest = next(iter(self._groups))
            self._count -= len(self._groups.pop(oldest))

    @property
    def _oldest(self) -> int:
        return next(iter(self._groups), self.next.commit + 1)

    @property
    def _newest(self) -> int:
        return next(reversed(self._groups), 0)

    def _lost(self, index: int, how: str) -> LostError:
        return LostError(
            f"the cluster sends Raft index {index} again, {how}, while {self.next.commit} has been received:"
            f" it was rebuilt or restored, or another cluster has the same service_id",
            position=str(Position(index, 0)),
            fix=RESYNC,
        )

    def save(self, file: Path) -> None:
        """Store the window; durable when this returns, whole or not at all."""
        text = json.dumps(
            {
                "next": list(self.next),
                "request": self._request,
                "node": self._node,
                "groups": [[index, group.own, group.zeros] for index, group in self._groups.items()],
            }
        ).encode()
        replace_durably(file, b"%08x\n" % zlib.crc32(text) + text)

    @classmethod
    def load(cls, file: Path) -> DeduplicationWindow | None:
        """The window that was saved last; None when there is none, or it cannot be trusted."""
        window = cls()
        try:
            crc, text = file.read_bytes().split(b"\n", 1)
            if int(crc, 16) != zlib.crc32(text):
                return None
        except (FileNotFoundError, ValueError):
            return None
        stored = json.loads(text)
        window.next = Position(*stored["next"])
        window._request, window._node = stored["request"], stored["node"]
        for index, own, zeros in stored["groups"]:
            window._groups[index] = _Group(
                [(identity, image) for identity, image in own], [(identity, image) for identity, image in zeros]
            )
        window._count = sum(map(len, window._groups.values()))
        return window
