"""Connections to the file: SQLite's own library, or Turso's. What a source does with them is the same.

No two libraries may have one file open in one process, as closing it in one drops the locks of the other: not SQLite's
and Turso's, and not Python's own SQLite and apsw's. An application is a process of its own. For Turso the file is
opened for several processes (`multiprocess_wal`), which the application has to do as well.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tailrace.errors import ConfigError, DamagedError, PreflightError, UnavailableError
from tailrace.sqlite.layout import Connection, transaction
from tailrace.sqlite.record import SURROGATE

EngineName = Literal["sqlite", "turso"]

BUSY_SECONDS = 10.0
_SHARED = "multiprocess_wal"
_LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class Engine:
    """Which library opens which file. A value; `session` opens and closes."""

    name: EngineName
    path: str

    @contextmanager
    def session(self, doing: str, *, writes: bool = False) -> Iterator[Connection]:
        """A connection for the length of a `with` block, in autocommit mode.

        Raises PreflightError for a file that is not there, may not be read or is no database, DamagedError for one
        that is corrupt, and UnavailableError while it is locked. `doing` says in the message what was going on.
        """
        failures = self._failures()
        try:
            connection = self._open(writes)
        except failures as error:
            raise self._explain(error, doing) from error
        try:
            yield connection
        except failures as error:
            raise self._explain(error, doing) from error
        finally:
            connection.close()

    @contextmanager
    def snapshot(self, doing: str) -> Iterator[Connection]:
        """The file as it is at one moment: a connection in a read transaction. Raises as `session` does."""
        with self.session(doing) as connection, transaction(connection, "BEGIN"):
            yield connection

    def _open(self, writes: bool) -> Any:
        path = Path(self.path)
        if not path.is_file():
            raise PreflightError(f"there is no file {path}", fix="check the source's `path`")
        if not os.access(path, os.R_OK):
            raise PreflightError(f"{path} may not be read by this user", fix=f"chmod u+r {path}")
        if self.name == "sqlite":
            uri = f"{path.resolve().as_uri()}?mode={'rw' if writes else 'ro'}"
            return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        if _is_locked_whole(path):
            raise self._locked()
        return _load_turso().connect(str(path), experimental_features=_SHARED, isolation_level=None)

    def _failures(self) -> tuple[type[Exception], ...]:
        return (sqlite3.Error,) if self.name == "sqlite" else (_load_turso().Error,)

    def _explain(self, error: Exception, doing: str) -> Exception:
        text = str(error)
        code = getattr(error, "sqlite_errorcode", None)
        # SQLite's text may quote a table's name; its code cannot. Turso has no codes.
        lowered = text.lower() if code is None else _WORDS.get(code & 0xFF, "")
        if "not a database" in lowered:
            return PreflightError(f"{self.path} is not an SQLite database", fix="check the source's `path`")
        if "lock" in lowered or "busy" in lowered:
            return self._locked()
        if "malformed" in lowered or "corrupt" in lowered:
            return DamagedError(f"{self.path} is damaged, found while {doing}: {text}", fix="restore it from a backup")
        return UnavailableError(f"{self.path} could not be read while {doing}: {text}")

    def _locked(self) -> UnavailableError:
        fix = "close the application that has it open, or let it use journal_mode = WAL"
        if self.name == "turso":
            fix = f"open it with experimental_features={_SHARED!r} in the application as well, or close it there"
        return UnavailableError(f"{self.path} is locked by another process", fix=fix)


_WORDS = {
    sqlite3.SQLITE_NOTADB: "not a database",
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "locked",
    sqlite3.SQLITE_CORRUPT: "malformed",
}


def _load_turso() -> Any:
    try:
        import turso
    except ImportError as error:
        raise ConfigError("a source of type turso needs pyturso", fix="pip install 'tailrace[turso]'") from error
    return turso


def _is_locked_whole(path: Path) -> bool:
    """Whether a Turso connection that is not shared holds the file.

    Opened for several processes the file can be read all the same, but what that connection writes never shows. The
    table of locks is looked at because a lock of our own, let go, would take Turso's locks in this process with it.
    """
    if not _LOCKS.exists():
        return False
    inode = str(path.stat().st_ino)
    for line in _LOCKS.read_text().splitlines():
        parts = line.split()
        whole = parts[1:2] == ["POSIX"] and parts[3] == "WRITE" and parts[-2:] == ["0", "EOF"]
        if whole and parts[5].rpartition(":")[2] == inode:
            return True
    return False


FIRST_ROWS = 500
MOST_ROWS = 20_000
PAGE_BYTES = 16 * 1024 * 1024


def next_rows(rows: int, size: int) -> int:
    """How many rows to fetch at once after so many were that large: they are all in memory."""
    return max(1, min(MOST_ROWS, PAGE_BYTES * rows // max(size, 1)))


def fetch(connection: Connection, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """All rows of a query. Text that is not UTF-8 comes with surrogates, as in `record.decode`."""
    try:
        rows: list[tuple[Any, ...]] = connection.execute(sql, parameters).fetchall()
    except sqlite3.OperationalError as error:
        if "UTF-8" not in str(error) or not isinstance(connection, sqlite3.Connection):
            raise
        # Decoding in Python is slow, so it is kept for files that need it.
        connection.text_factory = lambda raw: raw.decode("utf-8", SURROGATE)
        return connection.execute(sql, parameters).fetchall()
    return rows
