"""The Delta destination passes the suite that every destination must pass, in each of its forms."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.destination import Destination
from tailrace.destination.delta import upsert
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import Updates
from tailrace.destination.lake import key_index as lake_keys
from tailrace.errors import SchemaChangedError
from tailrace.model.schema import TableSchema
from tailrace.option.value import Secret
from tailrace.testing.destination import ITEMS, ChunkedCopyContract, insert, read
from tailrace.testing.fault import FaultyDestination
from tests.support.delta_table import queried
from tests.support.slatedb_bucket import BucketProcess, serving


class TestDelta(ChunkedCopyContract):
    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DeltaDestination(path=str(tmp_path / "lake"))

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        assert isinstance(destination, DeltaDestination)
        place = destination.place(table.table)
        if not DeltaTable.is_deltatable(place.uri, storage_options=dict(place.options)):
            return []
        handle = DeltaTable(place.uri, storage_options=dict(place.options))
        return [row for row in self.scan(handle) if row.get("_tailrace_deleted_at") is None]

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


class TestDeltaWithHistory(TestDelta):
    """The current versions of a history are the rows of the table."""

    @pytest.fixture
    def destination(self, tmp_path: Path) -> Destination:
        return DeltaDestination(path=str(tmp_path / "lake"), mode="history")

    def scan(self, table: DeltaTable) -> list[dict[str, Any]]:
        return [row for row in queried(table) if row.get("_tailrace_is_current", True)]

    def test_a_copy_may_have_columns_of_other_types(self, destination: Destination) -> None:
        """It may not: older versions hold values of the old type, so the history is kept and the table stops."""
        self.write(destination, 0, insert(id=1, name="a", price=1))
        columns = tuple(replace(each, type=pa.string()) if each.name == "price" else each for each in ITEMS.columns)
        other = replace(ITEMS, columns=columns, version=2)
        staged = self.staged(destination, read(id=1, name="a", price="one"), table=other)
        with pytest.raises(SchemaChangedError, match="price is string upstream") as refused:
            self.write(destination, 1, table=other, staged=staged, begins_copy=True, completes_copy=True)
        assert "move" in (refused.value.fix or "")
        assert self.rows(destination) == [{"id": 1, "name": "a", "price": 1}]


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


@pytest.fixture(scope="module")
def server() -> Iterator[BucketProcess]:
    with serving() as process:
        yield process


@pytest.fixture
def storage(server: BucketProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a lake in an empty bucket. What this machine stores for object stores is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {name: Secret(value) for name, value in server.options.items()}
    return {"path": f"s3://{uuid.uuid4().hex}/lake", "storage_options": options}


class TestDeltaInAnObjectStore(TestDelta):
    updates: Updates = "auto"

    @pytest.fixture
    def destination(self, storage: dict[str, Any]) -> Destination:
        return DeltaDestination(**storage, updates=self.updates)


class TestDeltaMergeOnReadInAnObjectStore(MarkedRows, TestDeltaInAnObjectStore):
    updates = "merge_on_read"


class TestDeltaPartitionedInAnObjectStore(TestDelta):
    @pytest.fixture
    def destination(self, storage: dict[str, Any]) -> Destination:
        return DeltaDestination(**storage, partition_by={"shop.items": ["price", "name"]})


class TestDeltaMergeOnReadWithKeyFilesInAnObjectStore(TestDeltaMergeOnReadInAnObjectStore):
    @pytest.fixture
    def destination(self, storage: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Destination:
        monkeypatch.setattr(lake_keys, "STORED_ROWS", 1)
        return DeltaDestination(**storage, updates="merge_on_read", deletes="soft", metadata=True)
