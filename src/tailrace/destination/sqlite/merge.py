"""Write a batch's rows and changes to its table, inside the batch's transaction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination import Refetch, Written
from tailrace.destination.metadata import truncate_values
from tailrace.destination.partial_row import left_out_columns, merged_exact, refetch_rows, split_lost
from tailrace.destination.sqlite.column import ColumnValues, as_texts
from tailrace.destination.sqlite.table import SqliteTarget
from tailrace.model.change import EXACT, Changes, Op
from tailrace.model.collapse import Collapsed, Marks, fit
from tailrace.model.schema import TableSchema

SLICE_ROWS = 50_000
"""How many rows are converted to Python values at a time."""

Old = dict[int, tuple[Any, ...]]
"""By row of a collapsed batch, the values it needs from the row it changes, in the order they are asked for."""


def append(target: SqliteTarget, chunks: Iterable[Changes], now: pa.TimestampScalar) -> int:
    """Write whole rows in order, copied rows or those of a log. Returns how many."""
    count = 0
    for chunk in chunks:
        fitted = fit(chunk, target.layout.table)
        for start in range(0, len(fitted), SLICE_ROWS):
            some = Changes(fitted.table, fitted.batch.slice(start, SLICE_ROWS))
            target.put(target.layout.rows_of(some, target.kept, now))
        count += len(fitted)
    return count


def merge(target: SqliteTarget, collapsed: Collapsed, now: pa.TimestampScalar, refetch: Refetch | None) -> Written:
    """Apply the last change of each key.

    Rows that lack values get those of the row they change, as it was before the batch; if there is none, those that the
    upstream has now. If the upstream lacks the row too, its delete will follow and the row is left out. Raises
    TableError when the upstream cannot be asked.
    """
    collapsed = _by_key(collapsed, target.kept)
    # Old values first: two rows may take each other's key.
    gaps = _Gaps.of(collapsed)
    wanted = np.ones(collapsed.rows.num_rows, bool)
    gaps.look_up(target, collapsed)
    gaps.fetch(target, collapsed, wanted, refetch)
    if collapsed.truncated:
        target.clear(_stamp(collapsed.truncate_marks, now) if target.layout.keeps_deleted else None)
    deletes = target.delete(collapsed.deletes) if collapsed.deletes.num_rows else 0
    for start in range(0, len(wanted), SLICE_ROWS):
        marks = _sliced(collapsed.marks, start)
        columns = [column.slice(start, SLICE_ROWS) for column in collapsed.rows.columns]
        rows = target.layout.rows(columns, marks, target.kept, now)
        gaps.fill(rows, start)
        some = wanted[start : start + SLICE_ROWS]
        target.put(rows, None if some.all() else some.tolist())
    upserts = int(wanted.sum())
    if target.layout.keeps_deleted:
        deletes = int((wanted & (collapsed.marks.op == Op.DELETE)).sum())
        upserts -= deletes
    return Written(collapsed.changes, upserts, deletes)


@dataclass
class _Gaps:
    """What the changes left out: which columns (`names`, at `places`) of which rows, and the values found for them."""

    places: list[int]
    names: list[str]
    mask: npt.NDArray[np.bool_]
    rows: npt.NDArray[np.int64]
    keys: pa.Table
    old: Old

    @classmethod
    def of(cls, collapsed: Collapsed) -> _Gaps:
        mask = collapsed.unchanged
        if mask is None:
            mask = np.zeros((0, len(collapsed.table.columns)), bool)
        names = left_out_columns(collapsed)
        places = [collapsed.table.arrow.get_field_index(name) for name in names]
        return cls(places, names, mask, collapsed.incomplete, collapsed.lookup, {})

    def look_up(self, target: SqliteTarget, collapsed: Collapsed) -> None:
        """Find values in the table as it is."""
        known = np.asarray(pc.is_valid(self.keys.column(0)).to_numpy(), bool)
        if collapsed.truncated or not known.any():
            return
        asked = [*self.names, *([EXACT] if EXACT in target.own else [])]
        self.old = target.find(self.rows[known].tolist(), self.keys.filter(pa.array(known)), asked)

    def fetch(
        self, target: SqliteTarget, collapsed: Collapsed, wanted: npt.NDArray[np.bool_], refetch: Refetch | None
    ) -> None:
        """Read from the upstream the values of rows that are not in the table; rows it lacks too are left out."""
        lost = np.array([row for row in self.rows.tolist() if row not in self.old], np.int64)
        lost, deleted = split_lost(collapsed, lost)
        wanted[deleted] = False
        if not len(lost):
            return
        fetched, at = refetch_rows(collapsed, lost, refetch)
        wanted[lost[at < 0]] = False
        found = fetched.take(pa.array(at[at >= 0]))
        values = target.encoded(found.select(self.names))
        if EXACT in found.column_names:
            values = [*values, found.column(EXACT).to_pylist()]
        self.old |= dict(zip(lost[at >= 0].tolist(), zip(*values, strict=True), strict=True))

    def fill(self, columns: ColumnValues, start: int) -> None:
        """Put the values found into the slice of rows that begins at `start`."""
        exact = columns[-1]
        low, high = np.searchsorted(self.rows, [start, start + SLICE_ROWS])
        for row in self.rows[low:high].tolist():
            if (values := self.old.get(row)) is None:
                continue
            kept = self.mask[row]
            for place, value in zip(self.places, values, strict=False):
                if kept[place]:
                    columns[place][row - start] = value
            if len(values) > len(self.places):
                names = [name for place, name in zip(self.places, self.names, strict=True) if kept[place]]
                exact[row - start] = merged_exact(exact[row - start], values[-1], names)


def _stamp(marks: Marks, now: pa.TimestampScalar) -> dict[str, Any]:
    """What the rows of a table that keeps its deleted rows hold after a truncate."""
    return {name: as_texts(pa.array([value], value.type))[0] for name, value in truncate_values(marks, now).items()}


def _by_key(collapsed: Collapsed, kept: TableSchema) -> Collapsed:
    """The rows in the table's order, so that neighbours are written together and each page only once."""
    rows, marks, unchanged = collapsed.rows, collapsed.marks, collapsed.unchanged
    key = {name: rows.column(name).cast(kept.column(name).type) for name in collapsed.table.key}
    # Arrow does not sort arrays; their rows are written as they come.
    sortable = [name for name, column in key.items() if not pa.types.is_nested(column.type)]
    order = np.arange(rows.num_rows)
    if sortable:
        order = pc.sort_indices(pa.table(key), [(name, "ascending") for name in sortable]).to_numpy()
    pick = pa.array(order)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    incomplete = place[collapsed.incomplete]
    ascending = np.argsort(incomplete)
    return replace(
        collapsed,
        rows=rows.take(pick),
        marks=marks.take(order),
        unchanged=None if unchanged is None else unchanged[order],
        incomplete=incomplete[ascending],
        lookup=collapsed.lookup.take(pa.array(ascending)),
    )


def _sliced(marks: Marks, start: int) -> Marks:
    end = start + SLICE_ROWS
    return Marks(
        marks.op[start:end],
        marks.commit[start:end],
        marks.ordinal[start:end],
        marks.committed_at.slice(start, SLICE_ROWS),
        marks.exact.slice(start, SLICE_ROWS),
    )
