"""A SQLite replica after any batches holds the table one gets by replaying their changes."""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.destination import Batch, TableBatch, chunking
from tailrace.destination.sqlite.destination import SqliteDestination
from tailrace.destination.sqlite.value import encode, kept_type
from tailrace.model.schema import TableSchema
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


def rows_in(path: Path) -> list[Row]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute('SELECT * FROM "public.t"')]


def as_kept(table: TableSchema, rows: dict[Key, Row]) -> dict[Key, Row]:
    """Rows with the values that the file has for them."""
    names = table.arrow.names
    columns = [
        encode(pa.array([row[c.name] for row in rows.values()], c.type), kept_type(c.type), c.name, "public.t")
        for c in table.columns
    ]
    kept = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
    return {tuple(row[name] for name in table.key): row for row in kept}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(data=st.data(), in_parts=st.booleans())
def test_a_replica_equals_replaying_whatever_the_batches_hold(kind: str, data: Any, in_parts: bool) -> None:
    types, keys = KINDS[kind]
    table = table_of(*types)
    expected: dict[Key, Row] = {}
    with tempfile.TemporaryDirectory() as folder, parts_of(1 if in_parts else chunking.PART_BYTES):
        destination = SqliteDestination(path=Path(f"{folder}/replica.db"))
        for number, events in enumerate(data.draw(histories(table, keys, cuts=3))):
            expected = replay(table, events, expected)
            changes = as_changes(table, events, 5, first_commit=100 * number)
            for attempt in range(2):
                written = destination.write_changes(TableBatch(table, Batch("p", number), changes))
                assert written.repeated == (attempt == 1 and bool(events))
            if not events:
                continue
            found = rows_in(destination.path)
            assert {tuple(row[name] for name in table.key): row for row in found} == as_kept(table, expected)
            assert len(found) == len(expected)


@settings(max_examples=25)
@given(data=st.data())
def test_soft_deletes_keep_exactly_the_rows_that_ever_were(data: Any) -> None:
    table = table_of(*KINDS["two texts"][0])
    ever: dict[Key, Row] = {}
    alive: dict[Key, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        destination = SqliteDestination(path=Path(f"{folder}/replica.db"), deletes="soft")
        for number, events in enumerate(data.draw(histories(table, KINDS["two texts"][1], cuts=3))):
            events = [event for event in events if event.op.name != "TRUNCATE"]
            alive_before = alive
            for count in range(len(events) + 1):
                alive = replay(table, events[:count], alive_before)
                ever |= alive
            destination.write_changes(TableBatch(table, Batch("p", number), as_changes(table, events, 5)))
        if not ever:
            return
        found = rows_in(destination.path)
        gone = {(row["k0"], row["k1"]) for row in found if row.pop("_tailrace_deleted_at") is not None}
        assert {(row["k0"], row["k1"]): row for row in found} == as_kept(table, ever)
        assert gone == set(ever) - set(alive)


@settings(max_examples=60)
@given(batches=shifting_histories(cuts=4), soft=st.booleans(), in_parts=st.booleans())
def test_a_replica_follows_its_columns_whatever_the_batches_hold(batches: Any, soft: bool, in_parts: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, parts_of(1 if in_parts else chunking.PART_BYTES):
        destination = SqliteDestination(path=Path(f"{folder}/replica.db"), deletes="soft" if soft else "hard")
        exists = False
        for table, changes, expected in delivered(destination, batches):
            exists = exists or bool(changes)
            if not exists:
                continue
            alive = [row for row in rows_in(destination.path) if row.get("_tailrace_deleted_at") is None]
            rows = [{name: row[name] for name in table.arrow.names} for row in alive]
            assert {tuple(row[name] for name in table.key): row for row in rows} == expected
            assert len(rows) == len(expected)
