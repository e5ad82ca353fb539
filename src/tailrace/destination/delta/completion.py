"""Changed rows made whole: what the upstream left out comes from the rows of before the batch, or from upstream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination import Refetch
from tailrace.destination.delta.column import delta_type, to_delta
from tailrace.destination.delta.data_file import read_columns
from tailrace.destination.delta.key_index import Candidate, DeltaTarget, Finder, Indexes, KeyProbe, partition_kinds
from tailrace.destination.delta.projection import AS_IS
from tailrace.errors import TableError, UnfitError
from tailrace.model import key as keys
from tailrace.model.change import EXACT, Op, Position
from tailrace.model.collapse import Collapsed, Marks


def complete(
    target: DeltaTarget,
    collapsed: Collapsed,
    wanted: KeyProbe,
    home: Indexes,
    home_row: Indexes,
    candidates: Sequence[Candidate],
    finder: Finder,
    refetch: Refetch | None,
) -> tuple[list[pa.ChunkedArray[Any]], Marks, Indexes]:
    """The rows to upsert with every column: what changes left out comes from the rows of before the batch.

    A row that is nowhere comes from upstream as it is now; if it is gone there, too, its delete is on the way and the
    row is left out. Returns the columns, their marks, and which of the collapsed rows they are.
    """
    table = collapsed.table
    every = np.arange(collapsed.rows.num_rows)
    if collapsed.unchanged is None:
        return collapsed.rows.columns, collapsed.marks, every
    name = str(table.table)
    kinds = finder.kinds
    sought = keys.comparable([to_delta(collapsed.lookup.column(c), k, c, name) for c, k in kinds.items()])
    where = keys.positions(sought, wanted.key)
    where[np.asarray(pc.is_null(collapsed.lookup.column(0)).to_numpy(zero_copy_only=False), bool)] = -1
    found = np.where(where >= 0, home[where], -1)
    if collapsed.truncated:
        found[:] = -1
    needed = [table.columns[i].name for i in np.flatnonzero(collapsed.unchanged.any(axis=0))]
    has_exact = EXACT in target.schema.names
    old_columns = [*needed, *([EXACT] if has_exact else [])]
    old_schema = pa.schema([target.schema.field(column) for column in old_columns])
    pieces: list[pa.Table] = []
    order: list[Indexes] = []
    for number in np.unique(found[found >= 0]):
        entry = candidates[number]
        at = np.flatnonzero(found == number)
        read = [old for column in old_columns if (old := entry.reading.name(column)) is not None]
        tables = read_columns(target.place, entry.file, read, partition_kinds(target, entry.file))
        whole = pa.concat_tables([entry.reading.read(some, old_schema) for some in tables])
        pieces.append(whole.take(pa.array(home_row[where[at]])))
        order.append(at)
    lost = np.flatnonzero(found < 0)
    dropped = np.zeros(len(every), bool)
    if len(lost):
        rows = collapsed.incomplete[lost]
        deleted = collapsed.marks.op[rows] == Op.DELETE
        dropped[rows[deleted]] = True
        lost, rows = lost[~deleted], rows[~deleted]
    if len(lost):
        fetched, at = _refetched(collapsed, rows, refetch)
        dropped[rows[at < 0]] = True
        lost, at = lost[at >= 0], at[at >= 0]
        # The upstream's current values, as if they had been at the destination.
        piece = pa.table(
            [to_delta(fetched.column(c), target.schema.field(c).type, c, name) for c in needed], names=needed
        )
        if EXACT in fetched.column_names:
            if not has_exact and not _fit(fetched.column(EXACT).take(pa.array(at)), needed):
                raise UnfitError(
                    "a row that was read again upstream holds a value that its column's type cannot hold",
                    table=name,
                    fix=f"tailrace resync FILE {name}",
                )
            piece = piece.append_column(EXACT, fetched.column(EXACT))
        pieces.append(AS_IS.read(piece, old_schema).take(pa.array(at)))
        order.append(lost)
    filler = pa.concat_tables(pieces) if pieces else old_schema.empty_table()
    filled = collapsed.incomplete[np.concatenate(order)] if order else np.zeros(0, np.int64)
    source = np.full(len(every), -1, np.int64)
    source[filled] = np.arange(len(filled))
    columns: list[pa.ChunkedArray[Any]] = []
    for index, column in enumerate(table.columns):
        values = collapsed.rows.column(index)
        missing = collapsed.unchanged[:, index] & (source >= 0)
        if missing.any():
            kind = delta_type(column.type)
            values = to_delta(values, kind, column.name, name)
            filling = to_delta(filler.column(column.name), kind, column.name, name)
            both = pa.chunked_array([*values.chunks, *filling.chunks], kind).combine_chunks()
            pick = np.where(missing, len(every) + source, every)
            values = pa.chunked_array([both.take(pa.array(pick))], kind)
        columns.append(values)
    marks = collapsed.marks
    if has_exact:
        marks = _with_old_exact(marks, table.columns, collapsed.unchanged, source, filler)
    if not dropped.any():
        return columns, marks, every
    kept = np.flatnonzero(~dropped)
    pick = pa.array(kept)
    return [values.take(pick) for values in columns], marks.take(kept), kept


def _fit(texts: pa.ChunkedArray[Any], needed: Sequence[str]) -> bool:
    """Whether none of the unfit values is one of the needed columns."""
    return not any(set(json.loads(text)) & set(needed) for text in texts.to_pylist() if text)


def _refetched(collapsed: Collapsed, rows: Indexes, refetch: Refetch | None) -> tuple[pa.Table, Indexes]:
    table = collapsed.table
    if refetch is None:
        first = rows[0]
        raise TableError(
            f"{len(rows)} changed rows lack values that the upstream left out, and the destination has no such rows",
            table=str(table.table),
            position=str(Position(int(collapsed.marks.commit[first]), int(collapsed.marks.ordinal[first]))),
            fix=f"tailrace resync FILE {table.table}",
        )
    wanted = collapsed.rows.select(list(table.key)).take(pa.array(rows))
    fetched = refetch(table, wanted)
    have = keys.comparable([fetched.column(c).cast(table.column(c).type) for c in table.key])
    return fetched, keys.positions(keys.comparable(wanted.columns), have)


def _with_old_exact(
    marks: Marks, columns: Sequence[Any], unchanged: npt.NDArray[np.bool_], source: Indexes, filler: pa.Table
) -> Marks:
    old = filler.column(EXACT)
    unfit = ~np.asarray(pc.is_null(old).to_numpy(zero_copy_only=False), bool)
    rows = np.flatnonzero(source >= 0)
    rows = rows[unfit[source[rows]]]
    if not len(rows):
        return marks
    exact = marks.exact.to_pylist()
    for row in rows:
        names = {columns[int(i)].name for i in np.flatnonzero(unchanged[row])}
        kept = {k: v for k, v in json.loads(old[int(source[row])].as_py()).items() if k in names}
        merged = {**json.loads(exact[row] or "{}"), **kept}
        exact[row] = json.dumps(merged, ensure_ascii=False) if merged else None
    return replace(marks, exact=pa.chunked_array([pa.array(exact, pa.string())]))
