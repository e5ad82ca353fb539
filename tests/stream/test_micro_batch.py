"""What a lane makes of errors: those of one table are its own, and those behind a commit are nobody's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.destination import Batch, Written
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.maintenance import Compaction
from tailrace.errors import TableError, UnavailableError
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.option.table import TableOptions
from tailrace.source.postgres.source import PostgresSource
from tailrace.stream import micro_batch
from tailrace.stream.block import CopyReceipt, error_row, staged_row
from tailrace.stream.micro_batch import Applier
from tailrace.testing.destination import ITEMS, PLAIN, RowChange, changes_of, insert, read

LOG = TableSchema(TableName("shop", "log"), (Column("line", pa.string()),), ())
SOURCE = PostgresSource("p", "", "p", "p", "", TableOptions())  # nobody connects to it


@pytest.fixture(autouse=True)
def _housekeeping_after_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch, "UPKEEP_BATCHES", 1)


def apply(destination: DeltaDestination, number: int, rows: dict[TableSchema, RowChange]) -> list[dict[str, Any]]:
    """What a lane says of a batch that copies a row into each of these tables."""
    blocks = [
        staged_row(CopyReceipt(table, destination.write_rows(table, changes_of(table, row)), False, False), 0)
        for table, row in rows.items()
    ]
    results = Applier(SOURCE, destination, 1).run(iter(blocks), Batch("p", number))
    return [row for result in results for row in result.to_pylist()]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_what_arrow_refuses_stops_its_own_table_and_no_value_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plainly = DeltaDestination.write_changes

    def write(self: DeltaDestination, table: TableSchema, *arguments: Any, **more: Any) -> Written:
        if table == ITEMS:
            raise pa.ArrowInvalid("Could not convert 'a secret'")
        return plainly(self, table, *arguments, **more)

    monkeypatch.setattr(DeltaDestination, "write_changes", write)
    row = read(id=1, name="a", price=1)
    items, plain = apply(DeltaDestination(str(tmp_path)), 0, {ITEMS: row, PLAIN: row})
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
    [result] = apply(DeltaDestination(str(tmp_path)), 0, {LOG: read(line="once")})
    assert (result["copied"], result["error"]) == (1, None)
    assert DeltaTable(str(tmp_path / "shop" / "log")).to_pyarrow_table().num_rows == 1
    [said] = caplog.messages
    assert said.startswith("housekeeping of shop.log: ")
    assert "secret" not in said


def test_a_file_that_only_housekeeping_misses_does_not_stop_its_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    destination = DeltaDestination(
        str(tmp_path), compact=Compaction(files=2), vacuum=None, partition_by={"shop.items": ("name",)}
    )
    for number in range(2):
        row = insert(id=number, name="old", price=1)
        destination.write_changes(ITEMS, changes_of(ITEMS, row), Batch("p", number))
    next((tmp_path / "shop" / "items").rglob("part-*.parquet")).unlink()
    [result] = apply(destination, 2, {ITEMS: read(id=3, name="new", price=1)})
    assert (result["copied"], result["error"]) == (1, None)
    assert "a file of the table is no longer in" in caplog.text


class DialectError(TableError):
    """A kind of error that only the author of a source knows."""


def test_an_error_of_an_authors_own_kind_stops_its_own_table(tmp_path: Path) -> None:
    destination = DeltaDestination(str(tmp_path))
    rows = destination.write_rows(PLAIN, changes_of(PLAIN, read(id=1, name="a", price=1)))
    blocks = [
        error_row(ITEMS, DialectError("a dialect of its own", fix="speak plainly", table="shop.items"), 0),
        staged_row(CopyReceipt(PLAIN, rows, False, False), 0),
    ]
    results = Applier(SOURCE, destination, 1).run(iter(blocks), Batch("p", 0))
    items, plain = (row for result in results for row in result.to_pylist())
    assert (plain["copied"], plain["error"]) == (1, None)
    error = json.loads(items["error"])
    assert (error["kind"], error["message"], error["fix"]) == ("TableError", "a dialect of its own", "speak plainly")
