"""The tables of `state.db`, and opening it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from tailrace.errors import ConfigError, DamagedError, UnavailableError

FILE = "state.db"
FORMAT = 1
_BUSY_SECONDS = 10.0

_TABLES = """
CREATE TABLE pipeline (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    name TEXT NOT NULL, created_at TEXT NOT NULL, epoch TEXT NOT NULL, fingerprint TEXT NOT NULL,
    run INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE table_state (
    upstream_id TEXT PRIMARY KEY, name TEXT NOT NULL, state TEXT NOT NULL, since TEXT NOT NULL,
    reason TEXT, fix TEXT, retry TEXT, resume TEXT, failed_in TEXT,
    rows_copied INTEGER NOT NULL DEFAULT 0, rows_total INTEGER,
    chunks_done INTEGER NOT NULL DEFAULT 0, chunks_total INTEGER,
    changes_applied INTEGER NOT NULL DEFAULT 0, position TEXT,
    last_change_committed_at TEXT, last_applied_at TEXT
) STRICT;
CREATE TABLE schema_version (
    upstream_id TEXT NOT NULL, version INTEGER NOT NULL, position TEXT NOT NULL, schema TEXT NOT NULL,
    PRIMARY KEY (upstream_id, version)
) STRICT;
CREATE TABLE progress (
    batch_id INTEGER PRIMARY KEY, offset TEXT NOT NULL, position TEXT,
    rows INTEGER NOT NULL, bytes INTEGER NOT NULL, seconds REAL NOT NULL, at TEXT NOT NULL
) STRICT;
CREATE TABLE source_status (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    gear TEXT, received TEXT, journal_bytes INTEGER, server TEXT, slot_restart TEXT, slot_confirmed TEXT,
    error TEXT, fix TEXT, at TEXT NOT NULL
) STRICT;
CREATE TABLE request (
    id INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, "table" TEXT NOT NULL, at TEXT NOT NULL, done_at TEXT
) STRICT;
"""


def open_writing(state_dir: Path) -> sqlite3.Connection:
    """A connection that may write; the folder and the file are made where they are missing."""
    path = Path(state_dir).absolute() / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = _connect(path.as_uri())
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        if _format(connection, path) == 0:
            for statement in _TABLES.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
    except (OSError, sqlite3.Error) as error:
        raise unusable(state_dir, error) from error
    return connection


def open_reading(state_dir: Path) -> sqlite3.Connection:
    """A connection that cannot write, also beside a running writer and in a folder that cannot be written.

    Raises ConfigError when the pipeline has no state yet.
    """
    path = Path(state_dir).absolute() / FILE
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: the pipeline has not run yet", fix="start it with `tailrace run FILE`"
        )
    try:
        try:
            connection = _connect(f"{path.as_uri()}?mode=ro")
            _format(connection, path)
        except sqlite3.OperationalError:
            # SQLite needs a log and its index beside the file, and may not make them here. Without a log nothing
            # was written since the last clean end, so the file alone is the whole truth.
            if path.with_name(FILE + "-wal").exists():
                raise
            connection = _connect(f"{path.as_uri()}?mode=ro&immutable=1")
            _format(connection, path)
    except sqlite3.Error as error:
        raise unusable(state_dir, error) from error
    return connection


def _connect(uri: str) -> sqlite3.Connection:
    # Own transactions (isolation_level None), and the store's own lock around each use from several threads.
    connection = sqlite3.connect(
        uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    connection.row_factory = sqlite3.Row
    return connection


def _format(connection: sqlite3.Connection, path: Path) -> int:
    """The format of the file; 0 for an empty one. Raises ConfigError when it is newer than this program."""
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > FORMAT:
        connection.close()
        raise ConfigError(
            f"{path} has format {found}, this tailrace reads up to {FORMAT}: a newer tailrace wrote it",
            fix="upgrade with `pip install -U tailrace`, or give the pipeline another `state` folder",
        )
    return found


def unusable(state_dir: Path, error: Exception) -> DamagedError | UnavailableError:
    """What an error of SQLite or the file system means to whoever runs the pipeline."""
    path = Path(state_dir) / FILE
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return DamagedError(
            f"{path} is not a sound state file: {error}",
            fix="restore it from a backup, or move the `state` folder away and copy the tables again",
        )
    return UnavailableError(
        f"cannot use {path}: {error}", fix="check the folder's rights, its free space and who else uses the file"
    )
