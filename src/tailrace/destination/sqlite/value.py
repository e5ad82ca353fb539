"""Arrow columns as values of SQLite.

Arrow type                          kept as
integers, booleans, durations       INTEGER; a duration in its own unit
unsigned 64 bit                     TEXT, as SQLite's integers end at 2**63 - 1
floats                              REAL; NaN is null here and is kept as text in `_tailrace_exact`
decimals                            TEXT with every digit, never in scientific notation
text                                TEXT
bytes                               BLOB
dates, times, timestamps            TEXT in ISO 8601, with as many digits as the type has; in UTC with a Z
lists, structs, maps                TEXT, JSON
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import UnfitError
from tailrace.model.value_text import Writer, quote, text_of

# Lists, structs and maps as JSON, a whole column at a time.
#
# Numbers are numbers, but decimals and what JSON has no number for (NaN, the infinities) are texts; bytes are hex
# digits; dates and times are as in a column of their own. A map is a list of pairs.


class _KeptWriter(Writer):
    nan = "NaN"
    infinity = "Infinity"

    def decimals(self, column: pa.Array[Any]) -> pa.Array[Any]:
        return quote(text_of(column))

    def octets(self, column: pa.Array[Any]) -> pa.Array[Any]:
        return quote(pa.array([None if value is None else value.hex() for value in column.to_pylist()], pa.string()))


_KEPT = _KeptWriter()


def json_text(values: pa.Array[Any]) -> pa.Array[Any]:
    """Each value as JSON, a null as `null`."""
    return _KEPT.value(values)


def kept_type(kind: pa.DataType) -> pa.DataType:
    """The type a column is kept as: one for all that differ only in how Arrow lays them out.

    Raises TypeError for a type that has no form in SQLite.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return kept_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return kept_type(kind.value_type)
    if pa.types.is_null(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_decimal(kind):
        wide = kind.precision > 38
        return pa.decimal256(kind.precision, kind.scale) if wide else pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit, "UTC" if kind.tz else None)
    if pa.types.is_date64(kind):
        return pa.date32()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kept_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, kept_type(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(kept_type(kind.key_type), kept_type(kind.item_type))
    plain = pa.types.is_primitive(kind) or pa.types.is_string(kind) or pa.types.is_binary(kind)
    if not plain or pa.types.is_interval(kind):
        raise TypeError(f"SQLite has no form for {kind}")
    return kind


def declared(kind: pa.DataType) -> str:
    """The type a column of this kept type is declared with; it decides how SQLite stores and compares values."""
    if kind == pa.uint64():
        return "TEXT"
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_duration(kind):
        return "INTEGER"
    if pa.types.is_floating(kind):
        return "REAL"
    return "BLOB" if pa.types.is_binary(kind) else "TEXT"


def encode(values: Any, kind: pa.DataType, column: str, table: str) -> list[Any]:
    """An array or chunked array as values that the driver binds to a column of the kept type `kind`.

    Raises UnfitError, without the value, for a value that the type cannot hold.
    """
    try:
        if values.type != kind:
            values = pc.cast(values, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UnfitError(
            f"a value of column {column} does not fit {kind}, as which the file keeps it",
            table=table,
            fix=f"tailrace resync FILE {table}",
        ) from None
    if isinstance(values, pa.ChunkedArray):
        values = pa.concat_arrays(values.chunks) if values.num_chunks else pa.nulls(0, kind)
    if pa.types.is_nested(kind):
        values = pc.if_else(values.is_valid(), json_text(values), None)
    elif pa.types.is_boolean(kind):
        values = values.cast(pa.int8())
    elif pa.types.is_duration(kind):
        values = values.cast(pa.int64())
    elif pa.types.is_temporal(kind) or pa.types.is_decimal(kind) or kind == pa.uint64():
        values = text_of(values)
    if not values.null_count and (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        # A third of the time that Arrow takes for it.
        plain: list[Any] = values.to_numpy().tolist()
        return plain
    listed: list[Any] = values.to_pylist()
    return listed


def nan_mask(values: Any) -> npt.NDArray[np.bool_] | None:
    """Where a column holds NaN, which SQLite has no value for; None when nowhere."""
    if not pa.types.is_floating(values.type):
        return None
    mask = pc.fill_null(pc.is_nan(values.cast(pa.float64())), False)
    if not pc.any(mask).as_py():
        return None
    return np.asarray(mask.to_pylist(), bool)
