"""One table's part of a batch, in one transaction of the replica's database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import pyarrow as pa

from tailrace.destination import Refetch, Stage, TableBatch, Written, chunking
from tailrace.destination.copy import early_changes_error, require_unknown
from tailrace.destination.metadata import now
from tailrace.destination.replica.bookkeeping import Bookkeeping
from tailrace.destination.replica.plan import ColumnRules
from tailrace.errors import OwnedError
from tailrace.model.change import Changes
from tailrace.model.collapse import Collapsed, collapse
from tailrace.model.schema import TableName, TableSchema


class ReplicaTable(Protocol):
    """The one table that a batch writes to, inside its transaction."""

    @property
    def kept(self) -> TableSchema:
        """The columns it has, dropped ones included."""
        ...

    def append(self, chunks: Iterable[Changes], now: pa.TimestampScalar) -> int:
        """Write whole rows in order, copied rows or those of a log. Returns how many."""
        ...

    def merge(self, collapsed: Collapsed, now: pa.TimestampScalar, refetch: Refetch | None) -> Written:
        """Apply the last change of each key."""
        ...


class Replica(ABC):
    """An open connection to a replica. A shadow is the table of a copy that will replace a table with rows."""

    place: str
    book: Bookkeeping
    rules: ColumnRules
    keeps_deleted: bool
    stage: Stage | None

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]:
        """Commit all of the block or nothing. No other runner commits meanwhile."""

    @abstractmethod
    def create(self, table: TableSchema, *, shadow: bool) -> ReplicaTable:
        """Create a table or a shadow."""

    @abstractmethod
    def evolve(self, now: TableSchema, table: TableSchema, *, shadow: bool) -> ReplicaTable:
        """Evolve a table or shadow from the columns `now`. Raises SchemaChangedError where that is impossible."""

    @abstractmethod
    def drop_shadow(self, table: TableName) -> None:
        """Drop what an earlier copy left. A repeat does nothing."""

    @abstractmethod
    def succeed(self, table: TableName) -> None:
        """Let the shadow replace the table."""

    @abstractmethod
    def has_rows(self, table: TableName) -> bool:
        """Whether the table holds a row."""


def write(replica: Replica, batch: TableBatch) -> Written:
    """Make the batch visible in one transaction. A batch that the table holds already changes nothing.

    Rows copied into a table that already holds rows go into a shadow, which replaces it in the batch that completes the
    copy. Nothing is committed when there is nothing to write and the table already has the columns of `batch.table`.
    Raises OwnedError when another runner of the pipeline committed meanwhile, TableError when this table cannot go on.
    """
    table, book = batch.table, replica.book
    batch = replace(batch, stage=replica.stage or batch.stage)
    last = book.last_batch(batch.pipeline, table.table)
    if batch.is_repeat(last):
        _discard(batch)
        return Written(repeated=True, last=last)
    pieces = chunking.parts(
        batch.log,
        table,
        chunking.PART_BYTES,
        row_bytes=lambda: chunking.ROW_BYTES,
        keep_deleted=replica.keeps_deleted,
    )
    # Read and collapsed before the lock is taken; other lanes write meanwhile.
    first = [_work(replica, part.chunks, table) for _, part in zip(range(1), pieces, strict=False)]
    if not (batch.copies or first) and not _evolves(replica, table):
        return Written(last=last)
    with replica.transaction():
        if book.last_batch(batch.pipeline, table.table) != last:
            raise OwnedError(
                f"another runner of {batch.pipeline} wrote batch {batch.id} or a later one meanwhile",
                table=str(table.table),
                fix="stop one of the two runners; `tailrace status` names them",
            )
        target, is_shadow = _target(replica, batch)
        if is_shadow and first and not batch.completes_copy:
            raise early_changes_error(table.table)
        at = now()
        written = Written(upserts=target.append(batch.copied(), at))
        while first:
            written += _apply(target, first.pop(), at, batch.refetch)
        for part in pieces:
            written += _apply(target, _work(replica, part.chunks, table), at, batch.refetch)
        if is_shadow and batch.completes_copy:
            replica.succeed(table.table)
            book.forget_copy(table.table)
            is_shadow = False
        if is_shadow:
            book.put_copy(batch.pipeline, target.kept)
        else:
            book.put_kept(target.kept)
        book.put_batch(batch.batch, table.table)
    _discard(batch)
    return replace(written, last=batch.batch.last)


def _discard(batch: TableBatch) -> None:
    if batch.stage is not None:
        batch.stage.discard(batch.staged)


def _evolves(replica: Replica, table: TableSchema) -> bool:
    now = replica.book.kept(table.table)
    return now is not None and replica.rules.plan(now, table).changes(now)


def _target(replica: Replica, batch: TableBatch) -> tuple[ReplicaTable, bool]:
    """The table that the batch writes to, with its columns in order, and whether it is to replace another table."""
    table = batch.table
    now = replica.book.kept(table.table)
    copy = replica.book.copy(table.table)
    if batch.begins_copy:
        replica.drop_shadow(table.table)
        replica.book.forget_copy(table.table)
        if now is None:
            return replica.create(table, shadow=False), False
        shadow = replica.create(table, shadow=True)
        if replica.has_rows(table.table):
            return shadow, True
        replica.succeed(table.table)
        return replica.evolve(shadow.kept, table, shadow=False), False
    if copy is not None and copy.pipeline == batch.pipeline and batch.copies:
        return replica.evolve(copy.kept, table, shadow=True), True
    if now is None:
        require_unknown(batch, replica.place)
        return replica.create(table, shadow=False), False
    return replica.evolve(now, table, shadow=False), False


def _work(replica: Replica, part: list[Changes], table: TableSchema) -> Collapsed | list[Changes]:
    return collapse(part, table, keep_deleted=replica.keeps_deleted) if table.key else part


def _apply(
    target: ReplicaTable, work: Collapsed | list[Changes], now: pa.TimestampScalar, refetch: Refetch | None
) -> Written:
    if isinstance(work, Collapsed):
        return target.merge(work, now, refetch)
    count = target.append(work, now)
    return Written(count, count)
