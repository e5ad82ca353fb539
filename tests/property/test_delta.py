"""A Delta table after any batches is the table one gets by replaying their changes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.destination import Batch, TableBatch
from tailrace.destination.delta import destination as delta
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.model.change import Op, Position
from tailrace.model.schema import TableSchema
from tests.support.history import (
    KINDS,
    Event,
    Key,
    Row,
    as_changes,
    delivered,
    histories,
    replay,
    shifting_histories,
    table_of,
)


def rows_of(path: str, destination: DeltaDestination, names: list[str]) -> list[Row]:
    return list(DeltaTable(f"{path}/public/t").to_pyarrow_table().select(names).to_pylist())


@pytest.mark.parametrize(
    "kind", ["dense int64", "int64", "two texts", "text", "decimal", "instant", "clock", "binary", "float", "date"]
)
@settings(max_examples=15)
@given(data=st.data(), partitioned=st.booleans(), in_parts=st.booleans())
def test_a_delta_table_equals_replaying_whatever_the_batches_hold(
    kind: str, data: Any, partitioned: bool, in_parts: bool
) -> None:
    with parts_of(1 if in_parts else delta.PART_BYTES):
        check_replay(kind, data, partitioned)


@contextmanager
def parts_of(size: int) -> Iterator[None]:
    """Within the block a batch is written in parts of this many bytes: as if it were larger than memory."""
    before, delta.PART_BYTES = delta.PART_BYTES, size
    try:
        yield
    finally:
        delta.PART_BYTES = before


def check_replay(kind: str, data: Any, partitioned: bool) -> None:
    types, keys = KINDS[kind]
    table = table_of(*types)
    expected: dict[Key, Row] = {}
    with tempfile.TemporaryDirectory() as path:
        destination = DeltaDestination(path=path, partition_by={"public.t": ["a"]} if partitioned else {})
        for number, events in enumerate(data.draw(histories(table, keys, cuts=3))):
            expected = replay(table, events, expected)
            changes = as_changes(table, events, 5, first_commit=100 * number)
            for attempt in range(2):
                written = destination.write_changes(TableBatch(table, Batch("p", number), changes))
                assert written.repeated == (attempt == 1 and bool(events))
            if not events:
                continue
            found = rows_of(path, destination, table.arrow.names)
            assert {tuple(row[name] for name in table.key): row for row in found} == expected
            assert len(found) == len(expected)


@settings(max_examples=20)
@given(data=st.data())
def test_soft_deletes_keep_exactly_the_rows_that_ever_were(data: Any) -> None:
    table = table_of(*KINDS["dense int64"][0])
    ever: dict[Key, Row] = {}
    alive: dict[Key, Row] = {}
    with tempfile.TemporaryDirectory() as path:
        destination = DeltaDestination(path=path, deletes="soft")
        for number, events in enumerate(data.draw(histories(table, KINDS["dense int64"][1], cuts=3))):
            events = [event for event in events if event.op.name != "TRUNCATE"]
            alive_before = alive
            for count in range(len(events) + 1):
                alive = replay(table, events[:count], alive_before)
                ever |= alive
            destination.write_changes(TableBatch(table, Batch("p", number), as_changes(table, events, 5)))
        if not ever:
            return
        found = DeltaTable(f"{path}/public/t").to_pyarrow_table().to_pylist()
        gone = {(row["k0"],) for row in found if row.pop("_tailrace_deleted_at") is not None}
        assert {(row["k0"],): row for row in found} == ever
        assert gone == set(ever) - set(alive)


@settings(max_examples=60)
@given(batches=shifting_histories(cuts=4), partitioned=st.booleans(), soft=st.booleans(), in_parts=st.booleans())
def test_a_delta_table_follows_its_columns_whatever_the_batches_hold(
    batches: Any, partitioned: bool, soft: bool, in_parts: bool
) -> None:
    with tempfile.TemporaryDirectory() as path, parts_of(1 if in_parts else delta.PART_BYTES):
        destination = DeltaDestination(
            path=path, deletes="soft" if soft else "hard", partition_by={"public.t": ["p"]} if partitioned else {}
        )
        exists = False
        for table, changes, expected in delivered(destination, batches):
            exists = exists or bool(changes)
            if not exists:
                continue
            found = DeltaTable(f"{path}/public/t").to_pyarrow_table().to_pylist()
            alive = [row for row in found if row.get("_tailrace_deleted_at") is None]
            rows = [{name: row[name] for name in table.arrow.names} for row in alive]
            assert {tuple(row[name] for name in table.key): row for row in rows} == expected
            assert len(rows) == len(expected)


@settings(max_examples=60)
@given(batches=shifting_histories(cuts=4), partitioned=st.booleans(), in_parts=st.booleans())
def test_replaying_a_history_gives_the_table_whatever_the_batches_hold(
    batches: Any, partitioned: bool, in_parts: bool
) -> None:
    count = 0
    with tempfile.TemporaryDirectory() as path, parts_of(1 if in_parts else delta.PART_BYTES):
        partition_by = {"public.t": ["p"]} if partitioned else {}
        destination = DeltaDestination(path=path, partition_by=partition_by, history=["public.*"])
        for table, changes, expected in delivered(destination, batches):
            count += sum(map(len, changes))
            if count:
                found = DeltaTable(f"{path}/public/t").to_pyarrow_table().to_pylist()
                assert len(found) == count
                assert replay(table, [event_of(table, row) for row in by_position(found)], {}) == expected


def by_position(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: str(row["_tailrace_position"]))


def event_of(table: TableSchema, row: Row) -> Event:
    """The change that a row of a history records."""
    return Event(
        Op[row["_tailrace_op"].upper()],
        {name: row[name] for name in table.arrow.names},
        frozenset(row["_tailrace_unchanged"] or ()),
        follows=Position.parse(row["_tailrace_position"]).ordinal > 0,
    )
