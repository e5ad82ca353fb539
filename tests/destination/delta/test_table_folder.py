"""A table's folder in an object store takes every kind of file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as arrow_fs

from tailrace.destination.delta.table_folder import TablePath, _open_store


def test_bytes_notes_and_parquet_are_written_to_a_store(tmp_path: Path) -> None:
    uri = tmp_path.as_uri()
    place = TablePath(uri, "", arrow_fs.PyFileSystem(_open_store(uri, {})), False)
    place.note("state", "first")
    place.note("state", "second")
    assert place.noted("state") == "second"
    with place.creating("a/bytes") as file:
        file.write(bytes(300_000))
        file.write(b"end")
    assert (tmp_path / "a/bytes").read_bytes() == bytes(300_000) + b"end"
    rows = pa.table({"id": np.arange(200_000)})
    with place.creating("rows.parquet") as file:
        pq.write_table(rows, file)
    assert pq.read_table(place.open("rows.parquet")).equals(rows)
