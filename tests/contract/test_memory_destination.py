"""The destination of the fuzzer keeps the promises of every destination; else what the fuzzer finds means nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tailrace.destination import Destination
from tailrace.model.schema import TableSchema
from tailrace.testing.destination import DestinationContract
from tests.support.fuzz.memory_destination import KEPT, MemoryDestination


class TestMemoryDestination(DestinationContract):
    @pytest.fixture
    def destination(self) -> Iterator[Destination]:
        KEPT["contract"] = {}
        yield MemoryDestination(place="contract")
        del KEPT["contract"]

    def read(self, destination: Destination, table: TableSchema) -> list[dict[str, Any]]:
        kept = KEPT["contract"].get(str(table.table))
        return kept.rows if kept is not None else []
