"""Connections to the file: SQLite's own library, or Turso's. What a source does with them is the same.

No two libraries may have one file open in one process, as closing it in one drops the locks of the other: not SQLite's
and Turso's, and not Python's own SQLite and apsw's. An application is a process of its own. A Turso file is opened for
several processes (`multiprocess_wal`) only while an application has it open that way, and read as a closed file when
no one has it open (see `turso_lock` for what happens otherwise).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tailrace.capture.layout import CaptureConnection, transaction
from tailrace.capture.record import SURROGATE
from tailrace.errors import ConfigError, DamagedError, PreflightError, UnavailableError
from tailrace.system import closed_file, turso_lock
from tailrace.system.file_header import MVCC_FIX, MVCC_REASON, is_mvcc

EngineName = Literal["sqlite", "turso"]

BUSY_SECONDS = 10.0


@dataclass(frozen=True)
class CapturedFile:
    """Which library opens which file. A value; `session` opens and closes."""

    name: EngineName
    path: str

    @contextmanager
    def session(self, doing: str, *, writes: bool = False) -> Iterator[CaptureConnection]:
        """A connection for the length of a `with` block, in autocommit mode.

        Raises PreflightError for a file that is not there, may not be read or is not a database, DamagedError for one
        that is corrupt, and UnavailableError while it is locked. `doing` describes the operation in the message.
        """
        path = Path(self.path)
        if not path.is_file():
            raise PreflightError(f"there is no file {path}", fix="check the source's `path`")
        if not os.access(path, os.R_OK):
            raise PreflightError(f"{path} may not be read by this user", fix=f"chmod u+r {path}")
        try:
            with self._open(path, writes) as connection:
                yield connection
        except self._failures() as error:
            raise self._explain(error, doing) from error

    @contextmanager
    def snapshot(self, doing: str) -> Iterator[CaptureConnection]:
        """The file as it is at one moment: a connection in a read transaction. Raises as `session` does."""
        with self.session(doing) as connection, transaction(connection, "BEGIN"):
            yield connection

    @contextmanager
    def _open(self, path: Path, writes: bool) -> Iterator[CaptureConnection]:
        if self.name == "sqlite":
            turso_lock.require_not_shared(path)
            if not writes:
                with closed_file.opened_by_sqlite(path, timeout_seconds=BUSY_SECONDS) as connection:
                    yield connection
                return
            uri = f"{path.resolve().as_uri()}?mode=rw"
            with closing(
                sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            ) as connection:
                yield connection
            return
        turso = _load_turso()
        if turso_lock.is_locked_whole(path):
            raise self._locked()
        if turso_lock.is_shared(path):
            shared = _SharedConnection(
                turso.connect(str(path), experimental_features=turso_lock.SHARED, isolation_level=None)
            )
            try:
                yield shared
            finally:
                shared.let_go()
        elif writes:
            with (
                turso_lock.shut_out(path, creates=True),
                closing(turso.connect(str(path), isolation_level=None)) as connection,
            ):
                yield connection
        else:
            with closed_file.opened(path) as connection:
                yield connection

    def _failures(self) -> tuple[type[Exception], ...]:
        return (sqlite3.Error,) if self.name == "sqlite" else (sqlite3.Error, _load_turso().Error)

    def _explain(self, error: Exception, doing: str) -> Exception:
        text, kind = str(error), _kind_of(error)
        if kind == "NotAdb":
            if is_mvcc(Path(self.path)):
                return PreflightError(f"{self.path} {MVCC_REASON}", fix=MVCC_FIX)
            return PreflightError(f"{self.path} is not an SQLite database", fix="check the source's `path`")
        if kind == "Busy":
            return self._locked()
        if kind == "Corrupt":
            return DamagedError(f"{self.path} is damaged, found while {doing}: {text}", fix="restore it from a backup")
        return UnavailableError(f"{self.path} could not be read while {doing}: {text}")

    def _locked(self) -> UnavailableError:
        fix = "close the application that has it open, or let it use journal_mode = WAL"
        if self.name == "turso":
            fix = f"close it in the application, or open it there with experimental_features={turso_lock.SHARED!r}"
        return UnavailableError(f"{self.path} is locked by another process", fix=fix)


class _SharedConnection:
    """A Turso connection next to an application's.

    Do not call `close()` on it: that checkpoints and truncates the WAL, which only the application may do. If the
    application has restarted meanwhile and opened the file alone, truncating would delete what it committed.
    """

    def __init__(self, connection: Any) -> None:
        self._connection: Any = connection

    @property
    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction)

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Any:
        return self._connection.execute(sql, parameters)

    def let_go(self) -> None:
        self._connection = None


_KINDS = {
    sqlite3.SQLITE_NOTADB: "NotAdb",
    sqlite3.SQLITE_BUSY: "Busy",
    sqlite3.SQLITE_LOCKED: "Busy",
    sqlite3.SQLITE_CORRUPT: "Corrupt",
}
"""Codes of SQLite, in the words of Turso."""


def _kind_of(error: Exception) -> str:
    """The kind of an error, never by words that may be part of a table's name.

    Turso raises an error of its own kind, and its Python module another one while it handles that.
    """
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None:
        return _KINDS.get(code & 0xFF, "")
    return "Busy" if str(error).startswith("Locking error: ") else type(error.__context__).__name__


def _load_turso() -> Any:
    try:
        import turso
    except ImportError as error:
        raise ConfigError("a source of type turso needs pyturso", fix="pip install 'tailrace[turso]'") from error
    return turso


FIRST_ROWS = 500
MOST_ROWS = 20_000
PAGE_BYTES = 16 * 1024 * 1024


def next_rows(rows: int, size: int) -> int:
    """How many rows to fetch next, given the size of the last ones: all of them are held in memory."""
    return max(1, min(MOST_ROWS, PAGE_BYTES * rows // max(size, 1)))


def fetch(connection: CaptureConnection, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """All rows of a query. Text that is not UTF-8 is returned with surrogates, as in `record.decode`."""
    try:
        rows: list[tuple[Any, ...]] = connection.execute(sql, parameters).fetchall()
    except sqlite3.OperationalError as error:
        if not str(error).startswith("Could not decode to UTF-8") or not isinstance(connection, sqlite3.Connection):
            raise
        # Decoding in Python is slow, so it is done only for files that need it.
        connection.text_factory = lambda raw: raw.decode("utf-8", SURROGATE)
        return connection.execute(sql, parameters).fetchall()
    return rows
