"""The one PySpark data source: every upstream as a stream of blocks.

Spark owns offsets, checkpoint and replay. `initialOffset`, `latestOffset`, `partitions` and `commit` run in one
long-lived Python process on the driver, where the follower lives; `read` runs on executors.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from tailrace.destination import Destination, Stage
from tailrace.destination.copy import require_columns
from tailrace.errors import TableError
from tailrace.source.copy_share import group_copies
from tailrace.source.follower import Follower, Limit, Offset, TableDirectives
from tailrace.source.schema_file import follow_alone
from tailrace.source.source import Source
from tailrace.source.split import ScanSplit, Split, weigh
from tailrace.state import StateStore, StoreAddress, TableState
from tailrace.state.planned import START_OF_STREAM
from tailrace.stream.block import SCHEMA, CopyReceipt, Pickled, error_row, log_row, staged_row, unfit_value
from tailrace.stream.executor_check import OPEN_GATE, ExecutorGate
from tailrace.stream.spark_error import portable_errors
from tailrace.stream.worker import begin, give_back_memory, leave_quietly
from tailrace.system import atomic_file
from tailrace.system.failpoint import reach

POLL_SECONDS = 0.02
IDLE_SECONDS = 0.25
"""How often an idle stream reads directives: Spark asks a hundred times a second, and the store may be a server."""
IDLE_TIMES = 50
"""And not before so many times the CPU time that the last reading took: with many tables that is long."""
LONG_SECONDS = 0.002
"""What takes less than this is not worth saving."""


@dataclass(frozen=True)
class Feed:
    """What a stream is made of. With a `destination`, copied rows are staged there, or in the `stage`, by the task that
    reads them, and only their receipts cross Spark; changes cross it as references to where they are. `state` is where
    errors, requests of operators and schema versions are, and `run` the number of the run that may write there. With
    `follows_cores` the number of lanes is that of the cores that the pipeline last noted in the cores file. Each
    process that reads passes the `gate` first."""

    source: Source
    limit: Limit
    lanes: int
    destination: Pickled[Destination] | None = None
    state: StoreAddress | None = None
    run: int = 0
    stage: Stage | None = None
    follows_cores: bool = False
    gate: ExecutorGate = OPEN_GATE

    def cores(self) -> int:
        """The cores that are registered now; 0: not known."""
        return read_cores(self.state.state_dir) if self.state is not None else 0

    def lanes_of(self, cores: int) -> int:
        return lanes_for(cores) if self.follows_cores and cores else self.lanes


@dataclass
class BlockPartition(InputPartition):
    """A split and the lane of each table in it."""

    split: Split
    lanes: Mapping[str, int] = field(default_factory=dict)


@dataclass
class CopyPartition(InputPartition):
    """Chunks of copies that one task reads, one after the other: one of a large table, or those of several small."""

    splits: Sequence[Split]
    lanes: Mapping[str, int]


@dataclass
class ScanPartition(InputPartition):
    """An errand, run by its own task; the lane of its table reads the result. `number` keeps their order."""

    scan: ScanSplit
    number: int
    lanes: Mapping[str, int]

    def rows(self, source: Source) -> Iterator[pa.RecordBatch]:
        found = self.scan.run(source.read)
        give_back_memory()
        reach("stream.found")
        [table] = found.weights
        yield log_row(found, self.number, self.lanes[table])


@dataclass
class LogPartition(InputPartition):
    """Splits of the log, which cross Spark by reference: each lane reads those of its tables where they are."""

    splits: Sequence[Split]
    lanes: Mapping[str, int]

    def rows(self) -> Iterator[pa.RecordBatch]:
        for number, split in enumerate(self.splits):
            shared: dict[int, list[str]] = {}
            for table in split.weights:
                shared.setdefault(self.lanes[table], []).append(table)
            for lane, tables in shared.items():
                yield log_row(split.only(tables), number, lane)


@dataclass(frozen=True)
class _Idle:
    """A search for changes that found none: the stream's offset, and the directives that applied."""

    offset: Offset
    directives: TableDirectives
    read_again_at: float


class BlockReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's calls, passed to the follower (driver) or the source (executors).

    An idle stream waits `answer_seconds` for changes before it answers Spark, which asks again a hundredth of a second
    later.
    """

    answer_seconds = 2.0

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self._follower: Follower | None = None
        self._target: Offset | None = None
        self._store: StateStore | None = None
        self._idle: _Idle | None = None
        self._waits_until: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        empty = dict.fromkeys(("_follower", "_target", "_store", "_idle", "_waits_until"))
        return {"feed": self.feed, **empty}

    @property
    def follower(self) -> Follower:
        if self._follower is None:
            source, store = self.feed.source, self._open_store()
            # With a store this is the stream of a pipeline, which has prepared the source and receives changes.
            self._follower = follow_alone(source) if store is None else source.follow(store, is_receiving=True)
        return self._follower

    def _open_store(self) -> StateStore | None:
        if self._store is None and self.feed.state is not None:
            self._store = self.feed.state.join(self.feed.run)
        return self._store

    @portable_errors()
    def initialOffset(self) -> Offset:
        start, store = self.follower.start(), self._open_store()
        if store is None or not store.shared:
            return start
        # Spark calls this again when it repeats batch 0, which must begin at the same offset on any machine.
        planned = store.planned_batches()
        if 0 in planned and START_OF_STREAM in planned:
            known: Offset = json.loads(planned[START_OF_STREAM])
            return known
        store.record_planned({START_OF_STREAM: json.dumps(start)})
        return start

    def getDefaultReadLimit(self) -> ReadLimit:
        # The limits count bytes and rows of the log, which Spark's own kinds of limit cannot express.
        return ReadAllAvailable()

    @portable_errors()
    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self.follower.target()

    @portable_errors()
    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        self._waits_until = None
        while True:
            if self.feed.state is not None and drain_file(self.feed.state.state_dir).exists():
                return start
            found = self._directives(start)
            end = self.follower.latest(start, replace(self.feed.limit, cores=self.feed.cores()), found[0])
            self._idle = _Idle(start, *found) if end is start or end == start else None
            if self._idle is None or (self._is_done(start) and self._has_waited()):
                reach("stream.planned")
                return end
            time.sleep(POLL_SECONDS)

    def _is_done(self, start: Offset) -> bool:
        """Whether an idle search may end. Only asked when nothing was found: a follower takes it as the end."""
        return self._target is None or self.follower.done(start, self._target)

    def _has_waited(self) -> bool:
        """Whether an idle search has lasted long enough to answer Spark, which would ask again at once."""
        if self._target is not None:
            return True
        now = time.monotonic()
        if self._waits_until is None:
            self._waits_until = now + self.answer_seconds
        return now >= self._waits_until

    def _directives(self, start: Offset) -> tuple[TableDirectives, float]:
        """The directives that follow from errors and operators, and when to read them again.

        Directives read a moment ago are reused only while the offset has not changed: a batch records an error, and
        after a batch the offset is another one. A table that has just failed must never be read further.
        """
        idle = self._idle
        if idle is not None and idle.offset == start and time.monotonic() < idle.read_again_at:
            return idle.directives, idle.read_again_at
        began, used = time.monotonic(), time.thread_time()
        directives = self._read_directives()
        took = time.thread_time() - used
        return directives, began + (IDLE_SECONDS if took < LONG_SECONDS else max(IDLE_SECONDS, took * IDLE_TIMES))

    def _read_directives(self) -> TableDirectives:
        store = self._open_store()
        if store is None:
            return TableDirectives()
        halted = store.halted_tables()
        resyncs = [request for request in store.open_requests() if request.kind == "resync"]
        ids = {table.name: table.upstream_id for table in store.tables_named({one.table for one in resyncs})}
        return TableDirectives(
            stopped={table.upstream_id: table.resume for table in halted if table.state is TableState.ERRORED},
            paused=[table.upstream_id for table in halted if table.paused_at is not None],
            resync={ids[request.table]: request.id for request in resyncs if request.table in ids},
            skips=store.skips(),
        )

    @portable_errors()
    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        splits = self.follower.plan(start, end)
        cores = self.feed.cores()
        lanes = spread(splits, self.feed.lanes_of(cores))
        if self.feed.destination is None:
            return [BlockPartition(split, lanes) for split in splits]
        errands = [
            ScanPartition(split, number, lanes) for number, split in enumerate(splits) if isinstance(split, ScanSplit)
        ]
        log = [split for split in splits if split.copies is None and not isinstance(split, ScanSplit)]
        copied = [split for split in splits if split.copies is not None]
        grouped = group_copies(copied, cores or self.feed.lanes, self.feed.source.copy_tasks)
        copies = [CopyPartition(group, lanes) for group in grouped]
        return [*copies, *errands, *([LogPartition(log, lanes)] if log else [])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        begin()
        with portable_errors():
            self.feed.gate.require()
            yield from self._rows(partition)

    def _rows(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, LogPartition):
            yield from partition.rows()
            return
        if isinstance(partition, ScanPartition):
            yield from partition.rows(self.feed.source)
            return
        assert isinstance(partition, CopyPartition)
        assert self.feed.destination is not None
        opened = self.feed.destination.open()
        for split in partition.splits:
            assert split.copies is not None
            yield self._stage(split, opened, partition.lanes[str(split.copies.table)])

    def _stage(self, split: Split, opened: Destination, lane: int) -> pa.RecordBatch:
        """Read a chunk of a copy and stage it. An error of its table does not stop the others."""
        stage = self.feed.stage
        assert split.copies is not None
        assert stage is not None
        try:
            require_columns(opened, split.copies)
            staged = opened.write_rows(split.copies, self.feed.source.read(split), stage)
            give_back_memory()
            reach("stream.staged")
            return staged_row(CopyReceipt(split.copies, staged, split.starts, split.completes), lane)
        except TableError as error:
            return error_row(split.copies, error, lane)
        except pa.ArrowException as error:
            return error_row(split.copies, unfit_value(error, str(split.copies.table)), lane)

    def stop(self) -> None:
        leave_quietly()
        if self._follower is not None:
            self._follower.stop()


def drain_file(state_dir: Path) -> Path:
    """While this file exists no new batch begins. The pipeline creates it to drain, and deletes it when it starts."""
    return state_dir / "drain"


def cores_file(state_dir: Path) -> Path:
    """How many cores the executors have now. The pipeline writes it; the planner, a process next to it, reads it."""
    return state_dir / "cores"


def note_cores(state_dir: Path, cores: int) -> None:
    """Let the next batches use so many cores. A repeat with the same number writes nothing."""
    if read_cores(state_dir) != cores:
        # A number that cannot be written now is written by the next call; until then batches use the earlier one.
        with suppress(OSError):
            atomic_file.replace_text(cores_file(state_dir), str(cores))


def read_cores(state_dir: Path) -> int:
    """The cores last noted; 0 when none were."""
    try:
        return int(cores_file(state_dir).read_bytes())
    except (FileNotFoundError, ValueError):
        return 0


def lanes_for(cores: int) -> int:
    """A lane for each core. Spark takes a lane modulo the lanes of the job, so a batch that was planned for another
    number still has each table in one lane."""
    return max(2, cores)


def spread(splits: Sequence[Split], lanes: int) -> dict[str, int]:
    """A lane for every table: the heaviest first, each to its own lane, which is the same in every batch, or to the
    one with least to do if its own would get more than an equal share. Pure."""
    weights = {str(split.copies.table): 0 for split in splits if split.copies is not None} | dict(weigh(splits))
    load = [0] * lanes
    share = (sum(weights.values()) + len(weights)) / lanes
    chosen = {}
    for table in sorted(weights, key=lambda name: (-weights[name], name)):
        lane = zlib.crc32(table.encode("utf-8", "surrogatepass")) % lanes
        if load[lane] + weights[table] + 1 > share:
            lane = load.index(min(load))
        # Even an empty table costs a commit, so empty tables are spread over the lanes as well.
        load[lane] += weights[table] + 1
        chosen[table] = lane
    return chosen


class BlockSource(DataSource):
    """Registered per pipeline by `bound`, so that configuration and its secrets never are options or plan text."""

    feed: Feed

    @classmethod
    def name(cls) -> str:
        return "tailrace_blocks"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return BlockReader(self.feed)


def bound(feed: Feed, name: str) -> type[BlockSource]:
    """A data source class that contains its feed: pickled by value, because its module is `__main__`."""
    body = {"feed": feed, "name": classmethod(lambda cls: name), "__module__": "__main__"}
    return type("BoundBlockSource", (BlockSource,), body)
