"""Arrow columns as DuckDB keeps them.

Arrow type                               kept as
integers, booleans, floats, text, bytes  the type of the same width; half floats as FLOAT
decimals                                 DECIMAL, up to 38 digits
dates, times, timestamps                 DATE, TIME, TIMESTAMP, TIMESTAMP_NS, TIMESTAMP WITH TIME ZONE
nanoseconds of a time, or with a zone    VARCHAR, ISO 8601
durations                                BIGINT in their own unit
lists, structs, maps                     lists, STRUCT, MAP

DuckDB uses the ends of the range of dates and timestamps for its infinities: a value there is null, and exact text.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.replica.sql_name import quote
from tailrace.destination.replica.unheld_value import UnheldMask, each_chunk, out_of_range, unfit
from tailrace.errors import UnfitError
from tailrace.model.schema import Column, TableName
from tailrace.model.value_text import text_of

_PLAIN = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "UTINYINT",
    pa.uint16(): "USMALLINT",
    pa.uint32(): "UINTEGER",
    pa.uint64(): "UBIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.date32(): "DATE",
    pa.time64("us"): "TIME",
    pa.timestamp("us"): "TIMESTAMP",
    pa.timestamp("ns"): "TIMESTAMP_NS",
    pa.timestamp("us", "UTC"): "TIMESTAMP WITH TIME ZONE",
}
_FIRST_DAY = -2_147_483_646
_FIRST_MICROSECOND = -9_223_372_022_400_000_000
_RANGES = {
    pa.date32(): (_FIRST_DAY, 2**31 - 2),
    pa.timestamp("us"): (_FIRST_MICROSECOND, 2**63 - 2),
    pa.timestamp("us", "UTC"): (_FIRST_MICROSECOND, 2**63 - 2),
    pa.timestamp("ns"): (-(2**63) + 2, 2**63 - 2),
}
"""The values that DuckDB has, where those are not all of the Arrow type."""


def kept_type(kind: pa.DataType) -> pa.DataType:
    """The type a column is kept as: one for all that differ only in how Arrow lays them out.

    Raises TypeError for a type that DuckDB has none for.
    """
    if (pa.types.is_timestamp(kind) and kind.unit == "ns" and kind.tz) or kind == pa.time64("ns"):
        return pa.string()
    return _kept(kind)


def _kept(kind: pa.DataType) -> pa.DataType:
    if kind in _PLAIN:
        return kind
    if isinstance(kind, pa.BaseExtensionType):
        return _kept(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _kept(kind.value_type)
    if pa.types.is_null(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_decimal(kind) and kind.precision <= 38 and 0 <= kind.scale <= kind.precision:
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_time32(kind):
        return pa.time64("us")
    if pa.types.is_date64(kind):
        return pa.date32()
    if pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_kept(kind.value_type))
    if pa.types.is_struct(kind) and kind.num_fields:
        return pa.struct([pa.field(field.name, _kept(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_kept(kind.key_type), _kept(kind.item_type))
    raise TypeError(f"DuckDB has no type for {kind}")


def declared(kind: pa.DataType) -> str:
    """The type that a column of this kept type is declared with."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if pa.types.is_decimal(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    if pa.types.is_list(kind):
        return f"{declared(kind.value_type)}[]"
    if pa.types.is_map(kind):
        return f"MAP({declared(kind.key_type)}, {declared(kind.item_type)})"
    return f"STRUCT({', '.join(f'{quote(field.name)} {declared(field.type)}' for field in kind)})"


def conversion(old: Column, new: Column) -> str:
    """The SQL that makes values of one kept type those of a wider one, `{}` being the column."""
    return "{}" if old.type == new.type else f"CAST({{}} AS {declared(new.type)})"


def encode(values: Any, kind: pa.DataType, column: str, table: str) -> Any:
    """An array or chunked array as the kept type `kind`.

    Raises UnfitError, without the value, for one that the type cannot hold.
    """
    try:
        if values.type != kind:
            as_text = pa.types.is_string(kind) and pa.types.is_temporal(values.type)
            values = each_chunk(values, text_of) if as_text else pc.cast(values, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UnfitError(
            f"a value of column {column} does not fit {kind}, as which the file keeps it",
            table=table,
            fix=f"tailrace resync FILE {table}",
        ) from None
    if pa.types.is_nested(kind) and not all(map(_holds_all, values.chunks if _is_chunked(values) else [values])):
        raise unfit(column, TableName.parse(table))
    return values


def unheld(values: Any) -> UnheldMask | None:
    """Where a column of a kept type holds what DuckDB takes for infinity; None when nowhere."""
    return out_of_range(values, _RANGES)


def _holds_all(values: pa.Array[Any]) -> bool:
    """Whether DuckDB has every value in a list, struct or map."""
    if pa.types.is_list(values.type):
        return _holds_all(values.flatten())
    if pa.types.is_struct(values.type):
        return all(map(_holds_all, values.flatten()))
    if pa.types.is_map(values.type):
        return _holds_all(values.keys) and _holds_all(values.items)
    return unheld(values) is None


def _is_chunked(values: Any) -> bool:
    return isinstance(values, pa.ChunkedArray)
