"""Pieces of a step and how executors read them: changed rows, and chunks of a copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import TableError
from tailrace.model.change import Changes, Op
from tailrace.model.schema import TableSchema
from tailrace.source.poll.connector import ConnectorSession, Page, Polled, Query
from tailrace.source.poll.key_snapshot import PART, Hashes, KeySnapshot, record
from tailrace.source.poll.keyset import Stretch
from tailrace.source.poll.offset import StepRead
from tailrace.source.poll.version_column import VersionKind, kind_of
from tailrace.source.split import Split


@dataclass(frozen=True)
class Task:
    """What every piece of a step knows of its table.

    records     whether all keys are recorded, for full diffs
    """

    table: Polled
    step: int
    folder: str
    page_rows: int
    chunk_rows: int
    records: bool

    @property
    def known(self) -> KeySnapshot:
        return KeySnapshot.of(self.folder, self.table.schema.upstream_id)

    @property
    def key_columns(self) -> TableSchema:
        return self.table.only(self.table.schema.key)

    def keys_of(self, rows: pa.StructArray) -> pa.StructArray:
        """The key columns of whole rows."""
        columns = self.key_columns
        arrays = [rows.field(column.name) for column in columns.columns]
        return pa.StructArray.from_arrays(arrays, fields=list(columns.row_type))

    def no_keys(self) -> pa.Table:
        """The result of `record` for no rows."""
        return record(pa.array([], self.key_columns.row_type), np.zeros(0, np.int64), 0)


@dataclass(frozen=True)
class PollSplit(Split):
    """The changed rows of one table."""

    task: Task | None = None
    reading: StepRead | None = None


@dataclass(frozen=True)
class ChunkSplit(Split):
    """A chunk of a copy; `base` is the step under which its keys are recorded."""

    task: Task | None = None
    stretch: Stretch = field(default_factory=Stretch)
    base: int = 0


@dataclass(frozen=True)
class RefusedSplit(Split):
    """A table that cannot continue, and why."""

    error: TableError | None = None


def pages(session: ConnectorSession, query: Query) -> Iterator[Page]:
    """The rows of a query's stretch, page by page; each begins after the last row of the previous one."""
    while True:
        page = session.select(query)
        if len(page):
            yield page
        if len(page) < query.rows:
            return
        assert page.last is not None
        query = replace(query, stretch=query.stretch._replace(after=page.last))


def read_changes(session: ConnectorSession, split: PollSplit) -> Iterator[Changes]:
    """The rows that a poll found, each with its operation. What was emitted is recorded at the end."""
    task, reading = split.task, split.reading
    assert task is not None
    assert reading is not None
    schema, known = task.table.schema, task.known
    seen = known.window(reading.window)
    window: list[Hashes] = []
    given: list[pa.Table] = []
    ordinal = 0
    for by, sweep, deleted in ((task.table.version, reading.sweep, False), (task.table.soft, reading.soft, True)):
        if sweep is None:
            continue
        for stretch, again in (
            (Stretch(sweep.after, sweep.settled), False),
            (Stretch(sweep.settled, sweep.upto), True),
        ):
            if stretch.after == stretch.upto:
                continue
            hashed = again or task.records or len(seen) > 0
            query = Query(task.table, by, stretch, schema, task.page_rows, deleted, hashed)
            for page in pages(session, query):
                fresh = (
                    np.ones(len(page), bool) if not len(seen) or page.hashes is None else ~np.isin(page.hashes, seen)
                )
                if again and page.hashes is not None:
                    window.append(page.hashes)
                if task.records:
                    given.append(record(task.keys_of(page.rows), None if deleted else page.hashes, task.step))
                op = np.full(len(page), Op.DELETE, np.int8) if deleted else _operations(task.table, page.rows)
                changes = Changes.build(
                    schema,
                    page.rows,
                    op=op,
                    commit=task.step,
                    ordinal=np.arange(ordinal, ordinal + len(page), dtype=np.int64),
                    committed_at=_moments(schema, by, page.rows),
                    exact=page.exact,
                )
                ordinal += len(page)
                if fresh.all():
                    yield changes
                elif fresh.any():
                    yield Changes(schema, changes.batch.filter(pa.array(fresh)))
    # Even if it is empty: then additional rows of a repeat count as not emitted.
    known.put_window(task.step, np.concatenate([np.zeros(0, np.int64), *window]))
    if task.records:
        known.put_polled(task.step, pa.concat_tables([*given, task.no_keys()]))


def _operations(table: Polled, rows: pa.StructArray) -> npt.NDArray[np.int8]:
    """A row that was created when it was last updated is an insert. Without `created_at` every row may be one."""
    if not table.tells_inserts:
        return np.full(len(rows), Op.UPDATE, np.int8)
    assert table.created is not None
    assert table.version is not None
    same = pc.fill_null(pc.equal(rows.field(table.created), rows.field(table.version)), False)
    return np.where(same.to_numpy(zero_copy_only=False), Op.INSERT, Op.UPDATE).astype(np.int8)


def _moments(table: TableSchema, by: str | None, rows: pa.StructArray) -> pa.Array[Any] | None:
    """The time of each change, if it was found by a time column."""
    if by is None or kind_of(table.column(by)) is not VersionKind.INSTANT:
        return None
    return rows.field(by).cast(pa.timestamp("us", "UTC"))


def read_chunk(session: ConnectorSession, split: ChunkSplit) -> Iterator[Changes]:
    """The rows of one chunk of a copy."""
    task = split.task
    assert task is not None
    given: list[pa.Table] = []
    query = Query(task.table, None, split.stretch, task.table.schema, task.page_rows, hashed=task.records)
    for page in pages(session, query):
        if task.records:
            given.append(record(task.keys_of(page.rows), page.hashes, 0))
        yield Changes.build(task.table.schema, page.rows, op=Op.READ, commit=task.step, exact=page.exact)
    if task.records:
        rows = pa.concat_tables([*given, task.no_keys()])
        parts = pa.array(np.zeros(rows.num_rows, np.int32))
        task.known.put_base(split.base, split.stretch, rows.append_column(PART, parts))
