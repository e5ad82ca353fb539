"""What random updates cost as the table grows: a thousand a second into tables of different sizes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, quantiles

from bench.lake import first_seen, require_equal
from bench.part import Stage, wait_for
from bench.process import Peak, cpu_seconds
from bench.report import Report

SIZES = (1_000_000, 10_000_000, 50_000_000)
UPDATES_PER_SECOND = 1_000
TICKS_PER_SECOND = 10
SECONDS = 60
AIM_COST = 2.0
AIM_READABLE_SECONDS = 1.5


@dataclass(frozen=True)
class Cost:
    """What the updates of one run took, per thousand of them."""

    cpu_seconds: float
    bytes_written: float


def measure(make_stage: Callable[[str, int], Stage], report: Report, scale: float) -> None:
    """Run the same updates at each size. The cost of the first is compared with that of all others."""
    costs = {}
    for size in (int(rows * scale) for rows in SIZES):
        costs[size] = _update(make_stage(f"growth_{size}", size), report, size)
    first = next(iter(costs.values()))
    for size, cost in list(costs.items())[1:]:
        part = f"{size / 1e6:g} M"
        report.add(
            "growth", f"{part}: CPU against the smallest", cost.cpu_seconds / first.cpu_seconds, "", AIM_COST, "most"
        )
        report.add("growth", f"{part}: bytes against the smallest", cost.bytes_written / first.bytes_written)


def _update(stage: Stage, report: Report, rows: int) -> Cost:
    stage.runner.once(stage.pipeline)
    lake = stage.lake / "public" / stage.shop.tables[0]
    stage.runner.start(stage.pipeline)
    began = time.time()
    stage.order(5, -1)
    wait_for(lambda: bool(first_seen(lake, {5: -1}, "items", began)), "the first change did not arrive")
    random.seed(rows)
    used, began = cpu_seconds(stage.runner.pid), time.time()
    with Peak(stage.runner.pid) as peak:
        committed = {key: (tick, at) for tick, key, at in _ticks(stage, rows)}
        ended = time.time()
        last, (value, at) = max(committed.items(), key=lambda one: one[1])
        # Only what came since then is read: the bench must not take the time that it measures.
        wait_for(lambda: bool(first_seen(lake, {last: value}, "items", at)), "the last update never arrived")
        spent = cpu_seconds(stage.runner.pid) - used
    run = stage.runner.drain()
    seen = first_seen(lake, {key: tick for key, (tick, _) in committed.items()}, "items", began)
    waits = [seen[key] - at for key, (_, at) in committed.items() if key in seen]
    assert len(waits) == len(committed), f"{len(committed) - len(waits)} updates never arrived"
    batches = [batch for batch in run.batches if began <= batch.at <= ended]
    thousands = SECONDS * UPDATES_PER_SECOND / 1000
    cost = Cost((spent.python + spent.other) / thousands, _written(lake, began) / thousands)
    part = f"{rows / 1e6:g} M"
    report.add("growth", f"{part}: batches", len(batches))
    report.add("growth", f"{part}: a batch, mean", mean(batch.milliseconds["addBatch"] for batch in batches) / 1e3, "s")
    report.add("growth", f"{part}: CPU per 1,000 updates", cost.cpu_seconds, "s")
    report.add("growth", f"{part}: bytes written per update", cost.bytes_written / 1e3, "B")
    report.add("growth", f"{part}: commit to readable, p50", quantiles(waits, n=100)[49], "s")
    report.add(
        "growth", f"{part}: commit to readable, p99", quantiles(waits, n=100)[98], "s", AIM_READABLE_SECONDS, "most"
    )
    report.add("growth", f"{part}: until the last update is readable", seen[last] - at, "s")
    report.add("growth", f"{part}: peak memory, Python", peak.python / 1e9, "GB")
    equal = require_equal(stage.dsn, stage.lake, stage.shop.tables)
    report.note(f"growth: {equal:,} rows are equal in lake and source")
    stage.close()
    return cost


def _ticks(stage: Stage, rows: int) -> Iterator[tuple[int, int, float]]:
    """Update random rows, some in each transaction: the number of the transaction, one of its keys, its time."""
    count = UPDATES_PER_SECOND // TICKS_PER_SECOND
    query = f"UPDATE {stage.shop.tables[0]} SET items = %s, updated_at = clock_timestamp() WHERE id = ANY (%s)"
    started = time.monotonic()
    for tick in range(SECONDS * TICKS_PER_SECOND):
        time.sleep(max(0.0, started + tick / TICKS_PER_SECOND - time.monotonic()))
        # The first key of each transaction is its own, so that no later one hides it.
        own = 6 + tick
        keys = [own, *random.sample(range(SECONDS * TICKS_PER_SECOND + 6, rows + 1), count - 1)]
        stage.connection.execute(query, [1000 + tick, keys])
        yield 1000 + tick, own, time.time()


def _written(table: Path, since: float) -> int:
    """The bytes of all files that were written to the table's folder since then."""
    found = (path.stat() for path in table.rglob("*") if path.is_file())
    return sum(status.st_size for status in found if status.st_mtime >= since)
