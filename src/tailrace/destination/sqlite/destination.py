"""`SqliteDestination`: staging copied rows, and one transaction for every table and batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from tailrace.destination import CopyMode, Destination, Stage, Staged, TableBatch, Written
from tailrace.destination.preflight import as_errors
from tailrace.destination.replica.write import write
from tailrace.destination.sqlite import preflight
from tailrace.destination.sqlite.bookkeeping import bookkeeping
from tailrace.destination.sqlite.option import SqliteDestinationOptions
from tailrace.destination.sqlite.reader import read_rows
from tailrace.destination.sqlite.replica import SqliteReplica
from tailrace.destination.sqlite.replica_file import opened, reaching
from tailrace.errors import Finding
from tailrace.model.change import Changes
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
        """Make the batch visible in one transaction (`tailrace.destination.replica.write`).

        Also raises UnavailableError when the file stays locked or cannot be written.
        """
        with reaching(self.path, str(batch.table.table)), opened(self.path, self.lock_timeout) as connection:
            return write(
                SqliteReplica(
                    connection,
                    str(self.path),
                    self.stage,
                    keeps_deleted=self.deletes == "soft",
                    metadata=self.metadata,
                ),
                batch,
            )

    def last_batch(self, table: TableName, pipeline: str) -> LastBatch | None:
        with reaching(self.path, str(table)):
            if not self.path.exists():
                return None
            with opened(self.path, self.lock_timeout) as connection:
                # The table itself may have been dropped from the file.
                book = bookkeeping(connection)
                return book.last_batch(pipeline, table) if book.kept(table) is not None else None

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
