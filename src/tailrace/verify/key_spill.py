"""The keys of one side and a digest per row, however many: in memory while they are few, else in files.

Rows are put into parts by a hash of their key, the same on both sides, so that parts can be compared one after the
other. A run of rows is written as one file, with one record batch per part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.model.digest import row_digests

DIGEST: Final = "_tailrace_digest"
PARTS: Final = 1024
RUN_ROWS: Final = 500_000
"""How many rows of a side are in memory, and about as many are compared at a time."""

KeyCounts = npt.NDArray[np.int64]


class KeySpill:
    """One side. `add` every row, then `finish`, then take any parts any number of times."""

    def __init__(self, folder: Path, key: pa.Schema, run_rows: int) -> None:
        self._folder = folder
        self._schema = key.append(pa.field(DIGEST, pa.int64()))
        self._run_rows = run_rows
        self._waiting: list[pa.RecordBatch] = []
        self._waits = 0
        self._files: list[Path] = []
        self._run: pa.Table = self._schema.empty_table()
        self.counts: KeyCounts = np.zeros(PARTS, np.int64)
        """How many rows there are in each part."""

    def __len__(self) -> int:
        return int(self.counts.sum())

    def add(self, rows: pa.RecordBatch) -> None:
        """Keep the key and the digest of each of these rows, of which every column counts."""
        arrays = [rows.column(name).cast(self._schema.field(name).type) for name in self._schema.names[:-1]]
        digests = pa.array(row_digests(rows.columns))
        self._waiting.append(pa.RecordBatch.from_arrays([*arrays, digests], schema=self._schema))
        self._waits += rows.num_rows
        if self._waits >= self._run_rows:
            self._write()

    def finish(self) -> None:
        """No more rows will come. A side that was never written stays in memory."""
        if self._files and self._waits:
            self._write()
        elif not self._files:
            self._run, sizes = self._sorted()
            self.counts = sizes

    def _sorted(self) -> tuple[pa.Table, KeyCounts]:
        """The rows that wait, in the order of their parts, and how many are in each."""
        rows = pa.Table.from_batches(self._waiting, self._schema).combine_chunks()
        self._waiting, self._waits = [], 0
        if not rows.num_rows:
            return rows, np.zeros(PARTS, np.int64)
        keys = [column.chunk(0) for column in rows.columns[:-1]]
        part = (row_digests(keys).view(np.uint64) % np.uint64(PARTS)).astype(np.int64)
        return rows.take(pa.array(np.argsort(part, kind="stable"))), np.bincount(part, minlength=PARTS)

    def _write(self) -> None:
        rows, sizes = self._sorted()
        path = self._folder / f"{len(self._files):06}.arrow"
        whole = rows.combine_chunks().to_batches()[0]
        ends = np.cumsum(sizes)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, self._schema) as writer:
            for end, size in zip(ends.tolist(), sizes.tolist(), strict=True):
                writer.write_batch(whole.slice(end - size, size))
        self._files.append(path)
        self.counts += sizes

    def take(self, first: int, last: int) -> pa.Table:
        """The rows of parts first to last, without last."""
        if not self._files:
            ends = np.concatenate([[0], np.cumsum(self.counts)])
            return self._run.slice(int(ends[first]), int(ends[last] - ends[first]))
        found: list[pa.RecordBatch] = []
        for path in self._files:
            with pa.memory_map(str(path)) as mapped:
                run = pa.ipc.open_file(mapped)
                found += [run.get_batch(part) for part in range(first, last)]
        return pa.Table.from_batches(found, self._schema)


def strides(piles: Sequence[KeySpill], rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of parts, all parts in turn, each of about so many rows on all sides together: never less than a part."""
    sizes = np.sum([spill.counts for spill in piles], axis=0).tolist()
    first, held = 0, 0
    for part, size in enumerate(sizes):
        if part > first and held + size > rows:
            yield first, part
            first, held = part, 0
        held += size
    yield first, PARTS
