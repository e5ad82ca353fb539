"""What a comparison found, on its way from the tasks that compared to the one that writes the table.

It is a file beside what is known of the table. Only a reference to it crosses Spark, so that a diff that finds every
row changed needs no more memory than one that finds none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tailrace.change import Changes, changes_type
from tailrace.schema import TableSchema
from tailrace.source import Split
from tailrace.wholefile import creating


@dataclass(frozen=True)
class DiffResultSplit(Split):
    """Changes of one table in a file; without one there were none."""

    table: TableSchema | None = None
    file: str | None = None

    def read(self) -> Iterator[Changes]:
        """The changes in the order in which they were found. Needs no connection, and may be repeated."""
        if self.file is None:
            return
        assert self.table is not None
        with pa.memory_map(self.file) as mapped, pa.ipc.open_stream(mapped) as batches:
            for batch in batches:
                yield Changes(self.table, batch)


def write_diff_result(path: Path, table: TableSchema, found: Iterator[Changes]) -> DiffResultSplit:
    """Put changes into a file as they come; none is made where there are none."""
    name, size = str(table.table), 0
    with ExitStack() as opened:
        writer: pa.RecordBatchStreamWriter | None = None
        for changes in found:
            if writer is None:
                file = opened.enter_context(creating(path))
                writer = opened.enter_context(pa.ipc.new_stream(file, changes_type(table.row_type)))
            writer.write_batch(changes.batch)
            size += changes.batch.nbytes
    return DiffResultSplit(weights={name: size}, schemas={name: table}, table=table, file=str(path) if size else None)
