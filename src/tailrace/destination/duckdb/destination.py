"""`DuckDbDestination`: one transaction for every table and batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from tailrace.destination import CopyMode, Destination, TableBatch, Written
from tailrace.destination.duckdb import preflight
from tailrace.destination.duckdb.option import DuckDbOptions
from tailrace.destination.duckdb.reader import read_rows
from tailrace.destination.duckdb.replica import DuckDbReplica
from tailrace.destination.duckdb.replica_file import bookkeeping, opened, reaching
from tailrace.destination.preflight import as_errors
from tailrace.destination.replica.write import write
from tailrace.errors import Finding
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.table_rows import TableRows


class DuckDbDestination(DuckDbOptions, Destination):
    """Keeps each table as a table of one DuckDB file, in the schema it has upstream; the file is opened inside methods.

    `deletes: soft` keeps deleted rows with `_tailrace_deleted_at` set, until the key is inserted again.
    A table without a key is a log: every change is a row, with its operation and position.
    A value that its column cannot hold stands as text in `_tailrace_exact`; that column comes with the first such
    value.
    """

    type: Literal["duckdb"] = "duckdb"
    copy_mode: ClassVar[CopyMode] = "own"
    lanes: ClassVar[int | None] = 1  # one process at a time can write to the file

    @property
    def name(self) -> str:
        return f"duckdb {self.path}"

    def shared_folders(self) -> dict[str, Path]:
        return {"destination.path (DuckDB)": self.path.parent}

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Check whether these tables can be kept here. Creates nothing."""
        return preflight.check(self.path, tables or ())

    def check_columns(self, table: TableSchema) -> list[Finding]:
        return as_errors(table, preflight.unkept_columns(table))

    def write_changes(self, batch: TableBatch) -> Written:
        """Make the batch visible in one transaction (`tailrace.destination.replica.write`).

        Also raises UnavailableError when another process keeps the file open, or it cannot be written.
        """
        with reaching(self.path, str(batch.table.table)), opened(self.path, self.lock_timeout) as connection:
            soft = self.deletes == "soft"
            return write(DuckDbReplica(connection, self.path, keeps_deleted=soft, metadata=self.metadata), batch)

    def last_batch(self, table: TableName, pipeline: str) -> LastBatch | None:
        with reaching(self.path, str(table)):
            if not self.path.exists():
                return None
            with opened(self.path, self.lock_timeout, read_only=True) as connection:
                book = bookkeeping(connection)
                # The table itself may have been dropped from the file.
                return book.last_batch(pipeline, table) if book.kept(table) is not None else None

    def read_table(self, table: TableSchema) -> TableRows:
        return read_rows(self.path, table, self.lock_timeout)
