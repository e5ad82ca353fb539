"""The destination of the examples passes the suite that every destination must pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import duckdb
import pytest

from examples import custom_destination
from examples.custom_destination import BOOK, DuckDbDestination, quote
from tailrace.destination import CopyMode, Destination
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import ChangeContract, DestinationContract, StreamedCopyContract


class _ReadsDuckDb(ChangeContract):
    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, DuckDbDestination)
        with duckdb.connect(destination.path) as file:
            file.execute("SET TimeZone = 'UTC'")
            try:
                rows: list[dict[str, Any]] = file.sql(f"FROM {quote(str(table.table))}").to_arrow_table().to_pylist()
            except duckdb.CatalogException:
                return []
        return rows


class TestDuckDb(_ReadsDuckDb, DestinationContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DuckDbDestination(path=str(tmp_path / "replica.duckdb"))


class StreamedDuckDb(DuckDbDestination):
    """The same, with rows of a copy as they come."""

    copy_mode: ClassVar[CopyMode] = "stream"

    def drop_table_for_copy(self, table: TableSchema) -> None:
        with duckdb.connect(self.path) as file:
            file.execute(BOOK)
            file.execute(f"DROP TABLE IF EXISTS {quote(str(table.table))}")
            file.execute("DELETE FROM _tailrace WHERE ends_with(id, ?)", [f" {table.table}"])


class TestStreamedDuckDb(_ReadsDuckDb, StreamedCopyContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return StreamedDuckDb(path=str(tmp_path / "replica.duckdb"))


def test_the_example_is_short_enough_to_be_read() -> None:
    assert len(Path(custom_destination.__file__).read_text().splitlines()) <= 60
