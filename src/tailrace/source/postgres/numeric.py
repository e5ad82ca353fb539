"""Columns of type `numeric` without a precision: text, unless the pipeline's file gives them a decimal type."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from tailrace.errors import Finding
from tailrace.model.schema import Column, TableSchema
from tailrace.option.table import DecimalOptions, TableOptions
from tailrace.source.postgres.pgoutput import text

UNBOUNDED = "numeric"
"""The declared type of such a column."""


def is_unbounded(column: Column) -> bool:
    return column.upstream_type == UNBOUNDED


def parse(texts: pa.Array[Any], column: Column) -> text.Parsed:
    """Texts as the column's type. A number may be too long for a type that its column does not have upstream; of any
    other column it is a sign that the column is read as what it is not."""
    if is_unbounded(column) and pa.types.is_decimal128(column.type):
        return text.parse_decimals(texts, column.type)
    return text.parse(texts, column.type)


def with_decimals(table: TableSchema, default: DecimalOptions | None, tables: TableOptions) -> TableSchema:
    """The table with the decimal types that the file gives its columns, by name, or all columns by `default`."""
    chosen = tables.settings_of(str(table.table)).numeric or {}

    def typed(column: Column) -> Column:
        wanted = chosen.get(column.name, default)
        if wanted is None or not is_unbounded(column) or pa.types.is_decimal(column.type):
            return column
        type_ = pa.decimal128(wanted.precision, wanted.scale)
        initial = column.initial
        if initial is not None:
            found = text.parse_decimals(pa.array([initial.as_py()], pa.string()), type_).array[0]
            initial = found if found.is_valid else None
        return replace(column, type=type_, initial=initial)

    return replace(table, columns=tuple(typed(column) for column in table.columns))


def misplaced(found: list[TableSchema], tables: TableOptions) -> list[Finding]:
    """Settings of single tables that no column takes."""
    return [
        Finding(
            "warning",
            "numeric",
            f"{table.table} has no column {name} of type numeric without a precision",
            f"correct or remove it in `numeric` of tables.settings.{table.table}",
        )
        for table in found
        if (settings := tables.settings.get(str(table.table))) is not None
        for name in settings.numeric or {}
        if not any(column.name == name and is_unbounded(column) for column in table.columns)
    ]
