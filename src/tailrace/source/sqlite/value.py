"""Turns columns of Python values, as SQLite's drivers return them, into the cells that records decode to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.capture.record import SURROGATE, Value
from tailrace.capture.record_decode import CellKind, RecordCells

_KINDS: dict[type, CellKind] = {
    type(None): CellKind.NULL,
    int: CellKind.INTEGER,
    float: CellKind.REAL,
    str: CellKind.TEXT,
    bytes: CellKind.BLOB,
}


def cells_of(values: Sequence[Value]) -> RecordCells:
    """One column as cells. No loop over the rows unless they hold values of several storage classes."""
    kinds = np.fromiter(map(_KINDS.__getitem__, map(type, values)), np.uint8, len(values))
    held = np.bincount(kinds, minlength=len(CellKind))
    integers = reals = octets = None
    if held[CellKind.INTEGER]:
        integers = np.asarray(_dense(values, kinds, CellKind.INTEGER, held, 0), np.int64)
    if held[CellKind.REAL]:
        reals = np.asarray(_dense(values, kinds, CellKind.REAL, held, 0.0), np.float64)
    if held[CellKind.TEXT] or held[CellKind.BLOB]:
        octets = _octets(values, kinds, held)
    return RecordCells(kinds, integers, reals, octets)


def _dense(values: Sequence[Value], kinds: Any, kind: CellKind, held: Any, other: Value) -> Sequence[Value]:
    """The values, with `other` in place of values of another kind."""
    if held[kind] == len(values):
        return values
    return [value if each == kind else other for value, each in zip(values, kinds.tolist(), strict=True)]


def _octets(values: Sequence[Value], kinds: Any, held: Any) -> pa.Array[Any]:
    if held[CellKind.NULL] + held[CellKind.TEXT] == len(values):
        try:
            texts = pa.array(values, pa.string())
        except UnicodeEncodeError:
            texts = None  # bytes that are not UTF-8, as surrogates
        if texts is not None:
            return texts.view(pa.binary()).fill_null(b"")
    elif held[CellKind.NULL] + held[CellKind.BLOB] == len(values):
        return pa.array(values, pa.binary()).fill_null(b"")
    return pa.array([_raw(value) for value in values], pa.binary())


def _raw(value: Value) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", SURROGATE)
    return value if isinstance(value, bytes) else b""
