"""An Iceberg table after any batches is the table one gets by replaying their changes."""

from __future__ import annotations

import tempfile
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.destination import Batch, TableBatch, chunking
from tailrace.destination.iceberg import data_file
from tailrace.destination.iceberg.column import encode, kept_type
from tailrace.destination.iceberg.destination import IcebergDestination
from tailrace.destination.lake import key_index
from tailrace.model.schema import TableName, TableSchema
from tests.support.destination_writing import parts_of
from tests.support.history import (
    KINDS,
    Key,
    Row,
    as_changes,
    delivered,
    histories,
    replay,
    shifting_histories,
    table_of,
)
from tests.support.iceberg_table import forget_everything, rows_in, scanned

TABLE = TableName("public", "t")


@pytest.fixture(autouse=True)
def _small_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are a large file, and its keys are stored."""
    monkeypatch.setattr(data_file, "LEAST_ROWS", 3)
    monkeypatch.setattr(key_index, "STORED_ROWS", 1)


def as_kept(table: TableSchema, rows: dict[Key, Row]) -> dict[Key, Row]:
    """Rows with the values that the table has for them."""
    names = table.arrow.names
    columns = [
        encode(pa.array([row[c.name] for row in rows.values()], c.type), kept_type(c.type), c.name, "public.t")
        for c in table.columns
    ]
    kept = [dict(zip(names, values, strict=True)) for values in zip(*(c.to_pylist() for c in columns), strict=True)]
    return {tuple(row[name] for name in table.key): row for row in kept}


@pytest.mark.parametrize("kind", sorted(KINDS))
@settings(max_examples=4)
@given(data=st.data(), in_parts=st.booleans())
def test_a_table_equals_replaying_whatever_the_batches_hold(kind: str, data: Any, in_parts: bool) -> None:
    types, keys = KINDS[kind]
    table = table_of(*types)
    expected: dict[Key, Row] = {}
    with tempfile.TemporaryDirectory() as folder, parts_of(1 if in_parts else chunking.PART_BYTES):
        destination = IcebergDestination(warehouse=folder)
        for number, events in enumerate(data.draw(histories(table, keys, cuts=3))):
            expected = replay(table, events, expected)
            changes = as_changes(table, events, 5, first_commit=100 * number)
            for attempt in range(2):
                written = destination.write_changes(TableBatch(table, Batch("p", number), changes))
                assert written.repeated == (attempt == 1 and bool(events))
                forget_everything()
            if not events:
                continue
            found = rows_in(destination, TABLE)
            assert {tuple(row[name] for name in table.key): row for row in found} == as_kept(table, expected)
            assert len(found) == len(expected)


@settings(max_examples=25)
@given(batches=shifting_histories(cuts=4), soft=st.booleans(), in_parts=st.booleans(), upkeep=st.booleans())
def test_a_table_follows_its_columns_whatever_the_batches_hold(
    batches: Any, soft: bool, in_parts: bool, upkeep: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, parts_of(1 if in_parts else chunking.PART_BYTES):
        destination = IcebergDestination(warehouse=folder, deletes="soft" if soft else "hard")
        for table, _, expected in delivered(destination, batches):
            if upkeep:
                destination.maintain_now(TABLE)
            found = rows_in(destination, TABLE)
            alive = [row for row in found if row.get("_tailrace_deleted_at") is None]
            rows = [{name: row.get(name) for name in table.arrow.names} for row in alive]
            assert {tuple(row[name] for name in table.key): row for row in rows} == expected
            assert len(rows) == len(expected)
            if found:
                assert all(len(deletes) <= 1 for deletes in scanned(destination, TABLE).values())
