"""Rows whose change left values out, completed from the rows at the destination, or from upstream.

A row that the destination lacks is read upstream, as it is there now. If it is gone there too, its delete will follow,
and the row is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import TableError, UnfitError
from tailrace.model import key as keys
from tailrace.model.change import EXACT, Op, Position
from tailrace.model.collapse import Collapsed, Marks
from tailrace.model.schema import TableSchema

Indexes = npt.NDArray[np.int64]

Refetch = Callable[[TableSchema, pa.Table], pa.Table]
"""Rows as they are upstream now, for the given keys; rows that are gone are left out."""

Lookup = Callable[[pa.Table], pa.Table]
"""Rows as they are at the destination, for the given keys: with all columns of the table, in any order."""

Cast = Callable[[Any, pa.DataType, str], Any]
"""Values of a column (its name comes last) as another type. Raises UnfitError for one that does not fit."""


def left_out_columns(collapsed: Collapsed) -> list[str]:
    """The columns that some change left out and no other change of the batch has."""
    if collapsed.unchanged is None:
        return []
    return [collapsed.table.columns[at].name for at in np.flatnonzero(collapsed.unchanged.any(axis=0))]


def look_up(collapsed: Collapsed, lookup: Lookup | None) -> tuple[pa.Table, Indexes]:
    """The rows that have the values changes left out, and for each incomplete row the index of its row, or -1."""
    table = collapsed.table
    none = np.full(len(collapsed.incomplete), -1, np.int64)
    known = np.asarray(pc.is_valid(collapsed.lookup.column(0)).to_numpy(zero_copy_only=False), bool)
    if lookup is None or collapsed.truncated or not known.any():
        return table.arrow.empty_table(), none
    sought = collapsed.lookup.filter(pa.array(known))
    given, cast = lookup(sought), _cast_of(table)
    found = pa.table(
        [cast(given.column(column.name), column.type, column.name) for column in table.columns], schema=table.arrow
    )
    none[known] = positions_of(table, sought, found)
    return found, none


def refetch_rows(collapsed: Collapsed, rows: Indexes, refetch: Refetch | None) -> tuple[pa.Table, Indexes]:
    """Rows as they are upstream now, and for each of the collapsed `rows` the index of its row, or -1 if it is gone.

    Raises TableError when there is no way to ask the upstream.
    """
    table = collapsed.table
    if refetch is None:
        first = rows[0]
        raise TableError(
            f"{len(rows)} changed rows lack values that the upstream left out, and the destination has no such rows",
            table=str(table.table),
            position=str(Position(int(collapsed.marks.commit[first]), int(collapsed.marks.ordinal[first]))),
            fix=f"tailrace resync FILE {table.table}",
        )
    sought = collapsed.rows.select(list(table.key)).take(pa.array(rows))
    fetched = refetch(table, sought)
    return fetched, positions_of(table, sought, fetched)


def split_lost(collapsed: Collapsed, lost: Indexes) -> tuple[Indexes, Indexes]:
    """Of the incomplete rows that the destination lacks: those to read upstream, and deletes, which need nothing."""
    deleted = collapsed.marks.op[lost] == Op.DELETE
    return lost[~deleted], lost[deleted]


def complete(
    collapsed: Collapsed,
    old: pa.Table,
    at: Indexes,
    refetch: Refetch | None,
    *,
    schema: pa.Schema | None = None,
    cast: Cast | None = None,
) -> tuple[list[pa.ChunkedArray[Any]], Marks, Indexes]:
    """The rows to upsert with every column. Returns the columns, their marks, and which of the collapsed rows they are.

    old       the values from before the batch, with the columns that were left out, and `_tailrace_exact` where the
              destination has that column
    at        for each incomplete row the row of `old` that has its values, or -1
    schema    the types of the result, where they are not those of the table
    """
    table, every = collapsed.table, np.arange(collapsed.rows.num_rows)
    if collapsed.unchanged is None:
        return collapsed.rows.columns, collapsed.marks, every
    cast = cast or _cast_of(table)
    schema = schema or table.arrow
    needed = left_out_columns(collapsed)
    has_exact = EXACT in old.schema.names
    dropped = np.zeros(len(every), bool)
    source = np.full(len(every), -1, np.int64)
    source[collapsed.incomplete] = at
    pieces = [old.select([*needed, EXACT] if has_exact else needed)]
    lost, deleted = split_lost(collapsed, collapsed.incomplete[at < 0])
    dropped[deleted] = True
    if len(lost):
        fetched, where = refetch_rows(collapsed, lost, refetch)
        dropped[lost[where < 0]] = True
        lost, where = lost[where >= 0], where[where >= 0]
        source[lost] = old.num_rows + np.arange(len(lost))
        pieces.append(_as_old(fetched.take(pa.array(where)), pieces[0].schema, table, cast))
    filler = pa.concat_tables(pieces)
    columns: list[pa.ChunkedArray[Any]] = []
    for index, column in enumerate(table.columns):
        values = collapsed.rows.column(index)
        missing = collapsed.unchanged[:, index] & (source >= 0)
        if missing.any():
            kind = schema.field(column.name).type
            values = cast(values, kind, column.name)
            filling = cast(filler.column(column.name), kind, column.name)
            both = pa.chunked_array([*values.chunks, *filling.chunks], kind).combine_chunks()
            pick = np.where(missing, len(every) + source, every)
            values = pa.chunked_array([both.take(pa.array(pick))], kind)
        columns.append(values)
    marks = collapsed.marks
    if has_exact:
        marks = _with_old_exact(marks, collapsed, source, filler.column(EXACT))
    if not dropped.any():
        return columns, marks, every
    kept = np.flatnonzero(~dropped)
    return [values.take(pa.array(kept)) for values in columns], marks.take(kept), kept


def merged_exact(new: str | None, old: str | None, unchanged: Iterable[str]) -> str | None:
    """The unfit values of a row: those of the change, and in columns that did not change those of the old row."""
    if old is None:
        return new
    names = set(unchanged)
    texts = {**json.loads(new or "{}"), **{name: text for name, text in json.loads(old).items() if name in names}}
    return json.dumps(texts, ensure_ascii=False) if texts else None


def positions_of(table: TableSchema, sought: pa.Table, found: pa.Table) -> Indexes:
    """For each of the keys `sought` the index of its row in `found`, or -1."""
    have = keys.comparable([found.column(name).cast(table.column(name).type) for name in table.key])
    return keys.positions(keys.comparable(sought.columns), have)


def _as_old(fetched: pa.Table, schema: pa.Schema, table: TableSchema, cast: Cast) -> pa.Table:
    """The upstream's current values, as if they had been at the destination."""
    needed = [name for name in schema.names if name != EXACT]
    arrays = [cast(fetched.column(name), schema.field(name).type, name) for name in needed]
    if EXACT in schema.names:
        given = EXACT in fetched.column_names
        arrays.append(fetched.column(EXACT) if given else pa.nulls(fetched.num_rows, pa.string()))
    elif EXACT in fetched.column_names and any(
        set(json.loads(text)) & set(needed) for text in fetched.column(EXACT).to_pylist() if text
    ):
        raise UnfitError(
            "a row that was read again upstream holds a value that its column's type cannot hold",
            table=str(table.table),
            fix=f"tailrace resync FILE {table.table}",
        )
    return pa.table(arrays, schema=schema)


def _with_old_exact(marks: Marks, collapsed: Collapsed, source: Indexes, old: pa.ChunkedArray[Any]) -> Marks:
    assert collapsed.unchanged is not None
    unfit = ~np.asarray(pc.is_null(old).to_numpy(zero_copy_only=False), bool)
    rows = np.flatnonzero(source >= 0)
    rows = rows[unfit[source[rows]]]
    if not len(rows):
        return marks
    exact = marks.exact.to_pylist()
    # Values that no type holds are rare: row by row is fine here.
    for row in rows:
        names = {collapsed.table.columns[int(at)].name for at in np.flatnonzero(collapsed.unchanged[row])}
        exact[row] = merged_exact(exact[row], old[int(source[row])].as_py(), names)
    return replace(marks, exact=pa.chunked_array([pa.array(exact, pa.string())]))


def _cast_of(table: TableSchema) -> Cast:
    def cast(values: Any, kind: pa.DataType, column: str) -> Any:
        try:
            return values if values.type == kind else pc.cast(values, kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            # Without the cause: its message may quote values.
            raise UnfitError(
                f"a value of column {column} does not fit {kind}",
                table=str(table.table),
                fix=f"tailrace resync FILE {table.table}",
            ) from None

    return cast
