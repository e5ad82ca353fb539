"""What `tailrace verify` reads of a Delta table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.option import Updates
from tailrace.model.schema import Column
from tailrace.testing.destination import ITEMS, RowDict, delete, insert, update, values_of_every_type, with_columns
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


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_query_finds_the_rows_of_a_marked_table_by_any_column(tmp_path: Path, partitioned: bool) -> None:
    """With vectors, partitions that are null, a column that older files lack, and commits around a checkpoint.

    Bounds in the log are wide once rows are marked, and must not rule out a file that still has the row.
    """
    partition_by = {"shop.items": ["price"]} if partitioned else {}
    destination = DeltaDestination(path=str(tmp_path), updates="merge_on_read", partition_by=partition_by)
    wide = with_columns(ITEMS, Column("size", pa.int64(), number=9))
    write(destination, 0, *(insert(id=n, name=str(n), price=n % 3 if n % 5 else None) for n in range(300)))
    write(destination, 1, *(update(id=n, name="new") for n in range(0, 300, 7)), delete(id=0), delete(id=299))
    write(destination, 2, *(update(id=n, name="sized", price=1, size=n) for n in range(5, 300, 13)), table=wide)
    table = DeltaTable(f"{tmp_path}/shop/items")
    table.create_checkpoint()
    write(destination, 3, *(delete(id=n) for n in range(1, 300, 17)), table=wide)
    expected: dict[int, RowDict] = {}
    for n in range(300):
        name, price, size = ("new" if n % 7 == 0 else str(n)), (n % 3 if n % 5 else None), None
        if n % 13 == 5:
            name, price, size = "sized", 1, n
        if n not in (0, 299) and n % 17 != 1:
            expected[n] = {"id": n, "name": name, "price": price, "size": size}
    table.update_incremental()
    conditions: dict[str, Callable[[RowDict], bool]] = {
        "true": lambda row: True,
        "id > 290": lambda row: row["id"] > 290,
        "id IN (0, 2, 299)": lambda row: row["id"] in (0, 2, 299),
        "name = 'new'": lambda row: row["name"] == "new",
        "price IS NULL": lambda row: row["price"] is None,
        "price = 1 AND size IS NOT NULL": lambda row: row["price"] == 1 and row["size"] is not None,
    }
    for condition, holds in conditions.items():
        query = QueryBuilder().register("it", table).execute(f"SELECT * FROM it WHERE {condition}")
        found = sorted(pa.table(query.read_all()).to_pylist(), key=lambda row: int(row["id"]))
        assert found == [row for row in expected.values() if holds(row)], condition
    assert sorted(read_back(destination, wide), key=lambda row: int(row["id"])) == list(expected.values())
