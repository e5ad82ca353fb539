"""The segment file: append-only, self-describing, named by a sequence number that is never reused.

    magic 8 bytes | length of the JSON, its checksum: 2 x 4 bytes | JSON, padded to a multiple of 8 | frames …

The JSON holds the state of the journal at the start of the segment. So a segment can be read on its own, and the next
segment tells how much of this one is valid: frames after the next one's `tail` are void.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from tailrace.errors import DamagedError
from tailrace.journal.frame import padded
from tailrace.model.change import START, Position
from tailrace.system.atomic_file import sync

SUFFIX = ".seg"
_MAGIC = b"tailrace"
_VERSION = 1
_PREFIX = struct.Struct("<8sII")
_FIRST_READ = 4096


class State(NamedTuple):
    """The state of a journal: its last frame, its last commit boundary, and the higher of that and the last note."""

    tail: Position = START
    head: Position = START
    mark: Position = START


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """`state` is the journal's state at the start of the segment; `end` is the offset of its first frame."""

    state: State
    seed: int
    end: int


def segment_name(sequence: int) -> str:
    return f"{sequence:020d}{SUFFIX}"


def sequence_of(name: str) -> int:
    return int(name.removesuffix(SUFFIX))


def list_segments(path: Path) -> Iterator[tuple[str, int]]:
    """Name and inode of each segment, in order. Empty if the directory does not exist."""
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, entry.inode()) for entry in entries if entry.name.endswith(SUFFIX)]
    except FileNotFoundError:
        return iter(())
    return iter(sorted((name, inode) for name, inode in found if name.removesuffix(SUFFIX).isdecimal()))


def new_header(state: State) -> tuple[bytes, SegmentHeader]:
    """The first bytes of a new segment, and what they say."""
    text = json.dumps(
        {
            "version": _VERSION,
            "tail": str(state.tail),
            "head": str(state.head),
            "mark": str(state.mark),
            "created": time.time_ns() // 1_000_000,
            # Frame checksums start from this header's, so bytes of another file are never taken for frames.
            "salt": secrets.token_hex(8),
        }
    ).encode()
    stored = _PREFIX.pack(_MAGIC, len(text), zlib.crc32(text)) + text + bytes(-len(text) % 8)
    return stored, SegmentHeader(state, zlib.crc32(text), len(stored))


def header_bytes(segment: bytes) -> bytes:
    """The bytes of a segment's header. No other segment has the same."""
    _, length, _ = _PREFIX.unpack_from(segment)
    return segment[: _PREFIX.size + length]


def create_segment(path: Path, name: str, content: Sequence[bytes | bytearray | memoryview]) -> int:
    """Create a segment file, durable on return, and open it for writing. It appears atomically or not at all."""
    new = path / f"{name}.new"
    try:
        with new.open("xb", buffering=0) as file:
            file.write(b"".join(content))
            os.fsync(file.fileno())
            opened = os.dup(file.fileno())
        new.rename(path / name)
        sync(path)
    except OSError:
        # If it stayed, its header would declare that the journal ends where this segment begins.
        new.unlink(missing_ok=True)
        (path / name).unlink(missing_ok=True)
        raise
    return opened


class RangeReadable(Protocol):
    """Bytes that can be read from any offset."""

    def read(self, length: int, offset: int) -> bytes: ...


def read_header(file: RangeReadable, name: str) -> SegmentHeader:
    """The header of an open segment. Raises DamagedError when it is not valid."""
    start = file.read(_FIRST_READ, 0)
    try:
        magic, length, crc = _PREFIX.unpack_from(start)
        text = start[_PREFIX.size : _PREFIX.size + length]
        if magic != _MAGIC or len(text) != length or zlib.crc32(text) != crc:
            raise ValueError("the header does not match its checksum")
        raw = json.loads(text)
        if raw["version"] != _VERSION:
            raise ValueError(f"format version {raw['version']} is not {_VERSION}")
        state = State(*(Position.parse(raw[key]) for key in ("tail", "head", "mark")))
    except (ValueError, KeyError, struct.error) as error:
        raise DamagedError(
            f"journal segment {name} cannot be read: {error}",
            fix="restart the receiver: it moves the segment to quarantine and reports what is lost",
        ) from error
    return SegmentHeader(state, crc, padded(_PREFIX.size + length))
