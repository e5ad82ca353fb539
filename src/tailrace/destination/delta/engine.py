"""Copy on write: find the files that hold a batch's keys, write those anew, leave all others alone.

An updated row goes into the new copy of the file that held it, so files keep their range of keys and their number;
only rows that are new go into a file of their own, or join the smallest file there is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace import key as keys
from tailrace.change import Op, Position
from tailrace.collapse import Collapsed, Marks
from tailrace.destination import Refetch
from tailrace.destination.delta.file import DataFile, FileWriter, read_columns, rows_per_file, total_rows
from tailrace.destination.delta.index import FileKeys, Index, Wanted, keys_of
from tailrace.destination.delta.layout import (
    COMMITTED_AT,
    DELETED_AT,
    EXACT,
    OP,
    POSITION,
    Layout,
    conform,
    delta_type,
    position_text,
    to_delta,
)
from tailrace.destination.delta.path import Place
from tailrace.errors import TableError

_JOINED_BYTES = 192 << 20
_NONE: Index = np.zeros(0, np.int64)


@dataclass
class Target:
    """A table to be changed: its files of before the batch, and how its columns read.

    schema     the columns the table has after the batch (dropped ones included)
    renamed    the files' names of columns that were renamed; with `rewrite`, every file is written anew to fit `schema`
    """

    place: Place
    layout: Layout
    schema: pa.Schema
    files: list[DataFile]
    staged: list[DataFile] = field(default_factory=list)
    renamed: Mapping[str, str] = field(default_factory=dict)
    rewrite: bool = False


@dataclass
class Outcome:
    """Files to add and to remove, and how many rows that upserts and deletes."""

    adds: list[DataFile]
    removes: list[DataFile]
    upserts: int = 0
    deletes: int = 0


@dataclass
class _Candidate:
    file: DataFile
    staged: bool
    keys: FileKeys | None = None
    dead: list[Index] = field(default_factory=list)
    joining: Index | None = None


def apply(target: Target, collapsed: Collapsed, now: pa.TimestampScalar, refetch: Refetch | None) -> Outcome:
    """Write the files that turn the table before the batch into the table after it. Commits nothing."""
    layout = target.layout
    if collapsed.truncated and not layout.keeps_deleted:
        candidates: list[_Candidate] = []
    else:
        candidates = [_Candidate(file, False) for file in target.files]
    gone = [] if candidates or not target.files else list(target.files)
    staged = [] if collapsed.truncated and not layout.keeps_deleted else target.staged
    kinds = {name: delta_type(layout.table.column(name).type) for name in layout.table.key}
    finder = _Finder(target, kinds)
    for file in staged:
        found = keys_of(target.place, file, layout.table.key, kinds, {})
        entry = _Candidate(file, True, found)
        finder.bury_all(candidates, Wanted(found.key))
        candidates.append(entry)

    wanted = Wanted(_wanted_keys(collapsed, kinds))
    upserts = collapsed.rows.num_rows
    home = np.full(len(wanted), -1, np.int64)
    home_row = np.full(len(wanted), -1, np.int64)
    if len(wanted):
        for number, entry in enumerate(candidates):
            if not wanted.may_hold(entry.file.low, entry.file.high):
                continue
            rows, which = finder.keys(entry).match(wanted)
            if len(rows):
                alive = rows if not entry.dead else rows[~np.isin(rows, np.concatenate(entry.dead))]
                which = which if not entry.dead else which[~np.isin(rows, np.concatenate(entry.dead))]
                entry.dead.append(alive)
                home[which], home_row[which] = number, alive

    rows_table, marks, kept = _complete(target, collapsed, wanted, home, home_row, candidates, finder, refetch)
    upsert = layout.rows(rows_table, marks, now) if upserts else None
    if upsert is not None and upsert.nbytes <= _JOINED_BYTES:
        # Taking rows here and there out of many chunks costs three times as much as out of one.
        upsert = upsert.combine_chunks()
    fresh = np.arange(len(kept))
    if upsert is not None:
        at_home = home[:upserts][kept]
        if not layout.partition_by:
            order = np.argsort(at_home, kind="stable")
            ends = np.searchsorted(at_home[order], np.arange(len(candidates) + 1))
            fresh = order[: ends[0]]
            for number, entry in enumerate(candidates):
                entry.joining = order[ends[number] : ends[number + 1]]
        limit = rows_per_file(total_rows(target.files) + total_rows(staged))
        fresh = _join_smallest(candidates, fresh, limit, layout)
    wipe = _Wipe.of(collapsed, now) if collapsed.truncated and layout.keeps_deleted else None
    outcome = _write(target, candidates, upsert, fresh, wipe)
    outcome.removes += gone
    outcome.upserts = len(kept)
    outcome.deletes = collapsed.deletes.num_rows
    if layout.keeps_deleted:
        outcome.deletes = int((marks.op == Op.DELETE).sum())
        outcome.upserts -= outcome.deletes
    return outcome


class _Finder:
    def __init__(self, target: Target, kinds: Mapping[str, pa.DataType]) -> None:
        self.target = target
        self.kinds = kinds

    def keys(self, entry: _Candidate) -> FileKeys:
        if entry.keys is None:
            renamed = {} if entry.staged else self.target.renamed
            key = self.target.layout.table.key
            entry.keys = keys_of(self.target.place, entry.file, key, self.kinds, renamed)
        return entry.keys

    def bury_all(self, candidates: list[_Candidate], wanted: Wanted) -> None:
        for entry in candidates:
            if wanted.may_hold(entry.file.low, entry.file.high):
                rows, _ = self.keys(entry).match(wanted)
                if len(rows):
                    entry.dead.append(rows)


def _wanted_keys(collapsed: Collapsed, kinds: Mapping[str, pa.DataType]) -> keys.Comparable:
    name = str(collapsed.table.table)
    return keys.comparable(
        [
            pa.chunked_array(
                [
                    *to_delta(collapsed.rows.column(column), kind, column, name).chunks,
                    *to_delta(collapsed.deletes.column(column), kind, column, name).chunks,
                ],
                kind,
            )
            for column, kind in kinds.items()
        ]
    )


def _complete(
    target: Target,
    collapsed: Collapsed,
    wanted: Wanted,
    home: Index,
    home_row: Index,
    candidates: Sequence[_Candidate],
    finder: _Finder,
    refetch: Refetch | None,
) -> tuple[list[pa.ChunkedArray[Any]], Marks, Index]:
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
    order: list[Index] = []
    for number in np.unique(found[found >= 0]):
        entry = candidates[number]
        at = np.flatnonzero(found == number)
        renamed = {} if entry.staged else dict(target.renamed)
        partition_kinds = _partition_kinds(target)
        read = [renamed.get(column, column) for column in old_columns]
        whole = pa.concat_tables(
            [conform(t, old_schema, renamed) for t in read_columns(target.place, entry.file, read, partition_kinds)]
        )
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
        pieces.append(conform(piece, old_schema).take(pa.array(at)))
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
            both = pa.chunked_array([*values.chunks, *filler.column(column.name).chunks], kind).combine_chunks()
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
    return [values.take(pick) for values in columns], _marks_at(marks, kept), kept


def _refetched(collapsed: Collapsed, rows: Index, refetch: Refetch | None) -> tuple[pa.Table, Index]:
    table = collapsed.table
    if refetch is None:
        first = rows[0]
        raise TableError(
            f"{len(rows)} changed rows lack values that the upstream left out, and the destination has no such rows",
            table=str(table.table),
            position=str(Position(int(collapsed.marks.commit[first]), int(collapsed.marks.ordinal[first]))),
            fix=f"tailrace resync {table.table}",
        )
    wanted = collapsed.rows.select(list(table.key)).take(pa.array(rows))
    fetched = refetch(table, wanted)
    have = keys.comparable([fetched.column(c).cast(table.column(c).type) for c in table.key])
    return fetched, keys.positions(keys.comparable(wanted.columns), have)


def _with_old_exact(
    marks: Marks, columns: Sequence[Any], unchanged: npt.NDArray[np.bool_], source: Index, filler: pa.Table
) -> Marks:
    old = filler.column(EXACT)
    unfit = ~np.asarray(pc.is_null(old).to_numpy(zero_copy_only=False), bool)
    rows = np.flatnonzero(source >= 0)
    rows = rows[unfit[source[rows]]]
    if not len(rows):
        return marks
    exact = marks.exact.to_pylist()
    for row in rows:
        names = {columns[i].name for i in np.flatnonzero(unchanged[row])}
        kept = {k: v for k, v in json.loads(old[int(source[row])].as_py()).items() if k in names}
        merged = {**json.loads(exact[row] or "{}"), **kept}
        exact[row] = json.dumps(merged, ensure_ascii=False) if merged else None
    return Marks(
        marks.op, marks.commit, marks.ordinal, marks.committed_at, pa.chunked_array([pa.array(exact, pa.string())])
    )


def _marks_at(marks: Marks, at: Index) -> Marks:
    pick = pa.array(at)
    return Marks(
        marks.op[at], marks.commit[at], marks.ordinal[at], marks.committed_at.take(pick), marks.exact.take(pick)
    )


def _partition_kinds(target: Target) -> dict[str, pa.DataType]:
    return {name: target.schema.field(name).type for name in target.layout.partition_by}


def _join_smallest(candidates: Sequence[_Candidate], fresh: Index, limit: int, layout: Layout) -> Index:
    """Few new rows go into the smallest file, if that is small, so that a trickle of inserts makes no heap of files."""
    if layout.partition_by or not len(fresh) or len(fresh) > limit // 2:
        return fresh
    small = [entry for entry in candidates if entry.file.rows <= limit // 2]
    if not small:
        return fresh
    entry = min(small, key=lambda one: one.file.rows)
    entry.joining = np.concatenate([entry.joining, fresh]) if entry.joining is not None else fresh
    return fresh[:0]


@dataclass(frozen=True)
class _Wipe:
    """A truncate of a table that keeps its deleted rows."""

    values: Mapping[str, pa.Scalar[Any]]

    @classmethod
    def of(cls, collapsed: Collapsed, now: pa.TimestampScalar) -> _Wipe:
        marks = collapsed.truncate_marks
        at = marks.committed_at[0]
        return cls(
            {
                DELETED_AT: at if at.is_valid else now,
                OP: pa.scalar("truncate"),
                POSITION: position_text(marks.commit, marks.ordinal)[0],
                COMMITTED_AT: at,
            }
        )

    def stamp(self, rows: pa.Table) -> pa.Table:
        """Rows that were alive are deleted now; those deleted before stay as they were."""
        alive = pc.is_null(rows.column(DELETED_AT))
        for name, value in self.values.items():
            if name in rows.schema.names:
                at = rows.schema.get_field_index(name)
                rows = rows.set_column(at, rows.schema.field(at), pc.if_else(alive, value, rows.column(name)))
        return rows


def _write(
    target: Target, candidates: Sequence[_Candidate], upsert: pa.Table | None, fresh: Index, wipe: _Wipe | None
) -> Outcome:
    outcome = Outcome([], [])
    limit = rows_per_file(total_rows(target.files) + (upsert.num_rows if upsert is not None else 0))
    jobs: list[Callable[[], list[DataFile]]] = []
    for entry in candidates:
        joining = entry.joining if entry.joining is not None else fresh[:0]
        stale = target.rewrite and not entry.staged
        if not (entry.dead or len(joining) or wipe or stale):
            if entry.staged:
                outcome.adds.append(entry.file)
            continue
        if not entry.staged:
            outcome.removes.append(entry.file)
        jobs.append(lambda entry=entry, joining=joining: _rewrite(target, entry, upsert, joining, wipe, limit))  # type: ignore[misc]
    if upsert is not None and len(fresh):
        fresh = np.sort(fresh)
        step = limit if not target.layout.partition_by else max(len(fresh), 1)
        for start in range(0, len(fresh), step):
            part = fresh[start : start + step]
            jobs.append(lambda part=part: _write_new(target, upsert, part, limit))  # type: ignore[misc]
    if len(jobs) == 1:
        outcome.adds += jobs[0]()
    elif jobs:
        with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
            for files in pool.map(lambda job: job(), jobs):
                outcome.adds += files
    return outcome


def _rewrite(
    target: Target, entry: _Candidate, upsert: pa.Table | None, joining: Index, wipe: _Wipe | None, limit: int
) -> list[DataFile]:
    """A file without its dead rows and with the rows that join it."""
    alive = np.ones(entry.file.rows, bool)
    for dead in entry.dead:
        alive[dead] = False
    renamed = {} if entry.staged else dict(target.renamed)
    # Halves rather than a full file and a crumb, once a file has grown past its size.
    after = int(alive.sum()) + len(joining)
    most = limit if after > 2 * limit else 2 * limit
    with FileWriter(target.place, target.schema, target.layout.partition_by, most) as writer:
        start = 0
        kinds = {renamed.get(n, n): k for n, k in _partition_kinds(target).items()}
        for rows in read_columns(target.place, entry.file, None, kinds) if alive.any() else ():
            here = alive[start : start + rows.num_rows]
            start += rows.num_rows
            kept = conform(rows if here.all() else rows.filter(pa.array(here)), target.schema, renamed)
            writer.write(wipe.stamp(kept) if wipe else kept)
        if upsert is not None and len(joining):
            writer.write(conform(upsert.take(pa.array(joining)), target.schema))
    return writer.written


def _write_new(target: Target, upsert: pa.Table, part: Index, limit: int) -> list[DataFile]:
    rows = upsert.slice(int(part[0]), len(part)) if part[-1] - part[0] + 1 == len(part) else upsert.take(pa.array(part))
    with FileWriter(target.place, target.schema, target.layout.partition_by, limit) as writer:
        writer.write(conform(rows, target.schema))
    return writer.written


def log(target: Target, tables: Iterable[pa.Table], changes: int) -> Outcome:
    """The changes of a table without a key, as new rows behind those there are."""
    outcome = _write(target, [_Candidate(f, False) for f in target.files] if target.rewrite else [], None, _NONE, None)
    limit = rows_per_file(total_rows(target.files))
    with FileWriter(target.place, target.schema, target.layout.partition_by, limit) as writer:
        for rows in tables:
            writer.write(conform(rows, target.schema))
    outcome.adds += [*target.staged, *writer.written]
    outcome.upserts = changes
    return outcome
