"""Values that a change left out, because they did not change: from an earlier change of the row, or from upstream.

A topic cannot be asked for a row by its key. What the batch itself does not hold is read upstream as it is there now;
if the row is gone there, its delete will follow, and the change is left out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.destination.partial_row import Refetch, merged_exact, positions_of
from tailrace.destination.webhook.format.image import second_halves
from tailrace.errors import TableError
from tailrace.model import key as keys
from tailrace.model.change import EXACT, Changes, Op, Position

Indexes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def filled(changes: Changes, refetch: Refetch | None) -> Changes:
    """The changes with every value. Raises TableError when upstream cannot be asked for those that are missing."""
    table, left_out, op = changes.table, changes.unchanged_mask(), changes.numpy("op")
    if left_out is None or not table.key:
        return changes
    left_out = left_out & ((op == Op.INSERT) | (op == Op.UPDATE))[:, None]
    origins = _origins(changes, left_out)
    lost = np.flatnonzero((origins < 0).any(axis=1))
    fetched = table.arrow.empty_table()
    kept = np.arange(len(changes))
    if len(lost):
        fetched, where = _fetch(changes, lost, refetch)
        at = np.full(len(changes), -1)
        at[lost] = where
        origins = np.where(origins < 0, len(changes) + at[:, None], origins)
        kept = np.setdiff1d(kept, lost[where < 0])
    row: list[pa.Array[Any]] = []
    for index, (column, values) in enumerate(zip(table.columns, changes.row.flatten(), strict=True)):
        if left_out[:, index].any():
            more = fetched.column(column.name).cast(column.type)
            both = pa.chunked_array([values, *more.chunks], column.type).combine_chunks()
            values = both.take(pa.array(origins[kept, index]))
        else:
            values = values.take(pa.array(kept))
        row.append(values)
    exact = _exact(changes, left_out, origins, fetched).take(pa.array(kept))
    batch = changes.batch.take(pa.array(kept))
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns["row"], columns["exact"] = table.rows(row, len(kept)), exact
    columns["unchanged"] = pa.nulls(len(kept), pa.binary())
    return Changes(table, pa.RecordBatch.from_arrays([*columns.values()], schema=batch.schema))


def _origins(changes: Changes, left_out: Mask) -> Indexes:
    """For each value the change that has it, or -1."""
    op = changes.numpy("op")
    columns = dict(zip(changes.table.row_type.names, changes.row.flatten(), strict=True))
    codes = keys.codes(keys.comparable([columns[name] for name in changes.table.key]))
    order = np.lexsort((np.arange(len(changes)), codes))
    same = np.flatnonzero(codes[order][1:] == codes[order][:-1])
    before = np.full(len(changes), -1)
    before[order[same + 1]] = order[same]
    moved = second_halves(changes)
    before[moved] = before[moved - 1]
    before[before >= 0] = np.where(_has_row(op[before[before >= 0]]), before[before >= 0], -1)
    origins = np.tile(np.arange(len(changes))[:, None], (1, left_out.shape[1]))
    for index in range(left_out.shape[1]):
        at = origins[:, index]
        while len(open_ := np.flatnonzero((at >= 0) & left_out[at, index])):
            at[open_] = before[at[open_]]
    return origins


def _has_row(op: npt.NDArray[np.int8]) -> Mask:
    has_row: Mask = (op != Op.DELETE) & (op != Op.TRUNCATE)
    return has_row


def _fetch(changes: Changes, lost: Indexes, refetch: Refetch | None) -> tuple[pa.Table, Indexes]:
    """Rows as they are upstream, and for each of the changes `lost` the index of its row, or -1 if it is gone."""
    table = changes.table
    if refetch is None:
        first = int(lost[0])
        raise TableError(
            f"{len(lost)} changed rows lack values that the upstream left out, and it cannot be asked for them",
            table=str(table.table),
            position=str(Position(int(changes.numpy("commit")[first]), int(changes.numpy("ordinal")[first]))),
            fix=f"tailrace resync FILE {table.table}",
        )
    rows = pa.Table.from_arrays(changes.row.flatten(), names=table.row_type.names)
    sought = rows.select(list(table.key)).take(pa.array(lost))
    fetched = refetch(table, sought)
    return fetched, positions_of(table, sought, fetched)


def _exact(changes: Changes, left_out: Mask, origins: Indexes, fetched: pa.Table) -> pa.Array[Any]:
    """The texts of values that no type holds, those of the values that were filled in as well."""
    exact: pa.Array[Any] = changes.batch.column("exact")
    there = fetched.column(EXACT).to_pylist() if EXACT in fetched.column_names else [None] * fetched.num_rows
    if exact.null_count == len(exact) and not any(there):
        return exact
    texts: list[str | None] = [*exact.to_pylist(), *there]
    names = np.array(changes.table.row_type.names, object)
    found = texts[: len(changes)]
    # Values that no type holds are rare: row by row is fine here.
    for row in np.flatnonzero(left_out.any(axis=1)).tolist():
        for origin in np.unique(origins[row][left_out[row]]).tolist():
            from_there = names[left_out[row] & (origins[row] == origin)]
            found[row] = merged_exact(found[row], texts[origin], from_there)
    return pa.array(found, pa.string())
