"""Columns of Python values, as SQLite's drivers hand them out, made into the cells that records decode to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.sqlite.cell import Cells, Kind
from tailrace.sqlite.record import SURROGATE, Value

_KINDS: dict[type, Kind] = {
    type(None): Kind.NULL,
    int: Kind.INTEGER,
    float: Kind.REAL,
    str: Kind.TEXT,
    bytes: Kind.BLOB,
}


def cells_of(values: Sequence[Value]) -> Cells:
    """One column as cells. No loop over the rows unless they hold values of several storage classes."""
    kinds = np.fromiter(map(_KINDS.__getitem__, map(type, values)), np.uint8, len(values))
    held = np.bincount(kinds, minlength=len(Kind))
    integers = reals = octets = None
    if held[Kind.INTEGER]:
        integers = np.asarray(_dense(values, kinds, Kind.INTEGER, held, 0), np.int64)
    if held[Kind.REAL]:
        reals = np.asarray(_dense(values, kinds, Kind.REAL, held, 0.0), np.float64)
    if held[Kind.TEXT] or held[Kind.BLOB]:
        octets = _octets(values, kinds, held)
    return Cells(kinds, integers, reals, octets)


def _dense(values: Sequence[Value], kinds: Any, kind: Kind, held: Any, other: Value) -> Sequence[Value]:
    """The values with `other` wherever one is of another kind."""
    if held[kind] == len(values):
        return values
    return [value if each == kind else other for value, each in zip(values, kinds.tolist(), strict=True)]


def _octets(values: Sequence[Value], kinds: Any, held: Any) -> pa.Array[Any]:
    if held[Kind.NULL] + held[Kind.TEXT] == len(values):
        try:
            texts = pa.array(values, pa.string())
        except UnicodeEncodeError:
            texts = None  # bytes that are not UTF-8, as surrogates
        if texts is not None:
            return texts.view(pa.binary()).fill_null(b"")
    elif held[Kind.NULL] + held[Kind.BLOB] == len(values):
        return pa.array(values, pa.binary()).fill_null(b"")
    return pa.array([_raw(value) for value in values], pa.binary())


def _raw(value: Value) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", SURROGATE)
    return value if isinstance(value, bytes) else b""
