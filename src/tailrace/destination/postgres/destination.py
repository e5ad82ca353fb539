"""`PostgresDestination`: one transaction for every table and batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from tailrace.destination import CopyMode, Destination, TableBatch, Written
from tailrace.destination.postgres import preflight
from tailrace.destination.postgres.name import place_of
from tailrace.destination.postgres.option import PostgresDestinationOptions
from tailrace.destination.postgres.reader import read_rows
from tailrace.destination.postgres.replica import PostgresReplica
from tailrace.destination.postgres.session import opened, reaching
from tailrace.destination.preflight import as_errors
from tailrace.destination.replica.write import write
from tailrace.errors import Finding
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema
from tailrace.model.table_rows import TableRows


class PostgresDestination(PostgresDestinationOptions, Destination):
    """Keeps each table as a table of one database, in the schema that `schema` says; sessions open inside methods.

    `deletes: soft` keeps deleted rows with `_tailrace_deleted_at` set, until the key is inserted again.
    A table without a key is a log: every change is a row, with its operation and position.
    A value that its column cannot hold stands as text in `_tailrace_exact`; that column comes with the first such
    value.
    """

    type: Literal["postgres"] = "postgres"
    copy_mode: ClassVar[CopyMode] = "own"

    @property
    def name(self) -> str:
        return f"postgres {self.dsn.masked} {self.schema_name}"

    def check(self, tables: Sequence[TableSchema] | None) -> list[Finding]:
        """Check whether these tables can be kept there. Creates nothing."""
        return preflight.check(self, tables or ())

    def check_columns(self, table: TableSchema) -> list[Finding]:
        return as_errors(table, preflight.unkept_columns(table, place_of(table.table, self.schema_name)))

    def write_changes(self, batch: TableBatch) -> Written:
        """Make the batch visible in one transaction (`tailrace.destination.replica.write`).

        Also raises UnavailableError when the server does not answer.
        """
        table = batch.table.table
        with reaching(self, str(table)), opened(self, creates=True) as session:
            return write(PostgresReplica(session, self, table, batch.pipeline), batch)

    def last_batch(self, table: TableName, pipeline: str) -> LastBatch | None:
        with reaching(self, str(table)), opened(self) as session:
            book = session.bookkeeping()
            # The table itself may have been dropped.
            if not session.has_book() or book.kept(table) is None:
                return None
            return book.last_batch(pipeline, table)

    def read_table(self, table: TableSchema) -> TableRows:
        return read_rows(self, table)
