"""From the columns a table has at a destination to those of a version: a pure plan, and the one table of widenings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pyarrow as pa

from tailrace.destination.metadata import row_schema
from tailrace.errors import SchemaChangedError
from tailrace.model.collapse import origins
from tailrace.model.schema import TableSchema


class ColumnKey(NamedTuple):
    """What identifies a column: its number if both columns have one, so that a renamed column is recognized."""

    name: str
    number: int
    type: pa.DataType


class ColumnMatch(NamedTuple):
    """The existing column that a wanted column is (None: it is new), and the type it has from now on."""

    at: int | None
    type: pa.DataType


def match_columns(
    before: Sequence[ColumnKey], after: Sequence[ColumnKey], *, table: str, place: str
) -> list[ColumnMatch]:
    """Match each wanted column with an existing one. Raises SchemaChangedError where a value might be lost."""
    matches: list[ColumnMatch] = []
    found = origins([(key.name, key.number) for key in before], [(key.name, key.number) for key in after])
    for wanted, at in zip(after, found, strict=True):
        old = before[at].type if at is not None else wanted.type
        if old == wanted.type or is_wider(wanted.type, old):
            matches.append(ColumnMatch(at, wanted.type))
        elif is_wider(old, wanted.type):
            # It became narrower upstream and stays as it is here: every value fits.
            matches.append(ColumnMatch(at, old))
        else:
            raise SchemaChangedError(
                f"column {wanted.name} is {wanted.type} upstream and {old} in {place}",
                table=table,
                fix=f"tailrace resync FILE {table}",
            )
    return matches


def require_same_kind(before: TableSchema, after: TableSchema) -> None:
    """Raises SchemaChangedError when a key was added or dropped: the rows of a table without a key are its changes."""
    if bool(before.key) != bool(after.key):
        raise SchemaChangedError(
            "the table is kept as a log of changes, and now has a key"
            if after.key
            else "the table is kept by its key, and now has none",
            table=str(after.table),
            fix=f"tailrace resync FILE {after.table}",
        )


def column_keys(table: TableSchema) -> list[ColumnKey]:
    return [ColumnKey(column.name, column.number, column.type) for column in table.columns]


@dataclass(frozen=True)
class ColumnPlan:
    """How a destination that rebuilds its tables gets from the old columns to the new ones.

    table      the columns afterwards: those of the version, but none narrower than it was
    sources    for each column of `schema` the name it had before; None for a new one
    initial    one row: what earlier rows hold in new columns
    changes    whether there is anything to do
    """

    table: TableSchema
    sources: Mapping[str, str | None]
    initial: pa.Table
    changes: bool

    @property
    def schema(self) -> pa.Schema:
        return row_schema(self.table)


def plan_columns(before: TableSchema | None, after: TableSchema) -> ColumnPlan:
    """From the columns a table has (None: there is no table) to those of a version. Raises SchemaChangedError where
    there is no way."""
    if before is None:
        return ColumnPlan(after, {}, pa.table({}), True)
    require_same_kind(before, after)
    matches = match_columns(column_keys(before), column_keys(after), table=str(after.table), place="the destination")
    columns = [replace(column, type=match.type) for column, match in zip(after.columns, matches, strict=True)]
    table = replace(after, columns=tuple(columns))
    old = [None if match.at is None else before.columns[match.at].name for match in matches]
    sources = dict(zip(table.arrow.names, old, strict=True))
    initial: dict[str, pa.Array[Any]] = {"_tailrace_initial": pa.array([True])}
    for column, match in zip(columns, matches, strict=True):
        if match.at is None:
            value = column.initial.as_py() if column.initial is not None else None
            initial[column.name] = pa.array([value], column.type)
    own = [name for name in row_schema(table).names if name not in sources]
    changes = column_keys(before) != column_keys(table) or before.key != table.key
    return ColumnPlan(table, sources | {name: name for name in own}, pa.table(initial), changes)


def is_wider(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether every value of `narrow` is one of `wide`, and they are not the same."""
    if wide == narrow:
        return False
    if is_integer(narrow):
        low, high = integer_range(narrow)
        if is_integer(wide):
            return integer_range(wide)[0] <= low and high <= integer_range(wide)[1]
        if pa.types.is_decimal(wide):
            return bool(wide.scale >= 0 and wide.precision - wide.scale >= len(str(high)))
        return bool(wide == pa.float64() and high < 2**53)
    if pa.types.is_floating(narrow):
        return bool(pa.types.is_floating(wide) and wide.bit_width > narrow.bit_width)
    if pa.types.is_decimal(narrow) and pa.types.is_decimal(wide):
        return bool(0 <= narrow.scale <= wide.scale and wide.precision - wide.scale >= narrow.precision - narrow.scale)
    return False


def is_integer(kind: pa.DataType) -> bool:
    """Whether it is an integer that widens: not one of 64 bits without a sign, which few destinations have."""
    return bool(pa.types.is_integer(kind) and kind != pa.uint64())


def integer_range(kind: pa.DataType) -> tuple[int, int]:
    bits = kind.bit_width
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if pa.types.is_signed_integer(kind) else (0, 2**bits - 1)
