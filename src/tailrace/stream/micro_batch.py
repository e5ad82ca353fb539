"""One micro-batch is one Spark job: log and receipts go to their tables' lanes, and each table is committed once."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, groupby
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Row

from tailrace.destination import Batch, Destination, EventDestination, Stage, Staged, TableBatch, Written
from tailrace.destination.copy import write_batch
from tailrace.destination.event import event_stream
from tailrace.errors import TableError
from tailrace.model.change import Changes, Op
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema
from tailrace.source.source import Source
from tailrace.source.split import Split, weigh
from tailrace.stream import upkeep
from tailrace.stream.block import ERROR, LOG, BlockRow, rows_of, unfit_value
from tailrace.stream.executor_check import OPEN_GATE, ExecutorGate
from tailrace.stream.spark_error import portable_errors
from tailrace.stream.worker import begin, give_back_memory
from tailrace.system.failpoint import reach
from tailrace.system.phase import phase, take

TOGETHER_BYTES = 128 * 1024 * 1024
"""How much of the log is decoded for several tables at once."""
UPKEEP_BATCHES = 20
"""How often a table's housekeeping is begun, in batches; it is cheap when nothing is due."""

RESULT_SCHEMA = (
    "table STRING, upstream_id STRING, copying BOOLEAN, copied BIGINT, changes BIGINT, inserts BIGINT, updates BIGINT,"
    " deletes BIGINT, bytes BIGINT, repeated BOOLEAN, committed_at BIGINT, seconds DOUBLE, error STRING, last STRING,"
    " phases STRING"
)
_RESULT_LAYOUT = pa.schema(
    [
        ("table", pa.string()),
        ("upstream_id", pa.string()),
        ("copying", pa.bool_()),
        ("copied", pa.int64()),
        ("changes", pa.int64()),
        ("inserts", pa.int64()),
        ("updates", pa.int64()),
        ("deletes", pa.int64()),
        ("bytes", pa.int64()),
        ("repeated", pa.bool_()),
        ("committed_at", pa.int64()),
        ("seconds", pa.float64()),
        ("error", pa.string()),
        ("last", pa.string()),
        ("phases", pa.string()),
    ]
)


@dataclass(frozen=True)
class TableResult:
    """What a batch did to one table: it was `copying` rows, or it applied changes of the log.

    `inserts`, `updates` and `deletes` are the changes as the upstream made them. `committed_at` is the upstream's time
    of its last change, in microseconds, `last` the last batch of the table at the destination, None if it is not known.
    `phases` are seconds of work since the lane's previous result, which may have been for several tables. `bytes` is
    the size of what it did: of changes in memory as Arrow, of copied rows as they are staged.
    """

    table: str
    upstream_id: str
    copying: bool
    copied: int
    changes: int
    inserts: int
    updates: int
    deletes: int
    repeated: bool
    committed_at: int | None
    seconds: float
    error: dict[str, Any] | None
    last: LastBatch | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    bytes: int = 0

    @classmethod
    def of_row(cls, row: Row) -> TableResult:
        values = row.asDict()
        error, last = (json.loads(values[name]) if values[name] else None for name in ("error", "last"))
        phases = json.loads(values["phases"])
        return cls(**{**values, "error": error, "last": LastBatch(**last) if last else None, "phases": phases})


@dataclass(frozen=True)
class KnownTables:
    """What the state says of the tables at the destination, by upstream id.

    `written`: earlier batches wrote rows of them. `held`: the last batch of each.
    """

    written: Set[str] = frozenset()
    held: Mapping[str, LastBatch] = field(default_factory=dict)

    def held_by(self, table: TableSchema) -> LastBatch | None:
        """The last batch of a table under its current name."""
        last = self.held.get(table.upstream_id)
        return last if last is not None and last.is_of(str(table.table)) else None


NOTHING_KNOWN = KnownTables()


@dataclass(frozen=True)
class Applier:
    """Applies the lanes of a micro-batch. Pickled to executors.

    `upkeep_in_background`: housekeeping does not hold up the batch, but ends with the worker. A run that ends after a
    few batches would never complete any. Each process that applies lanes passes the `gate` first.
    """

    source: Source
    destination: Destination
    lanes: int
    stage: Stage
    upkeep_in_background: bool = False
    gate: ExecutorGate = OPEN_GATE

    def apply(self, blocks: DataFrame, batch: Batch, known: KnownTables) -> list[TableResult]:
        """Run the batch's only job. Called by `foreachBatch`, again for the same batch after a crash."""
        lane = self

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with portable_errors():
                yield from lane.run(batches, batch, known)

        rows = blocks.repartitionById(self.lanes, "lane").mapInArrow(run, RESULT_SCHEMA).collect()
        return [TableResult.of_row(row) for row in rows]

    def run(
        self, batches: Iterator[pa.RecordBatch], batch: Batch, known: KnownTables = NOTHING_KNOWN
    ) -> Iterator[pa.RecordBatch]:
        """One lane: its tables one after the other. An error of one table does not stop the others."""
        begin()
        self.gate.require()
        take()
        rows = sorted(chain.from_iterable(map(rows_of, batches)), key=lambda row: (row.table, row.kind, row.first))
        copies = {
            table: _Work.of_copy(receipts)
            for table, receipts in groupby((row for row in rows if row.kind != LOG), lambda row: row.table)
        }
        splits = [row.log() for row in rows if row.kind == LOG]
        if isinstance(self.destination, EventDestination) and self.destination.takes_events:
            yield from self._write_events(self.destination, copies, splits, batch)
            return
        for table, work in copies.items():
            yield self._apply(table, work, batch, known)
        schemas = {name: schema for split in splits for name, schema in split.schemas.items()}
        weights = weigh(splits)
        for tables in group_tables(weights):
            read = self._read([split.only(tables) for split in splits if not tables.isdisjoint(split.weights)])
            for table, flow in _flows(tables, read):
                yield self._apply(table, _Work(schemas[table], flow, weights[table]), batch, known)

    def _write_events(
        self, destination: EventDestination, copies: dict[str, _Work], splits: Sequence[Split], batch: Batch
    ) -> Iterator[pa.RecordBatch]:
        """All tables of the batch as one stream. A table that cannot be read is left out of it."""
        started = time.monotonic()
        read = list(self._read(splits))
        works = copies | {name: _Work(split.schemas[name], iter(())) for split in splits for name in split.weights}
        errors = {error.table or "": error for _, found in read for error in found}
        errors |= {name: work.error for name, work in copies.items() if work.error is not None}
        for name, work in copies.items():
            if work.starts and name not in errors:
                destination.drop_table_for_copy(work.require_table())
        copied = [self.stage.read(work.staged) for name, work in copies.items() if name not in errors]
        log = [chunk for chunks, _ in read for chunk in chunks if str(chunk.table.table) not in errors]
        for chunk in log:
            works[str(chunk.table.table)].note(chunk)
        reach("stream.before_write")
        begun = [work.require_table() for name, work in copies.items() if work.starts and name not in errors]
        completed = [work.require_table() for name, work in copies.items() if work.completes and name not in errors]
        events = event_stream(chain.from_iterable(copied), log, completed, begun)
        with phase("write", outermost=True):
            written = destination.write_events(events, batch)
        reach("stream.written")
        for name, work in works.items():
            self.stage.discard(work.staged)
            result = work.result(name) | {"seconds": time.monotonic() - started, "repeated": written.repeated}
            if written or written.repeated:
                result["last"] = _text_of(written.last or batch.last)
            if name in errors:
                result["error"] = json.dumps(errors[name].describe())
            yield _row(result)

    def _read(self, splits: Sequence[Split]) -> Read:
        """The splits one after the other, while threads decode the next ones: that is mostly native code."""
        workers = os.cpu_count() or 1
        with ThreadPoolExecutor(workers) as pool:
            ahead: deque[Future[tuple[list[Changes], list[TableError]]]] = deque()
            for split in splits:
                ahead.append(pool.submit(self._read_split, split))
                if len(ahead) > workers:
                    yield _awaited(ahead.popleft())
            while ahead:
                yield _awaited(ahead.popleft())

    @phase("decode", outermost=True)
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

    def _apply(self, name: str, work: _Work, batch: Batch, known: KnownTables) -> pa.RecordBatch:
        started = time.monotonic()
        result: dict[str, Any] = {"table": name, "upstream_id": work.upstream_id, "copying": work.copying}
        try:
            table = work.require_table()
            part = work.of_batch(table, batch, known)
            written = self._write(part)
            if _due(name, batch):
                self._keep_up(table.table)
            result = work.result(name) | {
                "repeated": written.repeated,
                "last": _text_of(part.held_after(written)),
            }
        except TableError as error:
            result["error"] = json.dumps(error.describe())
        except pa.ArrowException as error:
            result["error"] = json.dumps(unfit_value(error, name).describe())
        give_back_memory()
        return _row({**result, "seconds": time.monotonic() - started})

    def _keep_up(self, table: TableName) -> None:
        def job() -> None:
            self.destination.maintain(table)
            self.stage.discard_abandoned()

        if self.upkeep_in_background:
            upkeep.BACKGROUND.submit(str(table), job)
        else:
            upkeep.do(str(table), job)

    @phase("write", outermost=True)
    def _write(self, batch: TableBatch) -> Written:
        reach("stream.before_write")
        written = write_batch(self.destination, replace(batch, refetch=self.source.refetch, stage=self.stage))
        reach("stream.written")
        return written


def _due(table: str, batch: Batch) -> bool:
    """Whether housekeeping is due: once in some batches, and for different tables in different ones."""
    return (batch.id + zlib.crc32(table.encode())) % UPKEEP_BATCHES == 0


def group_tables(weights: Mapping[str, int]) -> list[frozenset[str]]:
    """Tables to be read together: small ones together, a large one alone, so that it can be streamed. Pure."""
    found: list[frozenset[str]] = []
    together: list[str] = []
    for table in sorted(weights, key=lambda name: (weights[name], name)):
        if together and sum(weights[name] for name in together) + weights[table] > TOGETHER_BYTES:
            found.append(frozenset(together))
            together = []
        together.append(table)
    return [*found, frozenset(together)] if together else found


Read = Iterator[tuple[list[Changes], list[TableError]]]


@phase("wait", outermost=True)
def _awaited(coming: Future[tuple[list[Changes], list[TableError]]]) -> tuple[list[Changes], list[TableError]]:
    return coming.result()


def _flows(tables: frozenset[str], read: Read) -> Iterator[tuple[str, Iterator[Changes]]]:
    """The changes read, by table. A single table is passed on while it is read; several are gathered first."""
    if len(tables) == 1:
        [table] = tables
        yield table, _flow(read)
        return
    gathered: dict[str, list[Changes]] = {}
    failed: dict[str, TableError] = {}
    for changes, errors in read:
        for chunk in changes:
            gathered.setdefault(str(chunk.table.table), []).append(chunk)
        failed.update((error.table or "", error) for error in errors)
    for table in sorted(tables):
        flow = iter([([], [failed[table]])]) if table in failed else iter([(gathered.pop(table, []), [])])
        yield table, _flow(flow)


def _flow(read: Read) -> Iterator[Changes]:
    """The changes, each released from memory when it is requested. Raises the table's error at its place among them."""
    for changes, errors in read:
        if errors:
            raise errors[0]
        while changes:
            yield changes.pop(0)


class _Work:
    """What one batch holds for one table: receipts of copied rows, or changes of the log, counted as they are used.

    `table` is the version it ends with; None for a copy that failed.
    """

    def __init__(self, table: TableSchema | None, changes: Iterator[Changes], weight: int = 0) -> None:
        self.upstream_id = table.upstream_id if table is not None else ""
        self.weight = weight
        self.copying = False
        self.staged: list[Staged] = []
        self.starts = False
        self.completes = False
        self.count = 0
        self.bytes = 0
        self.ops = np.zeros(len(Op) + 1, np.int64)
        self.committed_at: int | None = None
        self._changes = changes
        self._table = table
        self.error: TableError | None = None

    @classmethod
    def of_copy(cls, rows: Iterable[BlockRow]) -> _Work:
        work = cls(None, iter(()))
        work.copying = True
        for row in rows:
            if row.kind == ERROR:
                work.upstream_id, work.error = row.error()
            else:
                receipt = row.receipt()
                work._table, work.upstream_id = receipt.table, receipt.table.upstream_id
                work.staged.append(receipt.staged)
                work.starts, work.completes = receipt.starts, receipt.completes
        return work

    def require_table(self) -> TableSchema:
        """The table at the version it ends with. Raises what stopped its copy."""
        if self.error is not None:
            raise self.error
        assert self._table is not None
        return self._table

    def of_batch(self, table: TableSchema, batch: Batch, known: KnownTables) -> TableBatch:
        return TableBatch(
            table,
            batch,
            self.changes(),
            self.staged,
            begins_copy=self.starts,
            completes_copy=self.completes,
            is_known=table.upstream_id in known.written,
            log_bytes=self.weight,
            known=known.held_by(table),
        )

    def changes(self) -> Iterator[Changes]:
        for chunk in self._changes:
            self.note(chunk)
            yield chunk

    def note(self, chunk: Changes) -> None:
        """Count the changes that are consumed."""
        self.count += len(chunk)
        self.bytes += chunk.batch.nbytes
        self.ops += np.bincount(chunk.batch.column("op").to_numpy(), minlength=len(self.ops))
        at = chunk.batch.column("committed_at").cast(pa.int64())[-1].as_py()
        self.committed_at = at if at is not None else self.committed_at

    def result(self, name: str) -> dict[str, Any]:
        return {
            "table": name,
            "upstream_id": self.upstream_id,
            "copying": self.copying,
            "copied": sum(receipt.rows for receipt in self.staged),
            "changes": self.count,
            "inserts": int(self.ops[Op.INSERT]),
            "updates": int(self.ops[Op.UPDATE] + self.ops[Op.MERGE]),
            "deletes": int(self.ops[Op.DELETE]),
            "bytes": self.bytes + sum(receipt.bytes for receipt in self.staged),
            "committed_at": self.committed_at,
        }


def _text_of(last: LastBatch) -> str:
    return json.dumps(asdict(last))


def _row(values: dict[str, Any]) -> pa.RecordBatch:
    counts = dict.fromkeys(("copied", "changes", "inserts", "updates", "deletes", "bytes"), 0)
    defaults: dict[str, Any] = {**counts, "repeated": False, "phases": json.dumps(take())}
    return pa.RecordBatch.from_pylist([{**defaults, **values}], schema=_RESULT_LAYOUT)
