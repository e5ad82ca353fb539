"""Rows of a data file as a bitmap, and its bytes, which are the same in Delta's deletion vectors and in Iceberg's.

magic number, 4 bytes | number of bitmaps, 8 bytes | for each bitmap, the upper half of its row numbers, 4 bytes | the
bitmap in Roaring's portable form; all little-endian
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

Rows = BitMap
"""Physical row numbers of one data file."""

_MAGIC = 1681511377


def bitmap(numbers: npt.NDArray[Any]) -> Rows:
    """Row numbers, in any order, as a bitmap."""
    found = BitMap()
    # pyroaring takes an `array` as a whole; anything else, numpy's arrays too, number by number.
    found.update(array("I", np.ascontiguousarray(numbers, np.uint32).tobytes()))
    return found


def numbers(rows: Rows) -> npt.NDArray[np.int64]:
    """The row numbers in a bitmap, ascending."""
    return np.frombuffer(rows.to_array(), np.uint32).astype(np.int64) if rows else np.zeros(0, np.int64)


def encode(rows: Rows) -> bytes:
    """A vector's data. The bitmap itself stays as it is."""
    if not rows:
        return struct.pack("<IQ", _MAGIC, 0)
    small = rows.copy()
    small.run_optimize()
    return struct.pack("<IQI", _MAGIC, 1, 0) + small.serialize()


def decode(data: bytes) -> Rows:
    """The inverse of `encode`. Raises ValueError for data that is damaged, or has row numbers of 2³² and more."""
    if len(data) < 12:
        raise ValueError("it is too short")
    magic, count = struct.unpack_from("<IQ", data)
    if magic != _MAGIC:
        raise ValueError("it does not begin like a vector")
    if count == 0:
        return BitMap()
    if len(data) <= 16:
        raise ValueError("it is too short")
    if count > 1 or data[12:16] != bytes(4):
        raise ValueError("it has row numbers of 2**32 and more, and no data file has so many rows")
    return BitMap.deserialize(data[16:])
