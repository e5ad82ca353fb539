"""Measures what change capture costs an application that writes an SQLite file, and how fast changes are read."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.report import Report
from tailrace.capture import capture, enable
from tailrace.capture.column_type import read_column
from tailrace.capture.record import encode
from tailrace.capture.record_decode import decode_records

ROWS = 200_000
RECORDS = 1_000_000
_TABLE = "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT, price REAL, body BLOB)"
_INSERT = "INSERT INTO t (name, price, body) VALUES (?, ?, ?)"


def measure(report: Report, folder: Path, scale: float) -> None:
    """Time bulk inserts in one transaction without capture, with hooks and with triggers; then decoding records."""
    count = int(ROWS * scale)
    bare = _rate(folder / "bare.db", _stdlib, count, lambda connection: None)
    triggers = _rate(folder / "trigger.db", _stdlib, count, lambda connection: enable(connection, "full"))
    report.add("capture", "bulk inserts without capture, stdlib", bare, "rows/s")
    report.add("capture", "triggers, ratio to none", triggers / bare, aim=0.2)
    plain = _rate(folder / "plain.db", _apsw, count, lambda connection: None)
    reading = _rate(folder / "read.db", _apsw, count, lambda connection: connection.preupdate_hook(_read, id=_read))
    hooks = _rate(folder / "hook.db", _apsw, count, lambda connection: capture(connection, "full"))
    report.add("capture", "bulk inserts without capture, apsw", plain, "rows/s")
    report.add("capture", "a hook that reads each row and keeps nothing, ratio to none", reading / plain)
    report.add("capture", "hooks, ratio to none", hooks / plain, aim=0.5)
    report.add(
        "capture", "full records decoded to typed columns", _decode_rate(int(RECORDS * scale)), "records/s", 300_000
    )


def _stdlib(file: Path) -> Any:
    return sqlite3.connect(file, isolation_level=None)


def _apsw(file: Path) -> Any:
    import apsw

    return apsw.Connection(str(file))


def _read(update: Any) -> tuple[Any, ...]:
    return update.database_name, update.table_name, update.opcode, update.rowid_new, update.new


def _rate(file: Path, connect: Callable[[Path], Any], count: int, prepare: Callable[[Any], object]) -> float:
    connection = connect(file)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(_TABLE)
    prepare(connection)
    rows = [(f"name {number}", number * 1.5, b"0123456789abcdef") for number in range(count)]
    cursor = connection.cursor()
    started = time.monotonic()
    cursor.execute("BEGIN")
    cursor.executemany(_INSERT, rows)
    cursor.execute("COMMIT")
    seconds = time.monotonic() - started
    connection.close()
    return count / seconds


def _decode_rate(count: int) -> float:
    some = [encode((number, f"name {number}", number * 1.5, b"0123456789abcdef")) for number in range(1000)]
    records = pa.array(some * (count // len(some)), pa.binary())
    kinds = [pa.int64(), pa.string(), pa.float64(), pa.binary()]
    started = time.monotonic()
    decoded = decode_records(records, len(kinds))
    for cells, kind in zip(decoded.columns, kinds, strict=True):
        read_column(cells, kind)
    return len(records) / (time.monotonic() - started)
