"""Measures what thousands of tables cost the planner: copying them, an idle poll, and a batch in which a few change.

`python -m bench --only many`. The planner itself in this process, with a server, a receiver and a store, but without
Spark: nothing is read or written for the tables.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import psycopg

from bench.report import Report
from bench.server import Server
from tailrace.destination import Stage
from tailrace.source.follower import Limit, Offset
from tailrace.stream.block import Pickled
from tailrace.stream.data_source import BlockReader, Feed, LogPartition, note_cores
from tailrace.stream.pipeline import Pipeline
from tailrace.stream.progress import ProgressRecorder

TABLES = 10_000
CHANGED = 20
IDLE_SECONDS = 15.0
LANES = 40
TOGETHER = 500
PLANS = 9


def measure(report: Report, folder: Path, scale: float) -> None:
    tables = max(CHANGED, int(TABLES * scale))
    with ExitStack() as stack:
        server = stack.enter_context(Server(folder))
        server.postgres.connect().execute("ALTER SYSTEM SET max_locks_per_transaction = 1024")
        server.postgres.stop()
        server.postgres.start()
        connection = stack.enter_context(server.create_database("many"))
        for first in range(0, tables, TOGETHER):
            numbers = range(first, min(first + TOGETHER, tables))
            connection.execute(
                ";".join(f"CREATE TABLE t{one} (id int PRIMARY KEY, v text)" for one in numbers).encode()
            )
        pipeline = Pipeline(
            name="many",
            source={"type": "postgres", "dsn": server.postgres.dsn("many"), "publication": "bench"},
            tables={"include": ["public.*"]},
            destination={"type": "delta", "path": str(folder / "lake")},
            state=str(folder / "state"),
        )
        store = stack.enter_context(pipeline.store.open())
        run = store.claim_run(seconds=3600.0, takes_over=True)
        pipeline.source.prepare(lambda: False)
        stack.enter_context(pipeline.source.receive())
        ProgressRecorder(store, pipeline.source, pipeline.config.tables).open_tables(pipeline.source.tables())
        stage, lake = Stage(folder / "staged", "many"), Pickled.of(pipeline.destination)
        limit = Limit(pipeline.config.batch.max_rows, pipeline.config.batch.max_bytes)
        note_cores(folder / "state", LANES)
        reader = BlockReader(Feed(pipeline.source, limit, LANES, lake, pipeline.store, run, stage, follows_cores=True))
        stack.callback(reader.stop)
        _measure(report, reader, connection, tables)


def _measure(report: Report, reader: BlockReader, connection: psycopg.Connection, tables: int) -> None:
    offset, batches, began, used = reader.initialOffset(), 0, time.monotonic(), time.process_time()
    while True:
        phases = [entry["phase"] for entry in offset["tables"].values()]
        if phases.count("ready") == tables:
            break
        end = _latest(reader, offset)
        if end != offset:
            batches += 1
            reader.partitions(offset, end)
        offset = end
    report.note(f"many: {tables:,} empty tables became ready in {batches} batches, {time.monotonic() - began:.0f} s")
    report.add("many", f"{tables:,} empty tables: batches until all are ready", batches)
    report.add("many", "CPU of the planner until all are ready", time.process_time() - used, "s")
    report.add("many", "bytes of the offset", len(json.dumps(offset)), "B")
    _latest(reader, offset)
    cpu, wall = time.process_time(), time.monotonic()
    while time.monotonic() - wall < IDLE_SECONDS:
        offset = _latest(reader, offset)
        time.sleep(0.01)  # Spark's own pause between two questions
    idle = (time.process_time() - cpu) / (time.monotonic() - wall)
    report.add("many", "idle, CPU of the planner", 100 * idle, "% of a core", 5, "most")
    for number in range(CHANGED):
        connection.execute(f"INSERT INTO t{number * (tables // CHANGED)} VALUES (1, 'v')".encode())
    while (end := _latest(reader, offset)) == offset:
        pass
    took: list[float] = []
    for _ in range(PLANS):
        cpu = time.process_time()
        again = reader.follower.latest(offset, reader.feed.limit, reader._read_directives())
        found = reader.partitions(offset, again)
        took.append(1000 * (time.process_time() - cpu))
    report.add("many", f"planning a batch in which {CHANGED} change, CPU, median", median(took), "ms", 50, "most")
    rows = [row for one in found if isinstance(one, LogPartition) for row in one.rows()]
    report.add("many", f"bytes of its {len(rows)} blocks", sum(row.nbytes for row in rows), "B")


def _latest(reader: BlockReader, offset: Offset) -> Offset:
    """Ask as Spark does: the offset crosses between two processes as text, both ways."""
    answer: Offset = json.loads(json.dumps(reader.latestOffset(offset, reader.getDefaultReadLimit())))
    return answer
