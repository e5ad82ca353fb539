"""Decode many SQLite records at once into columns, without an object per row.

The headers of all records are read together, column by column, from one buffer. The result is numpy arrays and one
Arrow array of bytes per column, which `column_type.read_column` converts to a typed Arrow column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.record import FIRST_LONG_SERIAL, SIZES, SURROGATE, Value

Indexes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_PAD = 16


class CellKind(IntEnum):
    """The storage class of one value. ABSENT: the record is older than the column and has no value for it."""

    NULL = 0
    INTEGER = 1
    REAL = 2
    TEXT = 3
    BLOB = 4
    ABSENT = 5


@dataclass(frozen=True)
class RecordCells:
    """One column of many records. The cell is in the array for its kind; an array without any cell is None.

    kinds       the storage class of each cell, a `CellKind`
    integers    the cells of kind INTEGER
    reals       the cells of kind REAL
    octets      the cells of kind TEXT and BLOB; empty bytes elsewhere
    """

    kinds: npt.NDArray[np.uint8]
    integers: npt.NDArray[np.int64] | None
    reals: npt.NDArray[np.float64] | None
    octets: pa.Array[Any] | None

    def are(self, kind: CellKind) -> Mask:
        found: Mask = self.kinds == kind
        return found

    def take(self, rows: Indexes) -> RecordCells:
        return RecordCells(
            self.kinds[rows],
            None if self.integers is None else self.integers[rows],
            None if self.reals is None else self.reals[rows],
            None if self.octets is None else self.octets.take(pa.array(rows)),
        )

    def to_list(self) -> list[Value]:
        """The cells as Python values, for tests and for display."""
        octets = self.octets.to_pylist() if self.octets is not None else []
        read: dict[int, Callable[[int], Value]] = {
            CellKind.INTEGER: lambda row: int(self.integers[row]) if self.integers is not None else None,
            CellKind.REAL: lambda row: float(self.reals[row]) if self.reals is not None else None,
            CellKind.TEXT: lambda row: octets[row].decode("utf-8", SURROGATE),
            CellKind.BLOB: lambda row: octets[row],
        }
        return [read[int(kind)](row) if int(kind) in read else None for row, kind in enumerate(self.kinds)]


@dataclass(frozen=True)
class Decoded:
    """Many records as columns. Malformed and null records are ABSENT in every column."""

    columns: list[RecordCells]
    malformed: Mask


def decode_records(records: pa.Array[Any], columns: int) -> Decoded:
    """The first `columns` values of every record, decoded column by column for all rows at once.

    A record with fewer values has ABSENT cells, as after ADD COLUMN; one with more values is malformed. Damaged rows
    do not raise: they are marked as malformed, so that the others can be used. At most 2 GB in one array.
    """
    data, starts, ends = _frame(records)
    words: npt.NDArray[np.uint64] = np.ndarray((len(data) - 8,), np.dtype(">u8"), data, strides=(1,))
    size, at = _read_varints(data, starts)
    header_ends = starts + size
    malformed = (header_ends > ends) | (size < at - starts) | (starts == ends)
    empty = starts == ends
    header_ends = np.where(malformed, starts, header_ends)
    at = np.where(malformed, starts, at)
    body = header_ends.copy()
    cells: list[tuple[Indexes, npt.NDArray[np.uint8], Indexes, Indexes]] = []
    for _ in range(columns):
        present = at < header_ends
        serials, following = _read_varints(data, at)
        at = np.where(present, following, at)
        lengths, kinds = _measure(serials)
        if not present.all():
            lengths, kinds = lengths * present, np.where(present, kinds, np.uint8(CellKind.ABSENT))
        wrong = (lengths > ends - body) | (kinds > CellKind.ABSENT)
        if wrong.any():
            malformed |= wrong
            lengths = np.where(wrong, 0, lengths)
        cells.append((serials, kinds, body, lengths))
        body = body + lengths
    malformed |= (at != header_ends) | (body != ends)
    buffer = pa.py_buffer(data)
    null = pc.is_null(records).to_numpy(zero_copy_only=False) if records.null_count else None
    if null is not None:
        malformed &= ~(null & empty)
    spoiled = malformed if malformed.any() else None
    return Decoded([_cells(words, buffer, spoiled, *cell) for cell in cells], malformed)


def _frame(records: pa.Array[Any]) -> tuple[npt.NDArray[np.uint8], Indexes, Indexes]:
    """The bytes of all records, with padding at the end, and where each record begins and ends."""
    if not len(records):
        return np.zeros(_PAD, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
    wide = pa.types.is_large_binary(records.type)
    _, raw_bounds, raw = records.buffers()
    offset_type, width = (np.int64, 8) if wide else (np.int32, 4)
    bounds = np.frombuffer(raw_bounds, offset_type, len(records) + 1, records.offset * width).astype(np.int64)
    data = np.zeros(int(bounds[-1] - bounds[0]) + _PAD, np.uint8)
    if raw is not None:
        data[:-_PAD] = np.frombuffer(raw, np.uint8)[bounds[0] : bounds[-1]]
    bounds -= bounds[0]
    return data, bounds[:-1], bounds[1:]


def _read_varints(data: npt.NDArray[np.uint8], at: Indexes) -> tuple[Indexes, Indexes]:
    """The varints at these offsets, and the offsets after them."""
    first = data[at]
    long = np.flatnonzero(first >= 0x80)
    values = first.astype(np.int64)
    following = at + 1
    if not len(long):
        return values, following
    values[long] &= 0x7F
    for count in range(1, 9):
        octets = data[np.minimum(at[long] + count, len(data) - 1)]
        shift, keep = (8, 0xFF) if count == 8 else (7, 0x7F)
        values[long] = values[long] << shift | octets & keep
        following[long] += 1
        long = long[octets >= 0x80]
        if not len(long):
            break
    return values, following


_LENGTHS = np.array([*SIZES, 0, 0], np.int64)
_UNKNOWN = CellKind.ABSENT + 1
_KINDS = np.array(
    [
        CellKind.NULL,
        *[CellKind.INTEGER] * 6,
        CellKind.REAL,
        CellKind.INTEGER,
        CellKind.INTEGER,
        _UNKNOWN,
        _UNKNOWN,
        CellKind.BLOB,
        CellKind.TEXT,
    ],
    np.uint8,
)


def _measure(serials: Indexes) -> tuple[Indexes, npt.NDArray[np.uint8]]:
    """The length and the storage class of each serial type."""
    # A varint of nine bytes may decode to a negative number. No value is that long, so give it a length that is
    # certain to be rejected.
    huge = serials < 0
    serials = np.where(huge, np.int64(2**62), serials) if huge.any() else serials
    long = serials >= FIRST_LONG_SERIAL
    if long.all():
        return (serials - FIRST_LONG_SERIAL) >> 1, _KINDS[12 + (serials & 1)]
    if not long.any():
        return _LENGTHS[serials], _KINDS[serials]
    short = np.where(long, 12 + (serials & 1), serials)
    return np.where(long, (serials - FIRST_LONG_SERIAL) >> 1, _LENGTHS[np.minimum(serials, 11)]), _KINDS[short]


def _cells(
    words: npt.NDArray[np.uint64],
    data: pa.Buffer,
    spoiled: Mask | None,
    serials: Indexes,
    kinds: npt.NDArray[np.uint8],
    body: Indexes,
    lengths: Indexes,
) -> RecordCells:
    if spoiled is not None:
        kinds = np.where(spoiled, np.uint8(CellKind.ABSENT), kinds)
    held = np.bincount(kinds, minlength=_UNKNOWN + 1)
    integers = reals = octets = None
    if held[CellKind.INTEGER] or held[CellKind.REAL]:
        # The last cells of a record may be empty, at an offset that is the end of the data.
        raw = words[np.minimum(body, len(words) - 1)].astype(np.uint64)
        if held[CellKind.INTEGER]:
            bits = (64 - 8 * lengths).clip(0, 63)
            integers = np.where((serials == 8) | (serials == 9), serials - 8, raw.view(np.int64) >> bits)
        if held[CellKind.REAL]:
            reals = raw.view(np.float64)
    if held[CellKind.TEXT] or held[CellKind.BLOB]:
        is_long = (kinds == CellKind.TEXT) | (kinds == CellKind.BLOB)
        octets = _slices(data, body, lengths if is_long.all() else lengths * is_long)
    return RecordCells(kinds, integers, reals, octets)


def _slices(data: pa.Buffer, starts: Indexes, lengths: Indexes) -> pa.Array[Any]:
    """The bytes at these ascending offsets as one array."""
    # View the buffer, without a copy, as one array in which values and the gaps between them alternate. Taking every
    # other element is then a single native pass.
    bounds = np.empty(2 * len(starts), np.int32)
    bounds[0::2] = starts
    np.add(starts, lengths, out=bounds[1::2], casting="unsafe")
    woven = pa.Array.from_buffers(pa.binary(), 2 * len(starts) - 1, [None, pa.py_buffer(bounds), data])
    return woven.take(pa.array(np.arange(0, 2 * len(starts), 2, dtype=np.int32)))
