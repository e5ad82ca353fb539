"""How a lane treats errors: an error of one table stops that table, and one after a commit stops none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.destination import (
    Batch,
    CopyBeginEvent,
    CopyEndEvent,
    Event,
    EventDestination,
    RelationEvent,
    Stage,
    TableBatch,
    Written,
)
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import CompactOptions
from tailrace.errors import TableError, UnavailableError
from tailrace.model.change import Changes
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.option.table import TableOptions
from tailrace.source.split import Split
from tailrace.stream import micro_batch
from tailrace.stream.block import CopyReceipt, error_row, log_row, staged_row
from tailrace.stream.micro_batch import Applier, KnownTables
from tailrace.testing.destination import ITEMS, PLAIN, RowChange, changes_of, insert, read
from tests.support.source_making import make_postgres

LOG = TableSchema(TableName("shop", "log"), (Column("line", pa.string()),), ())
SOURCE = make_postgres("postgresql://", Path("nowhere"), "p", TableOptions())  # no one connects to it


@pytest.fixture(autouse=True)
def _housekeeping_after_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "UPKEEP_BATCHES", 1)


class Journal(EventDestination):
    """Writes what it gets as lines of a file."""

    type: Literal["journal"] = "journal"
    path: Path

    def write_events(self, events: Iterator[Event], batch: Batch) -> Written:
        with self.path.open("a") as file:
            for event in events:
                rows = event.row.to_pylist() if isinstance(event, Changes) else ""
                said = event.table.table if isinstance(event, RelationEvent | CopyBeginEvent | CopyEndEvent) else rows
                print(type(event).__name__, said, file=file)
        return Written()

    def drop_table_for_copy(self, table: TableSchema) -> None:
        with self.path.open("a") as file:
            print("drop", table.table, file=file)


def test_an_event_destination_takes_the_tables_of_a_batch_together(tmp_path: Path) -> None:
    journal, stage = Journal(path=tmp_path / "journal"), Stage(tmp_path / "staged")
    blocks = [
        staged_row(CopyReceipt(table, journal.write_rows(table, changes_of(table, row), stage), True, True), 0)
        for table, row in ((ITEMS, read(id=1, name="a", price=1)), (LOG, read(line="x")))
    ]
    failed = error_row(PLAIN, TableError("cannot be read", table="shop.plain"), 0)
    lane = Applier(SOURCE, journal, 1, stage)
    results = [row for result in lane.run(iter([*blocks, failed]), Batch("p", 0)) for row in result.to_pylist()]
    assert [(row["table"], row["copied"], row["error"] is None) for row in results] == [
        ("shop.items", 1, True),
        ("shop.log", 1, True),
        ("shop.plain", 0, False),
    ]
    assert journal.path.read_text().splitlines() == [
        "drop shop.items",
        "drop shop.log",
        "CopyBeginEvent shop.items",
        "CopyBeginEvent shop.log",
        "RelationEvent shop.items",
        "Changes [{'id': 1, 'name': 'a', 'price': 1}]",
        "RelationEvent shop.log",
        "Changes [{'line': 'x'}]",
        "CopyEndEvent shop.items",
        "CopyEndEvent shop.log",
    ]
    assert not list(stage.folder.glob("*.arrow"))
    assert [row["bytes"] > 0 for row in results] == [True, True, False]


@pytest.mark.parametrize("as_events", [False, True])
def test_a_result_has_the_size_of_its_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_events: bool) -> None:
    changes = changes_of(ITEMS, insert(id=1, name="a" * 1000, price=1), insert(id=2, name="b", price=1))
    monkeypatch.setattr(type(SOURCE), "read", lambda source, split: iter(changes))
    destination = Journal(path=tmp_path / "journal") if as_events else DeltaDestination(path=str(tmp_path))
    split = Split(weights={"shop.items": 1}, schemas={"shop.items": ITEMS})
    lane = Applier(SOURCE, destination, 1, Stage(tmp_path / "staged"))
    [result] = [row for result in lane.run(iter([log_row(split, 0, 0)]), Batch("p", 0)) for row in result.to_pylist()]
    assert (result["changes"], result["error"]) == (2, None)
    assert 1000 < result["bytes"] < 3000


def apply(destination: DeltaDestination, number: int, rows: dict[TableSchema, RowChange]) -> list[dict[str, Any]]:
    """What a lane reports of a batch that copies a row into each of these tables."""
    blocks = [
        staged_row(CopyReceipt(table, destination.write_rows(table, changes_of(table, row)), False, False), 0)
        for table, row in rows.items()
    ]
    results = Applier(SOURCE, destination, 1, Stage(Path("nowhere"))).run(iter(blocks), Batch("p", number))
    return [row for result in results for row in result.to_pylist()]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_a_value_that_arrow_refuses_stops_its_own_table_and_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = DeltaDestination.write_changes

    def write(self: DeltaDestination, batch: TableBatch) -> Written:
        if batch.table == ITEMS:
            raise pa.ArrowInvalid("Could not convert 'a secret'")
        return plainly(self, batch)

    monkeypatch.setattr(DeltaDestination, "write_changes", write)
    row = read(id=1, name="a", price=1)
    items, plain = apply(DeltaDestination(path=str(tmp_path)), 0, {ITEMS: row, PLAIN: row})
    assert (plain["table"], plain["copied"], plain["error"]) == ("shop.plain", 1, None)
    error = json.loads(items["error"])
    assert (error["kind"], error["table"]) == ("TableError", "shop.items")
    assert "tailrace resync" in error["fix"]
    assert "secret" not in items["error"]


@pytest.mark.parametrize(
    "error", [UnavailableError("out of reach"), TableError("a file is gone"), pa.ArrowInvalid("a secret")]
)
def test_a_batch_is_done_once_it_is_committed_whatever_becomes_of_housekeeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    monkeypatch.setattr(DeltaDestination, "maintain", raising(error))
    [result] = apply(DeltaDestination(path=str(tmp_path)), 0, {LOG: read(line="once")})
    assert (result["copied"], result["error"]) == (1, None)
    assert DeltaTable(str(tmp_path / "shop" / "log")).to_pyarrow_table().num_rows == 1
    [said] = caplog.messages
    assert said.startswith("housekeeping of shop.log: ")
    assert "secret" not in said


def test_a_file_that_only_housekeeping_misses_does_not_stop_its_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    destination = DeltaDestination(
        path=str(tmp_path), compact=CompactOptions(files=2), vacuum=None, partition_by={"shop.items": ["name"]}
    )
    for number in range(2):
        row = insert(id=number, name="old", price=1)
        destination.write_changes(TableBatch(ITEMS, Batch("p", number), changes_of(ITEMS, row)))
    next((tmp_path / "shop" / "items").rglob("part-*.parquet")).unlink()
    [result] = apply(destination, 2, {ITEMS: read(id=3, name="new", price=1)})
    assert (result["copied"], result["error"]) == (1, None)
    assert "a file of the table is no longer in" in caplog.text


class DialectError(TableError):
    """A kind of error that only the author of a source knows."""


def test_an_error_of_an_authors_own_kind_stops_its_own_table(tmp_path: Path) -> None:
    destination = DeltaDestination(path=str(tmp_path))
    rows = destination.write_rows(PLAIN, changes_of(PLAIN, read(id=1, name="a", price=1)))
    blocks = [
        error_row(ITEMS, DialectError("a dialect of its own", fix="speak plainly", table="shop.items"), 0),
        staged_row(CopyReceipt(PLAIN, rows, False, False), 0),
    ]
    results = Applier(SOURCE, destination, 1, Stage(tmp_path)).run(iter(blocks), Batch("p", 0))
    items, plain = (row for result in results for row in result.to_pylist())
    assert (plain["copied"], plain["error"]) == (1, None)
    error = json.loads(items["error"])
    assert (error["kind"], error["message"], error["fix"]) == ("TableError", "a dialect of its own", "speak plainly")


def test_a_table_that_is_renamed_is_another_one_at_the_destination() -> None:
    table = TableSchema(TableName("public", "old"), (), upstream_id="7")
    renamed = replace(table, table=TableName("public", "new"))
    known = KnownTables(held={"7": LastBatch(3, table="public.old")})
    assert known.held_by(table) == LastBatch(3, table="public.old")
    assert known.held_by(renamed) is None
