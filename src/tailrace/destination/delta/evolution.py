"""How a Delta table's columns follow those of its upstream.

Added columns are added, dropped ones stay (and are null in new rows). A renamed or widened column needs every file
written anew, in the same commit as the batch that brings it; any other change of a type stops the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tailrace.destination.delta.layout import NUMBER, Layout
from tailrace.errors import SchemaChangedError


@dataclass(frozen=True)
class Evolution:
    """What to do to a table before or with the next commit.

    schema     the columns afterwards
    added      those that can be added at once
    renamed    new name → the name the files have; with `rewrite`, every file must be written anew
    """

    schema: pa.Schema
    added: tuple[pa.Field[Any], ...]
    renamed: Mapping[str, str]
    rewrite: bool


def evolve(now: pa.Schema, numbers: Mapping[str, str], layout: Layout) -> Evolution:
    """The way from a Delta table's columns to a layout. Raises SchemaChangedError where there is none."""
    wanted = layout.schema
    renamed: dict[str, str] = {}
    added: list[pa.Field[Any]] = []
    widened: dict[str, pa.DataType] = {}
    by_number = {number: name for name, number in numbers.items() if name not in wanted.names}
    for field in wanted:
        number = field.metadata[NUMBER].decode() if field.metadata and NUMBER in field.metadata else None
        if field.name in now.names:
            old = field.name
        elif number in by_number:
            old = renamed[field.name] = by_number[number]
        else:
            added.append(field)
            continue
        kind = now.field(old).type
        if kind == field.type:
            continue
        if is_wider(field.type, kind):
            widened[field.name] = field.type
        elif not is_wider(kind, field.type):
            raise SchemaChangedError(
                f"column {field.name} is {field.type} upstream and {kind} in the Delta table",
                table=str(layout.table.table),
                fix=f"tailrace resync {layout.table.table}",
            )
    back = {old: new for new, old in renamed.items()}
    fields: list[pa.Field[Any]] = []
    for field in now:
        name = back.get(field.name, field.name)
        fields.append(pa.field(name, widened.get(name, field.type), metadata=field.metadata))
    rewrite = bool(renamed or widened)
    return Evolution(pa.schema([*fields, *added]), tuple(added), renamed, rewrite)


def is_wider(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether every value of `narrow` is one of `wide`, so that old files can be read as the new type."""
    ints = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
    if narrow in ints:
        digits = [3, 5, 10, 19][ints.index(narrow)]
        if wide in ints:
            return ints.index(wide) > ints.index(narrow)
        if pa.types.is_decimal(wide):
            return bool(wide.precision - wide.scale >= digits)
        return bool(wide == pa.float64() and narrow != pa.int64())
    if narrow == pa.float32():
        return bool(wide == pa.float64())
    if pa.types.is_decimal(narrow) and pa.types.is_decimal(wide):
        return bool(
            wide.scale >= narrow.scale
            and wide.precision - wide.scale >= narrow.precision - narrow.scale
            and wide != narrow
        )
    return False
