"""How many rows the files of a copied table hold, and whether their keys are stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.destination.delta.data_file import LEAST_MARKED_ROWS, LEAST_ROWS
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.file_writer import FileWriter
from tailrace.destination.delta.key_index import key_folder, key_name
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.destination.delta.option import Updates
from tailrace.destination.lake.key_index import STORED_ROWS
from tailrace.model.change import Changes, Op
from tailrace.testing.destination import ITEMS
from tests.support.destination_writing import write


@pytest.mark.parametrize(
    ("updates", "rows", "files"),
    [
        ("auto", LEAST_MARKED_ROWS, [LEAST_ROWS] * 4),
        ("auto", LEAST_MARKED_ROWS + 1, [LEAST_MARKED_ROWS + 1]),
        ("auto", 3 * LEAST_MARKED_ROWS + 1, [2 * LEAST_MARKED_ROWS, LEAST_MARKED_ROWS + 1]),
        ("copy_on_write", LEAST_MARKED_ROWS + 1, [*[LEAST_ROWS] * 3, LEAST_ROWS + 1]),
        ("merge_on_read", LEAST_MARKED_ROWS, [LEAST_MARKED_ROWS]),
        ("merge_on_read", 2 * LEAST_MARKED_ROWS + 31_000, [2 * LEAST_MARKED_ROWS + 31_000]),
    ],
)
def test_files_of_a_chunk_are_small_where_they_are_rewritten_and_larger_where_rows_are_marked(
    tmp_path: Path, updates: Updates, rows: int, files: list[int]
) -> None:
    destination = DeltaDestination(path=str(tmp_path), updates=updates)
    values = [np.arange(rows), np.full(rows, "x"), np.zeros(rows, np.int32)]
    row = pa.StructArray.from_arrays([pa.array(value) for value in values], fields=list(ITEMS.row_type))
    whole = Changes.build(ITEMS, row, op=Op.READ, commit=0)
    parts = [Changes(ITEMS, whole.batch.slice(start, 10_000)) for start in range(0, rows, 10_000)]
    write(destination, 0, staged=[destination.write_rows(ITEMS, parts)], begins_copy=True)
    snapshot = DeltaSnapshot.load(destination.place(ITEMS.table), "shop.items")
    assert snapshot is not None
    assert [file.rows for file in snapshot.files()] == files
    # The keys of a table that will be marked are stored with its copy, and not by the first batch that marks rows.
    are_stored = max(files) >= LEAST_MARKED_ROWS
    large = {key_name(file) for file in snapshot.files() if file.rows >= STORED_ROWS}
    folder = key_folder(destination.place(ITEMS.table))
    assert {path.name for path in folder.glob("*")} == (large if are_stored else set())


@pytest.mark.parametrize("rows", [65, 100, 101, 149, 150, 151, 199, 200, 250, 251, 1000])
@pytest.mark.parametrize("step", [1, 7, 64, 1000])
def test_no_file_of_a_writer_is_less_than_half_full(tmp_path: Path, rows: int, step: int) -> None:
    place = DeltaDestination(path=str(tmp_path)).place(ITEMS.table)
    place.make()
    values = pa.table({"id": np.arange(rows)})
    with FileWriter(place, values.schema, (), 100) as writer:
        for start in range(0, rows, step):
            writer.write(values.slice(start, step))
    held = [file.rows for file in writer.written]
    assert sum(held) == rows
    assert min(held) >= 50
    assert max(held) <= 150
    read = pa.concat_tables([pq.read_table(place.open(file.path)) for file in writer.written])
    assert read.column("id").to_pylist() == list(range(rows))
