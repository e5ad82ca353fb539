"""The interface of destinations: one method, `write_changes`.

A destination is configuration only: a frozen model whose fields are the keys of `destination:` in the pipeline's file.
It is pickled to the tasks that write; handles open inside methods. Two promises make effects happen once: a write is
durable when it returns, and the same batch written again changes nothing: `TableBatch.is_repeat` recognises it by the
`mark` that the destination stored with the rows.

    class MyDestination(Destination):
        type: Literal["mine"] = "mine"
        path: str

        def write_changes(self, batch: TableBatch) -> Written: ...

`tailrace.testing.destination` has the tests that every destination must pass.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import pyarrow as pa

from tailrace.destination import chunking
from tailrace.destination.evolution import plan_columns
from tailrace.destination.metadata import metadata_values, now, row_schema
from tailrace.destination.partial_row import Lookup, Refetch, complete, look_up
from tailrace.destination.staging import Stage, Staged
from tailrace.errors import Finding, LostError, MismatchError, UnfitError
from tailrace.model.change import Changes, Position
from tailrace.model.collapse import Marks, any_exact, collapse, fit
from tailrace.model.delivery_status import DeliveryStatus
from tailrace.model.last_batch import LastBatch, MismatchedBatch, is_repeat
from tailrace.model.schema import TableName, TableSchema
from tailrace.option.value import TypedOptions

CopyMode = Literal["whole", "stream", "own"]


Mark = LastBatch | str | int | None
"""What a destination says of the last batch that it holds: the batch itself, the text of its mark, or its number."""


@dataclass(frozen=True)
class Batch:
    """A micro-batch. (`pipeline`, `mark`) is stored in the same commit as the data and makes a repeat a no-op.

    `end` identifies the offset at which it ends. `known` is the last batch that the destination as a whole holds
    according to the state; None: not known.
    """

    pipeline: str
    id: int
    end: int | None = None
    known: LastBatch | None = None

    @property
    def mark(self) -> str:
        """Its number and the offset at which it ends, as a short text: what a destination stores to know it again."""
        return str(self.last)

    @property
    def last(self) -> LastBatch:
        """What a destination that has written this batch holds."""
        return LastBatch(self.id, self.end)

    def is_repeat(self, last: Mark) -> bool:
        """Whether this batch was written already. `last` is the last batch of its pipeline that was; None: none was.

        Raises LostError when that is neither this batch nor the one before it, according to the state.
        """
        try:
            return is_repeat(self.last, last_of(last), self.known)
        except MismatchedBatch as found:
            raise self.mismatch(found) from None

    def mismatch(self, found: MismatchedBatch) -> LostError:
        """The error for a destination that does not fit the state as a whole."""
        again = "start again: tailrace reset FILE, then tailrace run FILE"
        return LostError(f"the destination does not fit the state: {found.reason}", fix=f"{found.fix}, or {again}")


def last_of(mark: Mark) -> LastBatch | None:
    if isinstance(mark, str):
        return LastBatch.parse(mark)
    return LastBatch(mark) if isinstance(mark, int) else mark


def table_mismatch(found: MismatchedBatch, table: TableName) -> MismatchError:
    """The error for a table that does not fit the state."""
    again = f"copy the table again: tailrace resync FILE {table}"
    return MismatchError(
        f"the table at the destination does not fit the state: {found.reason}",
        table=str(table),
        fix=f"{again}; or {found.fix}, then tailrace retry FILE {table}",
    )


@dataclass(frozen=True)
class Written:
    """What one write did. `repeated`: the batch was written earlier, and this call changed nothing.

    `last` is the last batch that the table holds now. None: this batch if it brought changes or was repeated, else this
    one or the one before it.
    """

    changes: int = 0
    upserts: int = 0
    deletes: int = 0
    repeated: bool = False
    last: LastBatch | None = None

    def __add__(self, other: Written) -> Written:
        return Written(
            self.changes + other.changes,
            self.upserts + other.upserts,
            self.deletes + other.deletes,
            self.repeated or other.repeated,
            other.last or self.last,
        )

    def __bool__(self) -> bool:
        """Whether something was written."""
        return bool(self.changes or self.upserts or self.deletes)


@dataclass(frozen=True)
class RowPart:
    """Complete rows, each key once. Parts are applied in their order: clear the table, delete keys, insert rows.

    clear      delete every row of the table
    deletes    the keys of deleted rows (key columns only); disjoint from those of `upserts`
    upserts    rows with the columns of `TableBatch.row_schema`, in place of those that have their keys
    """

    clear: bool
    deletes: pa.Table
    upserts: pa.Table
    changes: int

    @property
    def keys(self) -> pa.Table:
        """The keys of deletes and upserts: rows with one of these keys are deleted before the upserts are inserted."""
        return pa.concat_tables([self.deletes, self.upserts.select(self.deletes.column_names)])

    @property
    def written(self) -> Written:
        return Written(self.changes, self.upserts.num_rows, self.deletes.num_rows)


@dataclass(frozen=True)
class TableBatch:
    """Everything that one batch holds for one table.

    table            the version the table has after the batch, also when no change came with it: the destination
                     evolves to it in the same commit
    batch            stored in the same commit as the data
    log              changes, of this version or older ones; can be read once
    staged           copied rows, which come before the log
    begins_copy      the first batch of a copy
    completes_copy   the last batch of a copy
    replaces         this commit deletes all earlier rows (only with `copy_mode = "whole"`)
    is_known         earlier batches wrote rows of this table: if it is missing at the destination, its rows are lost,
                     and a batch that created it again would hide that
    known            the last batch that the table holds according to the state; None: not known
    log_bytes        the size of the changes in the log, as far as it is known
    refetch          asks the upstream for rows as they are now
    stage            where copied rows are staged, unless the destination stages them by itself
    """

    table: TableSchema
    batch: Batch
    log: Iterable[Changes] = ()
    staged: Sequence[Staged] = ()
    begins_copy: bool = False
    completes_copy: bool = False
    replaces: bool = False
    is_known: bool = False
    log_bytes: int = 0
    refetch: Refetch | None = None
    stage: Stage | None = None
    known: LastBatch | None = None
    found: list[LastBatch | None] = field(default_factory=list, repr=False, compare=False)
    """What `is_repeat` was asked about."""

    @property
    def id(self) -> int:
        return self.batch.id

    @property
    def pipeline(self) -> str:
        """The name of the pipeline and its epoch: after a reset, a pipeline counts its batches from 0 again."""
        return self.batch.pipeline

    @property
    def mark(self) -> str:
        """What a destination stores, in the same commit as the rows, to know the batch again."""
        return self.batch.mark

    @property
    def copies(self) -> bool:
        """Whether it is a batch of a copy."""
        return self.begins_copy or self.completes_copy or bool(self.staged)

    def is_repeat(self, last: Mark) -> bool:
        """Whether the table holds this batch already. `last` is the last batch of the pipeline that it holds.

        Raises MismatchError when that is neither this batch nor the one that the state knows: the table or the state
        was restored from an earlier copy. A batch that replaces all rows is written all the same.
        """
        self.found.append(last_of(last))
        try:
            return is_repeat(self.batch.last, self.found[-1], self.known, replaces=self.begins_copy or self.replaces)
        except MismatchedBatch as found:
            raise table_mismatch(found, self.table.table) from None

    def held_after(self, written: Written) -> LastBatch:
        """The last batch that the table holds after this one was written, as far as that is known."""
        if written.last is not None:
            return written.last
        if written or written.repeated:
            return self.batch.last
        before = self.found[-1] if self.found else self.known
        return replace(self.batch.last, least=before.id if before is not None else -1)

    @cached_property
    def row_schema(self) -> pa.Schema:
        """The columns of the rows in `parts`. Rows of a table without a key are its changes, with their operation."""
        return row_schema(self.table)

    def copied(self) -> Iterator[Changes]:
        """The staged rows, as those of `table`."""
        if self.staged:
            assert self.stage is not None, "rows are staged in a stage"
            for chunk in self.stage.read(self.staged):
                yield fit(chunk, self.table)

    def changes(self) -> Iterator[Changes]:
        """The log, as changes of `table`."""
        for chunk in self.log:
            yield fit(chunk, self.table)

    def parts(self, lookup: Lookup | None = None) -> Iterator[RowPart]:
        """The batch as rows to write, in pieces that fit into memory: staged rows first, then the log.

        Each piece must be written before the next one is asked for. Values that a change left out come from `lookup`,
        else from `refetch`. Raises UnfitError for a value that its column's type cannot hold.
        """
        clear = self.replaces
        for is_log, flow in enumerate((self.copied(), self.changes())):
            for part in chunking.parts(flow, self.table, chunking.PART_BYTES, row_bytes=lambda: chunking.ROW_BYTES):
                if any_exact(part.chunks):
                    raise UnfitError(
                        "a value does not fit the type of its column, and this destination has no other place for it",
                        table=str(self.table.table),
                        fix="cast the column upstream, or let the source leave it out",
                    )
                if self.table.key:
                    yield self._collapsed(part.chunks, is_log, clear, lookup)
                else:
                    rows = pa.concat_tables(map(self._log_rows, part.chunks))
                    yield RowPart(clear, rows.select([])[:0], rows, is_log * rows.num_rows)
                clear = False
        if clear:
            none = self.row_schema.empty_table()
            yield RowPart(True, none.select(list(self.table.key)), none, 0)

    def _collapsed(self, chunks: list[Changes], is_log: int, clear: bool, lookup: Lookup | None) -> RowPart:
        collapsed = collapse(chunks, self.table)
        # This part clears the earlier rows, so no value may be taken from them.
        old, at = look_up(collapsed, None if clear else lookup)
        columns, _, _ = complete(collapsed, old, at, self.refetch)
        rows = pa.table(columns, schema=self.table.arrow)
        return RowPart(clear or collapsed.truncated, collapsed.deletes, rows, is_log * collapsed.changes)

    def _log_rows(self, chunk: Changes) -> pa.Table:
        own = [field.name for field in list(self.row_schema)[len(self.table.columns) :]]
        return pa.table([*chunk.row.flatten(), *metadata_values(own, Marks.of(chunk), now())], schema=self.row_schema)


class Committer:
    """What a destination does on the driver besides writing tables, while the pipeline runs. Nothing, by default."""

    def batch(self, batch: Batch) -> AbstractContextManager[None]:
        """Runs around the writes of one batch. The batch counts once the block ends without an error.

        Entered again for the same batch after a crash. Raises UnavailableError when it cannot accept a batch now.
        """
        return nullcontext()

    def require_fit(self, batch: Batch) -> None:
        """Raise LostError if the destination as a whole holds neither this batch nor `batch.known` last.

        Called before the first batch of a run, with the number of that batch.
        """

    def last_batch(self, pipeline: str) -> LastBatch | None:
        """The last batch of the pipeline that the destination holds as a whole, after a batch; None: not known."""
        return None

    def poll(self) -> None:
        """Supervise what runs next to the pipeline. Called a few times a second; raises what only people can fix."""

    def delivery(self) -> DeliveryStatus | None:
        """How the delivery of what was accepted stands; None for a destination that writes in `write_changes`.

        Called a few times a second.
        """
        return None

    def settled(self, position: Position | None) -> None:
        """Spark has logged a batch: all tables have every change up to this position. None: some have not.

        Called from another thread than `batch`.
        """

    def drain(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """At the end of a run with `--once`, wait until everything accepted is delivered, or until `should_stop`.

        Raises UnavailableError when it does not; nothing is lost then.
        """


class Destination(TypedOptions, ABC):
    """Where tables are written. Its fields are the keys of `destination:`; only `write_changes` is required.

    copy_mode    how the rows of a copy arrive:
                 `whole`: all at once, in the batch that completes the copy; they replace all earlier rows
                 `stream`: batch by batch, after `drop_table_for_copy`
                 `own`: batch by batch; the destination keeps the earlier rows until the copy is complete
    lanes        how many tasks write at the same time; 1 for a destination with one writer; None: as many as there are
    """

    copy_mode: ClassVar[CopyMode] = "whole"
    lanes: ClassVar[int | None] = None

    @property
    def name(self) -> str:
        """Its name in logs and status, e.g. `delta ./lake`. The checkpoint stores it, to notice a new destination."""
        return self.type

    @abstractmethod
    def write_changes(self, batch: TableBatch) -> Written:
        """Make the batch visible in one commit: the staged rows, then the changes in order.

        Called once per table and batch, possibly again for the same batch after a crash: what the table holds already
        (`batch.is_repeat` of the stored `batch.mark`) is left alone. Raises UnavailableError for what a retry may fix,
        TableError when this table cannot go on.
        """

    def write_rows(self, table: TableSchema, rows: Iterable[Changes], stage: Stage) -> Staged:
        """Store copied rows without showing them. Called in the task that reads them, in parallel."""
        return stage.write(table, rows)

    def drop_table_for_copy(self, table: TableSchema) -> None:
        """With `copy_mode = "stream"`: forget a table and its batches before it is copied. A repeat does nothing."""

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Check, without changing anything, whether these tables can be kept there.

        None: the source is not ready, so the tables are not known. Then only the place itself is checked. An error
        that is about one table names it as its `table`: only that table is stopped by it.
        """
        return []

    def check_columns(self, table: TableSchema) -> list[Finding]:
        """The errors about columns that cannot be kept there, each with `table`. Pure and cheap.

        Called before every write to the table: an error stops the table instead.
        """
        return []

    def shared_folders(self) -> Mapping[str, Path]:
        """The local folders that it writes to, by the key of the file that names them. On a cluster every executor must
        see them, which is checked before the first batch."""
        return {}

    def maintain(self, table: TableName) -> str | None:
        """Housekeeping (compaction, vacuum) that is due. Returns what it did, None if nothing was due.

        Called once in some batches, after one of the table. It runs in another thread than the next batches, of this
        table too, and may be killed with its process at any moment; with `--once` a batch waits for it.
        """
        return None

    def committer(self, pipeline: str) -> AbstractContextManager[Committer]:
        """The driver's part, for the pipeline of this name. Entered once, on the driver, before the first batch."""
        return nullcontext(Committer())

    def shutdown(self) -> None:
        """Called once when the pipeline stops."""


@dataclass(frozen=True)
class BeginEvent:
    """A transaction of the upstream begins. `txn` and `committed_at` are None where the source gives none.

    `commit` is the position of its commit in the upstream's log (the LSN, for Postgres), which each of its changes
    carries with its ordinal. A transaction is in two batches when one of its tables was copied meanwhile; it then
    begins and ends in both.
    """

    commit: int
    txn: int | None = None
    committed_at: datetime.datetime | None = None


@dataclass(frozen=True)
class RelationEvent:
    """The changes of a table that come from now on have these columns."""

    table: TableSchema


@dataclass(frozen=True)
class CopyBeginEvent:
    """A copy of a table begins: rows that came before it count no more."""

    table: TableSchema


@dataclass(frozen=True)
class CopyEndEvent:
    """All rows of a table's copy have come."""

    table: TableSchema


@dataclass(frozen=True)
class CommitEvent:
    """A transaction of the upstream ends, as far as it concerns the tables of the pipeline."""

    commit: int


Event = BeginEvent | RelationEvent | Changes | CopyBeginEvent | CopyEndEvent | CommitEvent


class EventDestination(Destination):
    """Takes all tables as one stream, in the order of the upstream's commits: begin, relation, changes, commit.

    Copied rows come first, outside any transaction, after the begins of their copies and before the ends. One task
    writes, and sees each batch as a whole. `takes_events`: false if it is configured to take each table by itself
    instead.
    """

    copy_mode: ClassVar[CopyMode] = "stream"
    lanes: ClassVar[int | None] = 1
    takes_events: ClassVar[bool] = True

    @abstractmethod
    def write_events(self, events: Iterator[Event], batch: Batch) -> Written:
        """Store the events of a batch durably. Called again for the same batch after a crash.

        An error concerns the whole stream: no single table is stopped.
        """

    def write_changes(self, batch: TableBatch) -> Written:
        raise NotImplementedError("an event destination takes the tables of a batch together")


__all__ = [
    "Batch",
    "BeginEvent",
    "CommitEvent",
    "Committer",
    "CopyBeginEvent",
    "CopyEndEvent",
    "CopyMode",
    "Destination",
    "Event",
    "EventDestination",
    "LastBatch",
    "Lookup",
    "Mark",
    "Refetch",
    "RelationEvent",
    "RowPart",
    "Stage",
    "Staged",
    "TableBatch",
    "Written",
    "plan_columns",
]
