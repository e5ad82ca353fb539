"""The SQLite destination passes the suite that every destination must pass, in each of its forms."""

from __future__ import annotations

import datetime
import decimal
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.destination import Destination
from tailrace.destination.replica.sql_name import quote
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.destination.sqlite.name import file_name
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import ChunkedCopyContract
from tailrace.testing.fault import FaultyDestination


def reader_of(kind: pa.DataType) -> Callable[[Any], Any]:
    """How a value that the file keeps is read back."""
    if pa.types.is_boolean(kind):
        return bool
    if pa.types.is_decimal(kind):
        return decimal.Decimal
    if pa.types.is_date(kind):
        return datetime.date.fromisoformat
    if pa.types.is_timestamp(kind):
        return datetime.datetime.fromisoformat
    return json.loads if pa.types.is_nested(kind) else lambda value: value


class TestSqlite(ChunkedCopyContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return SqliteDestination(path=tmp_path / "replica.db")

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, SqliteDestination)
        if not Path(destination.path).exists():
            return []
        readers = {column.name: reader_of(column.type) for column in table.columns}
        with closing(sqlite3.connect(destination.path)) as connection:
            connection.row_factory = sqlite3.Row
            name = file_name(table.table)
            if not connection.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (name,)).fetchone():
                return []
            found = [dict(row) for row in connection.execute(f"SELECT * FROM {quote(name)}")]
        return [
            {name: None if row[name] is None else readers.get(name, str)(row[name]) for name in row}
            for row in found
            if row.get("_tailrace_deleted_at") is None
        ]


class TestSqliteWithEveryColumn(TestSqlite):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return SqliteDestination(path=tmp_path / "replica.db", deletes="soft", metadata=True)


class TestSqliteInAWrapperWithoutFaults(TestSqlite):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        (tmp_path / "faults").mkdir()
        return FaultyDestination(inner=SqliteDestination(path=tmp_path / "replica.db"), directory=tmp_path / "faults")

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, FaultyDestination)
        return super().read(destination.inner, table)
