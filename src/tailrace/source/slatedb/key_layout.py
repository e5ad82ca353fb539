"""Keys as columns: whole, or made of fields of a fixed width or between separators.

Every layout maps different keys to different values; a key that does not fit its layout raises MisfitError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

INTEGERS: dict[str, pa.DataType] = {
    **{f"int{bits}": getattr(pa, f"int{bits}")() for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": getattr(pa, f"uint{bits}")() for bits in (8, 16, 32, 64)},
}
TEXTS: dict[str, pa.DataType] = {"utf8": pa.string(), "raw": pa.binary()}
FIELDS = {**INTEGERS, **TEXTS}


_END = 2**31 - 1


class MisfitError(Exception):
    """Row `index` of a chunk does not fit; `reason` names what was expected, never what was found."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


def require(good: pa.Array[Any], reason: str) -> None:
    """Raise MisfitError for the first row that is not valid."""
    bad = np.flatnonzero(~good.fill_null(False).to_numpy(zero_copy_only=False))
    if len(bad):
        raise MisfitError(int(bad[0]), reason)


def as_text(values: pa.Array[Any], what: str) -> pa.Array[Any]:
    """Bytes as UTF-8 text."""
    try:
        return values.cast(pa.string())
    except pa.ArrowInvalid:
        for index, value in enumerate(values.to_pylist()):
            try:
                if value is not None:
                    value.decode()
            except UnicodeDecodeError:
                raise MisfitError(index, f"{what} is not UTF-8 text") from None
        raise


def fixed_width(values: pa.Array[Any], kind: pa.DataType, order: str = ">") -> pa.Array[Any]:
    """Numbers of a fixed width, big-endian unless `order` is given; every value has that width."""
    dtype = np.dtype(kind.to_pandas_dtype()).newbyteorder(order)
    dense = pc.fill_null(values, bytes(dtype.itemsize)).cast(pa.binary(dtype.itemsize))
    numbers = np.frombuffer(dense.buffers()[1], dtype, len(dense), dense.offset * dtype.itemsize)
    native = numbers.astype(dtype.newbyteorder("="))
    return pa.array(native, kind, mask=values.is_null().to_numpy(zero_copy_only=False))


@dataclass(frozen=True)
class KeyLayout:
    """What the key holds after its prefix: named fields, in order. Without a separator integers are big-endian and
    of a fixed width, and only the last field may be of any length; with one, they are decimal text."""

    prefix: bytes = b""
    fields: Mapping[str, str] = field(default_factory=lambda: {"key": "raw"})
    separator: bytes | None = None

    @property
    def types(self) -> dict[str, pa.DataType]:
        return {name: FIELDS[kind] for name, kind in self.fields.items()}

    def problem(self) -> str | None:
        """Why this layout cannot be read; None when it can."""
        kinds = list(self.fields.values())
        if not kinds:
            return "names no field"
        if unknown := [kind for kind in kinds if kind not in FIELDS]:
            return f"has a field of type {unknown[0]}; it can be {', '.join(FIELDS)}"
        if self.separator is None and any(kind in TEXTS for kind in kinds[:-1]):
            return "has a field of any length before the last; give a separator"
        return None

    def decode(self, keys: pa.Array[Any]) -> list[pa.Array[Any]]:
        """The columns of keys that begin with the prefix. Raises MisfitError for the first that does not fit."""
        rest = _cut(keys, len(self.prefix)) if self.prefix else keys
        pieces = self._fixed(rest) if self.separator is None else self._separated(rest, self.separator)
        return [self._read(piece, name, kind) for piece, (name, kind) in zip(pieces, self.fields.items(), strict=True)]

    def _fixed(self, rest: pa.Array[Any]) -> list[pa.Array[Any]]:
        widths = [INTEGERS[kind].bit_width // 8 if kind in INTEGERS else None for kind in self.fields.values()]
        total = sum(width or 0 for width in widths)
        lengths = pc.binary_length(rest)
        fits = pc.equal(lengths, total) if None not in widths else pc.greater_equal(lengths, total)
        require(fits, f"the key does not have the {total} bytes of its fields")
        if len(widths) == 1:
            return [rest]
        starts = np.cumsum([0, *(width or 0 for width in widths)])
        return [
            _cut(rest, int(start), int(start) + width if width is not None else _END)
            for start, width in zip(starts, widths, strict=False)
        ]

    def _separated(self, rest: pa.Array[Any], separator: bytes) -> list[pa.Array[Any]]:
        count = len(self.fields)
        parts = pc.split_pattern(rest, separator, max_splits=count - 1)
        require(pc.equal(pc.list_value_length(parts), count), f"the key does not have {count} fields")
        return [pc.list_element(parts, index) for index in range(count)]

    def _read(self, piece: pa.Array[Any], name: str, kind: str) -> pa.Array[Any]:
        if kind == "raw":
            return piece
        if kind == "utf8":
            return as_text(piece, f"key field {name}")
        if self.separator is None:
            return fixed_width(piece, INTEGERS[kind])
        text = as_text(piece, f"key field {name}")
        reason = f"key field {name} is not a plain {kind}"
        require(pc.match_substring_regex(text, "^(0|-?[1-9][0-9]{0,19})$"), reason)
        try:
            return text.cast(INTEGERS[kind])
        except pa.ArrowInvalid:
            low, high = _bounds(INTEGERS[kind])
            require(pa.array([low <= int(value) <= high for value in text.to_pylist()]), reason)
            raise

    def encode(self, columns: Mapping[str, list[Any]]) -> list[bytes]:
        """The keys of rows: the inverse of `decode`."""
        rows = zip(*(columns[name] for name in self.fields), strict=True)
        glue = self.separator or b""
        kinds = list(self.fields.values())
        return [
            self.prefix + glue.join(self._bytes(value, kind) for value, kind in zip(row, kinds, strict=True))
            for row in rows
        ]

    def _bytes(self, value: Any, kind: str) -> bytes:
        if kind == "raw":
            return bytes(value)
        if kind == "utf8":
            return str(value).encode()
        if self.separator is not None:
            return str(value).encode()
        return int(value).to_bytes(INTEGERS[kind].bit_width // 8, "big", signed=kind.startswith("int"))


def _bounds(kind: pa.DataType) -> tuple[int, int]:
    info = np.iinfo(kind.to_pandas_dtype())
    return int(info.min), int(info.max)


def _cut(keys: pa.Array[Any], start: int, stop: int = _END) -> pa.Array[Any]:
    # Always with an end: without one, pyarrow's own slicing fails on some arrays.
    return pc.binary_slice(keys, start, stop)
