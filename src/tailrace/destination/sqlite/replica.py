"""The open file as a replica, and the table of a batch in it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pyarrow as pa

from tailrace.destination import Refetch, Stage, Written
from tailrace.destination.replica.sql_name import quote
from tailrace.destination.replica.write import Replica
from tailrace.destination.sqlite.bookkeeping import bookkeeping
from tailrace.destination.sqlite.column import SqliteLayout
from tailrace.destination.sqlite.evolution import RULES, succeed
from tailrace.destination.sqlite.merge import append, merge
from tailrace.destination.sqlite.name import file_name
from tailrace.destination.sqlite.replica_file import transaction
from tailrace.destination.sqlite.table import SqliteTarget, has_rows
from tailrace.model.change import Changes
from tailrace.model.collapse import Collapsed
from tailrace.model.schema import TableName, TableSchema

SHADOW = "_tailrace copy of "
"""The prefix of a table that will replace another one."""


class SqliteReplica(Replica):
    rules = RULES

    def __init__(
        self, connection: sqlite3.Connection, place: str, stage: Stage, *, keeps_deleted: bool, metadata: bool
    ) -> None:
        self.connection = connection
        self.place = place
        self.stage = stage
        self.keeps_deleted = keeps_deleted
        self.metadata = metadata
        self.book = bookkeeping(connection)

    def transaction(self) -> AbstractContextManager[None]:
        return transaction(self.connection)

    def create(self, table: TableSchema, *, shadow: bool) -> SqliteReplicaTable:
        layout = self._layout(table)
        return SqliteReplicaTable(SqliteTarget.created(self.connection, _name(table.table, shadow), layout))

    def evolve(self, now: TableSchema, table: TableSchema, *, shadow: bool) -> SqliteReplicaTable:
        layout = self._layout(table)
        return SqliteReplicaTable(SqliteTarget.evolved(self.connection, _name(table.table, shadow), now, layout))

    def drop_shadow(self, table: TableName) -> None:
        self.connection.execute(f"DROP TABLE IF EXISTS {quote(_name(table, True))}")

    def succeed(self, table: TableName) -> None:
        succeed(self.connection, _name(table, True), _name(table, False))

    def has_rows(self, table: TableName) -> bool:
        return has_rows(self.connection, file_name(table))

    def _layout(self, table: TableSchema) -> SqliteLayout:
        return SqliteLayout(table, self.metadata, self.keeps_deleted)


@dataclass
class SqliteReplicaTable:
    target: SqliteTarget

    @property
    def kept(self) -> TableSchema:
        return self.target.kept

    def append(self, chunks: Iterable[Changes], now: pa.TimestampScalar) -> int:
        return append(self.target, chunks, now)

    def merge(self, collapsed: Collapsed, now: pa.TimestampScalar, refetch: Refetch | None) -> Written:
        return merge(self.target, collapsed, now, refetch)


def _name(table: TableName, shadow: bool) -> str:
    return SHADOW + file_name(table) if shadow else file_name(table)
