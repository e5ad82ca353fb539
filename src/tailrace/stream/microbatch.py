"""One micro-batch: the log and the receipts to their tables' lanes, each table committed once, one Spark job."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from tailrace.change import Changes
from tailrace.destination import Batch, Destination, Staged, Written
from tailrace.errors import TableError
from tailrace.failpoint import reach
from tailrace.schema import TableSchema
from tailrace.source import Source, Split
from tailrace.stream.block import ERROR, LOG, BlockRow, describe, rows_of
from tailrace.stream.worker import freeze_imports, give_back_memory

UPKEEP_BATCHES = 20
"""How often a table's housekeeping is looked at; it is cheap when nothing is due."""

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

        rows = blocks.repartitionById(self.lanes, "lane").mapInArrow(run, RESULT_SCHEMA).collect()
        return [Result(**{**row.asDict(), "error": json.loads(row["error"]) if row["error"] else None}) for row in rows]

    def run(self, batches: Iterator[pa.RecordBatch], batch: Batch) -> Iterator[pa.RecordBatch]:
        """One lane: its tables one after the other. An error of one table leaves the others going."""
        freeze_imports()
        rows = sorted(chain.from_iterable(map(rows_of, batches)), key=lambda row: (row.table, row.kind, row.first))
        logs = [row.log() for row in rows if row.kind == LOG]
        works: dict[str, _Work] = {}
        for row in rows:
            if row.kind != LOG:
                works.setdefault(row.table, _Work()).take(row)
        for changes, errors in self._read(logs):
            for chunk in changes:
                works.setdefault(str(chunk.table.table), _Work()).add(chunk)
            for error in errors:
                works.setdefault(error.table or "", _Work()).error = describe(error)
        for name in sorted(works):
            give_back_memory()
            started = time.monotonic()
            result = self._apply_table(works.pop(name), batch)
            yield _row({**result, "table": name, "seconds": time.monotonic() - started})
        give_back_memory()

    def _read(self, splits: Sequence[Split]) -> Iterator[tuple[list[Changes], list[TableError]]]:
        if len(splits) < 2:
            yield from map(self._read_split, splits)
            return
        # Decoding is native code for the most part, so that threads share it among the cores.
        with ThreadPoolExecutor(min(len(splits), os.cpu_count() or 1)) as pool:
            yield from pool.map(self._read_split, splits)

    def _read_split(self, split: Split) -> tuple[list[Changes], list[TableError]]:
        """The changes of the split's tables. A table that cannot be read is left out, and all others are read whole."""
        errors: list[TableError] = []
        while split.weights:
            try:
                found = [chunk for chunk in self.source.read(split) if str(chunk.table.table) in split.weights]
            except TableError as error:
                if error.table not in split.weights:
                    raise
                errors.append(error)
                split = split.only(split.weights.keys() - {error.table})
            else:
                give_back_memory()
                return found, errors
        return [], errors

    def _apply_table(self, work: _Work, batch: Batch) -> dict[str, Any]:
        table = work.table
        known = {"upstream_id": table.upstream_id} if table is not None else {}
        if work.error is not None or table is None:
            return {**known, "error": json.dumps(work.error)}
        try:
            written = self._write(table, work, batch)
            if _due(str(table.table), batch):
                self.destination.maintain(table.table)
        except TableError as error:
            return {**known, "error": json.dumps(describe(error))}
        return {
            **known,
            "copied": sum(receipt.rows for receipt in work.staged),
            "changes": work.count,
            "upserts": written.upserts,
            "deletes": written.deletes,
            "repeated": written.repeated,
            "committed_at": work.committed_at,
        }

    def _write(self, table: TableSchema, work: _Work, batch: Batch) -> Written:
        reach("stream.before_write")
        written = self.destination.write_changes(
            table, work.changes(), batch, staged=work.staged, starts=work.starts, refetch=self.source.refetch
        )
        reach("stream.written")
        return written


def _due(table: str, batch: Batch) -> bool:
    """Every so many batches, and not for all tables in the same one."""
    return (batch.id + zlib.crc32(table.encode())) % UPKEEP_BATCHES == 0


class _Work:
    """What one batch holds for one table."""

    def __init__(self) -> None:
        self.table: TableSchema | None = None
        self.staged: list[Staged] = []
        self.starts = False
        self.error: dict[str, Any] | None = None
        self.count = 0
        self.committed_at: int | None = None
        self._chunks: deque[Changes] = deque()

    def take(self, row: BlockRow) -> None:
        """A receipt of copied rows, or the error that stopped the copy."""
        if row.kind == ERROR:
            self.error = row.error()
            return
        self.table, receipt, starts = row.staged()
        self.staged.append(receipt)
        self.starts |= starts

    def add(self, changes: Changes) -> None:
        """Changes of the log, in order."""
        self.table = self.table or changes.table
        self.count += len(changes)
        at = changes.batch.column("committed_at").cast(pa.int64())[-1].as_py()
        self.committed_at = at if at is not None else self.committed_at
        self._chunks.append(changes)

    def changes(self) -> Iterator[Changes]:
        """The changes, each given away as it is asked for."""
        while self._chunks:
            yield self._chunks.popleft()


def _row(values: dict[str, Any]) -> pa.RecordBatch:
    defaults: dict[str, Any] = {"copied": 0, "changes": 0, "upserts": 0, "deletes": 0, "repeated": False}
    return pa.RecordBatch.from_pylist([{**defaults, **values}], schema=_RESULT_LAYOUT)
