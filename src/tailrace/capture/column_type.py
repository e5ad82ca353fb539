"""Maps declared SQLite column types to affinities and Arrow types, and decoded cells to Arrow columns.

SQLite allows any value in any column. A value that the column's Arrow type cannot hold is never altered: the column is
null there, and the value's exact text is returned separately, for a change's `exact`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.record_decode import CellKind, RecordCells

_EXACT_INTEGER = 2**53
_TEXTUAL_NUMERICS = ("DATE", "TIME")
_WHOLE_NUMERICS = ("BOOL",)


class Affinity(Enum):
    INTEGER = "INTEGER"
    REAL = "REAL"
    TEXT = "TEXT"
    BLOB = "BLOB"
    NUMERIC = "NUMERIC"


def affinity_of(declared: str) -> Affinity:
    """The affinity of a declared type, by SQLite's rules, applied in SQLite's order."""
    name = declared.upper()
    if "INT" in name:
        return Affinity.INTEGER
    if any(part in name for part in ("CHAR", "CLOB", "TEXT")):
        return Affinity.TEXT
    if "BLOB" in name or not name:
        return Affinity.BLOB
    if any(part in name for part in ("REAL", "FLOA", "DOUB")):
        return Affinity.REAL
    return Affinity.NUMERIC


def arrow_type(declared: str) -> pa.DataType:
    """The Arrow type for a column of this declared type."""
    match affinity_of(declared):
        case Affinity.INTEGER:
            return pa.int64()
        case Affinity.REAL:
            return pa.float64()
        case Affinity.TEXT:
            return pa.string()
        case Affinity.BLOB:
            # Most columns without a declared type hold text.
            return pa.binary() if declared else pa.string()
        case Affinity.NUMERIC:
            name = declared.upper()
            if any(part in name for part in _TEXTUAL_NUMERICS):
                return pa.string()
            return pa.int64() if any(part in name for part in _WHOLE_NUMERICS) else pa.float64()


class DecodedColumn(NamedTuple):
    """A typed column. `unfit` holds the exact text of values that the type cannot hold; None if all values fit.

    The array is null for those values. In `unfit`, blobs and text that is not UTF-8 have SQLite's notation: X'00FF'.
    """

    array: pa.Array[Any]
    unfit: pa.Array[Any] | None


def read_column(cells: RecordCells, type_: pa.DataType, initial: pa.Scalar[Any] | None = None) -> DecodedColumn:
    """The cells as `type_` (int64, float64, string or binary). Absent cells, of rows before ADD COLUMN, hold `initial`.

    Raises TypeError for any other type.
    """
    if pa.types.is_int64(type_):
        values, fits = _integers(cells)
    elif pa.types.is_float64(type_):
        values, fits = _reals(cells)
    elif pa.types.is_string(type_):
        values, fits = _texts(cells)
    elif pa.types.is_binary(type_):
        fits = cells.are(CellKind.BLOB)
        values = cells.octets if cells.octets is not None else pa.nulls(len(fits), type_)
    else:
        raise TypeError(f"SQLite columns are never stored as {type_}")
    array = values if fits.all() else pc.if_else(pa.array(fits), values, pa.scalar(None, type_))
    if initial is not None and (absent := cells.are(CellKind.ABSENT)).any():
        array = pc.if_else(pa.array(absent), initial.cast(type_), array)
    unfit = ~(fits | cells.are(CellKind.NULL) | cells.are(CellKind.ABSENT))
    return DecodedColumn(array, _exact_texts(cells, unfit) if unfit.any() else None)


_Mask = npt.NDArray[np.bool_]


def _integers(cells: RecordCells) -> tuple[pa.Array[Any], _Mask]:
    fits = cells.are(CellKind.INTEGER)
    return (pa.nulls(len(fits), pa.int64()) if cells.integers is None else pa.array(cells.integers)), fits


def _reals(cells: RecordCells) -> tuple[pa.Array[Any], _Mask]:
    fits = cells.are(CellKind.REAL)
    values = np.zeros(len(fits)) if cells.reals is None else cells.reals
    if cells.integers is not None:
        whole = cells.are(CellKind.INTEGER) & (np.abs(cells.integers) <= _EXACT_INTEGER) & (cells.integers != -(2**63))
        values = np.where(whole, cells.integers.astype(np.float64), values)
        fits = fits | whole
    return pa.array(values), fits


def _texts(cells: RecordCells) -> tuple[pa.Array[Any], _Mask]:
    fits = cells.are(CellKind.TEXT)
    if cells.octets is None:
        return pa.nulls(len(fits), pa.string()), fits
    octets = cells.octets if fits.all() else pc.if_else(pa.array(fits), cells.octets, pa.scalar(b"", pa.binary()))
    texts = octets.view(pa.string())
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        # Check each value only if the batch has text that is not UTF-8.
        fits = fits & np.array([_is_utf8(value) for value in octets.to_pylist()], bool)
        texts = pc.if_else(pa.array(fits), octets, pa.scalar(b"", pa.binary())).view(pa.string())
    return texts, fits


def _is_utf8(octets: bytes) -> bool:
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True


def _exact_texts(cells: RecordCells, unfit: _Mask) -> pa.Array[Any]:
    """The text of the values at `unfit`, null elsewhere. Such values are rare, so a loop is fast enough."""
    rows = np.flatnonzero(unfit)
    texts: list[str | None] = [None] * len(unfit)
    for row, value in zip(rows.tolist(), cells.take(rows).to_list(), strict=True):
        texts[row] = exact_text(value)
    return pa.array(texts, pa.string())


def exact_text(value: object) -> str:
    """A value as exact text: numbers in digits, text as it is, bytes as X'00FF'."""
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogateescape")
        return value if _is_utf8(raw) else f"X'{raw.hex().upper()}'"
    if isinstance(value, bytes):
        return f"X'{value.hex().upper()}'"
    return repr(value)
