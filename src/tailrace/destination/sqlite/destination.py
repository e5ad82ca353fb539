"""`SqliteDestination`: staging copied rows, and one transaction for every table and batch."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from tailrace.destination import Batch, DirectCommitter, Refetch, Staged, Written
from tailrace.destination.part import METADATA, early_changes_error, now, parts, require_unwritten
from tailrace.destination.sqlite import bookkeeping, preflight, stage
from tailrace.destination.sqlite.bookkeeping import SHADOW
from tailrace.destination.sqlite.column import SqliteLayout
from tailrace.destination.sqlite.evolution import plan, succeed
from tailrace.destination.sqlite.merge import append, merge
from tailrace.destination.sqlite.name import file_name, quote
from tailrace.destination.sqlite.reader import read_rows
from tailrace.destination.sqlite.replica_file import opened, reaching, transaction
from tailrace.destination.sqlite.table import SqliteTarget, has_rows
from tailrace.errors import Finding, OwnedError
from tailrace.model.change import Changes
from tailrace.model.collapse import Collapsed, collapse
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.table_rows import TableRows

if TYPE_CHECKING:
    from tailrace.destination.sqlite.option import SqliteDestinationOptions

PART_BYTES = 64 << 20
"""How much of a batch is collapsed and written at a time. Most batches are smaller; a huge transaction is not."""

ROW_BYTES = 8 << 10
"""What a row is taken to hold whose change left values out: upstreams leave out only large ones."""

LARGE_WAL_BYTES = 64 << 20
"""From this size on the write-ahead log is put into the file and cut between batches."""


@dataclass(frozen=True)
class SqliteDestination:
    """Keeps each table as a table of one SQLite file; frozen and picklable, the file is opened inside its methods.

    deletes                `hard` removes deleted rows; `soft` keeps them with `_tailrace_deleted_at` set, until the key
                           is inserted again
    metadata               adds `_tailrace_position`, `_tailrace_op` and `_tailrace_committed_at`, or those named of
                           `position`, `op`, `committed_at`
    lock_timeout_seconds   how long a write waits for another one to end

    A table without a key is a log: every change is a row, in order, with its operation and position.
    A value that its column cannot hold stands as text in `_tailrace_exact`; that column comes with the first such
    value.
    """

    path: str
    deletes: Literal["hard", "soft"] = "hard"
    metadata: bool | Sequence[str] = False
    lock_timeout_seconds: float = 60.0

    @classmethod
    def from_options(cls, options: SqliteDestinationOptions, *, name: str) -> SqliteDestination:
        return cls(str(options.path), options.deletes, options.metadata, float(options.lock_timeout))

    @property
    def name(self) -> str:
        return f"sqlite {self.path}"

    @property
    def _file(self) -> Path:
        return Path(self.path)

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Look whether these tables can be kept here. Creates nothing."""
        return preflight.check(self._file, tables or ())

    def write_rows(self, table: TableSchema, rows: Iterable[Changes]) -> Staged:
        """Store copied rows in a file beside the replica, which the receipt names. Each call writes one of its own."""
        with reaching(self._file, str(table.table)):
            return stage.write(self._file, table, rows)

    def write_changes(
        self,
        table: TableSchema,
        changes: Iterable[Changes],
        batch: Batch,
        *,
        staged: Sequence[Staged] = (),
        starts: bool = False,
        completes: bool = False,
        refetch: Refetch | None = None,
        weight: int = 0,
    ) -> Written:
        """Make the batch visible in one transaction. A batch that is there already is left alone.

        What a batch copies into a table that holds rows goes into a table beside it, which takes its place in the batch
        that completes the copy. Nothing is committed when there is nothing to write and the table has the columns of
        `table` already. Raises OwnedError when another runner of the pipeline committed meanwhile, UnavailableError
        when the file stays locked or cannot be written, TableError when this table cannot go on.
        """
        layout = self._layout(table)
        with reaching(self._file, str(table.table)), opened(self._file, self.lock_timeout_seconds) as connection:
            if bookkeeping.last_batch(connection, batch.pipeline, table.table) >= batch.id:
                stage.discard(self._file, staged)
                return Written(repeated=True)
            pieces = parts(changes, table, PART_BYTES, row_bytes=lambda: ROW_BYTES, keep_deleted=self.deletes == "soft")
            # Read and collapsed before the lock is taken; other lanes write meanwhile.
            first = [self._work(part.chunks, table) for _, part in zip(range(1), pieces, strict=False)]
            if not (starts or completes or staged or first) and not _evolves(connection, layout):
                return Written()
            with transaction(connection):
                if bookkeeping.last_batch(connection, batch.pipeline, table.table) >= batch.id:
                    raise OwnedError(
                        f"another runner of {batch.pipeline} wrote batch {batch.id} or a later one meanwhile",
                        table=str(table.table),
                        fix="stop one of the two runners; `tailrace status` names them",
                    )
                target, is_shadow = _target(self._file, connection, layout, batch, starts, completes or bool(staged))
                if is_shadow and first and not completes:
                    raise early_changes_error(table.table)
                at = now()
                written = Written(upserts=append(target, stage.read(self._file, staged), at))
                while first:
                    written = _sum(written, _apply(target, first.pop(), at, refetch))
                for part in pieces:
                    written = _sum(written, _apply(target, self._work(part.chunks, table), at, refetch))
                if is_shadow and completes:
                    succeed(connection, target.name, file_name(table.table))
                    bookkeeping.forget_copy(connection, table.table)
                    is_shadow = False
                if is_shadow:
                    bookkeeping.put_copy(connection, batch.pipeline, target.kept)
                else:
                    bookkeeping.put_kept(connection, target.kept)
                bookkeeping.put_batch(connection, batch, table.table)
            stage.discard(self._file, staged)
            return written

    def drop_table_for_copy(self, table: TableSchema) -> None:
        """Remove the table, a copy of it under way, and what is known of its batches. A repeat does nothing.

        Raises TableError for a table that tailrace did not make.
        """
        if not self._file.exists():
            return
        name = file_name(table.table)
        with (
            reaching(self._file, str(table.table)),
            opened(self._file, self.lock_timeout_seconds) as connection,
            transaction(connection),
        ):
            if bookkeeping.kept(connection, table.table) is not None:
                connection.execute(f"DROP TABLE IF EXISTS {quote(name)}")
            connection.execute(f"DROP TABLE IF EXISTS {quote(SHADOW + name)}")
            bookkeeping.forget(connection, table.table)

    def read_table(self, table: TableSchema) -> TableRows:
        return read_rows(self._file, table)

    def maintain(self, table: TableName) -> str | None:
        """Cut a write-ahead log that has grown large, and delete staged files that no batch will name."""
        wal = self._file.with_name(f"{self._file.name}-wal")
        done: list[str] = []
        with reaching(self._file, str(table)):
            if gone := stage.discard_abandoned(self._file):
                done.append(f"deleted {gone} abandoned files")
            if wal.exists() and (size := wal.stat().st_size) >= LARGE_WAL_BYTES:
                with opened(self._file, self.lock_timeout_seconds) as connection:
                    (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                if not busy:
                    done.append(f"cut a write-ahead log of {size >> 20} MiB")
        return "; ".join(done) or None

    def committer(self) -> AbstractContextManager[DirectCommitter]:
        return nullcontext(DirectCommitter())

    def shutdown(self) -> None:
        """Nothing is open between calls."""

    def _layout(self, table: TableSchema) -> SqliteLayout:
        metadata = tuple(METADATA) if self.metadata is True else tuple(self.metadata or ())
        return SqliteLayout(table, metadata, self.deletes == "soft")

    def _work(self, part: list[Changes], table: TableSchema) -> Collapsed | list[Changes]:
        return collapse(part, table, keep_deleted=self.deletes == "soft") if table.key else part


def _evolves(connection: sqlite3.Connection, layout: SqliteLayout) -> bool:
    now = bookkeeping.kept(connection, layout.table.table)
    return now is not None and plan(now, layout.table).changes(now)


def _target(
    file: Path, connection: sqlite3.Connection, layout: SqliteLayout, batch: Batch, starts: bool, copies: bool
) -> tuple[SqliteTarget, bool]:
    """The table that the batch writes to, with its columns in order, and whether it is to take the place of another."""
    table = layout.table.table
    name = file_name(table)
    now = bookkeeping.kept(connection, table)
    copy = bookkeeping.copy(connection, table)
    if starts:
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
    if copy is not None and copy.pipeline == batch.pipeline and copies:
        return SqliteTarget.evolved(connection, SHADOW + name, copy.kept, layout), True
    if now is None:
        require_unwritten(layout.table, batch, str(file))
        return SqliteTarget.created(connection, name, layout), False
    return SqliteTarget.evolved(connection, name, now, layout), False


def _apply(
    target: SqliteTarget, work: Collapsed | list[Changes], now: pa.TimestampScalar, refetch: Refetch | None
) -> Written:
    if isinstance(work, Collapsed):
        return merge(target, work, now, refetch)
    count = append(target, work, now)
    return Written(count, count)


def _sum(one: Written, two: Written) -> Written:
    return Written(one.changes + two.changes, one.upserts + two.upserts, one.deletes + two.deletes)
