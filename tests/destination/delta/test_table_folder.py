"""A table's folder in an object store takes every kind of file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.destination.delta.object_folder import SMALL_BYTES, ObjectFolder


def test_bytes_notes_and_parquet_are_written_to_a_store(tmp_path: Path) -> None:
    place = ObjectFolder(tmp_path.as_uri())
    place.note("state", "first")
    place.note("state", "second")
    assert place.noted("state") == "second"
    with place.creating("a/bytes") as file:
        file.write(bytes(300_000))
        file.write(b"end")
    assert (tmp_path / "a/bytes").read_bytes() == bytes(300_000) + b"end"
    for number in (200_000, 2_000_000):
        name, rows = f"{number}.parquet", pa.table({"id": np.random.default_rng(1).integers(0, 1 << 60, number)})
        with place.creating(name) as file:
            pq.write_table(rows, file)
            size = file.tell()
        assert (size > SMALL_BYTES) == (number > 1_000_000)
        assert (tmp_path / name).stat().st_size == size
        for known in (None, size):
            assert pq.read_table(place.open(name, known)).equals(rows)


def test_a_file_whose_writing_fails_is_not_in_the_store(tmp_path: Path) -> None:
    place = ObjectFolder(tmp_path.as_uri())
    for size in (10, 3 * SMALL_BYTES):
        with pytest.raises(ZeroDivisionError), place.creating("new") as file:
            _fail(file, size)
        assert place.missing(["new"]) == ["new"]


def _fail(file: Any, size: int) -> None:
    file.write(bytes(size))
    raise ZeroDivisionError
