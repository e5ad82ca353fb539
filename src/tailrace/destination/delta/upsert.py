"""Applies a batch to a table with a key: finds the rows that hold its keys, and replaces them.

Copy on write rewrites the files that hold those rows and leaves all others alone. An updated row goes into the new copy
of the file that held it, so files keep their range of keys and their number; only rows that are new go into a file of
their own, or join the smallest file there is.

Merge on read marks those rows in deletion vectors and puts all rows of the batch into new files: its cost is that of
the batch, whatever the size of the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination import Refetch
from tailrace.destination.delta.column import DeltaLayout, to_delta
from tailrace.destination.delta.data_file import DataFile, rows_per_file, total_rows
from tailrace.destination.delta.deletion_vector import VectorWriter
from tailrace.destination.delta.file_reader import read_columns, read_rows
from tailrace.destination.delta.file_writer import FileWriter
from tailrace.destination.delta.key_index import Candidate, DeltaTarget, Finder, partition_kinds
from tailrace.destination.delta.projection import AS_IS
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.lake.key_index import Indexes, KeyProbe
from tailrace.destination.lake.row_bitmap import bitmap, numbers
from tailrace.destination.metadata import DELETED_AT, truncate_values
from tailrace.destination.partial_row import Cast, complete, left_out_columns
from tailrace.model import key as keys
from tailrace.model.change import EXACT, Op
from tailrace.model.collapse import Collapsed

_JOINED_BYTES = 192 << 20
CHEAP_ROWS = 262_144
"""How many rows that do not change copy on write may write again in one batch, under `updates: auto`."""
_NONE: Indexes = np.zeros(0, np.int64)
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass
class Outcome:
    """Files to add and to remove, and how many rows that upserts and deletes.

    `marks`: some may have vectors. `moves`: rows that do not change were written to other files.
    """

    adds: list[DataFile]
    removes: list[DataFile]
    upserts: int = 0
    deletes: int = 0
    marks: bool = False
    moves: bool = False


def apply(target: DeltaTarget, collapsed: Collapsed, now: pa.TimestampScalar, refetch: Refetch | None) -> Outcome:
    """Write the files that turn the table before the batch into the table after it. Commits nothing."""
    layout = target.layout
    if collapsed.truncated and not layout.keeps_deleted:
        candidates: list[Candidate] = []
    else:
        candidates = [Candidate(file, target.reading) for file in target.files]
    gone = [] if candidates or not target.files else list(target.files)
    staged = [] if collapsed.truncated and not layout.keeps_deleted else target.staged
    kinds = layout.key_types
    finder = Finder(target, kinds)
    candidates += _bury_older_copies(finder, candidates, [Candidate(*one, staged=True) for one in staged])

    wanted = KeyProbe(_wanted_keys(collapsed, kinds))
    upserts = collapsed.rows.num_rows
    home, home_row = find_rows(finder, candidates, wanted, kill=True)

    marks = _is_marking(target, candidates, len(wanted))
    old, at = _old_values(target, collapsed, wanted, home, home_row, candidates, kinds)
    kept_types = pa.schema([layout.schema.field(column) for column in layout.table.arrow.names])
    rows_table, metadata, kept = complete(collapsed, old, at, refetch, schema=kept_types, cast=_cast_of(layout))
    upsert = layout.rows(rows_table, metadata, now) if upserts else None
    fresh = np.arange(len(kept))
    if upsert is not None and not marks:
        at_home = home[:upserts][kept]
        scattered = bool(layout.partition_by) or bool((at_home >= 0).any())
        if scattered and upsert.nbytes <= _JOINED_BYTES:
            # Taking rows here and there out of many chunks costs three times as much as out of one.
            upsert = _joined(upsert)
        if not layout.partition_by:
            order = np.argsort(at_home, kind="stable")
            ends = np.searchsorted(at_home[order], np.arange(len(candidates) + 1))
            fresh = order[: ends[0]]
            for number, entry in enumerate(candidates):
                entry.joining = order[ends[number] : ends[number + 1]]
        limit = rows_per_file(total_rows(target.files) + total_rows(file for file, _ in staged))
        fresh = _join_smallest(candidates, fresh, limit, layout)
    wipe = _Wipe.of(collapsed, now) if collapsed.truncated and layout.keeps_deleted else None
    outcome = _write(target, candidates, upsert, fresh, wipe, marks=marks)
    outcome.removes += gone
    outcome.upserts = len(kept)
    outcome.deletes = collapsed.deletes.num_rows
    if layout.keeps_deleted:
        outcome.deletes = int((metadata.op == Op.DELETE).sum())
        outcome.upserts -= outcome.deletes
    return outcome


def find_rows(
    finder: Finder, candidates: Sequence[Candidate], wanted: KeyProbe, *, kill: bool = False
) -> tuple[Indexes, Indexes]:
    """For each wanted key the candidate that holds its row, and the row's number there; -1 where there is none.

    With `kill` the rows that are found count as replaced.
    """
    home = np.full(len(wanted), -1, np.int64)
    home_row = np.full(len(wanted), -1, np.int64)
    if len(wanted):
        concerned = [number for number, one in enumerate(candidates) if wanted.may_hold(one.file.low, one.file.high)]
        found = _in_threads(lambda number: finder.find(candidates[number], wanted), concerned)
        for number, (rows, which) in zip(concerned, found, strict=True):
            if kill:
                candidates[number].kill(rows)
            home[which], home_row[which] = number, rows
    return home, home_row


def _bury_older_copies(finder: Finder, known: list[Candidate], copied: list[Candidate]) -> list[Candidate]:
    """A row may be copied twice if it moved within the table between two snapshots; the later copy counts.

    Returns the copied ones. The keys of each known file are looked at once: they may not all fit into memory.
    """
    if rivals := [one for one in known if any(one.file.may_share_keys(entry.file) for entry in copied)]:
        finder.bury_all(rivals, KeyProbe(keys.joined([finder.keys(entry).comparable() for entry in copied])))
    for at, entry in enumerate(copied):
        if rivals := [one for one in copied[:at] if one.file.may_share_keys(entry.file)]:
            finder.bury_all(rivals, KeyProbe(finder.keys(entry).comparable()))
    return copied


def _is_marking(target: DeltaTarget, candidates: Sequence[Candidate], changed: int) -> bool:
    """Whether the rows that the batch replaces are marked, and not their files rewritten."""
    if target.updates != "auto":
        return target.updates == "merge_on_read"
    unchanged = sum(one.file.alive - sum(map(len, one.dead)) for one in candidates if one.dead)
    return unchanged > max(CHEAP_ROWS, changed)


def _old_values(
    target: DeltaTarget,
    collapsed: Collapsed,
    wanted: KeyProbe,
    home: Indexes,
    home_row: Indexes,
    candidates: Sequence[Candidate],
    kinds: Mapping[str, pa.DataType],
) -> tuple[pa.Table, Indexes]:
    """The rows from before the batch with what changes left out; for each incomplete row its index there, or -1."""
    has_exact = EXACT in target.schema.names
    columns = [*left_out_columns(collapsed), *([EXACT] if has_exact else [])]
    schema = pa.schema([target.schema.field(column) for column in columns])
    if collapsed.unchanged is None or collapsed.truncated:
        return schema.empty_table(), np.full(len(collapsed.incomplete), -1, np.int64)
    name = str(collapsed.table.table)
    sought = keys.comparable([to_delta(collapsed.lookup.column(c), k, c, name) for c, k in kinds.items()])
    where = keys.positions(sought, wanted.key)
    where[np.asarray(pc.is_null(collapsed.lookup.column(0)).to_numpy(zero_copy_only=False), bool)] = -1
    found = np.where(where >= 0, home[where], -1)
    return read_found(target, candidates, found, home_row[where], schema)


def read_found(
    target: DeltaTarget, candidates: Sequence[Candidate], home: Indexes, home_row: Indexes, schema: pa.Schema
) -> tuple[pa.Table, Indexes]:
    """The rows that were found, with these columns, and for each wanted one its index among them, or -1."""
    at = np.full(len(home), -1, np.int64)
    pieces: list[pa.Table] = [schema.empty_table()]
    for number in np.unique(home[home >= 0]):
        entry = candidates[number]
        rows = np.flatnonzero(home == number)
        read = [old for column in schema.names if (old := entry.reading.name(column)) is not None]
        # Those that hold none of the rows are not read.
        order = np.argsort(home_row[rows])
        wanted_rows = home_row[rows][order]
        at[rows[order]] = sum(map(len, pieces)) + np.arange(len(rows))
        kinds_here = partition_kinds(target, entry.file)
        picked = read_rows(target.place, entry.file, read, kinds_here, wanted_rows)
        pieces += [entry.reading.read(some, schema) for some in picked]
    return pa.concat_tables(pieces), at


def _cast_of(layout: DeltaLayout) -> Cast:
    return lambda values, kind, column: to_delta(values, kind, column, str(layout.table.table))


def _in_threads(job: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """The result for each item, in order. Threads help: most of the work is native code."""
    if len(items) < 2:
        return [job(item) for item in items]
    with ThreadPoolExecutor(min(len(items), os.cpu_count() or 1)) as pool:
        return list(pool.map(job, items))


def _joined(rows: pa.Table) -> pa.Table:
    """The same rows with one chunk to a column."""
    return pa.table(_in_threads(lambda column: column.combine_chunks(), rows.columns), schema=rows.schema)


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


def _join_smallest(candidates: Sequence[Candidate], fresh: Indexes, limit: int, layout: DeltaLayout) -> Indexes:
    """A few new rows join the smallest file, if it is small, so that a trickle of inserts does not make many files."""
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
        return cls(truncate_values(collapsed.truncate_marks, now))

    def stamp(self, rows: pa.Table) -> pa.Table:
        """Mark the remaining rows as deleted; those that were marked before stay as they are."""
        alive = pc.is_null(rows.column(DELETED_AT))
        for name, value in self.values.items():
            if name in rows.schema.names:
                at = rows.schema.get_field_index(name)
                rows = rows.set_column(at, rows.schema.field(at), pc.if_else(alive, value, rows.column(name)))
        return rows


def _write(
    target: DeltaTarget,
    candidates: Sequence[Candidate],
    upsert: pa.Table | None,
    fresh: Indexes,
    wipe: _Wipe | None,
    *,
    marks: bool = False,
) -> Outcome:
    outcome = Outcome([], [], marks=marks)
    rows_after = total_rows(target.files) + (upsert.num_rows if upsert is not None else 0)
    limit = rows_per_file(rows_after, marks=marks)
    jobs: list[Callable[[], list[DataFile]]] = []
    marked: list[Candidate] = []
    for entry in candidates:
        joining = entry.joining if entry.joining is not None else fresh[:0]
        if not (entry.dead or len(joining) or wipe or entry.reading.rewrite):
            if entry.staged:
                outcome.adds.append(entry.file)
            continue
        if not entry.staged:
            outcome.removes.append(entry.file)
        if marks and not (wipe or entry.reading.rewrite):
            marked.append(entry)
            continue
        outcome.moves = True
        jobs.append(lambda entry=entry, joining=joining: _rewrite(target, entry, upsert, joining, wipe, limit))  # type: ignore[misc]
    if upsert is not None and len(fresh):
        step = limit if not target.layout.partition_by else max(len(fresh), 1)
        for start in range(0, len(fresh), step):
            part = fresh[start : start + step]
            jobs.append(lambda part=part: _write_new(target, upsert, part, limit))  # type: ignore[misc]
    outcome.adds += chain.from_iterable(_in_threads(lambda job: job(), jobs))
    outcome.adds += _mark(target.place, marked)
    return outcome


def _mark(place: TablePath, entries: Sequence[Candidate]) -> list[DataFile]:
    """The files with their dead rows marked; a file without a living row is gone."""
    found: list[DataFile] = []
    with VectorWriter(place) as writer:
        for entry in entries:
            dead = entry.marked(place) | bitmap(np.concatenate(entry.dead))
            if len(dead) < entry.file.rows:
                found.append(entry.file.with_vector(writer.put(dead)))
    return found


def _rewrite(
    target: DeltaTarget, entry: Candidate, upsert: pa.Table | None, joining: Indexes, wipe: _Wipe | None, limit: int
) -> list[DataFile]:
    """Rewrite a file without its deleted rows and with the rows that join it."""
    alive = np.ones(entry.file.rows, bool)
    for dead in (*entry.dead, numbers(entry.marked(target.place))):
        alive[dead] = False
    # Once a file has grown past its size, split it in halves, not into a full file and a tiny one.
    after = int(alive.sum()) + len(joining)
    most = limit if after > 2 * limit else 2 * limit
    with FileWriter(target.place, target.schema, target.layout.partition_by, most) as writer:
        start = 0
        kinds = partition_kinds(target, entry.file)
        for rows in read_columns(target.place, entry.file, None, kinds) if alive.any() else ():
            here = alive[start : start + rows.num_rows]
            start += rows.num_rows
            kept = entry.reading.read(rows if here.all() else rows.filter(pa.array(here)), target.schema)
            writer.write(wipe.stamp(kept) if wipe else kept)
        if upsert is not None and len(joining):
            writer.write(AS_IS.read(_picked(upsert, joining), target.schema))
    return writer.written


def _picked(rows: pa.Table, at: Indexes) -> pa.Table:
    """The rows `at`, ascending. Taken chunk by chunk: Arrow would first join the chunks of the whole table."""
    at = np.sort(at)
    batches = rows.to_batches()
    if len(batches) <= 1:
        return rows.take(pa.array(at))
    starts = np.cumsum([0, *(len(batch) for batch in batches)])
    cut = np.searchsorted(at, starts)
    picked = [
        batch.take(pa.array(at[cut[i] : cut[i + 1]] - starts[i]))
        for i, batch in enumerate(batches)
        if cut[i] < cut[i + 1]
    ]
    return pa.Table.from_batches(picked, rows.schema)


def _write_new(target: DeltaTarget, upsert: pa.Table, part: Indexes, limit: int) -> list[DataFile]:
    rows = upsert.slice(int(part[0]), len(part)) if part[-1] - part[0] + 1 == len(part) else _picked(upsert, part)
    with FileWriter(target.place, target.schema, target.layout.partition_by, limit) as writer:
        writer.write(AS_IS.read(rows, target.schema))
    return writer.written


def log(target: DeltaTarget, tables: Iterable[pa.Table], changes: int) -> Outcome:
    """The changes of a table without a key, as new rows after those there are."""
    stale = [Candidate(file, target.reading) for file in target.files if target.reading.rewrite]
    copied = [Candidate(file, reading, staged=True) for file, reading in target.staged]
    outcome = _write(target, [*stale, *copied], None, _NONE, None)
    limit = rows_per_file(total_rows(target.files))
    with FileWriter(target.place, target.schema, target.layout.partition_by, limit) as writer:
        for rows in tables:
            writer.write(AS_IS.read(rows, target.schema))
    outcome.adds += writer.written
    outcome.upserts = changes
    return outcome
