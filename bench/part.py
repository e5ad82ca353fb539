"""The measured parts: each runs on its own data and is compared with PostgreSQL's own programs in the same minute."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from bench.lake import first_seen, require_equal
from bench.process import Peak, Usage, cpu_seconds
from bench.report import Report
from bench.runner import Run, Runner
from bench.server import Server
from bench.workload import Shop, Size

TRICKLE_PAUSE_SECONDS = 0.1
LEAST_CPU_SECONDS = 0.05
_SETTLE_SECONDS = 60.0


def wait_for(is_so: Callable[[], bool], problem: str) -> None:
    """Wait until it is so. Raises RuntimeError with the problem when that takes too long."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(problem)
        time.sleep(0.2)


@dataclass
class Stage:
    """A database, the pipeline that follows it, and the lake it fills."""

    server: Server
    runner: Runner
    folder: Path
    report: Report
    size: Size
    database: str
    tables: int = 1
    shop: Shop = field(init=False)

    def __post_init__(self) -> None:
        self.connection = self.server.create_database(self.database)
        self.shop = Shop(self.connection, self.size, tables=self.tables)
        self.shop.fill()

    @property
    def dsn(self) -> str:
        return self.server.postgres.dsn(self.database)

    @property
    def lake(self) -> Path:
        return self.folder / self.database / "lake"

    @property
    def pipeline(self) -> dict[str, Any]:
        return {
            "name": self.database,
            "source": {"type": "postgres", "dsn": self.dsn},
            "tables": {"include": ["public.*"]},
            "destination": {"type": "delta", "path": str(self.lake)},
            "state": str(self.folder / self.database / "state"),
        }

    def close(self) -> None:
        """Drop the database and the lake, to make room on the disk."""
        name = self.connection.info.dbname
        slots = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s"
        self.connection.execute(slots, [name])
        self.connection.close()
        self.server.drop_database(name)
        shutil.rmtree(self.folder / self.database)

    def once(self, part: str) -> Run:
        """Run the pipeline to the end, report what it used, and compare the lake with the source."""
        postmaster = self.server.postgres.pid
        assert postmaster is not None
        before = cpu_seconds(postmaster)
        run = self.runner.once(self.pipeline)
        server = cpu_seconds(postmaster) - before
        self._describe(part, run, server)
        rows = require_equal(self.dsn, self.lake, self.shop.tables)
        self.report.note(f"{part}: {rows:,} rows are equal in lake and source")
        return run

    def _describe(self, part: str, run: Run, server: Usage) -> None:
        note = self.report.note
        note(
            f"{part}: {run.seconds:.2f} s in {len(run.batches)} batches, of which {run.startup_seconds:.2f} s start-up;"
            f" {run.started_at - run.called_at:.2f} s before the query; CPU seconds:"
            f" Python {run.cpu.python:.1f}, Java {run.cpu.other:.1f}, server {server.python + server.other:.1f}"
        )
        for name, seconds in sorted(run.cpu_by_process.items(), key=lambda item: -item[1]):
            if seconds >= LEAST_CPU_SECONDS:
                note(f"  {seconds:5.2f} CPU s {name}")
        for batch in run.batches:
            took = " ".join(f"{name} {ms}" for name, ms in sorted(batch.milliseconds.items()) if ms)
            note(f"  batch {batch.id} at {batch.at - run.started_at:.2f} s: {took}")

    def follow(self, part: str, change: Callable[[], int]) -> tuple[Run, int, float]:
        """Make changes while the pipeline is stopped, then time `pg_recvlogical` before and after the pipeline."""
        slots = [self.server.create_slot(self.connection) for _ in range(2)]
        changes = change()
        first = self.server.receive(self.connection, slots[0])
        run = self.once(part)
        raw = mean([first, self.server.receive(self.connection, slots[1])])
        return run, changes, raw

    def report_rate(self, part: str, run: Run, count: int, raw: float, *, unit: str, against: str, aim: float) -> None:
        report, steady = self.report, run.seconds - run.startup_seconds
        report.add(part, "pipeline, start of query to its end", count / run.seconds, f"{unit}/s")
        report.add(part, "pipeline, without start-up", count / steady, f"{unit}/s")
        report.add(part, "start-up", run.startup_seconds, "s")
        report.add(part, against, count / raw, f"{unit}/s")
        report.add(part, f"ratio to {against}", raw / run.seconds, "", aim)
        report.add(part, "the same without start-up", raw / steady)

    def copy(self, aim: float | None = 0.6) -> Run:
        """Measure the initial copy of all tables."""
        first = self._copy_out()
        run = self.once("copy")
        raw = mean([first, self._copy_out()])
        if aim is not None:
            rows = self.shop.rows * len(self.shop.tables)
            self.report_rate("copy", run, rows, raw, unit="rows", against="psql COPY binary", aim=aim)
        return run

    def _copy_out(self) -> float:
        return sum(self.server.copy_out(self.database, table) for table in self.shop.tables)

    def stream(self) -> Run:
        run, changes, raw = self.follow("stream", self.shop.change)
        self.report_rate("stream", run, changes, raw, unit="changes", against="pg_recvlogical", aim=1.5)
        return run

    def backlog(self) -> None:
        """Measure as many changes for each row as `stream` has, in a table of four times the size."""
        run, changes, raw = self.follow("backlog", self.shop.change)
        self.report_rate("backlog", run, changes, raw, unit="changes", against="pg_recvlogical", aim=1.5)

    def small(self) -> None:
        run, changes, raw = self.follow("small", self.shop.change_singly)
        self.report_rate("small", run, changes, raw, unit="tx", against="pg_recvlogical", aim=0.5)

    def spread(self, one: Run) -> None:
        """Measure the same changes as in `one`, spread over many tables."""
        run, changes, _ = self.follow("tables", self.shop.change)
        self.report.add("tables", f"{self.tables} tables", changes / run.seconds, "changes/s")
        self.report.add("tables", "cost against one table", run.seconds / one.seconds, "", 1.3, "most")
        steady = [each.seconds - each.startup_seconds for each in (run, one)]
        self.report.add("tables", "the same without start-up", steady[0] / steady[1])
        used = [each.cpu.python + each.cpu.other for each in (run, one)]
        self.report.add("tables", "CPU of the pipeline against one table", used[0] / used[1])

    def trickle(self) -> None:
        """Measure ten updates a second of rows across the table, each from its commit until it can be read."""
        table = self.lake / "public" / self.shop.tables[0]
        self.runner.start(self.pipeline)
        stride = self.shop.rows // 997
        began_at = time.time()
        self.order(5, -1)
        wait_for(lambda: bool(first_seen(table, {5: -1}, "items", began_at)), "the first change did not arrive")
        committed: dict[int, tuple[int, float]] = {}
        began = time.monotonic()
        for turn in range(int(self.size.trickle_seconds / TRICKLE_PAUSE_SECONDS)):
            time.sleep(max(0.0, began + turn * TRICKLE_PAUSE_SECONDS - time.monotonic()))
            key = 5 + (turn * 389 % 997) * stride
            self.order(key, 1000 + turn)
            committed[key] = (1000 + turn, time.time())
        time.sleep(3)
        run = self.runner.drain()
        seen = first_seen(table, {key: value for key, (value, _) in committed.items()}, "items", began_at)
        lost = committed.keys() - seen.keys()
        assert not lost, f"{len(lost)} changes of the trickle never arrived"
        waits = [seen[key] - at for key, (_, at) in committed.items()]
        percent = quantiles(waits, n=100)
        busy = [batch for batch in run.batches if batch.at > run.batches[0].at]
        for name in ("triggerExecution", "latestOffset", "addBatch"):
            self.report.note(
                f"trickle: {name} {mean(batch.milliseconds.get(name, 0) for batch in busy):.0f} ms a batch"
            )
        self.report.add("trickle", "batches", len(busy))
        self.report.add("trickle", "commit to readable, p50", percent[49], "s", 1.0, "most")
        self.report.add("trickle", "commit to readable, p99", percent[98], "s", 2.0, "most")
        require_equal(self.dsn, self.lake, self.shop.tables)

    def order(self, key: int, items: int) -> None:
        """Insert one order, or change its number of items."""
        self.connection.execute(
            f"INSERT INTO {self.shop.tables[0]} AS o VALUES (%s, 1, 'placed', 'EUR', 1, %s, NULL, now(), now(), false)"
            " ON CONFLICT (id) DO UPDATE SET items = excluded.items, updated_at = now()",
            [key, items],
        )

    def large(self) -> None:
        """Measure one transaction of millions of rows."""
        with Peak(self.runner.pid) as peak:
            run, changes, raw = self.follow("large", self.shop.insert_at_once)
        for name, size in sorted(peak.processes.items(), key=lambda item: -item[1]):
            self.report.note(f"large: {size / 1e6:6,.0f} MB {name}")
        self.report.add("large", "pipeline", changes / run.seconds, "changes/s")
        self.report.add("large", "pg_recvlogical", changes / raw, "changes/s")
        self.report.add("large", "peak memory, Python", peak.python / 1e9, "GB", 1.5, "most")
        self.report.add("large", "peak memory, Java", peak.java / 1e9, "GB")
