"""Measures the journal in an object store next to the one in a folder: what an append costs, and what reading costs.

`python -m bench --only journal`. Without Spark and Postgres. The object store is the tests' own, on this machine: its
answers are as fast as a loopback is, so a distance to a real store is added to every request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.report import Report
from tailrace.journal import Frame, FrameReader, Journal, JournalPlace, ObjectPlace
from tailrace.model.change import START, Position
from tests.support.slatedb_bucket import serving

SMALL_BYTES = 32 << 10
LARGE_BYTES = 8 << 20
APPENDS = 200
LARGE_APPENDS = 24


def measure(report: Report, folder: Path, scale: float) -> None:
    with serving() as server:
        places: dict[str, JournalPlace] = {
            "folder": folder / "journal",
            "object store": ObjectPlace("s3://bench/journal", server.options),
        }
        for name, place in places.items():
            _measure_place(report, name, place, scale)


def _measure_place(report: Report, name: str, place: JournalPlace, scale: float) -> None:
    small, large = max(20, int(APPENDS * scale)), max(4, int(LARGE_APPENDS * scale))
    with Journal.open_writer(place) as writer:
        reader = Journal.open_reader(place)
        number = 0

        def append(size: int) -> None:
            nonlocal number
            number += 1
            writer.append([Frame(Position(number, 0), Position(number, 1), True, 1, b"", bytes(size))])

        appended = [_timed(lambda: append(SMALL_BYTES)) for _ in range(small)]
        report.add("journal", f"{name}: append of 32 KiB, median", 1000 * median(appended), "ms")

        def follow() -> None:
            append(SMALL_BYTES)
            reader.refresh()
            (ref,) = reader.frames(Position(number - 1, 1), Position(number, 1))
            FrameReader(place).read(ref)

        seen = [_timed(follow) for _ in range(small)]
        report.add("journal", f"{name}: from append to read by another reader, median", 1000 * median(seen), "ms")
        took = sum(_timed(lambda: append(LARGE_BYTES)) for _ in range(large))
        report.add("journal", f"{name}: appends of 8 MiB", large * LARGE_BYTES / took / 1e6, "MB/s")
        reader.refresh()
        refs = reader.frames(START, reader.head())
        took = _timed(lambda: [None for _ in FrameReader(place).read_all(refs)])
        report.add("journal", f"{name}: read back", sum(ref.length for ref in refs) / took / 1e6, "MB/s")
        opened = _timed(lambda: Journal.open_reader(place).frames(START, reader.head()))
        report.add("journal", f"{name}: a new reader finds {len(refs)} frames", 1000 * opened, "ms")
        reader.close()


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
