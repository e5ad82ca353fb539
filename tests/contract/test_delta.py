"""The Delta destination passes the suite that every destination must pass, in each of its forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace.destination import Destination
from tailrace.destination.delta import upsert
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.lake import key_index as lake_keys
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import ChunkedCopyContract
from tailrace.testing.fault import FaultyDestination
from tests.support.delta_table import queried


class TestDelta(ChunkedCopyContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DeltaDestination(path=str(tmp_path / "lake"))

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, DeltaDestination)
        uri = TablePath.of(destination.path, table.table, {}).uri
        if not DeltaTable.is_deltatable(uri):
            return []
        return [row for row in self.scan(DeltaTable(uri)) if row.get("_tailrace_deleted_at") is None]

    def scan(self, table: DeltaTable) -> list[dict[str, Any]]:
        return list(table.to_pyarrow_table().to_pylist())


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


class MarkedRows:
    """A table with deletion vectors, which delta-rs reads by queries only."""

    def scan(self, table: DeltaTable) -> list[dict[str, Any]]:
        return queried(table)


class TestDeltaMergeOnRead(MarkedRows, TestDelta):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DeltaDestination(path=str(tmp_path / "lake"), updates="merge_on_read")


class TestDeltaMergeOnReadWithEveryColumn(MarkedRows, TestDelta):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DeltaDestination(path=str(tmp_path / "lake"), deletes="soft", metadata=True, updates="merge_on_read")


class TestDeltaMergeOnReadPartitioned(MarkedRows, TestDelta):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        partition_by = {"shop.items": ["price", "name"]}
        return DeltaDestination(path=str(tmp_path / "lake"), partition_by=partition_by, updates="merge_on_read")


class TestDeltaMergeOnReadWithKeyFiles(MarkedRows, TestDelta):
    """As with large files: their keys are stored, and each batch finds them there."""

    @pytest.fixture
    def destination(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Destination:
        monkeypatch.setattr(lake_keys, "STORED_ROWS", 1)
        return DeltaDestination(path=str(tmp_path / "lake"), updates="merge_on_read")


class TestDeltaThatBeginsToMark(MarkedRows, TestDelta):
    """As with a large table under `auto`: the first batch that would rewrite a row that stays marks rows instead."""

    @pytest.fixture
    def destination(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Destination:
        monkeypatch.setattr(upsert, "CHEAP_ROWS", 0)
        return DeltaDestination(path=str(tmp_path / "lake"))


class TestDeltaMergeOnReadInAWrapperWithoutFaults(MarkedRows, TestDeltaInAWrapperWithoutFaults):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        (tmp_path / "faults").mkdir()
        inner = DeltaDestination(path=str(tmp_path / "lake"), updates="merge_on_read")
        return FaultyDestination(inner=inner, directory=tmp_path / "faults")
