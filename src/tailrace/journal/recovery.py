"""Recovery when a writer opens a journal: find its end, ignore a torn append, report damage.

A torn end is what a crash leaves of an append that never returned. It was never acknowledged, so it is ignored.
Damage means bytes that were durable once and now differ from what was written. They are never served, a copy is kept
under `quarantine/`, and the caller gets the positions that are lost. Frames make the difference known: each holds the
offset before which everything was durable when it was written.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.journal.index import Gap, SegmentIndex
from tailrace.journal.segment import SegmentHeader, State, segment_name, sequence_of
from tailrace.journal.storage import JournalStorage, SegmentBytes
from tailrace.model.change import Position


@dataclass(frozen=True, slots=True)
class Damage:
    """Positions in (after, last] were durable once and can no longer be read.

    `last` equals `after` when the extent is unknown, because the last segment has lost its header.
    """

    segment: str
    offset: int
    after: Position
    last: Position


@dataclass
class Recovered:
    """The result of a recovery: the valid `segments`, oldest first, and the journal's `state` at their end."""

    segments: dict[str, SegmentHeader] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    state: State = field(default_factory=State)
    damage: list[Damage] = field(default_factory=list)
    next_sequence: int = 1


def recover(storage: JournalStorage, origin: Position) -> Recovered:
    """Check the segments and find the end of the journal. The caller must hold the writer's lock.

    Local files are checked frame by frame, except for the payloads of all but the last. Objects are not: a store keeps
    them as they were put, and each frame is checked when it is read. There only a missing piece is looked for. Removes
    files that an interrupted cut left; changes nothing else. `origin` is where an empty journal starts.
    """
    found = Recovered(state=State(origin, origin, origin))
    sizes = storage.sizes()
    names = list(sizes)
    found.next_sequence = 1 + max((sequence_of(name) for name in names + storage.names_aside()), default=0)
    headers = _sound_headers(storage, names)
    limits = void_limits(list(headers.values()))
    for (name, header), limit in zip(headers.items(), limits, strict=True):
        is_void = limit is not None and header.state.tail >= limit
        if is_void and storage.grows:
            storage.remove(name)
            continue
        found.segments[name] = header
        found.sizes[name] = sizes[name]
        if is_void or not (storage.grows or limit is None or _next_is_missing(name, headers)):
            continue
        with storage.open(name) as file:
            index = SegmentIndex(name, header)
            index.seal(file, file.size, limit)
            if limit is None:
                # A killed writer may leave intact frames that are only in the page cache: from now on they are durable.
                storage.sync(name)
                _examine_last(file, index, found)
        found.damage += [Damage(name, gap.offset, gap.after, gap.last) for gap in index.gaps]
    if names and names[-1] not in headers:
        # In any other place the loss would show as a gap between two segments. After the last one there is no
        # neighbour to compare with, so the end of the lost range is unknown.
        found.damage.append(Damage(names[-1], 0, found.state.tail, found.state.tail))
    for name in {damage.segment for damage in found.damage} & found.segments.keys():
        # A copy, because retention will remove the original.
        storage.set_aside(name, keeps=True)
    return found


def _next_is_missing(name: str, headers: Mapping[str, SegmentHeader]) -> bool:
    return segment_name(sequence_of(name) + 1) not in headers


def void_limits(headers: list[SegmentHeader]) -> list[Position | None]:
    """For each segment, the position after which its frames are void; None for the last, in which all are valid.

    A segment that starts before the end of an earlier one means that the journal was cut back in between.
    """
    limits: list[Position | None] = []
    limit: Position | None = None
    for header in reversed(headers):
        limits.append(limit)
        limit = header.state.tail if limit is None else min(limit, header.state.tail)
    return limits[::-1]


def _sound_headers(storage: JournalStorage, names: list[str]) -> dict[str, SegmentHeader]:
    found: dict[str, SegmentHeader] = {}
    for name, header in storage.headers(names).items():
        if header is None:
            storage.set_aside(name, keeps=False)
        else:
            found[name] = header
    return found


def _examine_last(file: SegmentBytes, index: SegmentIndex, found: Recovered) -> None:
    """Find the end of the journal from the payloads of the last segment and the bytes after its last frame."""
    bad: list[Gap] = []
    torn = size = file.size
    for offset, header in index.stored():
        payload = file.read(header.payload_length, offset + header.payload_at)
        if len(payload) != header.payload_length or zlib.crc32(payload) != header.payload_crc:
            if offset >= index.durable:
                torn = min(torn, offset)
            else:
                bad.append(Gap(header.previous, header.last, offset))
    torn = min([torn, *(gap.offset for gap in index.gaps if gap.offset >= index.durable)])
    index.gaps = [gap for gap in index.gaps if gap.offset < torn] + bad
    found.state = index.state if torn == size else index.state_before(torn)
