"""Compares the SlateDB source with a plain loop over `SlateDbWalReader`: rows per second, and latency.

`python -m bench --only slatedb`. Needs the extra `slatedb`; no Spark.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.report import Report
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.schema_file import SchemaFile
from tailrace.source.slatedb.log_split import WalRange, WalSplit
from tailrace.source.slatedb.object_store import ObjectStore, SlateDbDatabase, binding, run
from tailrace.source.slatedb.offset import WalPoint
from tailrace.source.slatedb.option import SlateDbOptions
from tailrace.source.slatedb.reader_pool import WORTHWHILE_BYTES, reader_pool
from tailrace.source.slatedb.row import look_up
from tailrace.source.slatedb.source import SlateDbSource
from tailrace.source.slatedb.wal import find_tail
from tailrace.source.source import SourceContext
from tailrace.source.split import Split

ROWS = 400_000
BATCH_ROWS = 500
SPLIT_FILES = 16
TAIL_WRITES = 100
LOOKUPS = 10_000
TAIL_PAUSE_SECONDS = 0.05
TRIES = 3


def measure(report: Report, folder: Path, scale: float) -> None:
    """Fill a database, read its log in both ways, alternating, then follow new writes in both ways."""
    (folder / "store").mkdir(parents=True)
    database = SlateDbDatabase("bench", ObjectStore("local", str(folder / "store")))
    store = {"type": "local", "path": folder / "store"}
    options = SlateDbOptions.model_validate({"type": "slatedb", "path": "bench", "store": store, "poll": 0.0})
    source = SlateDbSource(options, SourceContext("bench", TableOptions(), folder / "state"))
    rows = int(ROWS * scale)
    run(_fill(database, rows), "filling the database")
    splits = _splits(source, find_tail(database, 0))
    bare, ours = [], []
    for _ in range(TRIES):
        bare.append(_timed(lambda: run(_loop(database), "reading"), rows))
        ours.append(_timed(lambda: _count(source, splits), rows))
    before = _cpu_seconds()
    shared = [_timed(lambda: _in_threads(source, splits), rows) for _ in range(TRIES)]
    # The CPU time of child processes is counted only once they have ended.
    reader_pool().close()
    cores = (_cpu_seconds() - before) / sum(shared)
    report.add("slatedb", "bare SlateDbWalReader loop", rows / min(bare), "rows/s")
    report.add("slatedb", "through the source, one after the other", rows / min(ours), "rows/s")
    report.add("slatedb", "ratio to the bare loop", min(bare) / min(ours), "", 0.7)
    report.add("slatedb", "several splits at once", rows / min(shared), "rows/s")
    report.add("slatedb", "several splits at once, ratio", min(bare) / min(shared), "", 1.0)
    report.add("slatedb", "several splits at once, cores used", cores, "", 1.5)
    report.note(f"slatedb: {len(splits)} splits of {SPLIT_FILES} WAL files, {rows:,} rows, best of {TRIES}")
    _report_tail(report, source)
    _report_lookup(report, source, rows)


async def _fill(database: SlateDbDatabase, rows: int) -> None:
    api = binding()
    db = await api.DbBuilder(database.path, database.store.open()).build()
    handle = None
    for start in range(0, rows, BATCH_ROWS):
        batch = api.WriteBatch()
        for number in range(start, min(rows, start + BATCH_ROWS)):
            batch.put(b"key%012d" % number, b"v" * 100)
        handle = await db.write(batch)
    if handle is not None:
        await handle.await_durable()
    # Close without a flush of the memtable, so that the WAL stays complete.
    await db.shutdown_with_options(api.CloseOptions(flush_type=api.FlushType.WAL))


async def _loop(database: SlateDbDatabase) -> int:
    reader = database.wal_reader()
    last = await reader.last_wal_file_id(0)
    iterator = await reader.iterator(1)
    rows = 0
    for _ in range(last):
        rows += len((await iterator.next()).rows)
    return rows


def _splits(source: SlateDbSource, tail: int) -> list[WalSplit]:
    table = source.tables()[0]
    wanted = {str(table.table): WalRange(table, WalPoint(0, 0), WalPoint(tail, 2**62), 0)}
    return [
        WalSplit(first=first, last=min(tail, first + SPLIT_FILES - 1), ranges=wanted, bytes=WORTHWHILE_BYTES)
        for first in range(1, tail + 1, SPLIT_FILES)
    ]


def _count(source: SlateDbSource, splits: list[WalSplit]) -> int:
    return sum(len(changes) for split in splits for changes in source.read(split))


def _in_threads(source: SlateDbSource, splits: list[WalSplit]) -> int:
    """Read the splits in several threads, as a lane of the pipeline does."""
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda split: _count(source, [split]), splits))


def _cpu_seconds() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _timed(work: Callable[[], int], rows: int) -> float:
    started = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - started
    assert found == rows, f"{found} of {rows} rows"
    return seconds


def _report_tail(report: Report, source: SlateDbSource) -> None:
    """Write one row at a time, with the time of the write, and report its age when a reader receives it."""
    bare = _tail(source.database, _bare_tail)
    ours = _tail(source.database, lambda database, seen: _source_tail(source, seen))
    for name, ages in (("bare loop", bare), ("source", ours)):
        report.add("slatedb", f"write to read, {name}, p50", median(ages) * 1000, "ms")
        report.add("slatedb", f"write to read, {name}, p99", quantiles(ages, n=100)[98] * 1000, "ms")
    report.add("slatedb", "tail latency against the bare loop, p50", median(ours) / median(bare), "", 2.0, "most")


Seen = Callable[[bytes], bool]


def _tail(database: SlateDbDatabase, follow: Callable[[SlateDbDatabase, Seen], None]) -> list[float]:
    ages: list[float] = []
    ready = threading.Event()

    def seen(value: bytes) -> bool:
        """Record the age of a row; True for the last row."""
        ready.set()
        if value:
            ages.append(time.time() - float(value))
        return len(ages) == TAIL_WRITES

    reading = threading.Thread(target=follow, args=(database, seen))
    writing = threading.Thread(target=lambda: run(_trickle(database, ready), "writing"))
    writing.start()
    reading.start()
    writing.join()
    reading.join()
    return ages


async def _trickle(database: SlateDbDatabase, ready: threading.Event) -> None:
    api = binding()
    db = await api.DbBuilder(database.path, database.store.open()).build()
    while not ready.is_set():
        await db.put(b"tail", b"")
        await asyncio.sleep(TAIL_PAUSE_SECONDS)
    for _ in range(TAIL_WRITES):
        await db.put(b"tail", b"%f" % time.time())
        await asyncio.sleep(TAIL_PAUSE_SECONDS)
    await db.shutdown()


def _bare_tail(database: SlateDbDatabase, seen: Seen) -> None:
    async def follow() -> None:
        reader = database.wal_reader()
        head = await database.manifest()
        iterator = await reader.iterator(await reader.last_wal_file_id(head.replay_after_wal_id) + 1)
        while True:
            found = [seen(row.value) for row in (await iterator.next()).rows if row.key == b"tail"]
            if any(found):
                return

    run(follow(), "following")


def _source_tail(source: SlateDbSource, seen: Seen) -> None:
    follower = source.follow(SchemaFile())
    try:
        offset: dict[str, Any] = follower.start()
        while True:
            end = follower.latest(offset, Limit(2_000_000, 256_000_000), TableDirectives())
            if end == offset:
                time.sleep(0.01)
                continue
            for split in _log_only(follower.plan(offset, end)):
                for changes in source.read(split):
                    rows = zip(changes.row.field(0).to_pylist(), changes.row.field(1).to_pylist(), strict=True)
                    found = [seen(value) for key, value in rows if key == b"tail"]
                    if any(found):
                        return
            offset = end
    finally:
        follower.stop()


def _report_lookup(report: Report, source: SlateDbSource, rows: int) -> None:
    """Measure lookups by key, which merge operands and expiries need: for adjacent keys and for scattered keys."""
    run(_flush(source.database), "flushing")
    for name, step in (("neighbours", 1), ("far apart", max(1, rows // LOOKUPS))):
        keys = [b"key%012d" % number for number in range(0, rows, step)[:LOOKUPS]]
        seconds = _timed(partial(_look_up, source, keys), len(keys))
        report.add("slatedb", f"rows looked up by key, {name}", len(keys) / seconds, "rows/s")


def _look_up(source: SlateDbSource, keys: list[bytes]) -> int:
    return int(look_up(source.database, source.rules, source.rules[0], keys).num_rows)


async def _flush(database: SlateDbDatabase) -> None:
    api = binding()
    db = await api.DbBuilder(database.path, database.store.open()).build()
    await db.flush_with_options(api.FlushOptions(flush_type=api.FlushType.MEM_TABLE))
    await db.shutdown()


def _log_only(splits: list[Split]) -> Iterator[Split]:
    return (split for split in splits if isinstance(split, WalSplit))
