"""Measures sync: changes pushed and pulled, what each costs on the wire, and how fast a replica is made.

`python -m bench --only sync`. Needs the extra `sync`; without Spark. Server and client are two processes on this
machine, so the network costs nothing here.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from bench.report import Report
from tailrace.sync.session import SyncResult, sync

ROWS = 200_000
CHANGES = 50_000
SINGLE = 100
_INSERT = "INSERT INTO item VALUES (?, ?, ?, ?)"


def measure(report: Report, folder: Path, scale: float) -> None:
    """Make two replicas, push many changes of one in one sync, pull them into the other, then push singly."""
    rows, changes, single = int(ROWS * scale), int(CHANGES * scale), max(10, int(SINGLE * scale))
    served, one, other = (folder / f"{name}.db" for name in ("served", "one", "other"))
    with closing(sqlite3.connect(served)) as connection:
        connection.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL, body BLOB)")
        connection.executemany(_INSERT, map(_row, range(rows)))
        connection.commit()
    with _serving(served) as url:
        seconds, done = _timed(one, url)
        report.add("sync", "bootstrap", done.received_bytes / seconds / 1e6, "MB/s")
        report.add("sync", "rows of a new replica", done.pulled / seconds, "rows/s")
        sync(other, url)
        _write(one, rows, changes)
        seconds, done = _timed(one, url)
        assert done.pushed == changes, done
        report.add("sync", "changes pushed in one sync", changes / seconds, "changes/s")
        report.add("sync", "sent for each of them", done.sent_bytes / changes, "bytes")
        seconds, done = _timed(other, url)
        assert done.pulled == changes, done
        report.add("sync", "changes pulled in one sync", changes / seconds, "changes/s")
        report.add("sync", "received for each of them", done.received_bytes / changes, "bytes")
        began, sent, received = time.perf_counter(), 0, 0
        for turn in range(single):
            _write(one, rows + changes + turn, 1)
            done = sync(one, url)
            sent, received = sent + done.sent_bytes, received + done.received_bytes
        report.add("sync", "changes pushed one by one", single / (time.perf_counter() - began), "syncs/s")
        report.add("sync", "sent and received for each of them", (sent + received) / single, "bytes")
        sync(other, url)
        assert _read(one) == _read(other) == _read(served)


def _row(number: int) -> tuple[object, ...]:
    return number, f"name {number}", number * 1.5, b"0123456789abcdef"


def _write(path: Path, first: int, count: int) -> None:
    """Half of the changes are updates across the table, half are new rows."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        updated = count // 2
        stride = max(1, first // max(1, updated))
        updates = ((f"changed {number}", number * stride) for number in range(updated))
        connection.executemany("UPDATE item SET name = ? WHERE id = ?", updates)
        connection.executemany(_INSERT, map(_row, range(first, first + count - updated)))
        connection.execute("COMMIT")


def _read(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT * FROM item ORDER BY id").fetchall()


def _timed(path: Path, url: str) -> tuple[float, SyncResult]:
    began = time.perf_counter()
    done = sync(path, url)
    return time.perf_counter() - began, done


@contextmanager
def _serving(path: Path) -> Iterator[str]:
    command = [str(Path(sys.executable).with_name("tailrace")), "serve-sync", str(path), "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
