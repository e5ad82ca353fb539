"""One micro-batch: blocks to their tables' lanes, each table collapsed and committed once, one Spark job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from tailrace.change import Changes
from tailrace.destination import Batch, Destination, Staged, Written
from tailrace.errors import TableError
from tailrace.failpoint import reach
from tailrace.schema import TableSchema
from tailrace.source import Source
from tailrace.stream.block import CHANGES, ERROR, STAGED, BlockRow, describe, rows_of

RESULT_SCHEMA = (
    "table STRING, upstream_id STRING, copied BIGINT, changes BIGINT, upserts BIGINT, deletes BIGINT,"
    " repeated BOOLEAN, committed_at BIGINT, seconds DOUBLE, error STRING"
)
_RESULT_LAYOUT = pa.schema(
    [
        ("table", pa.string()),
        ("upstream_id", pa.string()),
        ("copied", pa.int64()),
        ("changes", pa.int64()),
        ("upserts", pa.int64()),
        ("deletes", pa.int64()),
        ("repeated", pa.bool_()),
        ("committed_at", pa.int64()),
        ("seconds", pa.float64()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class Result:
    """What a batch did to one table. `committed_at` is the upstream's time of its last change, in microseconds."""

    table: str
    upstream_id: str
    copied: int
    changes: int
    upserts: int
    deletes: int
    repeated: bool
    committed_at: int | None
    seconds: float
    error: dict[str, Any] | None


@dataclass(frozen=True)
class Applier:
    """Applies the lanes of a micro-batch. Pickled to executors."""

    source: Source
    destination: Destination
    lanes: int

    def apply(self, blocks: DataFrame, batch: Batch) -> list[Result]:
        """Run the batch's only job. Called by `foreachBatch`, again for the same batch after a crash."""
        lane = self

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return lane.run(batches, batch)

        rows = (
            blocks.repartitionById(self.lanes, "lane")
            .sortWithinPartitions("table", "kind", "first")
            .mapInArrow(run, RESULT_SCHEMA)
            .collect()
        )
        return [Result(**{**row.asDict(), "error": json.loads(row["error"]) if row["error"] else None}) for row in rows]

    def run(self, batches: Iterator[pa.RecordBatch], batch: Batch) -> Iterator[pa.RecordBatch]:
        """One lane: its tables one after the other. An error of one table leaves the others going."""
        rows = chain.from_iterable(map(rows_of, batches))
        for table, group in groupby(rows, lambda row: row.table):
            started = time.monotonic()
            result = self._apply_table(table, group, batch)
            yield _row({**result, "table": table, "seconds": time.monotonic() - started})

    def _apply_table(self, name: str, rows: Iterator[BlockRow], batch: Batch) -> dict[str, Any]:
        first = next(rows)
        if first.kind == ERROR:
            return {"error": json.dumps(first.error())}
        table = first.staged()[0] if first.kind == STAGED else next(first.changes()).table
        work = _Work(chain([first], rows))
        try:
            written = self._write(table, work, batch)
        except TableError as error:
            return {"upstream_id": table.upstream_id, "error": json.dumps(describe(error))}
        return {
            "upstream_id": table.upstream_id,
            "copied": work.copied,
            "changes": work.changes,
            "upserts": written.upserts,
            "deletes": written.deletes,
            "repeated": written.repeated,
            "committed_at": work.committed_at,
        }

    def _write(self, table: TableSchema, work: _Work, batch: Batch) -> Written:
        staged, starts, changes = work.split()
        reach("stream.before_write")
        written = self.destination.write_changes(
            table, changes, batch, staged=staged, starts=starts, refetch=self.source.refetch
        )
        reach("stream.written")
        return written


class _Work:
    """A table's rows of one batch, counted as they are used."""

    def __init__(self, rows: Iterable[BlockRow]) -> None:
        self._rows = iter(rows)
        self.copied = 0
        self.changes = 0
        self.committed_at: int | None = None

    def split(self) -> tuple[list[Staged], bool, Iterator[Changes]]:
        """The receipts, whether a copy starts, and the changes, which stay where they are until asked for."""
        staged: list[Staged] = []
        starts = False
        for row in self._rows:
            if row.kind != STAGED:
                return staged, starts, self._changes(chain([row], self._rows))
            _, receipt, first = row.staged()
            staged.append(receipt)
            starts |= first
            self.copied += receipt.rows
        return staged, starts, iter(())

    def _changes(self, rows: Iterable[BlockRow]) -> Iterator[Changes]:
        for row in rows:
            assert row.kind == CHANGES
            for changes in row.changes():
                self.changes += len(changes)
                if len(changes):
                    at = changes.batch.column("committed_at").cast(pa.int64())[-1].as_py()
                    self.committed_at = at if at is not None else self.committed_at
                yield changes


def _row(values: dict[str, Any]) -> pa.RecordBatch:
    defaults: dict[str, Any] = {"copied": 0, "changes": 0, "upserts": 0, "deletes": 0, "repeated": False}
    return pa.RecordBatch.from_pylist([{**defaults, **values}], schema=_RESULT_LAYOUT)
