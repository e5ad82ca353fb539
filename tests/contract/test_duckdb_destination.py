"""The DuckDB destination passes the suite that every destination must pass, in each of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from tailrace.destination import Destination
from tailrace.destination.duckdb.destination import DuckDbDestination
from tailrace.destination.duckdb.name import file_name
from tailrace.destination.replica.sql_name import quote
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import ChunkedCopyContract
from tailrace.testing.fault import FaultyDestination


class TestDuckDb(ChunkedCopyContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        # The file has the name of the schema that its tables are in.
        return DuckDbDestination(path=tmp_path / "shop.duckdb")

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, DuckDbDestination)
        if not destination.path.exists():
            return []
        name = file_name(table.table)
        with duckdb.connect(str(destination.path), read_only=True) as file:
            file.execute("SET TimeZone = 'UTC'")
            place = f"{quote(destination.path.stem)}.{quote(name.schema)}.{quote(name.name)}"
            try:
                rows = file.sql(f"SELECT * FROM {place}").to_arrow_table().to_pylist()
            except duckdb.CatalogException:
                return []
        return [row for row in rows if row.get("_tailrace_deleted_at") is None]


class TestDuckDbWithEveryColumn(TestDuckDb):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DuckDbDestination(path=tmp_path / "shop.duckdb", deletes="soft", metadata=True)


class TestDuckDbInAWrapperWithoutFaults(TestDuckDb):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        (tmp_path / "faults").mkdir()
        return FaultyDestination(inner=DuckDbDestination(path=tmp_path / "shop.duckdb"), directory=tmp_path / "faults")

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, FaultyDestination)
        return super().read(destination.inner, table)
