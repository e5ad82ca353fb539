"""Arrow columns as Postgres keeps them.

Arrow type                                 kept as
integers, booleans, floats, text, bytes    the type that holds them; unsigned ones as the next larger
decimals                                   numeric(p, s)
dates, times, timestamps                   date, time, timestamp, timestamptz; nanoseconds as text
durations                                  bigint in their own unit
lists of these                             arrays
lists of anything nested, structs, maps    text, JSON

Text whose upstream type is one of Postgres's own is kept as that type: it is cast both ways, and prints the same.
Postgres has fewer dates and timestamps than Arrow: others are null, and exact text.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.replica.unheld_value import UnheldMask, each_chunk, out_of_range, unfit
from tailrace.errors import UnfitError
from tailrace.model.schema import Column, TableName
from tailrace.model.value_text import PLAIN, text_of

_PLAIN = {
    pa.bool_(): "boolean",
    pa.int16(): "smallint",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.string(): "text",
    pa.binary(): "bytea",
    pa.date32(): "date",
    pa.time64("us"): "time without time zone",
    pa.timestamp("us"): "timestamp without time zone",
    pa.timestamp("us", "UTC"): "timestamp with time zone",
}
_LARGER = {
    pa.int8(): pa.int16(),
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.null(): pa.string(),
    pa.date64(): pa.date32(),
}
NATIVE = frozenset(
    {"numeric", "uuid", "json", "jsonb", "interval", "time without time zone", "time with time zone"}
    | {"inet", "cidr", "macaddr", "macaddr8", "pg_lsn", "bit varying", "tsvector", "tsquery"}
    | {"point", "line", "lseg", "box", "path", "polygon", "circle"}
    | {"int4range", "int8range", "numrange", "daterange", "tsrange", "tstzrange"}
    | {"int4multirange", "int8multirange", "nummultirange", "datemultirange", "tsmultirange", "tstzmultirange"}
)
"""Types that print each value as the text that it was made from."""

_RANGES = {
    pa.date32(): (-2_440_588, 2_145_031_948),
    pa.timestamp("us"): (-210_866_803_200_000_000, 9_223_371_331_199_999_999),
    pa.timestamp("us", "UTC"): (-210_866_803_200_000_000, 9_223_371_331_199_999_999),
}
"""The days and microseconds that Postgres has, from 4714 BC on."""


def kept_type(kind: pa.DataType) -> pa.DataType:
    """The type a column is kept as: one for all that differ only in how Arrow lays them out.

    Raises TypeError for a type that Postgres has no form for.
    """
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        element = _scalar(kind.value_type)
        return pa.string() if element is None else pa.list_(element)
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return pa.string()
    if isinstance(kind, pa.BaseExtensionType):
        return kept_type(kind.storage_type)
    if (found := _scalar(kind)) is None:
        raise TypeError(f"Postgres has no type for {kind}")
    return found


def _scalar(kind: pa.DataType) -> pa.DataType | None:
    if kind in _PLAIN:
        return kind
    if kind in _LARGER:
        return _LARGER[kind]
    if pa.types.is_dictionary(kind):
        return _scalar(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_decimal(kind) and 0 <= kind.scale <= kind.precision:
        wide = kind.precision > 38
        return pa.decimal256(kind.precision, kind.scale) if wide else pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind):
        return pa.string() if kind.unit == "ns" else pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_time(kind):
        return pa.string() if kind == pa.time64("ns") else pa.time64("us")
    return pa.int64() if pa.types.is_duration(kind) else None


def declared(column: Column, *, native: bool) -> str:
    """The type that a kept column is declared with."""
    kind = column.type
    if native and (found := native_type(column)):
        return found
    return _declared(kind.value_type) + "[]" if pa.types.is_list(kind) else _declared(kind)


def native_type(column: Column) -> str | None:
    """The type of Postgres's own that a text column has upstream, as it is declared here; None for any other."""
    of_list = pa.types.is_list(column.type)
    if (column.type.value_type if of_list else column.type) != pa.string():
        return None
    upstream = re.sub(r"\([\d,-]*\)", "", column.upstream_type)
    if of_list != upstream.endswith("[]"):
        return None
    element = upstream.removesuffix("[]")
    # Of a fixed length it would pad or cut.
    element = "bit varying" if element == "bit" else element
    # Arrays of inet are cast to text with the cast of inet, which adds a mask.
    return element + "[]" * of_list if element in NATIVE and (element != "inet" or not of_list) else None


def _declared(kind: pa.DataType) -> str:
    return f"numeric({kind.precision}, {kind.scale})" if pa.types.is_decimal(kind) else _PLAIN[kind]


def printed(column: Column, *, native: bool) -> str:
    """The SQL for the values of a kept column as its kept type, `{0}` being the column."""
    if native and native_type(column) == "inet":
        # The cast to text adds a mask.
        return "CASE WHEN {0} IS NOT NULL THEN format('%s', {0}) END"
    kind = column.type.value_type if pa.types.is_list(column.type) else column.type
    if pa.types.is_decimal(kind) or (native and native_type(column) is not None):
        return "{0}::text[]" if pa.types.is_list(column.type) else "{0}::text"
    return "{0}"


def encode(values: Any, kind: pa.DataType, column: str, table: str) -> Any:
    """An array or chunked array as the kept type `kind`.

    Raises UnfitError, without the value, for one that the type cannot hold.
    """
    if pa.types.is_string(kind) and pa.types.is_nested(values.type):
        return each_chunk(values, _json)
    try:
        if values.type != kind:
            as_text = pa.types.is_string(kind) and pa.types.is_temporal(values.type)
            values = each_chunk(values, text_of) if as_text else pc.cast(values, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UnfitError(
            f"a value of column {column} does not fit {kind}, as which the database keeps it",
            table=table,
            fix=f"tailrace resync FILE {table}",
        ) from None
    if pa.types.is_list(kind):
        for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
            if unheld(chunk.flatten()) is not None:
                raise unfit(column, TableName.parse(table))
    return values


def unheld(values: Any) -> UnheldMask | None:
    """Where a column of a kept type holds a date or timestamp that Postgres does not have; None when nowhere."""
    return out_of_range(values, _RANGES)


def _json(values: pa.Array[Any]) -> pa.Array[Any]:
    return pc.if_else(values.is_valid(), PLAIN.value(values), None)
