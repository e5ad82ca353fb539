"""Remembers a cluster's latest events, to recognise them when they are sent again.

rqlite delivers at least once: a node retries until it gets 200, and a new leader starts some entries back, with
its own node id and its own commit times. Raft indexes never fall, so an index at or below the last one is such a
repeat, with the events that are already known, or one that the former leader dropped and the next one has, or it comes
from a cluster that was rebuilt or restored.

An index between known ones that never came is new: the leader before had dropped it. Unless its sender went past it
before, and the same request repeats no known index, which would show that it has the same history. Of an index older
than the window, the journal may still hold the events.

Later statements of a request without `?transaction` come with index 0 and belong to the entry before them. rqlite
drops batches that hold nothing else, and each node makes its own batches, so any of them may arrive for the first time
when the others are repeated. They are compared one by one with the known ones of their entry: forwards if they follow
it, backwards if they are at the head of a request, before a known index. One that is not the next known one is new. At
the head before a new index they are new as well, unless another node repeats the last ones with their images.

A new one is appended at the end, like every new event. It is late if events that belong after it came first, and so
is an index that never came.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tailrace.errors import LostError
from tailrace.model.change import START, Position
from tailrace.source.rqlite.request import CdcEvent, EventId, PostedRequest, RaftEntry
from tailrace.source.source import RESYNC
from tailrace.system.atomic_file import replace_durably

WINDOW_ENTRIES = 65_536
"""How many of the latest Raft entries are remembered, whatever their size. A new leader repeats what the old one
delivered in about a second, and rqlite commits some thousands of entries in that time."""
_NODES = 64
"""Of how many nodes it is remembered how far they came; a new node has a new id."""
_FACTOR, _MODULUS = 1_000_003, (1 << 61) - 1


class Zero(NamedTuple):
    """Where an event with index 0 belongs: after the entry `behind`, as number `place` of the events there."""

    behind: int
    place: int


class Placed(NamedTuple):
    """A new event with its position. `zero` is set if it came with index 0, `entry` if
    that is an older index, which never came before."""

    position: Position
    at: int
    event: CdcEvent
    zero: Zero | None
    late: bool
    entry: int | None = None


class _Own(NamedTuple):
    """The events of one entry: how many they are, and digests of them in their order. `image` is 0 if one has none."""

    events: int = 0
    identity: int = 0
    image: int = 1

    def with_events(self, known: Iterable[EventId]) -> _Own:
        events, identity, image = self
        for one, its_image in known:
            events += 1
            identity = (identity * _FACTOR + one) % _MODULUS
            image = ((image * _FACTOR + its_image) % _MODULUS or 1) if image and its_image else 0
        return _Own(events, identity, image)

    def is_same(self, other: _Own) -> bool:
        """Whether they are the same events, as far as can be compared: some may lack their images."""
        return self[:2] == other[:2] and (self.image == other.image or not self.image or not other.image)


_NO_EVENTS = _Own()


@dataclass(slots=True)
class KnownEntry:
    """What is known of one index: the entry's own events, and those with index 0 after it, in the cluster's order."""

    own: _Own = _NO_EVENTS
    zeros: list[EventId] = field(default_factory=list)


FindEntry = Callable[[int], KnownEntry | None]
"""What the journal holds of an index; None if it never came. Raises LookupError if the journal begins after it."""


def _no_journal(index: int) -> KnownEntry | None:
    raise LookupError(index)


class DeduplicationWindow:
    """The latest events of one cluster, and the position of the next one. Only `admit` and `remember` change it."""

    def __init__(self, *, entries: int = WINDOW_ENTRIES) -> None:
        # No event has (0, 0): that is the position before everything.
        self.next = Position(0, 2)
        self._request = self._node = ""
        self._at = 0
        self._reached: dict[str, int] = {}
        self._groups: dict[int, KnownEntry] = {}
        self._bound = entries
        self._find: FindEntry = _no_journal

    @property
    def mark(self) -> Position:
        """The position up to which every event has its place: the second half of the last event."""
        return START if self.next == (0, 2) else Position(self.next.commit, self.next.ordinal - 1)

    @property
    def request(self) -> str:
        """The digest of the last request that held something new."""
        return self._request

    @property
    def node(self) -> str:
        """The node that sent it."""
        return self._node

    @property
    def at(self) -> int:
        """When the last entry was committed, in ms, as its sender says; 0 if that is not known."""
        return self._at

    def admit(self, request: PostedRequest, find: FindEntry = _no_journal) -> list[Placed]:
        """The events of a request that are new, with their positions. They are known from then on.

        Indexes older than the window are looked up with `find`. Raises LostError for different events at a known index,
        or an index that is no longer remembered. The window may then hold a part of the request and must be rebuilt.
        """
        if request.digest == self._request:
            return []
        self._find = find
        placed: list[Placed] = []
        first = next((at for at, entry in enumerate(request.entries) if entry.index), len(request.entries))
        placed += self._admit_head(request, first)
        index, place = 0, 0
        for entry in request.entries[first:]:
            if entry.index:
                index, place = entry.index, 0
                placed += self._admit_own(entry, request)
            else:
                placed += self._admit_zeros(entry, Zero(self._home(index), place))
                place += len(entry.events)
        if placed:
            self._request, self._node = request.digest, request.node
            self._reach(request.node, max(entry.index for entry in request.entries))
        return placed

    def remember(
        self, position: Position, known: EventId, zero: Zero | None, index: int | None, request: str, node: str, at: int
    ) -> None:
        """Add an event that the journal holds, in the journal's order. `at`: when it was committed."""
        if zero is not None:
            self._add_zero(zero, known)
        else:
            self._add_own(position.commit if index is None else index, [known])
        self.next = Position(position.commit, position.ordinal + 2)
        self._request, self._node = request, node
        if zero is None and index is None:
            self._at = at
        if zero is None:
            self._reach(node, position.commit if index is None else index)

    def resume(self, mark: Position) -> None:
        """Continue after `mark` without knowing the events before it."""
        self.next = Position(mark.commit, mark.ordinal + 1)

    def entry(self, index: int) -> KnownEntry | None:
        """What is known of an index."""
        return self._groups.get(index)

    def _admit_own(self, entry: RaftEntry, request: PostedRequest) -> Iterator[Placed]:
        if not entry.events:
            return
        if entry.index > self.next.commit:
            self.next = Position(entry.index, 0)
            self._at = entry.at
            yield from self._place_all(entry, None)
            return
        known = self._known(entry.index)
        if known is None or not known.own.events:
            if entry.index < self._reached.get(request.node, 0) and not self._repeats(request):
                raise self._lost(entry.index, "which the same node left out before")
            yield from self._place_all(entry, entry.index)
        elif not _own(entry).is_same(known.own):
            raise self._lost(entry.index, "with other events than those that came with it before")

    def _place_all(self, entry: RaftEntry, index: int | None) -> list[Placed]:
        """Place the events of an entry, at once: there may be very many."""
        commit, first = self.next
        placed = [
            Placed(Position(commit, first + 2 * at), entry.at, event, None, index is not None, index)
            for at, event in enumerate(entry.events)
        ]
        self._add_own(entry.index, (event.known for event in entry.events))
        self.next = Position(commit, first + 2 * len(placed))
        return placed

    def _known(self, index: int) -> KnownEntry | None:
        """What is known of an index that is not new. Raises LostError for one of which nothing can be known."""
        if index in self._groups or index > self._oldest:
            return self._groups.get(index)
        try:
            return self._find(index)
        except LookupError:
            raise self._lost(index, "which is older than anything remembered") from None

    def _reach(self, node: str, index: int) -> None:
        self._reached[node] = max(index, self._reached.pop(node, 0))
        if len(self._reached) > _NODES:
            del self._reached[next(iter(self._reached))]

    def _repeats(self, request: PostedRequest) -> bool:
        """Whether the request holds an index that came before with the same events: its sender has our history."""
        return any(
            entry.index in self._groups and _own(entry).is_same(self._groups[entry.index].own)
            for entry in request.entries
            if entry.index and entry.events
        )

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
        known = self._known(index) if index < self._oldest and self._groups else self._groups.get(index)
        return known.zeros if known is not None else []

    def _home(self, index: int) -> int:
        """The index that zeros after `index` belong to: itself, or the last one before it that has events."""
        if not self._groups:
            return max(index, self.next.commit)
        if index >= self.next.commit or index in self._groups or self._known(index) is not None:
            return index
        indexes = list(self._groups)
        return indexes[max(bisect_left(indexes, index) - 1, 0)]

    def _place(self, at: int, event: CdcEvent, zero: Zero) -> Placed:
        if zero.behind > self.next.commit:
            self.next = Position(zero.behind, 0)
        late = zero.behind < self.next.commit or zero.place < len(self._zeros(zero.behind))
        placed = Placed(self.next, at, event, zero, late)
        self._add_zero(zero, event.known)
        self.next = Position(self.next.commit, self.next.ordinal + 2)
        return placed

    def _add_own(self, index: int, known: Iterable[EventId]) -> None:
        if self._oldest <= index < self._newest and index not in self._groups:
            self._groups = dict(sorted([*self._groups.items(), (index, KnownEntry())]))
        if index >= self._oldest or not self._groups:  # otherwise it is no longer remembered
            group = self._groups.setdefault(index, KnownEntry())
            group.own = group.own.with_events(known)
            self._trim()

    def _add_zero(self, zero: Zero, known: EventId) -> None:
        if zero.behind in self._groups or zero.behind >= self._newest:  # otherwise it is no longer remembered
            self._groups.setdefault(zero.behind, KnownEntry()).zeros.insert(zero.place, known)
            self._trim()

    def _trim(self) -> None:
        while len(self._groups) > self._bound:
            del self._groups[self._oldest]

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
                "at": self._at,
                "reached": self._reached,
                "entries": [[index, group.own, group.zeros] for index, group in self._groups.items()],
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
        window._reached, window._at = stored.get("reached", {}), stored.get("at", 0)
        for index, own, zeros in stored.get("groups", ()):  # up to 0.1 the events were kept one by one
            window._groups[index] = KnownEntry(_NO_EVENTS.with_events(own), [(one, image) for one, image in zeros])
        for index, own, zeros in stored.get("entries", ()):
            window._groups[index] = KnownEntry(_Own(*own), [(one, image) for one, image in zeros])
        return window


def _own(entry: RaftEntry) -> _Own:
    return _NO_EVENTS.with_events(event.known for event in entry.events)
