"""Encode many rows as SQLite records at once, with exactly the bytes of `record.encode`.

Rows come as columns. A column is the serial types of its values and their bodies, one after the other. Headers are
built as one matrix, and a single native pass joins everything. `record_decode.decode_records` is the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.record import REAL_SERIAL, SIZES, Value, split

RecordValues = Sequence[Value]
Serials = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Records: TypeAlias = "pa.Array[Any]"

_MOST_OCTETS = 1 << 30
"""The limit for all records of a batch together, because Arrow's offsets have 31 bits."""
_MOST_HEADER = 127
"""The largest header whose size fits in one byte."""
_LIMITS = tuple(1 << (8 * size - 1) for size in SIZES[1:6])
_WIDTHS = np.array(SIZES, np.int64)
_PLACES = np.arange(8)


@dataclass(frozen=True)
class _Column:
    """One value of every row. `bodies` is None if all bodies are empty."""

    serials: Serials
    bodies: Records | None


def encode_columns(columns: Sequence[RecordValues]) -> Records | None:
    """The record of each row. None if the rows are very wide or long: then encode them one by one.

    Raises OverflowError as `encode` does.
    """
    parts = _split(columns)
    return None if parts is None else _join(parts)


def describe_updates(
    old: Sequence[RecordValues], new: Sequence[RecordValues]
) -> tuple[Records, Records, Records] | None:
    """The records before, after and updates of each update, as in `change.describe_update`; None as above."""
    befores, afters = _split(old), _split(new)
    if befores is None or afters is None or len(befores) != len(afters):
        return None
    flags, values = [], []
    for a, b in zip(befores, afters, strict=True):
        differs = a.serials != b.serials
        if a.bodies is not None and b.bodies is not None:
            differs = differs | pc.not_equal(a.bodies, b.bodies).to_numpy(zero_copy_only=False)
        flags.append(_Column(8 + differs.astype(np.int64), None))
        bodies = None if b.bodies is None else pc.if_else(pa.array(differs), b.bodies, b"")
        values.append(_Column(np.where(differs, b.serials, 0), bodies))
    before, after, updates = _join(befores), _join(afters), _join([*flags, *values])
    return None if before is None or after is None or updates is None else (before, after, updates)


def _split(columns: Sequence[RecordValues]) -> list[_Column] | None:
    found: list[_Column] = []
    room = _MOST_OCTETS
    for values in columns:
        column = _column(values, room)
        if column is None:
            return None
        room -= 0 if column.bodies is None else column.bodies.nbytes
        found.append(column)
    return found or None


def _column(values: Sequence[Any], room: int) -> _Column | None:
    """Encode one column; None if its bodies would take more than `room` bytes."""
    kinds = set(map(type, values))
    has_nulls = NoneType in kinds
    kinds.discard(NoneType)
    kind = kinds.pop() if len(kinds) == 1 else None if kinds else int
    if kind not in (int, float, str, bytes):
        return _mixed(values, room)
    filled, is_null = values, None
    if has_nulls:
        is_null = np.fromiter((value is None for value in values), np.bool_, len(values))
        filled = [kind() if value is None else value for value in values]
    try:
        if kind is int:
            return _integers(np.fromiter(filled, np.int64, len(values)), is_null)
        if kind is float:
            return _reals(np.fromiter(filled, np.float64, len(values)), is_null)
        if kind is str:
            return _texts(filled, is_null, room)
        return _octets(filled, b"".join(filled), 12, is_null, room)
    except (OverflowError, UnicodeError):
        # Only the encoder of single values handles such a value.
        return _mixed(values, room)


def _mixed(values: Sequence[Any], room: int) -> _Column | None:
    parts = split(values)
    bodies = [body for _, body in parts]
    octets = b"".join(bodies)
    if len(octets) > room:
        return None
    return _Column(np.array([serial for serial, _ in parts], np.int64), _lay(octets, _lengths(bodies)))


def _texts(values: Sequence[str], is_null: Mask | None, room: int) -> _Column | None:
    text = "".join(values)
    octets = text.encode()
    encoded: Sequence[str | bytes] = values if len(octets) == len(text) else [value.encode() for value in values]
    return _octets(encoded, octets, 13, is_null, room)


def _octets(
    values: Sequence[str | bytes], octets: bytes, serial: int, is_null: Mask | None, room: int
) -> _Column | None:
    if len(octets) > room:
        return None
    lengths = _lengths(values)
    serials = serial + 2 * lengths
    if is_null is not None:
        serials[is_null] = 0
    return _Column(serials, _lay(octets, lengths))


def _integers(numbers: npt.NDArray[np.int64], is_null: Mask | None) -> _Column:
    # One bit is for the sign, and -2**n needs no more bits than 2**n - 1.
    sizes = numbers ^ (numbers >> 63)
    serials = np.ones(len(numbers), np.int64)
    highest = sizes.max()
    for limit in _LIMITS:
        if highest >= limit:
            serials += sizes >= limit
    small = numbers >> 1 == 0
    serials[small] = 8 + numbers[small]
    if is_null is not None:
        serials[is_null] = 0
    return _Column(serials, _cut(numbers, _WIDTHS[serials]))


def _reals(numbers: npt.NDArray[np.float64], is_null: Mask | None) -> _Column:
    serials = np.where(np.isnan(numbers), 0, REAL_SERIAL)
    if is_null is not None:
        serials[is_null] = 0
    return _Column(serials, _cut(numbers.view(np.int64), _WIDTHS[serials]))


def _cut(words: npt.NDArray[np.int64], widths: npt.NDArray[np.int64]) -> Records | None:
    """The last `widths` bytes of each number, most significant first."""
    width = int(widths.max())
    if not width:
        return None
    matrix = words.astype(">i8").view(np.uint8).reshape(-1, 8)[:, 8 - width :]
    if width == widths.min():
        return _lay(matrix.tobytes(), widths)
    return _lay(matrix[_PLACES[:width] >= (width - widths)[:, None]].tobytes(), widths)


def _join(columns: list[_Column]) -> Records | None:
    """Join the columns to records; None if a header's size does not fit in its first byte."""
    serials = np.array([column.serials for column in columns]).T
    if len(columns) >= _MOST_HEADER:
        return None
    highest = int(serials.max())
    header = np.empty((len(serials), len(columns) + 1), np.uint8)
    if highest < 128:
        header[:, 0] = len(columns) + 1
        header[:, 1:] = serials
        lengths = np.full(len(serials), len(columns) + 1)
        headers = _lay(header.tobytes(), lengths)
    else:
        # Split every number into groups of seven bits, then keep those from the first that is not zero.
        groups = (highest.bit_length() + 6) // 7
        shifts = np.arange(7 * (groups - 1), -1, -7)
        shifted = serials[:, :, None] >> shifts
        kept = (shifted > 0) | (shifts == 0)
        lengths = 1 + kept.sum(axis=(1, 2))
        if lengths.max() > _MOST_HEADER:
            return None
        octets = shifted & 0x7F | np.where(shifts > 0, 0x80, 0)
        rows = len(serials)
        matrix = np.concatenate((lengths[:, None], octets.reshape(rows, -1)), axis=1).astype(np.uint8)
        mask = np.concatenate((np.ones((rows, 1), np.bool_), kept.reshape(rows, -1)), axis=1)
        headers = _lay(matrix[mask].tobytes(), lengths)
    bodies = [column.bodies for column in columns if column.bodies is not None]
    joined: Records = pc.binary_join_element_wise(headers, *bodies, pa.scalar(b"", pa.binary()))
    return joined


def _lay(octets: bytes, lengths: npt.NDArray[np.int64]) -> Records:
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(bounds), pa.py_buffer(octets)])


def _lengths(values: Sequence[str | bytes]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, values), np.int64, len(values))
