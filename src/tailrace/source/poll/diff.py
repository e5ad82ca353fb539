"""The full diff: compares the keys and row hashes of a whole table with what is known downstream.

Each stretch of keys is compared on its own, by its own task. Only rows that are new or differ are read in full; known
keys that no longer exist become deletes. Keys that polls brought since the last diff belong to no stretch yet, as only
the database knows the order of its keys: a separate task checks which of them are gone again. It reads them earlier or
later than their stretch is read, so its result is recorded for the next diff.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import DamagedError, TableError
from tailrace.model import key as keys
from tailrace.model.change import Changes, Op, changes_type
from tailrace.model.digest import row_digests
from tailrace.model.schema import TableSchema
from tailrace.source.poll.connector import ConnectorSession, Query
from tailrace.source.poll.key_snapshot import GONE, HASH, PART, STEP, Base, read_keys, record
from tailrace.source.poll.keyset import Keyset
from tailrace.source.poll.split import RefusedSplit, Task, pages
from tailrace.source.split import ScanSplit, Split
from tailrace.system.atomic_file import creating

# The result of a comparison, on its way from the comparing tasks to the one that writes the table.
# It is a file next to the table's key snapshot. Only a reference to it crosses Spark, so that a diff in which every row
# changed needs no more memory than one without changes.


@dataclass(frozen=True)
class DiffResultSplit(Split):
    """Changes of one table in a file; no file means no changes."""

    table: TableSchema | None = None
    file: str | None = None

    def read(self) -> Iterator[Changes]:
        """The changes in the order in which they were found. Needs no connection, and can be read repeatedly."""
        if self.file is None:
            return
        assert self.table is not None
        with pa.memory_map(self.file) as mapped, pa.ipc.open_stream(mapped) as batches:
            for batch in batches:
                yield Changes(self.table, batch)


def write_diff_result(path: Path, table: TableSchema, found: Iterator[Changes]) -> DiffResultSplit:
    """Write changes to a file as they arrive; without changes no file is created."""
    name, size = str(table.table), 0
    with ExitStack() as opened:
        writer: pa.RecordBatchStreamWriter | None = None
        for changes in found:
            if writer is None:
                file = opened.enter_context(creating(path))
                writer = opened.enter_context(pa.ipc.new_stream(file, changes_type(table.row_type)))
            writer.write_batch(changes.batch)
            size += changes.batch.nbytes
    return DiffResultSplit(weights={name: size}, schemas={name: table}, table=table, file=str(path) if size else None)


_ORDINALS = 1 << 40
"""The distance between the first ordinals of two pieces of one diff."""


@dataclass(frozen=True)
class DiffSplit(Split):
    """One piece of a diff; each writes its result as part of the new base.

    since     the step whose base, together with the polls after it, is the known state
    window    the step whose rows the next poll will see again
    number    which of the diff's pieces it is
    """

    task: Task | None = None
    since: int = 0
    window: int = 0
    number: int = 0


@dataclass(frozen=True)
class StretchSplit(DiffSplit):
    """Compares a stretch of keys with the part of the base that covers it."""

    base: Base | None = None


@dataclass(frozen=True)
class NewcomerSplit(DiffSplit):
    """Keys that polls emitted since the last diff and that no file of its base holds: one of `shares` equal parts."""

    files: tuple[str, ...] = ()
    share: int = 0
    shares: int = 1


@dataclass(frozen=True)
class DiffScan(ScanSplit):
    """A piece large enough for a task of its own."""

    piece: DiffSplit | None = None

    def run(self, read: Callable[[Split], Iterator[Changes]]) -> Split:
        assert self.piece is not None
        task = self.piece.task
        assert task is not None
        try:
            return write_diff_result(task.known.new_diff_result(task.step), task.table.schema, read(self.piece))
        except TableError as error:
            return RefusedSplit(weights=self.weights, schemas=self.schemas, error=error)


_Found = Iterator[tuple[Op, pa.StructArray, "pa.Array[pa.Scalar[str]] | None"]]


def read_diff(session: ConnectorSession, split: DiffSplit) -> Iterator[Changes]:
    """The deletes and changes of one piece, in its own range of ordinals."""
    assert split.task is not None
    table = split.task.table.schema.table
    try:
        yield from _read_diff(session, split, split.task)
    except DamagedError as error:
        raise TableError(error.message, table=str(table), fix=f"tailrace resync FILE {table}") from error


def _read_diff(session: ConnectorSession, split: DiffSplit, task: Task) -> Iterator[Changes]:
    polled = task.known.polled(split.since, task.step - 1)
    if isinstance(split, NewcomerSplit):
        found = _compare_newcomers(session, task, split, polled)
    else:
        assert isinstance(split, StretchSplit)
        assert split.base is not None
        found = _compare_stretch(session, task, split.base, _since(polled, split.since))
    first = ordinal = split.number * _ORDINALS
    for op, rows, exact in found:
        if len(rows):
            numbers = np.arange(ordinal, ordinal + len(rows), dtype=np.int64)
            yield Changes.build(task.table.schema, rows, op=op, commit=task.step, ordinal=numbers, exact=exact)
            ordinal += len(rows)
    if ordinal > first:
        # A row that has changed back must not be taken for an unchanged row.
        task.known.put_window(task.step, np.zeros(0, np.int64))
    elif split.number == 0:
        task.known.put_window(task.step, task.known.window(split.window))


def _compare_newcomers(session: ConnectorSession, task: Task, split: NewcomerSplit, polled: pa.Table | None) -> _Found:
    """Keys that were added and deleted since. Keys in the base are compared with their stretch."""
    if polled is None:
        return
    there = polled.filter(pc.invert(polled.column(GONE))).select(list(_key_names(task)))
    if split.shares > 1:
        share = row_digests([each.combine_chunks() for each in there.columns]).view(np.uint64) % np.uint64(split.shares)
        there = there.filter(pa.array(share == split.share))
    for file in split.files:
        if there.num_rows:
            base = _comparable(task, read_keys(file, _key_names(task)))
            there = there.filter(pa.array(keys.positions(_comparable(task, there), base) < 0))
    left = [
        pa.Table.from_batches([pa.RecordBatch.from_struct_array(page.rows)])
        for page in session.fetch(task.table, there, task.key_columns)
    ]
    missing = np.ones(there.num_rows, bool)
    if left:
        missing = keys.positions(_comparable(task, there), _comparable(task, pa.concat_tables(left))) < 0
    gone = _only_keys(task, there.filter(pa.array(missing)))
    kept = task.keys_of(_only_keys(task, there.filter(pa.array(~missing))))
    # If a deleted key comes back before its stretch is read, the base will hold it, so its delete must be recorded. If
    # an existing key is deleted before that, no base will hold it, so it must be recorded as emitted. Write the file
    # even when it is empty: then what a repeat finds counts as not emitted.
    notes = [record(task.keys_of(gone), None, task.step), record(kept, np.zeros(len(kept), np.int64), task.step)]
    task.known.put_polled(task.step, pa.concat_tables(notes), f"{split.share}of{split.shares}")
    yield Op.DELETE, gone, None


@dataclass(frozen=True)
class _Since:
    """What is known of keys apart from their base: the last hash emitted, null where the row may not exist.

    `gone` holds the keys that certainly do not exist.
    """

    rows: pa.Table
    gone: pa.Table


def _since(polled: pa.Table | None, since: int) -> _Since | None:
    if polled is None:
        return None
    noted = pc.equal(polled.column(STEP), since)
    # Its stretch was compared in the same diff, so the base holds what was emitted. For a row that was gone it is
    # unknown whether its stretch emitted it again.
    there = pc.and_(noted, pc.is_valid(polled.column(HASH)))
    gone = pc.and_not(polled.column(GONE), noted)
    return _Since(polled.filter(pc.invert(there)), polled.filter(gone))


def _compare_stretch(session: ConnectorSession, task: Task, base: Base, since: _Since | None) -> _Found:
    """Compare the current rows of one stretch with its base and with what was polled since."""
    now, cuts = _read_stretch(session, task, base)
    known = base.read()
    current, before = _comparable(task, now), _comparable(task, known)
    at = keys.positions(current, before)
    differs = (at < 0) | ~_equal(now, known, at)
    missing = keys.positions(before, current) < 0
    if since is not None and since.rows.num_rows:
        at = keys.positions(current, _comparable(task, since.rows))
        differs = np.where(at < 0, differs, ~_equal(now, since.rows, at))
        missing &= keys.positions(before, _comparable(task, since.gone)) < 0
    yield Op.DELETE, _only_keys(task, known.filter(pa.array(missing))), None
    wanted = now.filter(pa.array(differs)).select(list(_key_names(task)))
    for page in session.fetch(task.table, wanted, task.table.schema):
        yield Op.UPDATE, page.rows, page.exact
    task.known.put_base(task.step, base.stretch, now, cuts)


def _read_stretch(session: ConnectorSession, task: Task, base: Base) -> tuple[pa.Table, list[Keyset]]:
    """Keys and hashes of the stretch, and the marks at which the next diff may cut it."""
    tables: list[pa.Table] = []
    cuts: list[Keyset] = []
    rows_in_part = 0
    query = Query(task.table, None, base.stretch, task.key_columns, task.page_rows, hashed=True)
    last: Keyset | None = None
    for page in pages(session, query):
        if rows_in_part >= task.chunk_rows and last is not None:
            cuts.append(last)
            rows_in_part = 0
        rows = record(page.rows, page.hashes, 0)
        tables.append(rows.append_column(PART, pa.array(np.full(len(page), len(cuts), np.int32))))
        rows_in_part += len(page)
        last = page.last
    tables.append(task.no_keys().append_column(PART, pa.array([], pa.int32())))
    return pa.concat_tables(tables), cuts


def _equal(now: pa.Table, known: pa.Table, at: keys.Numbers) -> npt.NDArray[np.bool_]:
    """Whether each row's hash equals the known one at its position; False where none is known."""
    if not known.num_rows:
        return np.zeros(now.num_rows, bool)
    taken = known.column(HASH).combine_chunks().take(pa.array(np.maximum(at, 0)))
    same = pc.fill_null(pc.equal(now.column(HASH).combine_chunks(), taken), False)
    return np.asarray(same.to_numpy(zero_copy_only=False), bool) & (at >= 0)


def _key_names(task: Task) -> tuple[str, ...]:
    return tuple(column.name for column in task.key_columns.columns)


def _comparable(task: Task, rows: pa.Table) -> keys.Comparable:
    return keys.comparable([rows.column(name) for name in _key_names(task)])


def _only_keys(task: Task, rows: pa.Table) -> pa.StructArray:
    """Rows with only the key columns set."""
    names = _key_names(task)
    arrays = [
        rows.column(column.name).combine_chunks().cast(column.type)
        if column.name in names
        else pa.nulls(rows.num_rows, column.type)
        for column in task.table.schema.columns
    ]
    flat = [pa.concat_arrays(each.chunks) if isinstance(each, pa.ChunkedArray) else each for each in arrays]
    return pa.StructArray.from_arrays(flat, fields=list(task.table.schema.row_type))
