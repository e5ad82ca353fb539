"""A pipeline without Spark, one step at a time: the shipped reader, lanes, recorder and store, and Spark's two logs.

What Spark, the disk and the destination keep outlives a crash; everything else is dropped and made again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tailrace.destination import Batch, Destination, Stage
from tailrace.source import discovery
from tailrace.source.follower import Limit, Offset
from tailrace.source.postgres.source import PostgresSource
from tailrace.state import SqliteStore, StateStore, TableRecord, TableState
from tailrace.stream.block import Pickled
from tailrace.stream.data_source import BlockReader, Feed
from tailrace.stream.micro_batch import Applier, KnownTables, TableResult
from tailrace.stream.progress import ProgressRecorder
from tailrace.stream.supervisor import Supervisor
from tailrace.system.failpoint import VARIABLE, FailpointError, reach
from tests.support.fuzz.stepped_source import SteppedReceiver

MOST_BATCHES = 300
"""A sequence is short: a pipeline that needs more batches to settle copies a table again and again."""

QUIET_LOOKS = 2
"""How often a pipeline that does nothing looks for tables before it counts as settled."""


class StuckError(AssertionError):
    """The pipeline does not settle."""


class _Run:
    """What one start of the pipeline holds open."""

    def __init__(self, pipeline: SteppedPipeline) -> None:
        source, tables = pipeline.source, pipeline.source.context.tables
        address = SqliteStore(source.context.name, source.context.state_dir)
        self.store: StateStore = address.open()
        number = self.store.claim_run(takes_over=True)
        self.recorder = ProgressRecorder(self.store, source, tables, pipeline.clock)
        self.recorder.open_tables(source.tables())
        self.supervisor = Supervisor(self.store, tables, self.recorder.is_stopped, pipeline.clock)
        self.reader = BlockReader(
            Feed(
                source,
                pipeline.limit,
                pipeline.lanes,
                Pickled.of(pipeline.destination),
                address,
                number,
                pipeline.stage,
            )
        )
        self.reader.answer_seconds = 0.0  # a step that finds nothing ends at once
        self.receiver = SteppedReceiver(source, pipeline.session)

    def close(self) -> None:
        if self.reader._follower is not None:
            self.reader._follower.stop()
        if self.reader._store is not None:
            self.reader._store.close()
        self.store.close()
        self.receiver.close()


class SteppedPipeline:
    """Runs batches when it is told to. `offset`, `planned` and `batch_id` are what Spark's checkpoint holds."""

    def __init__(
        self,
        source: PostgresSource,
        destination: Destination,
        session: psycopg.Connection[Any],
        *,
        limit: Limit,
        lanes: int = 1,
        pieces: int = 0,
    ) -> None:
        self.source = source
        self.destination = destination
        self.session = session
        self.limit = limit
        self.lanes = lanes
        self.pieces = pieces
        self.stage = Stage(Path(source.context.state_dir) / "staged", source.context.name)
        self.offset: Offset | None = None
        self.planned: Offset | None = None
        self.batch_id = 0
        self._committed: tuple[int, Offset] | None = None
        self._run: _Run | None = None
        self._later = timedelta(0)

    def clock(self) -> datetime:
        return datetime.now(UTC) + self._later

    @property
    def run(self) -> _Run:
        if self._run is None:
            self._run = _Run(self)
            recorder = self._run.recorder
            if self._committed is not None and self._committed[0] > recorder.last_batch:
                recorder.committed(*self._committed, seconds=0.0)
            self._run.supervisor.poll()
        return self._run

    def crash(self) -> None:
        """Drop everything that is not durable. The next call starts the pipeline again."""
        if self._run is not None:
            self._run.close()
            self._run = None

    @contextmanager
    def dying(self, failpoint: str) -> Iterator[None]:
        """The block, in which the pipeline dies if it comes to this failpoint (none: if empty)."""
        if not failpoint:
            yield
            return
        name, _, nth = failpoint.partition("@")
        os.environ[VARIABLE] = f"{name}:raise" + (f"@{nth}" if nth else "")
        try:
            with suppress(FailpointError):
                yield
                return
            self.crash()
        finally:
            del os.environ[VARIABLE]

    def receive(self, *, keeps: bool = False) -> None:
        """Read what is committed into the journal."""
        self.run.receiver.receive(self.pieces, keeps=keeps)

    def discover(self) -> None:
        """Look for tables, as happens every few seconds."""
        with mock.patch.object(discovery, "DISCOVERY_SECONDS", 0.0):
            self.run.reader.follower.discover()  # type: ignore[attr-defined]

    def batch(self) -> bool:
        """One micro-batch: the one that was logged and not committed, else the next. False: there is nothing to do."""
        run = self.run
        run.supervisor.poll()
        if self.offset is None:
            self.offset = _stored(run.reader.initialOffset())
        if self.planned is None:
            end = _stored(run.reader.latestOffset(self.offset, ReadAllAvailable()))
            if end == self.offset:
                return False
            self.planned = end
        reach("fuzz.logged")
        partitions = run.reader.partitions(self.offset, self.planned)
        blocks = [row for partition in partitions for row in run.reader.read(partition)]
        reach("pipeline.before_apply")
        batch = Batch("fuzz", self.batch_id, end=zlib.crc32(json.dumps(self.planned).encode()))
        run.recorder.applied(batch, self._apply(blocks, batch, run.recorder.known_tables()))
        reach("pipeline.applied")
        self._committed = (self.batch_id, self.planned)
        self.offset, self.planned, self.batch_id = self.planned, None, self.batch_id + 1
        reach("pipeline.before_release")
        run.recorder.committed(*self._committed, seconds=0.0)
        reach("pipeline.released")
        return True

    def _apply(self, blocks: list[pa.RecordBatch], batch: Batch, known: KnownTables) -> list[TableResult]:
        applier = Applier(self.source, self.destination, self.lanes, self.stage)
        results: list[TableResult] = []
        for lane in range(self.lanes):
            own = [block for block in blocks if block.column("lane")[0].as_py() == lane]
            for written in applier.run(iter(own), batch, known):
                results += [TableResult.of_row(Row(**row)) for row in written.to_pylist()]
        return results

    def settle(self) -> None:
        """Run until nothing happens any more, then as `--once` does: that must find nothing to do and end."""
        quiet = 0
        for _ in range(MOST_BATCHES):
            self.receive()
            if self.batch() or self._wait_for_retry():
                quiet = 0
                continue
            quiet += 1
            if quiet > QUIET_LOOKS:
                break
            self.discover()
        else:
            raise StuckError(f"not settled after {MOST_BATCHES} batches: {self.offset}")
        follower = self.run.reader.follower
        target = follower.target()
        for _ in range(QUIET_LOOKS):
            self.receive()
            self.batch()
            assert self.offset is not None
            if follower.done(self.offset, target):
                return
        raise StuckError(f"nothing to do, and not done: {self.offset}; the target is {target}")

    def _wait_for_retry(self) -> bool:
        """When a table waits to be tried again, let that time pass."""
        if not any(table.retry == "timed" for table in self.errored()):
            return False
        self._later += timedelta(hours=1)
        self.run.supervisor.poll()
        return self.run.recorder.has_freed()

    def errored(self) -> list[TableRecord]:
        return [table for table in self.run.store.tables() if table.state is TableState.ERRORED]


def _stored(offset: Offset) -> Offset:
    """As Spark's log gives it back."""
    stored: Offset = json.loads(json.dumps(offset))
    return stored
