"""Versions of tables that a reader without a state store remembers."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.journal import Journal
from tailrace.model.change import Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.schema_file import SchemaFile

ITEMS = TableSchema(TableName("shop", "items"), (Column("id", pa.int64()),), ("id",), upstream_id="1")


def test_versions_are_there_again_for_the_next_reader(tmp_path: Path) -> None:
    SchemaFile(tmp_path / "reader.versions").put_schema(ITEMS, Position(5, 0))
    found = SchemaFile(tmp_path / "reader.versions").schema_at("1", Position(7, 0))
    assert found == ITEMS.at_version(1)


def test_a_receiver_may_start_in_the_folder_while_a_version_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = os.fsync

    def start_receiver(file: int) -> None:
        monkeypatch.setattr(os, "fsync", synced)
        Journal.open_writer(tmp_path).close()
        synced(file)

    monkeypatch.setattr(os, "fsync", start_receiver)
    SchemaFile(tmp_path / "reader.versions").put_schema(ITEMS, Position(5, 0))
    assert SchemaFile(tmp_path / "reader.versions").schema_at("1") is not None
