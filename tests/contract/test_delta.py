"""The Delta destination passes the suite that every destination must pass, in each of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace.destination import Destination
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.table_folder import TablePath
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import ChunkedCopyContract
from tailrace.testing.fault import FaultyDestination


class TestDelta(ChunkedCopyContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DeltaDestination(path=str(tmp_path / "lake"))

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, DeltaDestination)
        uri = TablePath.of(destination.path, table.table, {}).uri
        if not DeltaTable.is_deltatable(uri):
            return []
        rows: list[dict[str, Any]] = DeltaTable(uri).to_pyarrow_table().to_pylist()
        return [row for row in rows if row.get("_tailrace_deleted_at") is None]


class TestDeltaWithEveryColumn(TestDelta):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DeltaDestination(path=str(tmp_path / "lake"), deletes="soft", metadata=True)


class TestDeltaPartitioned(TestDelta):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DeltaDestination(path=str(tmp_path / "lake"), partition_by={"shop.items": ["price", "name"]})


class TestDeltaInAWrapperWithoutFaults(TestDelta):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        (tmp_path / "faults").mkdir()
        return FaultyDestination(inner=DeltaDestination(path=str(tmp_path / "lake")), directory=tmp_path / "faults")

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, FaultyDestination)
        return super().read(destination.inner, table)
