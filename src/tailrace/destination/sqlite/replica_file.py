"""Opening the file: making it once, knowing it again, and what SQLite's errors mean here."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from tailrace.destination.sqlite import bookkeeping
from tailrace.errors import DamagedError, PreflightError, TableError, UnavailableError
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
    # Without the log ahead of writing, which not everybody lets us turn on, less would let a power cut undo a commit.
    "PRAGMA synchronous = EXTRA",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -65536",
    # A table takes another's place by name; views of people that name it must not be in the way.
    "PRAGMA legacy_alter_table = ON",
    "PRAGMA foreign_keys = OFF",
)


def foreign_content(path: Path) -> str | None:
    """Why the file at a path cannot be the replica; None when it is one, is empty or is not there. Changes nothing."""
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
    """A connection to the file for the length of the block; the file is made when it is not there.

    Statements commit by themselves outside `transaction`. Raises PreflightError for a file of somebody else.
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
        # Nobody can change the mode while others are at work; then one of the next connections does.
        with suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")
        yield connection


def _make(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Somebody else may have made it while this connection waited.
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            bookkeeping.make(connection)
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of the block or nothing of it, with the file's write lock from its beginning on."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        failpoint.reach("sqlite.before_commit")
        if not connection.in_transaction:
            # Some errors of a disk make SQLite undo a transaction. Statements after that were committed one by one.
            raise UnavailableError("SQLite ended the transaction by itself; the batch is done again")
        connection.execute("COMMIT")
    except BaseException:
        connection.rollback()
        raise
    failpoint.reach("sqlite.committed")


@contextmanager
def reaching(path: Path, table: str) -> Iterator[None]:
    """Turns what SQLite and the disk say into errors that tell whether trying again helps."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _DOWN:
            raise _unavailable(path, table, str(error)) from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise DamagedError(
                f"{path}: {error}", table=table, fix=f"move {path} away and copy all tables again with tailrace resync"
            ) from error
        raise TableError(
            f"SQLite refused in {path}: {error}",
            table=table,
            fix="look at the indexes, triggers and views added to the file;"
            f" tailrace resync FILE {table} begins it again",
        ) from error
    except OSError as error:
        raise _unavailable(path, table, errno.errorcode.get(error.errno or 0, "error")) from error


def _unavailable(path: Path, table: str, reason: str) -> UnavailableError:
    return UnavailableError(
        f"cannot use {path}: {reason}",
        table=table,
        fix=f"end whatever holds a write lock on, free space for, or restore access to {path}; "
        "the pipeline goes on by itself",
    )
