"""A destination in the memory of this process, written as anyone would write one: with `plan_columns` and `parts`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from tailrace.destination import Destination, TableBatch, Written, plan_columns
from tailrace.destination.evolution import ColumnPlan
from tailrace.model.schema import TableSchema
from tailrace.system.failpoint import reach

Row = dict[str, Any]


@dataclass
class MemoryTable:
    """One table: its columns as they are kept, its rows (of a table without a key: its changes, in order)."""

    schema: TableSchema
    columns: pa.Schema
    rows: list[Row] = field(default_factory=list)
    last: dict[str, str] = field(default_factory=dict)


KEPT: dict[str, dict[str, MemoryTable]] = {}
"""What each destination holds, by its place: the destination itself is configuration, and is pickled."""


class MemoryDestination(Destination):
    """Tables in `KEPT`. A batch becomes visible with one assignment, as with the commit of a database."""

    type: Literal["memory"] = "memory"
    place: str

    def write_changes(self, batch: TableBatch) -> Written:
        tables, name = KEPT[self.place], str(batch.table.table)
        before = tables.get(name)
        if before is not None and batch.is_repeat(before.last.get(batch.pipeline)):
            return Written(repeated=True)
        # The rows of a whole copy replace the table with its columns, whatever they were.
        old = None if batch.replaces else before
        plan = plan_columns(old.schema if old is not None else None, batch.table)
        after = MemoryTable(plan.table, plan.schema, _moved(old, plan), dict(before.last) if before else {})
        written = Written()
        for part in batch.parts(lambda keys: _looked_up(after, keys)):
            if part.clear:
                after.rows = []
            if after.schema.key:
                gone = set(_keys(part.keys.to_pylist(), after.schema))
                after.rows = [row for row in after.rows if _key(row, after.schema) not in gone]
            after.rows += _cast(part.upserts, after.columns).to_pylist()
            written += part.written
        if written or batch.replaces or plan.changes:
            after.last[batch.pipeline] = batch.mark
            reach("memory.before_commit")
            tables[name] = after
            reach("memory.committed")
        return written


def _moved(old: MemoryTable | None, plan: ColumnPlan) -> list[Row]:
    """The rows as those of the new columns."""
    if old is None or not plan.changes:
        return list(old.rows) if old is not None else []
    arrays: list[Any] = []
    for new in plan.schema:
        was = plan.sources[new.name]
        if was is None:
            arrays.append(pa.array(plan.initial.column(new.name).to_pylist() * len(old.rows), new.type))
        else:
            arrays.append(pa.array([row[was] for row in old.rows], old.columns.field(was).type).cast(new.type))
    names = plan.schema.names
    return [dict(zip(names, values, strict=True)) for values in zip(*(a.to_pylist() for a in arrays), strict=True)]


def _looked_up(table: MemoryTable, keys: pa.Table) -> pa.Table:
    wanted = set(_keys(keys.to_pylist(), table.schema))
    return pa.Table.from_pylist([row for row in table.rows if _key(row, table.schema) in wanted], table.columns)


def _keys(rows: Iterable[Row], schema: TableSchema) -> Iterator[tuple[Any, ...]]:
    return (_key(row, schema) for row in rows)


def _key(row: Row, schema: TableSchema) -> tuple[Any, ...]:
    return tuple(row[name] for name in schema.key)


def _cast(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """The rows in the types that the table has, which may be wider than the version's."""
    return pa.table([rows.column(kept.name).cast(kept.type) for kept in schema], names=schema.names)
