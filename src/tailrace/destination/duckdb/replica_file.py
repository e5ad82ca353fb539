"""Opening the file: creating it once, recognizing it later, and what DuckDB's errors mean here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import duckdb

from tailrace.destination.duckdb.name import BOOK_SCHEMA, file_name, folded
from tailrace.destination.replica.bookkeeping import Bookkeeping
from tailrace.destination.replica.sql_name import fold_ascii, quote
from tailrace.errors import RESYNC, DamagedError, PreflightError, TableError, UnavailableError
from tailrace.model.schema import TableName
from tailrace.system import failpoint
from tailrace.system.atomic_file import make_folder

RETRY_SECONDS: Final = 0.05
_MAGIC_AT, _MAGIC = 8, b"DUCK"
_DOWN = (duckdb.IOException, duckdb.ConnectionException, duckdb.OutOfMemoryException)
_ANOTHER_FILE = "set destination.path to a file that is not there yet"


def foreign_content(path: Path) -> str | None:
    """Why the file at a path cannot be the replica, as far as its first bytes show; None when it is missing."""
    if not path.exists():
        return None
    if not path.is_file():
        return f"{path} is a directory, not a file"
    with path.open("rb") as file:
        header = file.read(_MAGIC_AT + len(_MAGIC))
    return None if header[_MAGIC_AT:] == _MAGIC else f"{path} is no DuckDB file"


@contextmanager
def opened(path: Path, timeout_seconds: float, *, read_only: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection to the file for the length of the block; a missing file is created, unless it is only read.

    Waits while another process has the file open. Raises PreflightError for a file that tailrace did not make.
    """
    if not read_only:
        make_folder(path.parent)
    if problem := foreign_content(path):
        raise PreflightError(problem, fix=_ANOTHER_FILE)
    connection = _connect(path, timeout_seconds, read_only=read_only)
    try:
        connection.execute("SET TimeZone = 'UTC'; SET enable_progress_bar = false")
        if not _has_book(connection):
            if read_only or _has_tables(connection):
                raise PreflightError(f"the DuckDB file {path} was not made by tailrace", fix=_ANOTHER_FILE)
            with transaction(connection):
                connection.execute(f"CREATE SCHEMA {quote(BOOK_SCHEMA)}")
                bookkeeping(connection).create()
        yield connection
    finally:
        # Without a commit, closing undoes everything.
        connection.close()


def bookkeeping(connection: duckdb.DuckDBPyConnection) -> Bookkeeping:
    def run(sql: str, values: Any) -> list[tuple[Any, ...]]:
        return connection.execute(sql, list(values)).fetchall()

    def is_taken(table: TableName) -> bool:
        # `lower` in DuckDB knows more letters than its names do.
        found = (
            "SELECT table_schema, table_name FROM information_schema.tables WHERE table_catalog = current_database()"
        )
        name = file_name(table)
        return fold_ascii(str(name)) in {fold_ascii(str(TableName(*one))) for one in run(found, ())}

    catalog = catalog_of(connection)
    return Bookkeeping(
        run=run,
        place=lambda name: f"{catalog}.{quote(BOOK_SCHEMA)}.{quote(name)}",
        key=lambda table: str(file_name(table)),
        unique=folded,
        is_taken=is_taken,
        holder="the file",
    )


def catalog_of(connection: duckdb.DuckDBPyConnection) -> str:
    """What the file is called in SQL. Without it, a schema with the name of the file would be ambiguous."""
    return quote(connection.execute("SELECT current_database()").fetchall()[0][0])


@contextmanager
def transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Commit all of the block. After an error the connection must be closed, which undoes it."""
    connection.begin()
    yield
    failpoint.reach("duckdb.before_commit")
    connection.commit()
    failpoint.reach("duckdb.committed")


@contextmanager
def reaching(path: Path, table: str) -> Iterator[None]:
    """Turn DuckDB and disk errors into tailrace errors, which say whether a retry helps."""
    try:
        yield
    except duckdb.DependencyException as error:
        raise index_error(table) from error
    except duckdb.Error as error:
        # The path stands in the text, and may hold any word.
        text = str(error).replace(str(path), "")
        if isinstance(error, duckdb.SerializationException) or "Corrupt database" in text:
            raise DamagedError(f"{path} is damaged", table=table, fix=f"move {path} away, then {RESYNC}") from error
        if isinstance(error, _DOWN) or (isinstance(error, duckdb.TransactionException) and "Could not" in text):
            # A path, a process that holds the lock, a full disk; what follows is advice on other tools.
            raise _unavailable(path, table, str(error).splitlines()[0].partition(". However")[0]) from error
        # Without its text: that may quote values.
        raise TableError(
            f"DuckDB reported an error in {path}: {type(error).__name__}",
            table=table,
            fix="check the indexes and views that were added to the file;"
            f" to copy the table again: tailrace resync FILE {table}",
        ) from error
    except OSError as error:
        raise _unavailable(path, table, error.strerror or type(error).__name__) from error


def index_error(table: str) -> TableError:
    """The error for an index that people added, and that a table cannot keep while its columns change."""
    return TableError(
        "an index that was added to the table prevents a change of its columns",
        table=table,
        fix=f"drop the index (duckdb_indexes() lists it), then tailrace retry FILE {table}, and create it again",
    )


def _unavailable(path: Path, table: str, reason: str) -> UnavailableError:
    return UnavailableError(
        f"cannot use {path}: {reason}",
        table=table,
        fix="close the file in other programs, and check that its disk has space and that this user may write there;"
        " tailrace retries by itself",
    )


def _connect(path: Path, timeout_seconds: float, *, read_only: bool) -> duckdb.DuckDBPyConnection:
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return duckdb.connect(str(path), read_only=read_only)
        except (duckdb.IOException, duckdb.ConnectionException) as error:
            if not is_locked(error) or time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_SECONDS)


def is_locked(error: duckdb.Error) -> bool:
    """Whether another process, or this one in another way, has the file open."""
    # DuckDB has no code of its own for it; the path comes later in the text.
    return str(error).startswith(("IO Error: Could not set lock", "Connection Error: Can't open a connection"))


def _has_book(connection: duckdb.DuckDBPyConnection) -> bool:
    found = "SELECT 1 FROM duckdb_schemas() WHERE database_name = current_database() AND schema_name = ?"
    return bool(connection.execute(found, [BOOK_SCHEMA]).fetchall())


def _has_tables(connection: duckdb.DuckDBPyConnection) -> bool:
    found = "SELECT 1 FROM information_schema.tables WHERE table_catalog = current_database() LIMIT 1"
    return bool(connection.execute(found).fetchall())
