# ruff: noqa: S608 - every name in the SQL here is quoted
"""A replica in a database that takes and gives rows as Arrow tables."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager

from tailrace.destination import Stage
from tailrace.destination.replica.arrow_table import ArrowDatabase, ArrowLayout, ArrowTable
from tailrace.destination.replica.bookkeeping import Bookkeeping
from tailrace.destination.replica.write import Replica
from tailrace.model.schema import TableName, TableSchema


class ArrowReplica(Replica):
    """`database` is connected, and `transaction` opens a transaction of it."""

    stage: Stage | None = None

    def __init__(
        self, database: ArrowDatabase, place: str, book: Bookkeeping, *, keeps_deleted: bool, metadata: bool
    ) -> None:
        self.database = database
        self.rules = database.rules
        self.place = place
        self.book = book
        self.keeps_deleted = keeps_deleted
        self.metadata = metadata

    @abstractmethod
    def transaction(self) -> AbstractContextManager[None]: ...

    def create(self, table: TableSchema, *, shadow: bool) -> ArrowTable:
        return ArrowTable.created(self.database, self._layout(table), shadow=shadow)

    def evolve(self, now: TableSchema, table: TableSchema, *, shadow: bool) -> ArrowTable:
        return ArrowTable.evolved(self.database, now, self._layout(table), shadow=shadow)

    def drop_shadow(self, table: TableName) -> None:
        self.database.run(f"DROP TABLE IF EXISTS {self._sql(table, shadow=True)}")

    def succeed(self, table: TableName) -> None:
        name, heir = (self.database.name(table, shadow=shadow) for shadow in (False, True))
        self.database.replace(name, heir, table)

    def has_rows(self, table: TableName) -> bool:
        return bool(self.database.ask(f"SELECT 1 AS one FROM {self._sql(table, shadow=False)} LIMIT 1").num_rows)

    def _sql(self, table: TableName, *, shadow: bool) -> str:
        return self.database.sql(self.database.name(table, shadow=shadow))

    def _layout(self, table: TableSchema) -> ArrowLayout:
        return ArrowLayout(table, self.metadata, self.keeps_deleted)
