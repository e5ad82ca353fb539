"""How a Delta table's columns follow those of its upstream.

Added columns are added, dropped ones stay (and are null in new rows) until another column takes their name. A column
that is renamed, widened, added with an initial value or under a dropped one's name needs every file written again,
in the same commit as the batch that brings it; any other change of a type stops the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tailrace.destination.delta.column import DeltaLayout, number_of, to_delta
from tailrace.destination.delta.projection import AS_IS, ColumnReading
from tailrace.destination.evolution import ColumnKey, ColumnMatch, match_columns
from tailrace.errors import TableError


@dataclass(frozen=True)
class Evolution:
    """The way from some columns to others.

    schema     the columns afterwards
    added      those that were not there before
    reading    how earlier files are read afterwards
    """

    schema: pa.Schema
    added: tuple[pa.Field[Any], ...] = ()
    reading: ColumnReading = AS_IS

    @property
    def changes(self) -> bool:
        return bool(self.added or self.reading.rewrite)


def evolve(now: pa.Schema, layout: DeltaLayout) -> Evolution:
    """From a Delta table's columns to those of a layout. Raises SchemaChangedError where that is impossible."""
    wanted = layout.schema
    added: list[pa.Field[Any]] = []
    kept: dict[int, pa.Field[Any]] = {}
    for field, match in zip(wanted, _matches(now, wanted, layout), strict=True):
        if match.at is None:
            added.append(field)
        else:
            metadata = field.metadata or now.field(match.at).metadata
            kept[match.at] = pa.field(field.name, match.type, metadata=metadata)
    names = _folded(wanted)
    fields = [kept.get(at, field) for at, field in enumerate(now) if at in kept or field.name.lower() not in names]
    schema = pa.schema([*fields, *added])
    return Evolution(schema, tuple(added), reading_of(now, schema, layout))


def reading_of(now: pa.Schema, schema: pa.Schema, layout: DeltaLayout) -> ColumnReading:
    """How files with the columns `now` are read as rows of a table that has the columns `schema`.

    Raises SchemaChangedError for a column whose type changed to one that is neither wider nor narrower.
    """
    name = str(layout.table.table)
    if now.equals(schema, check_metadata=True):
        return AS_IS
    renamed: dict[str, str] = {}
    initial: dict[str, pa.Scalar[Any]] = {}
    first, names = initial_values(layout), _folded(now)
    retyped = False
    for field, match in zip(schema, _matches(now, schema, layout), strict=True):
        if match.at is None:
            if field.name in first or field.name.lower() in names:
                initial[field.name] = first.get(field.name, pa.scalar(None, field.type))
            continue
        old = now.field(match.at)
        if old.name != field.name:
            renamed[field.name] = old.name
        retyped = retyped or old.type != field.type
    return ColumnReading(name, renamed, initial, bool(renamed or initial or retyped))


def _folded(schema: pa.Schema) -> set[str]:
    """The names as Delta compares them: without regard to case."""
    return {name.lower() for name in schema.names}


def require_partition(layout: DeltaLayout, partition_by: tuple[str, ...] | None = None) -> None:
    """Raises TableError when the table lacks a column of its `partition_by`, or is partitioned by other columns."""
    table = layout.table
    if missing := [name for name in layout.partition_by if name not in table.arrow.names]:
        raise TableError(
            f"the table is partitioned by {', '.join(missing)}, which the upstream dropped or renamed",
            table=str(table.table),
            fix=f"correct partition_by of {table.table}, then tailrace resync FILE {table.table}",
        )
    if partition_by is not None and partition_by != layout.partition_by:
        raise TableError(
            f"the table is partitioned by {list(partition_by)}, not {list(layout.partition_by)}",
            table=str(table.table),
            fix=f"set partition_by back, or tailrace resync FILE {table.table}",
        )


def initial_values(layout: DeltaLayout) -> Mapping[str, pa.Scalar[Any]]:
    """What rows older than a column hold in it, where that is not null, as Delta keeps it."""
    return {
        column.name: to_delta(
            pa.array([column.initial], column.initial.type),
            layout.schema.field(column.name).type,
            column.name,
            str(layout.table.table),
        )[0]
        for column in layout.table.columns
        if column.initial is not None and column.initial.is_valid
    }


def _matches(now: pa.Schema, wanted: pa.Schema, layout: DeltaLayout) -> list[ColumnMatch]:
    before, after = ([ColumnKey(f.name, number_of(f), f.type) for f in schema] for schema in (now, wanted))
    return match_columns(before, after, table=str(layout.table.table), place="the Delta table")
