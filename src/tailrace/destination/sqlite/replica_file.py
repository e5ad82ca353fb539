"""Opening the file: creating it once, recognizing it later, and what SQLite's errors mean here."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tailrace.destination.sqlite import bookkeeping
from tailrace.errors import RESYNC, DamagedError, PreflightError, TableError, UnavailableError
from tailrace.system import failpoint, turso_lock
from tailrace.system.atomic_file import make_folder

APPLICATION_ID = int.from_bytes(b"tail")
"""In the header of every file that tailrace made; no other file is written to."""

_MAGIC = b"SQLite format 3\0"
_APPLICATION_ID_AT = 68
_DOWN = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
    }
)
_SETTINGS = (
    # WAL mode cannot always be turned on; without it, a weaker setting would let a power cut undo a commit.
    "PRAGMA synchronous = EXTRA",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -65536",
    # A rebuilt table takes the old one's name; views that users made on it must not prevent the rename.
    "PRAGMA legacy_alter_table = ON",
    "PRAGMA foreign_keys = OFF",
)


def foreign_content(path: Path) -> str | None:
    """Why the file at a path cannot be the replica; None when it is one, is empty or is missing. Changes nothing."""
    if not path.exists():
        return None
    if not path.is_file():
        return f"{path} is a directory, not a file"
    with path.open("rb") as file:
        header = file.read(_APPLICATION_ID_AT + 4)
    if not header:
        return None
    if not header.startswith(_MAGIC):
        return f"{path} is no SQLite file"
    if int.from_bytes(header[_APPLICATION_ID_AT:]) != APPLICATION_ID:
        return f"the SQLite file {path} was not made by tailrace"
    return None


@contextmanager
def opened(path: Path, timeout_seconds: float) -> Iterator[sqlite3.Connection]:
    """A connection to the file for the length of the block; a missing file is created.

    Statements commit by themselves outside `transaction`. Raises PreflightError for a file that tailrace did not make.
    """
    make_folder(path.parent)
    if problem := foreign_content(path):
        raise PreflightError(problem, fix="set destination.path to a file that is not there yet")
    with (
        turso_lock.shut_out(path),
        closing(sqlite3.connect(path, timeout=timeout_seconds, isolation_level=None)) as connection,
    ):
        for setting in _SETTINGS:
            connection.execute(setting)
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            _make(connection)
        # SQLite refuses to change the mode while others are connected. A later connection does it.
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")
        yield connection


def _make(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another connection may have created it while this one waited.
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            bookkeeping.create(connection)
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit all of the block or nothing, holding the file's write lock from the beginning."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        bookkeeping.bring_up_to_date(connection)
        yield
        failpoint.reach("sqlite.before_commit")
        if not connection.in_transaction:
            # Some disk errors make SQLite roll back the transaction. Later statements were committed one by one.
            raise UnavailableError("SQLite ended the transaction by itself; the batch is applied again")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise
    failpoint.reach("sqlite.committed")


@contextmanager
def reaching(path: Path, table: str) -> Iterator[None]:
    """Turn SQLite and disk errors into tailrace errors, which say whether a retry helps."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _DOWN:
            raise _unavailable(path, table, str(error)) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise DamagedError(f"{path}: {error}", table=table, fix=f"move {path} away, then {RESYNC}") from error
        raise TableError(
            f"SQLite reported an error in {path}: {error}",
            table=table,
            fix="check the indexes, triggers and views that were added to the file;"
            f" to copy the table again: tailrace resync FILE {table}",
        ) from error
    except OSError as error:
        raise _unavailable(path, table, errno.errorcode.get(error.errno or 0, "error")) from error


def _unavailable(path: Path, table: str, reason: str) -> UnavailableError:
    return UnavailableError(
        f"cannot use {path}: {reason}",
        table=table,
        fix=f"check that no other process locks {path}, that the disk has space and that this user may write there; "
        "tailrace retries by itself",
    )
