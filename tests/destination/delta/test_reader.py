"""What `tailrace verify` reads of a Delta table."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import Updates
from tailrace.testing.destination import ITEMS, delete, insert, update, values_of_every_type
from tests.support.delta_table import read_back
from tests.support.destination_writing import write


@pytest.mark.parametrize("updates", get_args(Updates))
def test_rows_of_every_type_are_read_without_those_that_are_kept_though_deleted(
    tmp_path: Path, updates: Updates
) -> None:
    destination = DeltaDestination(path=str(tmp_path), deletes="soft", updates=updates)
    table, rows = values_of_every_type()
    write(destination, 0, *(insert(**row) for row in rows), table=table)
    write(destination, 1, delete(id=0), update(**rows[1]), table=table)
    assert sorted(read_back(destination, table), key=lambda row: int(row["id"])) == rows[1:]


def test_a_table_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    assert read_back(DeltaDestination(path=str(tmp_path)), ITEMS) == []
