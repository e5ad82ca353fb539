"""The tape of a served file, in `FILE-tape`: a copy of its tables whose changes triggers capture, for pipelines.

The tape cannot be in the served file itself. Its pages carry everything to all clients: they would get the triggers and
the tape too, and Turso's clients keep a tape of their own under the same name. So after each revision the rows of the
copy are brought to those of the served file, in one transaction: what several commits did since the last time is one
transaction of the tape, and a row that they changed twice is one change. The tape is only appended to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw

from tailrace.capture import trigger
from tailrace.capture.layout import quoted, served_tape, transaction, trigger_capture
from tailrace.sync.row_difference import bring_rows
from tailrace.sync.schema import columns, read_objects
from tailrace.system import failpoint
from tailrace.system.side_file import make_side_file

_BUSY_MILLISECONDS = 60_000


class ServedTape:
    """Safe for several threads. Only a server writes the file, while it holds the lock of the served one."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        make_side_file(served_tape(path), path)
        self._connection = apsw.Connection(
            str(served_tape(path)),
            flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_URI,
        )
        self._connection.set_busy_timeout(_BUSY_MILLISECONDS)
        # A pipeline may have read what a power cut would take away.
        self._connection.execute(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA recursive_triggers = OFF"
        )
        # Read-only, because BEGIN IMMEDIATE locks every attached database that can be written.
        self._connection.execute("ATTACH ? AS now", (f"{path.resolve().as_uri()}?mode=ro",))

    def close(self) -> None:
        """Interrupt what runs, and close the file."""
        with suppress(apsw.ConnectionClosedError):
            self._connection.interrupt()
        with self._lock:
            self._connection.close()

    def advance(self) -> int:
        """Bring the copy to the served file as it is now; how many rows were written. Complete or nothing."""
        with self._lock:
            is_captured = trigger_capture(self._connection) is not None
            while self._bring_schema():
                if is_captured:
                    trigger.enable(self._connection)
            with transaction(self._connection):
                if any(self._schema_changes()):
                    return 0  # changed just now: the next call brings it
                rows = sum(bring_rows(self._connection, table) for table in self._tables("now"))
                failpoint.reach("sync.before-tape-commit")
            if not is_captured:
                trigger.enable(self._connection)
            return rows

    def _bring_schema(self) -> bool:
        """Make one step towards the tables of the served file; whether there was one to make."""
        with transaction(self._connection):
            statements = list(self._schema_changes())
            for statement in statements:
                self._connection.execute(statement)
        return bool(statements)

    def _schema_changes(self) -> Iterator[str]:
        """What the next step is. A table that was made again is dropped in one step and created in the next: the
        triggers record both."""
        mine, theirs = self._tables("main"), self._tables("now")
        for table in mine.keys() - theirs.keys():
            yield f"DROP TABLE {quoted(table)}"
        for table, sql in theirs.items():
            if table not in mine:
                yield sql
                continue
            here, there = self._fields("main", table), self._fields("now", table)
            if here == there:
                continue
            if there[: len(here)] != here or any(is_key for _, _, is_key in there[len(here) :]):
                yield f"DROP TABLE {quoted(table)}"
                continue
            for name, declared, _ in there[len(here) :]:
                yield f"ALTER TABLE {quoted(table)} ADD COLUMN {quoted(name)} {declared}"

    def _tables(self, schema: str) -> dict[str, str]:
        found = read_objects(self._connection, schema)
        return {name: sql for (kind, name), sql in found.items() if kind == "table"}

    def _fields(self, schema: str, table: str) -> list[tuple[str, str, int]]:
        """Name, type and place in the key of each stored column."""
        stored = columns(self._connection, schema, table)
        rows: list[Any] = self._connection.execute(f"PRAGMA {schema}.table_xinfo({quoted(table)})").fetchall()
        return [(str(name), str(declared), int(key)) for _, name, declared, _, _, key, _ in rows if name in stored]
