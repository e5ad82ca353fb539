"""Builds the copy's SELECT list, and converts its result to the same values that the log gives.

Plain types are read from a binary COPY as Arrow at full speed, a few more of them by the compiled reader than by ADBC.
Every other type is selected as the text of its output function, and parsed like the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from tailrace.errors import UnfitError
from tailrace.model import exact
from tailrace.model.schema import Column, TableSchema
from tailrace.source.postgres import numeric
from tailrace.source.postgres.pgoutput import instant, text
from tailrace.source.postgres.pgoutput.message import EPOCH_US
from tailrace.system.libpq import EXACT_TEXT

SESSION: Final[dict[str, str]] = {
    **EXACT_TEXT,
    # The log has every row: a policy that hides rows from the role must fail the query, not make the copy incomplete.
    "row_security": "off",
    # A copy takes as long as it takes, whatever the role's own limits. A lock is not waited for without end: the error
    # names what holds it, and is tried again. (Newer servers have more limits: see `later_settings`.)
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "20000",
}
"""Settings of every session whose text is parsed here, also the walsender's: its output depends on them."""


def session_for(server_encoding: str) -> dict[str, str]:
    """`SESSION` for sessions that read rows of a database with this `server_encoding`.

    A SQL_ASCII database may hold bytes that are not UTF-8. With a UTF-8 client the server fails the whole slot on them;
    unconverted, they stop only the table that has them.
    """
    return {**SESSION, "client_encoding": "SQL_ASCII"} if server_encoding == "SQL_ASCII" else SESSION


class Reading(Enum):
    """What a column's values look like in a binary COPY of `select_list`. Text of an output function is BYTES, too."""

    BOOLEAN = auto()
    INT16 = auto()
    INT32 = auto()
    INT64 = auto()
    OID = auto()
    DATE = auto()
    TIMESTAMP = auto()
    BYTES = auto()
    JSONB = auto()
    NUMERIC = auto()
    UUID = auto()

    def arrow(self, type_: pa.DataType) -> pa.DataType:
        """The Arrow type that a column of this type is read as."""
        return pa.string() if self in _AS_TEXT and not pa.types.is_binary(type_) else type_


_AS_TEXT: Final = frozenset({Reading.BYTES, Reading.JSONB, Reading.UUID})

# Declared types that every reader delivers in the right Arrow type. A modifier, as in character(3), does not matter.
_NATIVE: Final = {
    "boolean": Reading.BOOLEAN,
    "smallint": Reading.INT16,
    "integer": Reading.INT32,
    "bigint": Reading.INT64,
    "real": Reading.INT32,
    "double precision": Reading.INT64,
    "bytea": Reading.BYTES,
    "date": Reading.DATE,
    "timestamp without time zone": Reading.TIMESTAMP,
    "timestamp with time zone": Reading.TIMESTAMP,
    "text": Reading.BYTES,
    "character varying": Reading.BYTES,
    "character": Reading.BYTES,
    "bpchar": Reading.BYTES,
}
# And those that the compiled reader delivers.
_BINARY: Final = {"oid": Reading.OID, "uuid": Reading.UUID, "json": Reading.BYTES, "jsonb": Reading.JSONB}
# Built-in types whose cast to text gives the same as their output function. (Not inet, boolean, character and "char".)
# Only the owner of a type can make a cast for it, and these belong to the server.
_CAST: Final = frozenset(
    {"numeric", "uuid", "json", "jsonb", "interval", "time without time zone", "time with time zone", "money"}
)


def reading_of(column: Column) -> Reading:
    """How the compiled reader reads a column of `select_list(…, binary=True)`."""
    declared = _unmodified(column.upstream_type)
    if declared == "numeric" and pa.types.is_decimal128(column.type) and not numeric.is_unbounded(column):
        return Reading.NUMERIC
    return _NATIVE.get(declared) or _BINARY.get(declared) or Reading.BYTES


def select_list(
    table: TableSchema, names: Mapping[str, str | None] | None = None, *, binary: bool = False
) -> sql.Composed:
    """The expressions that select a table's columns, in order and under their names, for `Converter`.

    `names` maps each column to its current name, or to None when it was dropped: it is then selected as null. `binary`:
    for the compiled reader.
    """
    current = {column.name: column.name for column in table.columns} if names is None else names
    return sql.SQL(", ").join(
        sql.SQL("{} AS {}").format(_expression(column, current[column.name], binary), sql.Identifier(column.name))
        for column in table.columns
    )


def _expression(column: Column, current: str | None, binary: bool) -> sql.Composable:
    if current is None:
        return sql.SQL("NULL::text")
    name, declared = sql.Identifier(current), _unmodified(column.upstream_type)
    if declared in _NATIVE or (binary and (declared in _BINARY or reading_of(column) is Reading.NUMERIC)):
        return name
    return sql.SQL("{}::pg_catalog.text").format(name) if declared in _CAST else output_text(name)


def output_text(value: sql.Composable) -> sql.Composed:
    """The text of a value's output function, as pgoutput gives it, which no one but a superuser can define.

    A cast to text would call the function of anyone who owns the type and made a cast for it, with our rights.
    """
    # concat() turns null into an empty string. IS NOT NULL would be false for a composite value with a null in it.
    return sql.SQL("CASE WHEN {0} IS DISTINCT FROM NULL THEN pg_catalog.concat({0}) END").format(value)


def _unmodified(declared: str) -> str:
    """The declared type without its modifier, also for `timestamp(3) with time zone`."""
    before, opened, rest = declared.partition("(")
    return before + rest.partition(")")[2] if opened else declared


class Converter:
    """Turns copied batches of one table into its rows. Holds no state between batches."""

    def __init__(self, table: TableSchema) -> None:
        self._table = table

    def convert(self, batch: pa.RecordBatch) -> tuple[pa.StructArray, pa.Array[Any] | None]:
        """The rows of a batch that `select_list` selected, and the `exact` column where it is needed.

        Plain types are not copied in memory. Raises UnfitError as `pgoutput.decode` does.
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
    """Delivered values, native or text, as the column's type. Raises UnfitError if a value must not become null."""
    try:
        if array.type != column.type:
            parsed = numeric.parse(array, column)
        elif pa.types.is_temporal(column.type):
            parsed = _rescue(array)
        elif pa.types.is_string(column.type):
            parsed = text.parse(array, column.type)
        else:
            parsed = text.Parsed(array, None)
    except UnicodeDecodeError:
        raise UnfitError(
            f"column {column.name} holds text that is not UTF-8; tailrace does not alter values",
            fix=f"fix the values in column {column.name} upstream, or change its type to bytea",
            table=str(table.table),
        ) from None
    except ValueError:
        # Without the cause: it quotes the value.
        raise UnfitError(
            f"column {column.name} ({column.upstream_type}) holds text that cannot be read as {column.type}",
            fix=f"check the column's type upstream, then run tailrace resync FILE {table.table}",
            table=str(table.table),
        ) from None
    if parsed.unfit is not None and column.name in table.key:
        raise UnfitError(
            f"key column {column.name} holds a value that {column.type} cannot hold, such as infinity or NaN",
            fix=f"fix the value upstream, or change the type of {column.name} to text",
            table=str(table.table),
        )
    return parsed


# Earlier than any date or timestamp of Postgres (4714 BC). ADBC adds the difference between the epochs without an
# overflow check, so infinities and the last years before 294277 come out below it.
_EARLIEST_DAY: Final = -2_440_589
_EARLIEST_US: Final = _EARLIEST_DAY * instant.DAY_US


def _rescue(array: pa.Array[Any]) -> text.Parsed:
    """Native dates or timestamps; those that overflowed become null, with their text in `unfit`."""
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
    # -infinity is the lowest 32-bit day number, counted from 2000.
    return "-infinity" if count == -(2**31) + EPOCH_US // instant.DAY_US else "infinity"
