"""`SqliteDestination`: staging copied rows, and one transaction for every table and batch."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import pyarrow as pa

from tailrace.destination import (
    CopyMode,
    Destination,
    Refetch,
    Stage,
    Staged,
    TableBatch,
    Written,
    chunking,
)
from tailrace.destination.copy import early_changes_error, require_unknown
from tailrace.destination.metadata import now
from tailrace.destination.preflight import as_errors
from tailrace.destination.sqlite import bookkeeping, preflight
from tailrace.destination.sqlite.bookkeeping import SHADOW
from tailrace.destination.sqlite.column import SqliteLayout
from tailrace.destination.sqlite.evolution import plan, succeed
from tailrace.destination.sqlite.merge import append, merge
from tailrace.destination.sqlite.name import file_name, quote
from tailrace.destination.sqlite.option import SqliteDestinationOptions
from tailrace.destination.sqlite.reader import read_rows
from tailrace.destination.sqlite.replica_file import opened, reaching, transaction
from tailrace.destination.sqlite.table import SqliteTarget, has_rows
from tailrace.errors import Finding, OwnedError
from tailrace.model.change import Changes
from tailrace.model.collapse import Collapsed, collapse
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.table_rows import TableRows
from tailrace.system import failpoint

LARGE_WAL_BYTES = 64 << 20
"""From this size on, the write-ahead log is checkpointed and truncated between batches."""


class SqliteDestination(SqliteDestinationOptions, Destination):
    """Keeps each table as a table of one SQLite file; the file is opened inside its methods.

    `deletes: soft` keeps deleted rows with `_tailrace_deleted_at` set, until the key is inserted again.
    A table without a key is a log: every change is a row, in order, with its operation and position.
    A value that its column cannot hold stands as text in `_tailrace_exact`; that column comes with the first such
    value.
    """

    type: Literal["sqlite"] = "sqlite"
    copy_mode: ClassVar[CopyMode] = "own"

    @property
    def name(self) -> str:
        return f"sqlite {self.path}"

    def shared_folders(self) -> dict[str, Path]:
        return {"destination.path (SQLite)": self.path.parent}

    @property
    def stage(self) -> Stage:
        """The folder of staged rows is next to the file, on the disk they will be written to."""
        return Stage(self.path.with_name(f"{self.path.name}-staged"))

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Check whether these tables can be kept here. Creates nothing."""
        return preflight.check(self.path, tables or ())

    def check_columns(self, table: TableSchema) -> list[Finding]:
        return as_errors(table, preflight.unkept_columns(table))

    def write_rows(self, table: TableSchema, rows: Iterable[Changes], stage: Stage | None = None) -> Staged:
        """Store copied rows next to the file, in this destination's own stage. Each call writes a file of its own."""
        with reaching(self.path, str(table.table)):
            staged = self.stage.write(table, rows)
        failpoint.reach("sqlite.staged")
        return staged

    def write_changes(self, batch: TableBatch) -> Written:
        """Make the batch visible in one transaction. A batch that the table holds already changes nothing.

        Rows copied into a table that already holds rows go into a shadow table, which replaces it in the batch that
        completes the copy. Nothing is committed when there is nothing to write and the table already has the columns
        of `batch.table`. Raises OwnedError when another runner of the pipeline committed meanwhile, UnavailableError
        when the file stays locked or cannot be written, TableError when this table cannot go on.
        """
        table, layout = batch.table, self._layout(batch.table)
        with reaching(self.path, str(table.table)), opened(self.path, self.lock_timeout) as connection:
            last = bookkeeping.last_batch(connection, batch.pipeline, table.table)
            if batch.is_repeat(last):
                self.stage.discard(batch.staged)
                return Written(repeated=True, last=last)
            pieces = chunking.parts(
                batch.log,
                table,
                chunking.PART_BYTES,
                row_bytes=lambda: chunking.ROW_BYTES,
                keep_deleted=self.deletes == "soft",
            )
            # Read and collapsed before the lock is taken; other lanes write meanwhile.
            first = [self._work(part.chunks, table) for _, part in zip(range(1), pieces, strict=False)]
            if not (batch.copies or first) and not _evolves(connection, layout):
                return Written(last=last)
            with transaction(connection):
                if bookkeeping.last_batch(connection, batch.pipeline, table.table) != last:
                    raise OwnedError(
                        f"another runner of {batch.pipeline} wrote batch {batch.id} or a later one meanwhile",
                        table=str(table.table),
                        fix="stop one of the two runners; `tailrace status` names them",
                    )
                target, is_shadow = _target(self.path, connection, layout, batch)
                if is_shadow and first and not batch.completes_copy:
                    raise early_changes_error(table.table)
                at = now()
                written = Written(upserts=append(target, self.stage.read(batch.staged), at))
                while first:
                    written += _apply(target, first.pop(), at, batch.refetch)
                for part in pieces:
                    written += _apply(target, self._work(part.chunks, table), at, batch.refetch)
                if is_shadow and batch.completes_copy:
                    succeed(connection, target.name, file_name(table.table))
                    bookkeeping.forget_copy(connection, table.table)
                    is_shadow = False
                if is_shadow:
                    bookkeeping.put_copy(connection, batch.pipeline, target.kept)
                else:
                    bookkeeping.put_kept(connection, target.kept)
                bookkeeping.put_batch(connection, batch.batch, table.table)
            self.stage.discard(batch.staged)
            return replace(written, last=batch.batch.last)

    def last_batch(self, table: TableName, pipeline: str) -> LastBatch | None:
        with reaching(self.path, str(table)):
            if not self.path.exists():
                return None
            with opened(self.path, self.lock_timeout) as connection:
                # The table itself may have been dropped from the file.
                known = bookkeeping.kept(connection, table)
                return bookkeeping.last_batch(connection, pipeline, table) if known is not None else None

    def read_table(self, table: TableSchema) -> TableRows:
        return read_rows(self.path, table)

    def maintain(self, table: TableName) -> str | None:
        """Truncate a write-ahead log that has grown large, and delete staged files that no batch will name."""
        return self._maintain(table, LARGE_WAL_BYTES)

    def maintain_now(self, table: TableName) -> str | None:
        """The same for a write-ahead log of any size."""
        return self._maintain(table, 1)

    def _maintain(self, table: TableName, wal_bytes: int) -> str | None:
        wal = self.path.with_name(f"{self.path.name}-wal")
        done: list[str] = []
        with reaching(self.path, str(table)):
            if gone := self.stage.discard_abandoned():
                done.append(f"deleted {gone} abandoned files")
            if wal.exists() and (size := wal.stat().st_size) >= wal_bytes:
                with opened(self.path, self.lock_timeout) as connection:
                    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if not busy:
                    done.append(f"cut a write-ahead log of {size >> 20} MiB")
        return "; ".join(done) or None

    def _layout(self, table: TableSchema) -> SqliteLayout:
        return SqliteLayout(table, self.metadata, self.deletes == "soft")

    def _work(self, part: list[Changes], table: TableSchema) -> Collapsed | list[Changes]:
        return collapse(part, table, keep_deleted=self.deletes == "soft") if table.key else part


def _evolves(connection: sqlite3.Connection, layout: SqliteLayout) -> bool:
    now = bookkeeping.kept(connection, layout.table.table)
    return now is not None and plan(now, layout.table).changes(now)


def _target(
    file: Path, connection: sqlite3.Connection, layout: SqliteLayout, batch: TableBatch
) -> tuple[SqliteTarget, bool]:
    """The table that the batch writes to, with its columns in order, and whether it is to replace another table."""
    table = layout.table.table
    name = file_name(table)
    now = bookkeeping.kept(connection, table)
    copy = bookkeeping.copy(connection, table)
    if batch.begins_copy:
        connection.execute(f"DROP TABLE IF EXISTS {quote(SHADOW + name)}")
        bookkeeping.forget_copy(connection, table)
        if now is None:
            return SqliteTarget.created(connection, name, layout), False
        shadow = SqliteTarget.created(connection, SHADOW + name, layout)
        if has_rows(connection, name):
            return shadow, True
        succeed(connection, SHADOW + name, name)
        shadow.name = name
        return shadow, False
    if copy is not None and copy.pipeline == batch.pipeline and batch.copies:
        return SqliteTarget.evolved(connection, SHADOW + name, copy.kept, layout), True
    if now is None:
        require_unknown(batch, str(file))
        return SqliteTarget.created(connection, name, layout), False
    return SqliteTarget.evolved(connection, name, now, layout), False


def _apply(
    target: SqliteTarget, work: Collapsed | list[Changes], now: pa.TimestampScalar, refetch: Refetch | None
) -> Written:
    if isinstance(work, Collapsed):
        return merge(target, work, now, refetch)
    count = append(target, work, now)
    return Written(count, count)
