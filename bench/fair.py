"""Measures how long small tables wait for their copy next to a huge one that was created first.

`python -m bench --only fair`. Small tables are copied alone, then the same tables next to a huge one, whose copy takes
about sixteen batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

from bench.report import Report
from bench.runner import Run, Runner
from bench.server import Server

HUGE_ROWS = 4_000_000
ROW_BYTES = 240
BATCHES = 16
CHUNKS = 8
"""How many chunks of the huge table a batch holds."""
SMALL = 40
SMALL_ROWS = 1_000
LEAST_CHUNK = 1_000_000


def measure(report: Report, folder: Path, scale: float) -> None:
    rows = max(200_000, int(HUGE_ROWS * scale))
    chunk = max(LEAST_CHUNK, rows * ROW_BYTES // BATCHES // CHUNKS)
    with Server(folder) as server, Runner(folder / "spark", {}) as runner:
        for name, huge in (("warmup", 0), ("alone", 0), ("crowd", rows)):
            with server.create_database(name) as connection:
                _fill(connection, huge)
            run = runner.once(_pipeline(server, name, folder, chunk))
            if name == "warmup":
                continue
            waited = _last_readable(folder / name / "lake") - run.batches[0].at
            if not huge:
                report.add("fair", f"{SMALL} small tables alone: the last is readable after", waited, "s")
                continue
            took = run.ended_at - run.batches[0].at
            report.note(f"fair: {rows:,} rows of the huge table in {_copying(run)} batches, {took:.1f} s")
            report.add("fair", f"next to one of {rows:,} rows: the last is readable after", waited, "s")
            report.add("fair", "all tables are complete after", took, "s")
            report.add("fair", "the small tables' wait, of that time", 100 * waited / took, "%", 50, "most")


def _fill(connection: psycopg.Connection, huge: int) -> None:
    if huge:
        connection.execute("CREATE TABLE huge (id int PRIMARY KEY, v text)")
        connection.execute(
            f"INSERT INTO huge SELECT n, repeat(md5(n::text), 6) FROM generate_series(1, {huge}) n".encode()
        )
    for number in range(SMALL):
        connection.execute(f"CREATE TABLE small{number} (id int PRIMARY KEY, v text)".encode())
        connection.execute(
            f"INSERT INTO small{number} SELECT n, md5(n::text) FROM generate_series(1, {SMALL_ROWS}) n".encode()
        )
    connection.execute("ANALYZE")


def _pipeline(server: Server, name: str, folder: Path, chunk: int) -> dict[str, Any]:
    return {
        "name": name,
        "source": {
            "type": "postgres",
            "dsn": server.postgres.dsn(name),
            "publication": "bench",
            "copy": {"chunk_bytes": chunk},
        },
        "tables": {"include": ["public.*"]},
        "destination": {"type": "delta", "path": str(folder / name / "lake")},
        "state": str(folder / name / "state"),
        "batch": {"max_bytes": chunk * CHUNKS},
    }


def _last_readable(lake: Path) -> float:
    """When the last commit of a small table was made: nothing changes them after their copy."""
    logs = [file for table in (lake / "public").glob("small*") for file in (table / "_delta_log").glob("*.json")]
    return max(file.stat().st_mtime for file in logs)


def _copying(run: Run) -> int:
    return sum(batch.milliseconds.get("addBatch", 0) > 0 for batch in run.batches)
