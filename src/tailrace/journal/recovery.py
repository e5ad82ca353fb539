"""Recovery when a writer opens a journal: find its end, ignore a torn append, report damage.

A torn end is what a crash leaves of an append that never returned. It was never acknowledged, so it is ignored.
Damage means bytes that were durable once and now differ from what was written. They are never served, a copy is kept
under `quarantine/`, and the caller gets the positions that are lost. Frames make the difference known: each holds the
offset before which everything was durable when it was written.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.errors import DamagedError
from tailrace.journal.index import Gap, SegmentIndex
from tailrace.journal.segment import (
    SegmentHeader,
    State,
    list_segments,
    read_header,
    remove_segment,
    sequence_of,
)
from tailrace.model.change import Position
from tailrace.system.atomic_file import sync

_QUARANTINE = "quarantine"


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


def recover(path: Path, origin: Position) -> Recovered:
    """Check the headers of every segment and the payloads of the last one. The caller must hold the writer's lock.

    Removes files that an interrupted cut left; changes nothing else. `origin` is where an empty journal starts.
    """
    for left in path.glob("*.new"):
        left.unlink()
    found = Recovered(state=State(origin, origin, origin))
    names = [name for name, _ in list_segments(path)]
    aside = [file.name for file in (path / _QUARANTINE).glob("*.seg")]
    found.next_sequence = 1 + max((sequence_of(name) for name in names + aside), default=0)
    headers = _read_headers(path, names)
    limits = void_limits(list(headers.values()))
    for (name, header), limit in zip(headers.items(), limits, strict=True):
        if limit is not None and header.state.tail >= limit:
            remove_segment(path, name)
            continue
        found.segments[name] = header
        with open_segment(path, name) as (file, size):
            found.sizes[name] = size
            index = SegmentIndex(name, header)
            index.seal(file, size, limit)
            if limit is None:
                _examine_last(file, size, index, found)
        found.damage += [Damage(name, gap.offset, gap.after, gap.last) for gap in index.gaps]
    if names and names[-1] not in headers:
        # In any other place the loss would show as a gap between two segments. After the last one there is no
        # neighbour to compare with, so the end of the lost range is unknown.
        found.damage.append(Damage(names[-1], 0, found.state.tail, found.state.tail))
    for name in {damage.segment for damage in found.damage} & found.segments.keys():
        _quarantine(path, name)
    return found


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


@contextmanager
def open_segment(path: Path, name: str) -> Iterator[tuple[int, int]]:
    """A segment's file descriptor, for reading, and its size."""
    file = os.open(path / name, os.O_RDONLY)
    try:
        yield file, os.fstat(file).st_size
    finally:
        os.close(file)


def _read_headers(path: Path, names: list[str]) -> dict[str, SegmentHeader]:
    headers: dict[str, SegmentHeader] = {}
    for name in names:
        try:
            with open_segment(path, name) as (file, _):
                headers[name] = read_header(file, name)
        except DamagedError:
            (path / _QUARANTINE).mkdir(exist_ok=True)
            (path / name).rename(path / _QUARANTINE / name)
            sync(path / _QUARANTINE)
            sync(path)
    return headers


def _examine_last(file: int, size: int, index: SegmentIndex, found: Recovered) -> None:
    """Find the end of the journal from the payloads of the last segment and the bytes after its last frame."""
    # A killed writer may leave intact frames that are only in the page cache. Sync them: from now on they are durable.
    os.fsync(file)
    bad: list[Gap] = []
    torn = size
    for offset, header in index.stored():
        payload = os.pread(file, header.payload_length, offset + header.payload_at)
        if len(payload) != header.payload_length or zlib.crc32(payload) != header.payload_crc:
            if offset >= index.durable:
                torn = min(torn, offset)
            else:
                bad.append(Gap(header.previous, header.last, offset))
    torn = min([torn, *(gap.offset for gap in index.gaps if gap.offset >= index.durable)])
    index.gaps = [gap for gap in index.gaps if gap.offset < torn] + bad
    found.state = index.state if torn == size else index.state_before(torn)


def _quarantine(path: Path, name: str) -> None:
    """Copy the damaged file to quarantine, because retention will remove the original."""
    folder = path / _QUARANTINE
    folder.mkdir(exist_ok=True)
    if (folder / name).exists():
        return
    new = folder / f"{name}.new"
    shutil.copyfile(path / name, new)
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.rename(folder / name)
    sync(folder)
