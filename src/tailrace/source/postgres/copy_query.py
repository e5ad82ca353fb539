"""From a table's columns to the copy's SELECT list and back to the same values the log gives.

The binary COPY that ADBC reads brings plain types as Arrow at full speed. Every other type is asked for as the
text its output function gives, and read by the parser the log uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from tailrace.errors import UnfitError
from tailrace.model import exact
from tailrace.model.schema import Column, TableSchema
from tailrace.source.postgres.pgoutput import instant, text
from tailrace.source.postgres.pgoutput.message import EPOCH_US

SESSION: Final[dict[str, str]] = {
    "DateStyle": "ISO,MDY",
    "TimeZone": "UTC",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
    # Names of tables and functions (regclass, regproc) are printed in full only outside the search path.
    "search_path": "pg_catalog",
    "quote_all_identifiers": "off",
    # The log carries every row: a policy that hides some from the role fails the query instead of shortening the copy.
    "row_security": "off",
}
"""Settings of every session whose text is read here, the walsender's too: its output depends on them."""


def session_for(server_encoding: str) -> dict[str, str]:
    """`SESSION` for sessions that read rows of a database with this `server_encoding`.

    A SQL_ASCII database may hold bytes that are not UTF-8. Asked for UTF-8, its server fails the whole slot on them;
    left as they are, they stop the one table that has them.
    """
    return {**SESSION, "client_encoding": "SQL_ASCII"} if server_encoding == "SQL_ASCII" else SESSION


# Declared types that COPY delivers as they are wanted. A modifier, as in character(3), does not matter.
_NATIVE: Final = frozenset(
    {"boolean", "smallint", "integer", "bigint", "real", "double precision", "bytea", "date"}
    | {"timestamp without time zone", "timestamp with time zone", "text", "character varying", "character", "bpchar"}
)
# Declared types whose cast to text is their output function. (That of inet, boolean, character and "char" is not.)
_CAST: Final = frozenset(
    {"numeric", "uuid", "json", "jsonb", "interval", "time without time zone", "time with time zone", "money"}
)


def select_list(table: TableSchema, names: Mapping[str, str | None] | None = None) -> sql.Composed:
    """The expressions that ask for a table's columns, in order and under their names, for `Converter`.

    `names` has what the columns are called by now, None for one that was dropped: it is null.
    """
    called = {column.name: column.name for column in table.columns} if names is None else names
    return sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(_expression(column, called[column.name]), sql.Identifier(column.name))
        for column in table.columns
    )


def _expression(column: Column, called: str | None) -> sql.Composable:
    if called is None:
        return sql.SQL("NULL::text")
    name, declared, type_ = sql.Identifier(called), _unmodified(column.upstream_type), column.type
    if declared in _NATIVE:
        return name
    if declared in _CAST or pa.types.is_list(type_) or pa.types.is_decimal(type_):
        return sql.SQL("{}::text").format(name)
    if cast := _casts(type_):
        return sql.SQL("{}" + cast).format(name)
    # format() goes through the output function as pgoutput does, but makes an empty string of a null.
    return sql.SQL("CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.format('%s', {0}) END").format(name)


def _casts(type_: pa.DataType) -> str | None:
    """For domains and the like: the way to the type that COPY delivers as `type_`."""
    if pa.types.is_integer(type_):
        return f"::text::int{type_.bit_width // 8}"
    if pa.types.is_floating(type_):
        return f"::float{type_.bit_width // 8}"
    if pa.types.is_timestamp(type_):
        return "::timestamptz" if type_.tz else "::timestamp"
    if pa.types.is_boolean(type_):
        return "::bool"
    if pa.types.is_date(type_):
        return "::date"
    return "::bytea" if pa.types.is_binary(type_) else None


def _unmodified(declared: str) -> str:
    """`character varying(20)` is `character varying`, `timestamp(3) with time zone` is without its 3 too."""
    before, opened, rest = declared.partition("(")
    return before + rest.partition(")")[2] if opened else declared


class Converter:
    """Turns copied batches of one table into its rows. Holds no state between batches."""

    def __init__(self, table: TableSchema) -> None:
        self._table = table

    def convert(self, batch: pa.RecordBatch) -> tuple[pa.StructArray, pa.Array[Any] | None]:
        """The rows of a batch that `select_list` asked for, and the `exact` column where it is needed.

        Plain types are passed on without a copy. Raises UnfitError as `pgoutput.decode` does.
        """
        arrays: list[pa.Array[Any]] = []
        unfit: dict[str, pa.Array[Any]] = {}
        for column, array in zip(self._table.columns, batch.columns, strict=True):
            parsed = read_column(self._table, column, array)
            arrays.append(parsed.array)
            if parsed.unfit is not None:
                unfit[column.name] = parsed.unfit
        return self._table.rows(arrays, batch.num_rows), exact.combine(unfit)


def read_column(table: TableSchema, column: Column, array: pa.Array[Any]) -> text.Parsed:
    """Delivered values, native or text, as the column's type. Raises UnfitError for what may not be kept as null."""
    try:
        if array.type != column.type:
            parsed = text.parse(array, column.type)
        elif pa.types.is_temporal(column.type):
            parsed = _rescue(array)
        elif pa.types.is_string(column.type):
            parsed = text.parse(array, column.type)
        else:
            parsed = text.Parsed(array, None)
    except UnicodeDecodeError:
        raise UnfitError(
            f"column {column.name} holds text that is not UTF-8, which may not be altered",
            fix=f"mend the values in column {column.name} upstream, or change its type to bytea",
            table=str(table.table),
        ) from None
    except ValueError:
        # The cause quotes the value.
        raise UnfitError(
            f"column {column.name} ({column.upstream_type}) holds text that cannot be read as {column.type}",
            fix=f"run tailrace resync FILE {table.table} after looking at the column's type upstream",
            table=str(table.table),
        ) from None
    if parsed.unfit is not None and column.name in table.key:
        raise UnfitError(
            f"key column {column.name} holds a value that {column.type} cannot hold, such as infinity or NaN",
            fix=f"mend the value upstream, or change the type of {column.name} to text",
            table=str(table.table),
        )
    return parsed


# Earlier than any date or timestamp Postgres has (4714 BC). ADBC adds the distance between the epochs without
# looking for an overflow, so that infinities and the last years before 294277 come out below it.
_EARLIEST_DAY: Final = -2_440_589
_EARLIEST_US: Final = _EARLIEST_DAY * instant.DAY_US


def _rescue(array: pa.Array[Any]) -> text.Parsed:
    """Native dates or timestamps with those taken out that went around the end of their range."""
    is_date = pa.types.is_date32(array.type)
    counts = array.view(pa.int32() if is_date else pa.int64())
    lowest = pc.min(counts).as_py()
    if lowest is None or lowest >= (_EARLIEST_DAY if is_date else _EARLIEST_US):
        return text.Parsed(array, None)
    outside = pc.less(counts, _EARLIEST_DAY if is_date else _EARLIEST_US)
    distinct = pc.if_else(outside, counts, None).dictionary_encode()
    zone = "" if is_date or array.type.tz is None else "+00"
    texts = [
        _day_text(count) if is_date else instant.format_microsecond(_unwrap(count), zone)
        for count in distinct.dictionary.to_pylist()
    ]
    return text.Parsed(pc.if_else(outside, None, array), pa.array(texts, pa.string()).take(distinct.indices))


def _unwrap(count: int) -> int:
    with np.errstate(over="ignore"):
        return int(np.int64(count) - np.int64(EPOCH_US))


def _day_text(count: int) -> str:
    # The first day after the lowest 32-bit number, counted from 2000, is what remains of -infinity.
    return "-infinity" if count == -(2**31) + EPOCH_US // instant.DAY_US else "infinity"
