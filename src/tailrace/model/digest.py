"""64-bit digests of rows, computed for whole columns at once; equal rows have equal digests.

Two different rows have the same digest with a probability of 1 in 2^64. That is enough to detect changes, but no
protection against rows that are made to collide on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Digests = npt.NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_BASE = np.uint64(0xD6E8FEB86659FD93)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_NULL = np.uint64(0xA0761D6478BD642F)
_PIECE_BYTES = 1 << 22


def row_digests(columns: Sequence[pa.Array[Any]]) -> npt.NDArray[np.int64]:
    """One digest per row of these columns. Equal values have equal digests only in columns of equal type."""
    count = len(columns[0]) if columns else 0
    total = np.full(count, _ODD, np.uint64)
    for column in columns:
        total = _mix(total * _BASE + _digests(column))
    return total.view(np.int64)


def _mix(values: Digests) -> Digests:
    """Mix so that every bit of the result depends on every bit of the value (the last step of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _digests(array: pa.Array[Any]) -> Digests:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _digests(array.storage)
    if pa.types.is_dictionary(kind):
        return _digests(array.dictionary_decode())
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL, np.uint64)
    values = _present(array, kind)
    if array.null_count:
        values = np.where(np.asarray(array.is_null().to_numpy(zero_copy_only=False), bool), _NULL, values)
    return values


def _present(array: pa.Array[Any], kind: pa.DataType) -> Digests:
    """The digests of the values; undefined where a value is null."""
    if pa.types.is_struct(kind):
        return row_digests(array.flatten()).view(np.uint64)
    if pa.types.is_map(kind):
        return _present(array.cast(pa.list_(pa.struct([("k", kind.key_type), ("v", kind.item_type)]))), array.type)
    if pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_type))
        kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = np.asarray(array.offsets.to_numpy(zero_copy_only=False), np.int64)
        return _sequences(_digests(array.values), offsets)
    if pa.types.is_floating(kind):
        numbers = np.asarray(array.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False), np.float64)
        # -0 and 0 must have one digest, and so must all NaNs.
        return _mix(np.where(np.isnan(numbers), np.nan, numbers + 0.0).view(np.uint64))
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    elif pa.types.is_decimal(kind):
        array = array.cast(pa.string())
    elif pa.types.is_temporal(kind):
        array = array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    if pa.types.is_integer(array.type):
        whole = array.fill_null(0).cast(pa.uint64() if pa.types.is_unsigned_integer(array.type) else pa.int64())
        return _mix(np.asarray(whole.to_numpy(zero_copy_only=False)).view(np.uint64))
    return _texts(array.cast(pa.large_binary()))


def _texts(array: pa.Array[Any]) -> Digests:
    if not len(array):
        return np.zeros(0, np.uint64)
    _, places, data = array.buffers()
    offsets = np.frombuffer(places, np.int64, len(array) + 1, array.offset * 8)
    if data is None:
        return _sequences(np.zeros(0, np.uint64), offsets)
    octets = np.frombuffer(data, np.uint8)
    found = np.empty(len(array), np.uint64)
    table = _octet_digests()
    # Piece by piece, because each byte takes eight bytes here.
    first = 0
    while first < len(array):
        last = int(np.searchsorted(offsets, offsets[first] + _PIECE_BYTES, side="right")) - 1
        last = min(max(last, first + 1), len(array))
        piece = table[octets[offsets[first] : offsets[last]]]
        found[first:last] = _sequences(piece, offsets[first : last + 1] - offsets[first])
        first = last
    return found


def _octet_digests() -> Digests:
    return _mix(np.arange(1, 257, dtype=np.uint64) * _ODD)


def _sequences(elements: Digests, offsets: npt.NDArray[np.int64]) -> Digests:
    """The digest of each run of elements: a polynomial in an odd number, the difference of two prefix sums."""
    begin, end = offsets[:-1], offsets[1:]
    sums = np.zeros(len(elements) + 1, np.uint64)
    np.cumsum(elements * _powers(_BASE, len(elements)), out=sums[1:])
    # The digest must not depend on where in the array a run begins, so divide by the power of its first index.
    runs = (sums[end] - sums[begin]) * _powers(_INVERSE, len(elements) + 1)[begin]
    return _mix(runs + (end - begin).astype(np.uint64) * _ODD)


def _powers(base: np.uint64, count: int) -> Digests:
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)
