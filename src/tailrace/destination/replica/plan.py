"""How a table's columns in a replica follow those of its upstream: a pure plan.

Added columns are added and renamed ones renamed in place; dropped ones stay, null in rows written from then on, until
another column takes their name. The table is rebuilt, in the transaction of the batch that brings the change, for a
column whose values are kept in another form from now on, for one that takes a dropped column's name, and for another
key. A change of a type that could lose a value stops the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tailrace.destination.evolution import column_keys, match_columns, require_same_kind
from tailrace.destination.replica.sql_name import quote
from tailrace.model.schema import Column, TableSchema


@dataclass(frozen=True)
class ReplicaPlan:
    """The way from some columns to others.

    kept       the upstream's columns afterwards, dropped ones included
    sources    for each of them that was there before, its name before and the SQL for its values
    initial    what rows hold in the others, where that is not null
    rebuilt    whether renaming and adding columns is not enough
    """

    kept: TableSchema
    sources: Mapping[str, tuple[str, str]]
    initial: Mapping[str, pa.Scalar[Any]]
    rebuilt: bool

    @property
    def renamed(self) -> dict[str, str]:
        """For columns that still exist, the old name to the new one."""
        return {old: new for new, (old, _) in self.sources.items()}

    @property
    def added(self) -> Sequence[Column]:
        return [column for column in self.kept.columns if column.name not in self.sources]

    def rename_steps(self) -> list[tuple[str, str]]:
        """The columns to rename, one after another.

        They go through temporary names that no column has: two columns may have swapped names.
        """
        moves = [(old, f"_tailrace {at}", new) for at, (old, new) in enumerate(self.renamed.items()) if old != new]
        return [(old, between) for old, between, _ in moves] + [(between, new) for _, between, new in moves]

    def changes(self, now: TableSchema) -> bool:
        return self.rebuilt or column_keys(self.kept) != column_keys(now)


@dataclass(frozen=True)
class ColumnRules:
    """How one kind of database keeps columns.

    place        what an error calls it: `the file`
    kept_type    the type that a column is kept as; raises TypeError for one that has no form there
    conversion   the SQL that makes values of one kept column those of another, `{}` being the column
    fold         a name as the database compares names
    """

    place: str
    kept_type: Callable[[pa.DataType], pa.DataType]
    conversion: Callable[[Column, Column], str]
    fold: Callable[[str], str]

    def as_kept(self, table: TableSchema) -> TableSchema:
        """The table with the types its columns have there. Raises TypeError for one that has none."""
        columns = tuple(replace(column, type=self.kept_type(column.type), initial=None) for column in table.columns)
        return replace(table, columns=columns)

    def plan(self, now: TableSchema, table: TableSchema) -> ReplicaPlan:
        """From the columns a table has there to those of a version; SchemaChangedError where that is impossible."""
        wanted = self.as_kept(table)
        require_same_kind(now, wanted)
        places: dict[int, Column] = {}
        sources: dict[str, tuple[str, str]] = {}
        added: list[Column] = []
        rebuilt = False
        matches = match_columns(column_keys(now), column_keys(wanted), table=str(table.table), place=self.place)
        for column, match in zip(wanted.columns, matches, strict=True):
            if match.at is None:
                added.append(column)
                continue
            old = now.columns[match.at]
            places[match.at] = replace(column, type=match.type)
            conversion = self.conversion(old, places[match.at])
            rebuilt = rebuilt or conversion != "{}"
            sources[column.name] = (old.name, conversion.format(quote(old.name)))
        taken = {self.fold(column.name) for column in wanted.columns}
        kept: list[Column] = []
        for at, old in enumerate(now.columns):
            if at in places:
                kept.append(places[at])
            elif self.fold(old.name) in taken:
                rebuilt = True
            else:
                kept.append(old)
                sources[old.name] = (old.name, quote(old.name))
        key = {sources[column][0] for column in wanted.key if column in sources}
        rebuilt = rebuilt or key != set(now.key) or len(key) != len(wanted.key)
        initial = {
            column.name: column.initial
            for column in table.columns
            if column.name not in sources and column.initial is not None
        }
        return ReplicaPlan(replace(wanted, columns=(*kept, *added)), sources, initial, rebuilt)
