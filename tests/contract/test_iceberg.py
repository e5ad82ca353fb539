"""The Iceberg destination passes the suite that every destination must pass, in each of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.destination import Destination
from tailrace.destination.iceberg.catalog import load_table
from tailrace.destination.iceberg.destination import IcebergDestination
from tailrace.destination.lake import key_index
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import ChunkedCopyContract
from tailrace.testing.fault import FaultyDestination


class TestIceberg(ChunkedCopyContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return IcebergDestination(warehouse=str(tmp_path / "ice"))

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, IcebergDestination)
        found = load_table(destination, table.table)
        rows = [] if found is None else found.scan().to_arrow().to_pylist()
        return [row for row in rows if row.get("_tailrace_deleted_at") is None]


class TestIcebergWithEveryColumn(TestIceberg):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return IcebergDestination(warehouse=str(tmp_path / "ice"), deletes="soft", metadata=True)


class TestIcebergWithKeyFiles(TestIceberg):
    """As with large files: their keys are stored, and each batch finds them there."""

    @pytest.fixture
    def destination(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Destination:
        monkeypatch.setattr(key_index, "STORED_ROWS", 1)
        return IcebergDestination(warehouse=str(tmp_path / "ice"))


class TestIcebergInAWrapperWithoutFaults(TestIceberg):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        (tmp_path / "faults").mkdir()
        return FaultyDestination(
            inner=IcebergDestination(warehouse=str(tmp_path / "ice")), directory=tmp_path / "faults"
        )

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, FaultyDestination)
        return super().read(destination.inner, table)
