"""Rows of a binary COPY as Arrow, by `row_reader.c`: a third of the processor's time that ADBC takes.

The compiled part comes with a wheel of the platform, or was built by a compiler at installation. Without it, and with a
psycopg that is not its binary build, `is_available` is false and ADBC reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import pq

from tailrace.errors import TailraceError
from tailrace.model.schema import Column
from tailrace.source.postgres.copy_query import Reading, reading_of

LIBRARY: Final = Path(__file__).with_name("librow_reader.so")
BATCH_ROWS = 131_072
BATCH_BYTES = 16 * 1024 * 1024
STEP_MILLISECONDS = 100

_KINDS: Final = {
    Reading.BOOLEAN: 0,
    Reading.INT16: 1,
    Reading.INT32: 2,
    Reading.INT64: 3,
    Reading.OID: 4,
    Reading.DATE: 5,
    Reading.TIMESTAMP: 6,
    Reading.BYTES: 7,
    Reading.JSONB: 8,
    Reading.NUMERIC: 9,
    Reading.UUID: 10,
}
"""The numbers of `enum kind` in `row_reader.c`."""
_BATCH, _END, _SILENT, _BROKEN, _MALFORMED, _NO_MEMORY = range(6)


class _Libpq(ctypes.Structure):
    _fields_ = (
        ("get_copy_data", ctypes.c_void_p),
        ("consume_input", ctypes.c_void_p),
        ("free_memory", ctypes.c_void_p),
    )


class _Compiled:
    """The compiled part, and the libpq that psycopg has loaded."""

    def __init__(self, library: ctypes.CDLL, libpq: ctypes.CDLL) -> None:
        self.new = library.row_reader_new
        self.new.restype = ctypes.c_void_p
        self.new.argtypes = [
            _Libpq, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self.fill = library.row_reader_fill
        self.fill.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32]
        self.take = library.row_reader_take
        self.take.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.rows = library.row_reader_rows
        self.rows.restype = ctypes.c_int64
        self.rows.argtypes = [ctypes.c_void_p]
        self.nans = library.row_reader_nans
        self.nans.restype = ctypes.c_int64
        self.nans.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)]
        self.free = library.row_reader_free
        self.free.restype = None
        self.free.argtypes = [ctypes.c_void_p]
        functions = (libpq.PQgetCopyData, libpq.PQconsumeInput, libpq.PQfreemem)
        self.libpq = _Libpq(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))


@cache
def _compiled() -> _Compiled | None:
    """None where there is no compiled part for this machine, or no libpq that psycopg shares."""
    libpq = _libpq_of_psycopg()
    if libpq is None or not LIBRARY.exists():
        return None
    try:
        return _Compiled(ctypes.CDLL(str(LIBRARY)), ctypes.CDLL(str(libpq)))
    except (OSError, AttributeError):
        return None  # built for another machine


def _libpq_of_psycopg() -> Path | None:
    if pq.__impl__ != "binary":
        return None
    import psycopg_binary

    package = Path(psycopg_binary.__file__).parent
    found = [*package.parent.glob("psycopg_binary.libs/libpq-*.so*"), *package.glob(".dylibs/libpq*.dylib")]
    return found[0] if len(found) == 1 else None


def is_available() -> bool:
    return _compiled() is not None


def read_rows(
    connection: psycopg.Connection[Any], columns: Sequence[Column], check: Callable[[], None]
) -> Iterator[pa.RecordBatch]:
    """The batches of a COPY that has begun on the connection, with the types of `copy_query.reading_of`.

    `check` is called when nothing came for a while, and may raise. A decimal column with a NaN comes as text.
    """
    compiled = _compiled()
    assert compiled is not None
    readings = [reading_of(column) for column in columns]
    kinds = np.array([_KINDS[reading] for reading in readings], np.int32)
    scales = np.array([column.type.scale if pa.types.is_decimal(column.type) else 0 for column in columns], np.int32)
    pgconn: Any = connection.pgconn  # its pointer is not in the types
    reader = compiled.new(
        compiled.libpq, pgconn.pgconn_ptr, pgconn.socket, len(columns), kinds.ctypes.data, scales.ctypes.data
    )
    if not reader:
        raise MemoryError
    try:
        outcome = _BATCH
        while outcome != _END:
            outcome = compiled.fill(reader, BATCH_ROWS, BATCH_BYTES, STEP_MILLISECONDS)
            if outcome == _SILENT:
                check()
                continue
            _raise_for(outcome, pgconn)
            if compiled.rows(reader):
                yield _take(compiled, reader, pgconn, columns, readings)
    finally:
        compiled.free(reader)


def _raise_for(outcome: int, pgconn: pq.abc.PGconn) -> None:
    if outcome == _NO_MEMORY:
        raise MemoryError
    if outcome == _MALFORMED:
        raise TailraceError("the server sent rows in another form than it was asked for")
    if outcome == _BROKEN:
        raise psycopg.OperationalError(pgconn.get_error_message())


def _take(
    compiled: _Compiled, reader: int, pgconn: pq.abc.PGconn, columns: Sequence[Column], readings: Sequence[Reading]
) -> pa.RecordBatch:
    not_numbers = {
        index: bits
        for index, reading in enumerate(readings)
        if reading is Reading.NUMERIC and (bits := _nans(compiled, reader, index)) is not None
    }
    # A struct ArrowArray has five numbers, four pointers and one more; it is moved out of here at once.
    memory = (ctypes.c_int64 * 10)()
    _raise_for(compiled.take(reader, ctypes.addressof(memory)), pgconn)
    schema = pa.schema(
        [(column.name, reading.arrow(column.type)) for column, reading in zip(columns, readings, strict=True)]
    )
    batch = pa.RecordBatch._import_from_c(ctypes.addressof(memory), schema)
    for index, bits in not_numbers.items():
        field = pa.field(columns[index].name, pa.string())
        batch = batch.set_column(index, field, _as_text(batch.column(index), bits))
    return batch


def _nans(compiled: _Compiled, reader: int, index: int) -> np.ndarray[Any, Any] | None:
    """Which values of a decimal column are NaN; None when no one is."""
    at = ctypes.c_void_p()
    if not compiled.nans(reader, index, ctypes.byref(at)):
        return None
    rows = compiled.rows(reader)
    found = np.frombuffer(ctypes.string_at(at.value or 0, (rows + 7) // 8), np.uint8)
    return np.unpackbits(found, count=rows, bitorder="little").astype(bool)


def _as_text(values: pa.Array[Any], is_nan: np.ndarray[Any, Any]) -> pa.Array[Any]:
    texts = [None if value is None else format(value, "f") for value in values.to_pylist()]
    return pa.array(["NaN" if nan else text for text, nan in zip(texts, is_nan, strict=True)], pa.string())
