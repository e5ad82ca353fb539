"""An application that has a file open, as a process of its own, with the real engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

ProcessKind = Literal["wal", "rollback", "trigger", "hook", "turso", "turso shared"]
PROCESS_KINDS: tuple[ProcessKind, ...] = ("wal", "rollback", "trigger", "hook", "turso", "turso shared")

APPLICATION = """
import sys
path, kind = sys.argv[1:]
if kind.startswith("turso"):
    import turso
    options = {"experimental_features": "multiprocess_wal"} if kind == "turso shared" else {}
    connection = turso.connect(path, isolation_level=None, **options)
    connection.execute("PRAGMA capture_data_changes_conn('full')")
elif kind == "hook":
    import apsw
    connection = apsw.Connection(path)
    connection.execute("PRAGMA journal_mode = WAL")
else:
    import sqlite3
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"PRAGMA journal_mode = {'DELETE' if kind == 'rollback' else 'WAL'}")
connection.execute("CREATE TABLE IF NOT EXISTS items (id INTEGER PRIMARY KEY, name TEXT, updated_at TEXT)")
if kind == "hook":
    from tailrace.capture import capture
    capture(connection, "full")
if kind == "trigger":
    from tailrace.capture import enable
    enable(connection, "full")
for line in sys.stdin:
    if line == "close\\n":
        connection.close()
        break
    for _ in range(int(line)):
        connection.execute("INSERT INTO items (name, updated_at) VALUES ('x', '2026-01-01 00:00:00')")
    print(list(connection.execute("SELECT count(*) FROM items").fetchall())[0][0], flush=True)
"""


class ApplicationProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        """The exit code, once it has ended by itself."""
        return self._process.wait()

    def insert(self, rows: int) -> int:
        """So many rows are committed; how many the table has then."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(rows, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        print("close", file=self._process.stdin, flush=True)
        assert self._process.wait() == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running(path: Path, kind: ProcessKind) -> Iterator[ApplicationProcess]:
    """An application that has the file open, and is killed at the end unless it closed it."""
    with subprocess.Popen(
        [sys.executable, "-c", APPLICATION, str(path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield ApplicationProcess(process)
        finally:
            process.kill()
