"""Applies a batch to a table that keeps the versions of its rows.

A version is told apart by its row's key and where it ends, so the current one is found by (key, `OPEN`). The changes of
a batch become versions, one for each commit that left the row with other values; the current version is closed and
replaced. What results is an ordinary batch of upserts and deletes, which `upsert` writes.

Copied rows of a table that has a history continue it: where they differ from the current versions they begin new ones,
and current versions whose rows were not copied end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination import Refetch
from tailrace.destination.delta import upsert, version
from tailrace.destination.delta.column import to_delta
from tailrace.destination.delta.data_file import DataFile
from tailrace.destination.delta.file_reader import read_columns
from tailrace.destination.delta.key_index import Candidate, DeltaTarget, Finder, partition_kinds
from tailrace.destination.delta.projection import AS_IS, ColumnReading
from tailrace.destination.delta.upsert import Outcome
from tailrace.destination.lake.key_index import KeyProbe
from tailrace.destination.partial_row import complete
from tailrace.model import key as keys
from tailrace.model.change import EXACT, Changes, Op
from tailrace.model.collapse import Collapsed, Marks, any_exact, collapse
from tailrace.model.digest import row_digests
from tailrace.model.schema import TableSchema

Indexes = npt.NDArray[np.int64]
Bits = npt.NDArray[np.bool_]

_SLICE_ROWS = 262_144
_INSTANT = pa.timestamp("us", "UTC")
_NEVER = np.iinfo(np.int64).min
"""Stands for no time: before every other."""


@dataclass(frozen=True)
class VersionWork:
    """What a batch brings a table with a history: the changes of `table`, after copied rows that continue it."""

    table: TableSchema
    chunks: list[Changes]
    copied: Sequence[tuple[DataFile, ColumnReading]] | None = None

    @property
    def changes(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def has_exact(self) -> bool:
        return any_exact(self.chunks)


def apply(target: DeltaTarget, work: VersionWork, now: pa.TimestampScalar, refetch: Refetch | None) -> Outcome:
    """Write the files that turn the table before the batch into the table after it. Commits nothing."""
    run = _Run(target, work.table, now, refetch)
    if work.copied is not None:
        run.continue_with(work.copied)
    for piece in _around_truncates(work.chunks):
        if piece[0].batch.column("op")[0].as_py() == Op.TRUNCATE:
            run.truncate(piece[0])
        else:
            run.change(piece)
    return run.outcome()


def _around_truncates(chunks: Iterable[Changes]) -> Iterator[list[Changes]]:
    """The changes in order, each truncate by itself."""
    piece: list[Changes] = []
    for chunk in chunks:
        start = 0
        for at in [*np.flatnonzero(chunk.numpy("op") == Op.TRUNCATE).tolist(), len(chunk)]:
            if at > start:
                piece.append(Changes(chunk.table, chunk.batch.slice(start, at - start)))
            if at < len(chunk):
                if piece:
                    yield piece
                piece = []
                yield [Changes(chunk.table, chunk.batch.slice(at, 1))]
            start = at + 1
    if piece:
        yield piece


@dataclass
class _Steps:
    """Changes of rows, in order, with their values complete and in the table's own types.

    `bumps`: at or before the position of the version it changes, such a change still ends that version. Any other then
    belongs to the same commit as the version, and takes its place.
    """

    keys: pa.Table
    values: pa.Table
    op: npt.NDArray[np.int8]
    commit: Indexes
    at: Indexes
    bumps: bool = False

    def __len__(self) -> int:
        return len(self.op)


@dataclass
class _Run:
    target: DeltaTarget
    table: TableSchema
    now: pa.TimestampScalar
    refetch: Refetch | None
    before: list[DataFile] = field(init=False)
    done: Outcome = field(default_factory=lambda: Outcome([], []))
    wrote: bool = False

    def __post_init__(self) -> None:
        target = self.target
        self.before = target.files
        # The table may keep a type wider than it is upstream now, which older versions need.
        kept = [replace(column, type=target.schema.field(column.name).type) for column in target.layout.table.columns]
        versions = replace(target.layout.table, columns=tuple(kept))
        self.target = replace(target, layout=replace(target.layout, table=versions))

    @property
    def key(self) -> list[str]:
        return list(self.table.key)

    @property
    def value_schema(self) -> pa.Schema:
        """The columns whose values make a version: all but those that say when it held."""
        own = {column.name for column in version.COLUMNS}
        return pa.schema([one for one in self.target.schema if one.name not in own])

    def outcome(self) -> Outcome:
        if not self.wrote:
            # Copied files join the table, and a new schema may need every file written again.
            self._write(_no_rows(self.target.layout.table))
        known = {file.identity for file in self.before}
        left = {file.identity for file in self.target.files}
        self.done.adds = [file for file in self.target.files if file.identity not in known]
        self.done.removes = [file for file in self.before if file.identity not in left]
        return self.done

    # -- what a batch holds -------------------------------------------------------------------------------

    def change(self, chunks: list[Changes]) -> None:
        """Changes of the log, without truncates."""
        every = collapse(chunks, self.table, each=True)
        if not len(every.marks):
            return
        row_keys = self._delta(every.rows.select(self.key))
        group, first = _groups(row_keys)
        old, old_at = self._current(row_keys.take(pa.array(first)))
        among = keys.comparable(row_keys.take(pa.array(first)).columns)
        where = keys.positions(keys.comparable(self._delta(every.lookup).columns), among)
        unknown = np.asarray(pc.is_null(every.lookup.column(0)).to_numpy(zero_copy_only=False), bool)
        at = np.where(unknown | (where < 0), -1, old_at[where])
        types = pa.schema([self.target.schema.field(name) for name in self.table.arrow.names])
        columns, marks, kept = complete(every, old, at, self.refetch, schema=types, cast=self._cast)
        columns = [self._cast(column, types.field(at).type, types.names[at]) for at, column in enumerate(columns)]
        values = AS_IS.read(
            pa.table([*columns, marks.exact], schema=types.append(pa.field(EXACT, pa.string()))), self.value_schema
        )
        times = _microseconds(pc.fill_null(marks.committed_at, self.now))
        steps = _Steps(row_keys.take(pa.array(kept)), values, marks.op, marks.commit, times)
        self._advance(steps, old, old_at, group[kept])

    def truncate(self, change: Changes) -> None:
        """Close every current version."""
        times = _microseconds(pc.fill_null(change.batch.column("committed_at"), self.now))
        self._close(self._current_keys(), int(change.numpy("commit")[0]), int(times[0]), bumps=False)

    def continue_with(self, copied: Sequence[tuple[DataFile, ColumnReading]]) -> None:
        """All rows of a new copy, in place of the current versions."""
        seen: list[keys.Comparable] = []
        commit = 0
        for rows in self._copied(copied):
            row_keys = rows.select(self.key)
            commits = version.parsed_positions(rows.column(version.FROM))[:, 0]
            commit = max(commit, int(commits.max()))
            times = _microseconds(pc.fill_null(rows.column(version.VALID_FROM), self.now))
            op = np.full(rows.num_rows, Op.READ, np.int8)
            steps = _Steps(row_keys, rows.select(self.value_schema.names), op, commits, times, bumps=True)
            group, first = _groups(row_keys)
            old, old_at = self._current(row_keys.take(pa.array(first)))
            self._advance(steps, old, old_at, group)
            seen.append(keys.comparable(row_keys.columns))
        copied_keys = keys.joined(seen) if seen else None
        now = int(_microseconds(pa.chunked_array([pa.array([self.now])]))[0])
        for current in self._current_keys():
            lost = _outside(keys.comparable(current.columns), copied_keys)
            self._close([current.filter(pa.array(lost))], commit, now, bumps=True)

    def _copied(self, copied: Sequence[tuple[DataFile, ColumnReading]]) -> Iterator[pa.Table]:
        """The rows of copied files, in slices."""
        waiting: list[pa.Table] = []
        for file, reading in copied:
            for rows in read_columns(self.target.place, file, None, partition_kinds(self.target, file)):
                waiting.append(reading.read(rows, self.target.schema))
                if sum(map(len, waiting)) >= _SLICE_ROWS:
                    yield pa.concat_tables(waiting)
                    waiting = []
        if waiting and any(map(len, waiting)):
            yield pa.concat_tables(waiting)

    def _close(self, current: Iterable[pa.Table], commit: int, at: int, *, bumps: bool) -> None:
        """End the current versions with these keys, which are each there once."""
        for row_keys in current:
            for start in range(0, row_keys.num_rows, _SLICE_ROWS):
                some = row_keys.slice(start, _SLICE_ROWS)
                count = some.num_rows
                values = AS_IS.read(some, self.value_schema)
                op = np.full(count, Op.DELETE, np.int8)
                steps = _Steps(some, values, op, np.full(count, commit), np.full(count, at), bumps)
                self._advance(steps, *self._current(some), np.arange(count))

    # -- versions -----------------------------------------------------------------------------------------

    def _advance(self, steps: _Steps, old: pa.Table, old_at: Indexes, group: Indexes) -> None:
        """Make versions of the steps. `old_at` has the current version of each group's key in `old`, or -1."""
        known = np.flatnonzero(old_at >= 0)
        bounds = np.full((len(old_at), 2), -1, np.int64)
        if len(known):
            bounds[known] = version.parsed_positions(old.column(version.FROM).take(pa.array(old_at[known])))
        # The current versions come first, as steps that were made before.
        count = len(known)
        member = np.concatenate([known, group])
        is_row = np.concatenate([np.ones(count, bool), steps.op != Op.DELETE])
        commit = np.concatenate([bounds[known, 0], steps.commit])
        ordinal = np.concatenate([bounds[known, 1], np.zeros(len(steps), np.int64)])
        late = np.flatnonzero(steps.commit <= bounds[group, 0])
        commit[count + late] = bounds[group[late], 0]
        ordinal[count + late] = bounds[group[late], 1] + steps.bumps
        began = _microseconds(old.column(version.VALID_FROM).take(pa.array(old_at[known])))
        at = np.concatenate([began, steps.at])
        values = pa.concat_tables(
            [old.select(self.value_schema.names).take(pa.array(old_at[known])), steps.values.cast(self.value_schema)]
        )

        order = np.argsort(member, kind="stable")
        member, is_row, commit, ordinal, at = (one[order] for one in (member, is_row, commit, ordinal, at))
        is_old = order < count
        # The last step of a commit counts; one that takes the place of a current version began when that did.
        starts = ~_same(member, commit, ordinal)
        first = np.flatnonzero(starts)
        last = np.append(first[1:], len(order))[: len(first)] - 1
        began_at = np.where(is_old[first], at[first], at[last])
        member, is_row, commit, ordinal, at = member[last], is_row[last], commit[last], ordinal[last], began_at
        source, is_old = order[last], is_old[last]
        final = np.append(member[1:] != member[:-1], True)[: len(member)]
        gone = member[final & ~is_row]

        digest = np.where(is_row, _digests(values)[source], 0)
        begins = np.append(True, member[1:] != member[:-1])[: len(member)]
        before_row = np.append(False, is_row[:-1])[: len(member)] & ~begins
        before_digest = np.append(0, digest[:-1])[: len(member)]
        changes = (is_row != before_row) | (is_row & (digest != before_digest))
        pick = np.flatnonzero(changes)
        member, is_row, commit, ordinal, at, source, is_old = (
            one[pick] for one in (member, is_row, commit, ordinal, at, source, is_old)
        )
        at = _not_before(at, member)
        ends = np.append(member[1:] == member[:-1], False)[: len(member)]
        upcoming = np.minimum(np.arange(len(member)) + 1, max(len(member) - 1, 0))
        out = np.flatnonzero(is_row & ~(is_old & ~ends))
        ends, upcoming = ends[out], upcoming[out]
        rows = values.take(pa.array(source[out]))
        to = version.commit_texts(commit[upcoming], ordinal[upcoming])
        own = [
            _times(at[out]),
            _times(np.where(ends, at[upcoming], _NEVER)),
            pa.array(~ends),
            version.commit_texts(commit[out], ordinal[out]),
            pc.if_else(pa.array(ends), to, version.OPEN),
        ]
        closed = gone[old_at[gone] >= 0]
        self._write(self._collapsed(rows, own, old.take(pa.array(old_at[closed])), len(steps)))

    def _collapsed(self, rows: pa.Table, own: list[Any], closed: pa.Table, changes: int) -> Collapsed:
        table = self.target.layout.table
        names = {column.name: values for column, values in zip(version.COLUMNS, own, strict=True)}
        columns = [names[name] if name in names else rows.column(name) for name in table.arrow.names]
        count = rows.num_rows
        exact = rows.column(EXACT) if EXACT in rows.schema.names else pa.chunked_array([pa.nulls(count, pa.string())])
        zeros = np.zeros(count, np.int64)
        marks = Marks(
            np.full(count, Op.UPDATE, np.int8), zeros, zeros, pa.chunked_array([pa.nulls(count, _INSTANT)]), exact
        )
        return replace(
            _no_rows(table),
            rows=pa.table(columns, schema=pa.schema([pa.field(c.name, c.type) for c in table.columns])),
            marks=marks,
            deletes=closed.select(list(table.key)),
            changes=changes,
        )

    def _write(self, collapsed: Collapsed) -> None:
        if self.wrote and not collapsed.rows.num_rows and not collapsed.deletes.num_rows:
            return
        outcome = upsert.apply(self.target, collapsed, self.now, None)
        gone = {file.identity for file in outcome.removes}
        files = [*(file for file in self.target.files if file.identity not in gone), *outcome.adds]
        updates = "merge_on_read" if outcome.marks else self.target.updates
        self.target = replace(self.target, files=files, staged=[], reading=AS_IS, updates=updates)
        self.wrote = True
        self.done.upserts += outcome.upserts
        self.done.deletes += outcome.deletes
        self.done.marks |= outcome.marks
        self.done.moves |= outcome.moves

    # -- what the table holds -----------------------------------------------------------------------------

    def _candidates(self) -> list[Candidate]:
        known = [Candidate(file, self.target.reading) for file in self.target.files]
        return [*known, *(Candidate(*one, staged=True) for one in self.target.staged)]

    def _current(self, row_keys: pa.Table) -> tuple[pa.Table, Indexes]:
        """The current versions with these keys, each key once, and for each key the index of its version, or -1."""
        wanted = KeyProbe(keys.comparable([*row_keys.columns, pa.repeat(version.OPEN, row_keys.num_rows)]))
        candidates = self._candidates()
        finder = Finder(self.target, self.target.layout.key_types)
        home, home_row = upsert.find_rows(finder, candidates, wanted)
        return upsert.read_found(self.target, candidates, home, home_row, self.target.schema)

    def _current_keys(self) -> list[pa.Table]:
        """The keys of all current versions."""
        names = [*self.key, version.IS_CURRENT]
        schema = pa.schema([self.target.schema.field(name) for name in names])
        found: list[pa.Table] = []
        for entry in self._candidates():
            columns = [old for name in names if (old := entry.reading.name(name)) is not None]
            dead, start = entry.marked(self.target.place), 0
            kinds = partition_kinds(self.target, entry.file)
            for rows in read_columns(self.target.place, entry.file, columns, kinds):
                read = entry.reading.read(rows, schema)
                alive = np.asarray(read.column(version.IS_CURRENT).to_numpy(), bool)
                alive = alive & ~np.isin(np.arange(start, start + len(alive)), np.array(dead, np.int64))
                start += len(alive)
                found.append(read.select(self.key).filter(pa.array(alive)))
        return found

    def _delta(self, rows: pa.Table) -> pa.Table:
        """The same rows in the table's types."""
        fields = [self.target.schema.field(name) for name in rows.schema.names]
        columns = [self._cast(column, one.type, one.name) for column, one in zip(rows.columns, fields, strict=True)]
        return pa.table(columns, schema=pa.schema(fields))

    def _cast(self, values: Any, kind: pa.DataType, column: str) -> Any:
        return to_delta(values, kind, column, str(self.table.table))


def _no_rows(table: TableSchema) -> Collapsed:
    """Nothing to write."""
    return collapse([], table)


def _groups(row_keys: pa.Table) -> tuple[Indexes, Indexes]:
    """For each row a number of its key, and for each number the first row that has it."""
    codes = keys.codes(keys.comparable(row_keys.columns))
    _, first, group = np.unique(codes, return_index=True, return_inverse=True)
    return group.astype(np.int64), first.astype(np.int64)


def _outside(current: keys.Comparable, copied: keys.Comparable | None) -> Bits:
    if copied is None:
        return np.ones(len(current), bool)
    if isinstance(current, np.ndarray) and isinstance(copied, np.ndarray):
        return ~np.isin(current, copied)
    found = pc.is_in(keys.binary(current), value_set=keys.binary(copied))
    return ~np.asarray(found.to_numpy(zero_copy_only=False), bool)


def _same(*columns: Indexes) -> Bits:
    """Whether each row equals the one before it."""
    equal = np.ones(len(columns[0]), bool)
    equal[:1] = False
    for column in columns:
        equal[1:] &= column[1:] == column[:-1]
    return equal


def _digests(values: pa.Table) -> Indexes:
    return row_digests([column.combine_chunks() for column in values.columns])


def _not_before(at: Indexes, member: Indexes) -> Indexes:
    """Times that do not go back within a key: the clocks of an upstream's commits may."""
    same = np.append(False, member[1:] == member[:-1])[: len(member)]
    while len(back := np.flatnonzero(same & (at < np.append(_NEVER, at[:-1])[: len(at)]))):
        at = at.copy()
        at[back] = at[back - 1]
    return at


def _microseconds(times: Any) -> Indexes:
    numbers = pc.fill_null(times.cast(pa.int64()), _NEVER)
    return np.asarray(numbers.to_numpy(zero_copy_only=False) if isinstance(numbers, pa.Array) else numbers.to_numpy())


def _times(microseconds: Indexes) -> pa.Array[Any]:
    return pa.array(microseconds, pa.int64(), mask=microseconds == _NEVER).cast(_INSTANT)
