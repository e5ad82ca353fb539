"""The open file as a replica."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from tailrace.destination.duckdb.name import SHADOW, file_name
from tailrace.destination.duckdb.replica_file import bookkeeping, catalog_of, index_error, transaction
from tailrace.destination.duckdb.value import conversion, declared, encode, kept_type, unheld
from tailrace.destination.replica.arrow_replica import ArrowReplica
from tailrace.destination.replica.arrow_table import ArrowDatabase
from tailrace.destination.replica.plan import ColumnRules
from tailrace.destination.replica.sql_name import fold_ascii, quote
from tailrace.destination.replica.unheld_value import UnheldMask
from tailrace.model.schema import Column, TableName, TableSchema

RULES = ColumnRules("the file", kept_type, conversion, fold_ascii)
_INCOMING = "_tailrace_incoming"


class DuckDbDatabase(ArrowDatabase):
    rules = RULES
    same = "IS NOT DISTINCT FROM"

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._catalog = catalog_of(connection)

    def run(self, sql: str) -> None:
        self._connection.execute(sql)

    def ask(self, sql: str) -> pa.Table:
        return self._connection.sql(sql).to_arrow_table()

    @contextmanager
    def incoming(self, rows: pa.Table) -> Iterator[str]:
        self._connection.register(_INCOMING, rows)
        try:
            yield _INCOMING
        finally:
            # After an error the transaction takes no statement, and this error must not hide that one.
            with suppress(duckdb.Error):
                self._connection.unregister(_INCOMING)

    def name(self, table: TableName, *, shadow: bool) -> TableName:
        name = file_name(table)
        return TableName(name.schema, SHADOW + name.name) if shadow else name

    def sql(self, name: TableName) -> str:
        return f"{self._catalog}.{quote(name.schema)}.{quote(name.name)}"

    def create(self, name: TableName, kept: TableSchema, own: Any) -> None:
        self.run(f"CREATE SCHEMA IF NOT EXISTS {self._catalog}.{quote(name.schema)}")
        super().create(name, kept, own)

    def declared(self, column: Column) -> str:
        return declared(column.type)

    def encode(self, values: Any, kind: pa.DataType, column: str, table: str) -> Any:
        return encode(values, kind, column, table)

    def unheld(self, values: Any) -> UnheldMask | None:
        return unheld(values)

    def replace(self, name: TableName, heir: TableName, table: TableName) -> None:
        """The indexes that people added stay. Raises TableError for one on a column that is gone."""
        indexes = self._connection.execute(
            "SELECT sql FROM duckdb_indexes() WHERE database_name = current_database()"
            " AND schema_name = ? AND table_name = ? AND sql IS NOT NULL",
            [name.schema, name.name],
        ).fetchall()
        super().replace(name, heir, table)
        for (sql,) in indexes:
            try:
                self.run(sql)
            except (duckdb.BinderException, duckdb.CatalogException) as error:
                raise index_error(str(table)) from error


class DuckDbReplica(ArrowReplica):
    database: DuckDbDatabase

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, path: Path, *, keeps_deleted: bool, metadata: bool
    ) -> None:
        book = bookkeeping(connection)
        super().__init__(DuckDbDatabase(connection), str(path), book, keeps_deleted=keeps_deleted, metadata=metadata)
        self._connection = connection

    def transaction(self) -> AbstractContextManager[None]:
        return transaction(self._connection)
