"""A 64-bit hash of keys that are byte strings, for all rows at once.

It only says where a key can be: who uses it compares the keys themselves, so keys with the same hash do no harm. Key
files hold its values: if it changes, their version must too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.model import key as keys

KeyHashes = npt.NDArray[np.uint64]

_WORDS = 32
"""How many words of eight bytes are read of a key. Of a longer one the middle is left out: someone else chose it, and
its length must not decide how long a batch takes."""
_SEED, _FACTOR = np.uint64(0x5851F42D4C957F2D), np.uint64(0x9E3779B97F4A7C15)
_LAST = ((33, np.uint64(0xFF51AFD7ED558CCD)), (33, np.uint64(0xC4CEB9FE1A85EC53)))
_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
"""By number of bytes: what keeps that many of a word's first ones."""


def hash64(values: pa.Array[Any]) -> KeyHashes:
    """One number per key, the same for equal keys. `values` is a `large_binary` array without nulls."""
    if not len(values):
        return np.zeros(0, np.uint64)
    ends, data = keys.parts(values)
    start, length = ends[:-1], np.diff(ends)
    raw = np.append(data, np.zeros(8, np.uint8))
    words = np.ndarray((len(raw) - 7,), "<u8", raw.data, strides=(1,))  # those that begin at each byte
    found = _SEED ^ (length.astype(np.uint64) * _FACTOR)
    count = np.minimum((length + 7) >> 3, _WORDS)
    for number in range(int(count.max())):
        rows = np.flatnonzero(count > number)
        size = length[rows]
        at = np.full(len(rows), 8 * number)
        if number >= _WORDS // 2:
            at = np.where(size > 8 * _WORDS, size - 8 * (_WORDS - number), at)
        word = words[start[rows] + at] & _MASKS[np.minimum(size - at, 8)]
        mixed = (found[rows] ^ word) * _FACTOR
        found[rows] = mixed ^ (mixed >> np.uint64(32))
    for shift, factor in _LAST:
        found = (found ^ (found >> np.uint64(shift))) * factor
    return found ^ (found >> np.uint64(33))
