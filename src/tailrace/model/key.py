"""Row keys in a comparable form: one number or one byte string per row.

Two rows have the same key exactly when their comparable keys are equal, whatever the key's column types are.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model.value_text import PLAIN

Numbers = npt.NDArray[np.int64]
Comparable: TypeAlias = "Numbers | pa.Array[Any]"
"""int64 if the key is a single integer, date or time column; otherwise a `large_binary` array without nulls."""

_NUMBER = r"^(0|-?[1-9][0-9]{0,18})$"
_COLON, _BAR = b":", b"|"
_NULL = b"\xff\xfenull"  # not valid UTF-8, so no text equals it


def comparable(columns: Sequence[pa.Array[Any] | pa.ChunkedArray[Any]]) -> Comparable:
    """The key of each row as one value. `columns` are the key's columns, in the key's order."""
    arrays = [_plain(column) for column in columns]
    if len(arrays) == 1 and is_numeric(arrays[0].type) and not arrays[0].null_count:
        return _numbers(arrays[0])
    if len(arrays) == 1:
        return pc.fill_null(_text(arrays[0]), _NULL)
    parts: list[Any] = []
    for array in arrays:
        text = _text(array)
        # The length prefix distinguishes ("a", "bc") from ("ab", "c"); a null has no prefix.
        length = pc.cast(pc.cast(pc.binary_length(text), pa.large_string()), pa.large_binary())
        parts.append(
            pc.fill_null(pc.binary_join_element_wise(length, text, pa.scalar(_COLON, pa.large_binary())), b"n")
        )
    return pc.binary_join_element_wise(*parts, pa.scalar(_BAR, pa.large_binary()))


def is_numeric(kind: pa.DataType) -> bool:
    """Whether a single key column of this type compares as int64."""
    return bool(
        (pa.types.is_integer(kind) and kind != pa.uint64())
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_time(kind)
        or pa.types.is_duration(kind)
    )


def positions(wanted: Comparable, among: Comparable) -> npt.NDArray[np.int64]:
    """For each wanted key, the index of its row in `among`, or -1. Keys in `among` must be distinct."""
    if isinstance(wanted, np.ndarray) and isinstance(among, np.ndarray):
        if not len(among):
            return np.full(len(wanted), -1, np.int64)
        order = None if is_ascending(among) else np.argsort(among)
        ordered = among if order is None else among[order]
        at = np.searchsorted(ordered, wanted)
        at[at == len(ordered)] = 0
        found = at if order is None else order[at]
        return np.where(ordered[at] == wanted, found, -1)
    index = pc.index_in(binary(wanted), value_set=binary(among))
    return np.asarray(pc.fill_null(index, -1).to_numpy(zero_copy_only=False), np.int64)


def matches(ascending: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
    """Where the wanted numbers are in `ascending`: indexes into it, and for each of them the index among the wanted.

    Both are sorted and of the same type; only `ascending` may hold a number more than once.
    """
    # Search the shorter side in the longer; both ascend, so the searches walk through memory once.
    if len(wanted) > len(ascending):
        at = np.searchsorted(wanted, ascending)
        found = np.flatnonzero(wanted[np.minimum(at, len(wanted) - 1)] == ascending)
        return found, at[found]
    last = len(ascending) - 1
    at = np.searchsorted(ascending, wanted)
    hit = np.flatnonzero(ascending[np.minimum(at, last)] == wanted) if len(wanted) else np.zeros(0, np.int64)
    at = at[hit]
    again = (at < last) & (ascending[np.minimum(at + 1, last)] == ascending[at])
    if not again.any():
        return at, hit
    count = np.ones(len(at), np.int64)
    count[again] = np.searchsorted(ascending, wanted[hit[again]], "right") - at[again]
    before = np.cumsum(count) - count
    return np.repeat(at - before, count) + np.arange(int(count.sum())), np.repeat(hit, count)


def is_ascending(keys: Numbers) -> bool:
    return bool(np.all(keys[1:] >= keys[:-1]))


def binary(keys: Comparable) -> pa.Array[Any]:
    """Keys as byte strings, numbers too. For comparing a key that is numeric on one side only."""
    if isinstance(keys, np.ndarray):
        return pc.cast(pc.cast(pa.array(keys), pa.large_string()), pa.large_binary())
    return keys


def joined(pieces: Sequence[Comparable]) -> Comparable:
    """The keys of all pieces, of which there is at least one, after one another."""
    found = [piece for piece in pieces if isinstance(piece, np.ndarray)]
    if len(found) == len(pieces):
        return np.concatenate(found)
    return pa.concat_arrays([binary(piece) for piece in pieces])


def parts(keys: pa.Array[Any]) -> tuple[Numbers, npt.NDArray[np.uint8]]:
    """Byte strings as offsets, one more than there are strings and the first 0, and the bytes they are offsets of."""
    _, offsets, data = keys.buffers()
    if not len(keys):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64, len(keys) + 1, keys.offset * 8)
    first, size = int(ends[0]), int(ends[-1] - ends[0])
    return ends - first, np.frombuffer(data, np.uint8, size, first) if size else np.zeros(0, np.uint8)


def numbers(keys: pa.Array[Any]) -> tuple[Numbers, Numbers]:
    """The inverse of `binary`: those of the byte strings that stand for an int64, as numbers, and their indexes."""
    is_number = pc.match_substring_regex(keys, _NUMBER)
    at = np.flatnonzero(np.asarray(is_number.to_numpy(zero_copy_only=False), bool))
    # Of 19 digits not all fit into int64, but all into this decimal.
    wide = keys.filter(is_number).cast(pa.large_string()).cast(pa.decimal128(19, 0))
    # Not at import: for a decimal, pyarrow imports pandas.
    least, most = (pa.scalar(Decimal(bound), pa.decimal128(19, 0)) for bound in (-(2**63), 2**63 - 1))
    fits = pc.and_(pc.greater_equal(wide, least), pc.less_equal(wide, most))
    fitting = np.asarray(fits.to_numpy(zero_copy_only=False), bool)
    return np.asarray(wide.filter(fits).cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64), at[fitting]


def codes(keys: Comparable) -> Numbers:
    """One number per key, equal exactly where keys are equal; small and dense unless keys are numbers far apart."""
    if isinstance(keys, np.ndarray):
        return keys
    return np.asarray(keys.dictionary_encode().indices.to_numpy(zero_copy_only=False), np.int64)


def _plain(column: pa.Array[Any] | pa.ChunkedArray[Any]) -> pa.Array[Any]:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array


def _numbers(array: pa.Array[Any]) -> Numbers:
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif not pa.types.is_integer(array.type):
        width = array.type.bit_width
        array = array.view(pa.int64() if width == 64 else pa.int32())
    return np.asarray(array.to_numpy(zero_copy_only=False), np.int64)


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _text(array: pa.Array[Any]) -> Any:
    if _is_text(array.type):
        return array.cast(pa.large_binary())
    if pa.types.is_nested(array.type):
        return pc.if_else(array.is_valid(), PLAIN.value(array), None).cast(pa.large_binary())
    if pa.types.is_floating(array.type):
        wide = array.cast(pa.float64())
        # Upstreams treat -0 and 0 as the same key, and all NaNs as the same key.
        array = pc.if_else(pc.is_nan(wide), float("nan"), pc.add(wide, 0.0))
    elif pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif pa.types.is_temporal(array.type):
        width = array.type.bit_width
        array = array.view(pa.int64() if width == 64 else pa.int32())
    return pc.cast(pc.cast(array, pa.large_string()), pa.large_binary())
