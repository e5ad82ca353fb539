"""The frame, the unit that is appended, checked and read, and its encoding in a segment. Does no I/O.

    header   96 bytes, little-endian: magic, two checksums, flags, lengths, positions, count, group
    meta     small; under the header's checksum, so that a scan of headers can trust it
    payload  big; under its own checksum, verified only when it is read

Each part starts at a multiple of 8 bytes, so numpy can view a payload without a copy.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.model.change import Position

MAGIC = b"\xf7TrF"
_COMPLETE = 1
_NOTE = 2

# magic, header crc | payload crc, flags, meta length, zero | payload length, first, last, previous, count, group
_HEAD = struct.Struct("<4sI")
_BODY = struct.Struct("<IIIIQQQQQQQQQ")
_LAST = struct.Struct("<QQ")
_LAST_AT = _HEAD.size + struct.calcsize("<IIIIQQQ")
HEADER_BYTES = _HEAD.size + _BODY.size


@dataclass(frozen=True, slots=True)
class Frame:
    """Changes from `first` to `last`, as opaque bytes.

    `complete` says that `last` is a commit boundary: everything up to it can be served. A transaction larger than
    a frame is several frames of which only the last is complete. `count` is the number of changes, for read limits.
    `payload` is anything with a buffer (bytes, memoryview, pyarrow.Buffer); a frame that was read has a memoryview.
    """

    first: Position
    last: Position
    complete: bool
    count: int
    meta: bytes = b""
    payload: bytes | bytearray | memoryview = b""


@dataclass(frozen=True, slots=True)
class FrameRef:
    """Where a frame is stored, and all of its fields except the payload.

    Picklable. With the journal's place it is enough to read the frame, with one request: `seed` is the checksum of its
    segment's header, from which the frame's own begins. A ref that goes to one task may have a shorter `meta`; the
    frame that is read has the stored one.
    """

    segment: str
    offset: int
    length: int
    first: Position
    last: Position
    complete: bool
    count: int
    meta: bytes
    seed: int


def grouped(refs: Iterable[FrameRef], size: int) -> Iterator[list[FrameRef]]:
    """The frames in groups of at least `size` bytes each; only the last group may be smaller."""
    group: list[FrameRef] = []
    gathered = 0
    for ref in refs:
        group.append(ref)
        gathered += ref.length
        if gathered >= size:
            yield group
            group, gathered = [], 0
    if group:
        yield group


class Header(NamedTuple):
    """The fixed part of a stored frame.

    `previous` is the `last` of the frame before it, so that a missing frame is noticed. `group` is the offset at which
    the append that wrote this frame began: every byte of the segment before it was durable by then.
    """

    payload_crc: int
    complete: bool
    note: bool
    meta_length: int
    payload_length: int
    first: Position
    last: Position
    previous: Position
    changes: int
    group: int

    @property
    def payload_at(self) -> int:
        return HEADER_BYTES + padded(self.meta_length)

    @property
    def length(self) -> int:
        return self.payload_at + padded(self.payload_length)


def padded(length: int) -> int:
    """`length` rounded up to a multiple of 8."""
    return (length + 7) & ~7


def frame_bytes(frame: Frame) -> int:
    """The number of bytes that a frame takes in a segment."""
    return HEADER_BYTES + padded(len(frame.meta)) + padded(memoryview(frame.payload).nbytes)


def encode(frame: Frame, *, previous: Position, group: int, seed: int, note: bool = False) -> tuple[bytes, memoryview]:
    """The header with its meta, padded, and the payload, not padded.

    The header's checksum starts from `seed`, so it is valid in this segment only.
    """
    payload = memoryview(frame.payload).cast("B")
    body = _BODY.pack(
        zlib.crc32(payload),
        (_COMPLETE if frame.complete else 0) | (_NOTE if note else 0),
        len(frame.meta),
        0,
        payload.nbytes,
        *frame.first,
        *frame.last,
        *previous,
        frame.count,
        group,
    )
    crc = zlib.crc32(frame.meta, zlib.crc32(body, seed))
    return _HEAD.pack(MAGIC, crc) + body + frame.meta + bytes(-len(frame.meta) % 8), payload


def decode(record: bytes) -> Header:
    """The header at the start of `record`, unchecked (see `is_sound`)."""
    crc, flags, meta_length, _, payload_length, fc, fo, lc, lo, pc, po, count, group = _BODY.unpack_from(
        record, _HEAD.size
    )
    return Header(
        crc,
        bool(flags & _COMPLETE),
        bool(flags & _NOTE),
        meta_length,
        payload_length,
        Position(fc, fo),
        Position(lc, lo),
        Position(pc, po),
        count,
        group,
    )


def is_sound(record: bytes, meta_length: int, seed: int) -> bool:
    """Whether header and meta are the bytes that were written to this segment."""
    magic, crc = _HEAD.unpack_from(record)
    end = HEADER_BYTES + meta_length
    return bool(magic == MAGIC and crc == zlib.crc32(memoryview(record)[_HEAD.size : end], seed))


def last_of(record: bytes) -> Position:
    """The `last` of a record, without decoding the rest."""
    return Position(*_LAST.unpack_from(record, _LAST_AT))
