"""Measures how fast a table is read after an hour of updates, with its maintenance, against a new copy of its rows.

`python -m bench --only upkeep`. Without Spark and Postgres: batches are written one after the other, as fast as they
go, and maintenance runs in the background as in a pipeline. `--scale 5` takes 10 M rows.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from bench.report import Report
from tailrace.destination import Batch, TableBatch
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.destination.delta.log import DeltaSnapshot
from tailrace.model.change import Changes, Op
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.stream.micro_batch import UPKEEP_BATCHES
from tailrace.stream.upkeep import Upkeep

ROWS = 2_000_000
BATCHES = 3600
"""An hour of a batch a second."""
BATCH_ROWS = 1000
SCANS = 7
_COPY_ROWS = 1_000_000
_NUMBERS = ("a", "b", "c", "d")
TABLE = TableSchema(
    TableName("public", "rows"),
    tuple(
        Column(name, kind, name != "id", number=number)
        for number, (name, kind) in enumerate(
            {
                "id": pa.int64(),
                **dict.fromkeys(_NUMBERS, pa.int64()),
                "share": pa.float64(),
                "name": pa.string(),
                "city": pa.string(),
                "at": pa.timestamp("us", "UTC"),
                "paid": pa.bool_(),
            }.items()
        )
    ),
    ("id",),
)
_QUERY = (
    f"SELECT count(*), sum(id), {', '.join(f'sum({name})' for name in _NUMBERS)}, sum(share), max(name), max(city),"
    ' max("at"), sum(CASE WHEN paid THEN 1 ELSE 0 END) FROM it'
)


def measure(report: Report, folder: Path, scale: float) -> None:
    """Update a table for an hour's worth of batches, then read it and a copy of it in turn."""
    rows = max(10_000, int(ROWS * scale))
    batches = BATCHES if scale >= 1 else max(100, int(BATCHES * scale))
    kept = DeltaDestination(path=str(folder / "kept"), updates="merge_on_read")
    fresh = DeltaDestination(path=str(folder / "fresh"))
    random = np.random.default_rng(1)
    _copy(
        kept, (_rows(random, np.arange(start, min(start + _COPY_ROWS, rows))) for start in range(0, rows, _COPY_ROWS))
    )
    hour = _Hour(kept)
    cpu, making = time.process_time(), 0.0
    for number in range(1, batches + 1):
        started = time.thread_time()
        rows_of_batch = _rows(random, np.sort(random.choice(rows, BATCH_ROWS, replace=False)))
        making += time.thread_time() - started
        hour.write(number, rows_of_batch)
    hour.background.wait(600)
    applying = time.process_time() - cpu - making - hour.upkeep_cpu_seconds
    report.add("upkeep", "CPU per batch", 1000 * applying / batches, "ms")
    report.add("upkeep", "CPU of maintenance per batch", 1000 * hour.upkeep_cpu_seconds / batches, "ms")
    report.add("upkeep", "longest batch without maintenance", max(hour.alone, default=0.0), "s")
    report.add("upkeep", "longest batch during maintenance", max(hour.during, default=0.0), "s")
    _report_files(report, kept)
    query = (
        QueryBuilder().register("it", DeltaTable(kept.place(TABLE.table).uri)).execute("SELECT * FROM it ORDER BY id")
    )
    _copy(fresh, (batch.to_struct_array() for batch in pa.table(query.read_all()).cast(TABLE.arrow).to_batches()))
    pairs = [(_scan(kept), _scan(fresh)) for _ in range(SCANS)]
    scans = median(mine.reading / other.reading for mine, other in pairs)
    # A small number of rows is read in the time that its plan takes.
    report.add("upkeep", "scan, ratio to a fresh copy (CPU)", scans, "", 1.3 if scale >= 1 else None, "most")
    whole = median(mine.whole / other.whole for mine, other in pairs)
    report.add("upkeep", "scan and opening, ratio to a fresh copy (CPU)", whole)
    report.add("upkeep", "opening (CPU)", 1000 * median(mine.opening for mine, _ in pairs), "ms")


@dataclass
class _Hour:
    """Batches and their maintenance, and what they took."""

    destination: DeltaDestination
    background: Upkeep = field(default_factory=Upkeep)
    alone: list[float] = field(default_factory=list)
    during: list[float] = field(default_factory=list)
    upkeep_cpu_seconds: float = 0.0
    is_maintaining: bool = False

    def write(self, number: int, rows: pa.StructArray) -> None:
        was_maintaining, started = self.is_maintaining, time.monotonic()
        changes = [Changes.build(TABLE, rows, op=Op.UPDATE, commit=number)]
        self.destination.write_changes(TableBatch(TABLE, Batch("bench", number), changes))
        took = self.during if was_maintaining or self.is_maintaining else self.alone
        took.append(time.monotonic() - started)
        if number % UPKEEP_BATCHES == 0:
            self.background.submit(str(TABLE.table), self._maintain)

    def _maintain(self) -> None:
        self.is_maintaining, cpu = True, time.thread_time()
        self.destination.maintain(TABLE.table)
        self.upkeep_cpu_seconds += time.thread_time() - cpu
        self.is_maintaining = False


def _rows(random: np.random.Generator, ids: npt.NDArray[np.int64]) -> pa.StructArray:
    count = len(ids)
    values: list[pa.Array[Any]] = [
        pa.array(ids),
        *(pa.array(random.integers(0, 1000, count)) for _ in _NUMBERS),
        pa.array(random.random(count)),
        pa.array(np.char.add("name ", random.integers(0, 1_000_000, count).astype(str))),
        pa.array(np.char.add("city ", random.integers(0, 50, count).astype(str))),
        pa.array(random.integers(1_700_000_000_000_000, 1_750_000_000_000_000, count), pa.timestamp("us", "UTC")),
        pa.array(random.random(count) < 0.5),
    ]
    return pa.StructArray.from_arrays(values, fields=list(TABLE.row_type))


def _copy(destination: DeltaDestination, rows: Any) -> None:
    staged = destination.write_rows(TABLE, (Changes.build(TABLE, part, op=Op.READ, commit=0) for part in rows))
    batch = TableBatch(TABLE, Batch("bench", 0), staged=[staged], begins_copy=True, completes_copy=True)
    destination.write_changes(batch)


@dataclass(frozen=True)
class _Scan:
    """The CPU seconds of opening a table, and of reading every value."""

    opening: float
    reading: float

    @property
    def whole(self) -> float:
        return self.opening + self.reading


def _scan(destination: DeltaDestination) -> _Scan:
    started = time.process_time()
    table = DeltaTable(destination.place(TABLE.table).uri)
    opened = time.process_time()
    QueryBuilder().register("it", table).execute(_QUERY).read_all()
    return _Scan(opened - started, time.process_time() - opened)


def _report_files(report: Report, destination: DeltaDestination) -> None:
    place = destination.place(TABLE.table)
    snapshot = DeltaSnapshot.load(place, str(TABLE.table))
    assert snapshot is not None
    log = sorted(Path(place.base, "_delta_log").iterdir())
    vectors = [file.vector.size_in_bytes for file in snapshot.files() if file.vector is not None]
    report.add("upkeep", "data files", len(snapshot.files()))
    dead, all_rows = (sum(getattr(file, name) for file in snapshot.files()) for name in ("dead", "rows"))
    report.add("upkeep", "deleted rows in them", 100 * dead / all_rows, "%")
    report.add("upkeep", "vectors in use", sum(vectors) / 1e6, "MB")
    report.add("upkeep", "files in the log", len(log))
    report.add("upkeep", "log", sum(file.stat().st_size for file in log) / 1e6, "MB")
    report.add("upkeep", "last checkpoint", max(log, key=_checkpoint_order).stat().st_size / 1e6, "MB")


def _checkpoint_order(file: Path) -> tuple[bool, str]:
    return file.name.endswith(".checkpoint.parquet"), file.name
