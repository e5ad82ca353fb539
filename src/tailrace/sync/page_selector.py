"""The pages that a client selects: a set of numbers in the portable format of Roaring bitmaps.

Decoded here rather than by a library, because the bytes come from the network: nothing is read beyond their end, and no
more numbers are made than the database has pages.
"""

from __future__ import annotations

import struct

import numpy as np

from tailrace.sync.protobuf import MalformedMessageError

_WITH_RUNS, _WITHOUT_RUNS = 12347, 12346
_ARRAY_LIMIT = 4096
_OFFSETS_FROM = 4
_BITMAP_BYTES = 8192


def decode_selector(selector: bytes, pages: int) -> frozenset[int]:
    """The selected page numbers below `pages`. Raises MalformedMessageError for bytes that are not such a set."""
    try:
        return frozenset(_decode(selector, pages))
    except (struct.error, IndexError, ValueError):
        raise MalformedMessageError("the page selector is not a Roaring bitmap") from None


def _decode(selector: bytes, pages: int) -> set[int]:
    (cookie,) = struct.unpack_from("<I", selector)
    at, runs = 4, b""
    if cookie & 0xFFFF == _WITH_RUNS:
        count = (cookie >> 16) + 1
        runs = selector[at : at + (count + 7) // 8]
        at += (count + 7) // 8
        has_offsets = count >= _OFFSETS_FROM
    elif cookie == _WITHOUT_RUNS:
        (count,) = struct.unpack_from("<I", selector, at)
        at += 4
        has_offsets = True
    else:
        raise ValueError("unknown cookie")
    heads = np.frombuffer(selector, "<u2", 2 * count, at).reshape(count, 2).tolist() if count else []
    at += 4 * count + (4 * count if has_offsets else 0)
    found: set[int] = set()
    for place, (key, cardinality) in enumerate(heads):
        if runs and runs[place // 8] >> (place % 8) & 1:
            (number,) = struct.unpack_from("<H", selector, at)
            pairs = np.frombuffer(selector, "<u2", 2 * number, at + 2).reshape(number, 2).tolist()
            values = [value for start, more in pairs for value in range(start, min(start + more, 0xFFFF) + 1)]
            at += 2 + 4 * number
        elif cardinality + 1 > _ARRAY_LIMIT:
            bits = np.frombuffer(selector, np.uint8, _BITMAP_BYTES, at)
            values = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            at += _BITMAP_BYTES
        else:
            values = np.frombuffer(selector, "<u2", cardinality + 1, at).tolist()
            at += 2 * (cardinality + 1)
        base = key << 16
        if base < pages:
            found.update(base + value for value in values if base + value < pages)
    return found
