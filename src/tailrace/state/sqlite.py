"""The state in one SQLite file of the pipeline's `state` folder."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailrace.errors import ConfigError, DamagedError, UnavailableError
from tailrace.state import layout
from tailrace.state.database import Row, Values, closed_on_error
from tailrace.state.layout import FORMAT, Dialect
from tailrace.system.atomic_file import make_folder

# State files of older formats, made new in place.

_FROM_1 = """
INSERT INTO pipeline (name, created_at, epoch, fingerprint, run, serial)
    SELECT name, created_at, epoch, fingerprint, run, COALESCE((SELECT MAX(id) FROM old_request), 0) FROM old_pipeline;
INSERT INTO table_state
    SELECT pipeline.name, upstream_id, old.name,
        CASE WHEN state IN ('SyncWait', 'Catchup') THEN 'FinishedCopy' ELSE state END,
        since, reason, fix, CASE retry WHEN 'automatic' THEN 'timed' ELSE retry END, 0, NULL, NULL, resume,
        CASE WHEN failed_in IN ('SyncWait', 'Catchup') THEN 'FinishedCopy' ELSE failed_in END,
        rows_copied, rows_total, chunks_done, chunks_total, changes_applied, position,
        last_change_committed_at, last_applied_at
    FROM old_table_state AS old, pipeline;
INSERT INTO schema_version (pipeline, upstream_id, position, version, schema)
    SELECT pipeline.name, upstream_id, position, version, schema FROM old_schema_version AS old, pipeline
    WHERE NOT EXISTS (SELECT 1 FROM old_schema_version AS newer WHERE newer.upstream_id = old.upstream_id
        AND newer.position = old.position AND newer.version > old.version);
INSERT INTO progress (pipeline, batch_id, "offset", position, rows, bytes, seconds, at)
    SELECT pipeline.name, batch_id, "offset", position, rows, bytes, seconds, at FROM old_progress, pipeline;
INSERT INTO source_status
    (pipeline, gear, received, journal_bytes, server, slot_restart, slot_confirmed, error, fix, at)
    SELECT pipeline.name, gear, received, journal_bytes, server, slot_restart, slot_confirmed, error, fix, at
    FROM old_source_status, pipeline;
INSERT INTO request (pipeline, id, kind, "table", at, done_at)
    SELECT pipeline.name, id, kind, "table", at, done_at FROM old_request, pipeline
"""

_TABLES_OF_1 = ("pipeline", "table_state", "schema_version", "progress", "source_status", "request")


def upgrade(connection: sqlite3.Connection, found: int, dialect: layout.Dialect) -> None:
    """Bring the tables from format `found` (0: none are there) to the newest, inside the caller's transaction."""
    old = _TABLES_OF_1 if found == 1 else ()
    for name in old:
        connection.execute(f"ALTER TABLE {name} RENAME TO old_{name}")
    for statement in layout.statements(dialect, found):
        connection.execute(statement)
    if old:
        for statement in _FROM_1.strip().split(";\n"):
            connection.execute(statement)
    for name in old:
        connection.execute(f"DROP TABLE old_{name}")
    connection.execute(f"PRAGMA user_version = {layout.FORMAT}")


FILE = "state.db"
_BUSY_SECONDS = 10.0
_DIALECT = Dialect("INTEGER", "REAL", "BLOB", "TEXT", " STRICT")


class SqliteStateDatabase:
    """One connection to `state.db`. A write is on disk when its transaction ends."""

    shared = False
    locking = ""
    clock = "SELECT strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now') AS at"

    def __init__(self, connection: sqlite3.Connection, state_dir: Path) -> None:
        self._connection = connection
        self._state_dir = state_dir
        self.place = str(state_dir)

    @classmethod
    def open_writing(cls, state_dir: Path) -> SqliteStateDatabase:
        """The folder and the file are made where they are missing; a file of an older format becomes a new one."""
        path = Path(state_dir).absolute() / FILE
        try:
            make_folder(path.parent)
            connection = _connect(path.as_uri())
            with closed_on_error(connection):
                connection.execute("PRAGMA journal_mode = WAL")
                # As FULL; on a file system without WAL, a power cut could undo a commit with that.
                connection.execute("PRAGMA synchronous = EXTRA")
                with _transaction(connection):
                    found = _format(connection, path)
                    if found < FORMAT:
                        upgrade(connection, found, _DIALECT)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(state_dir, error) from error
        return cls(connection, state_dir)

    @classmethod
    def open_reading(cls, state_dir: Path) -> SqliteStateDatabase:
        """Cannot write; works beside a running writer and in a folder that cannot be written.

        Raises ConfigError when the pipeline has no state yet.
        """
        path = Path(state_dir).absolute() / FILE
        if not path.exists():
            raise ConfigError(
                f"{path} does not exist: the pipeline has not run yet", fix="start it with `tailrace run FILE`"
            )
        try:
            connection = _connect_reading(path)
            with closed_on_error(connection):
                found = _format(connection, path)
                if found == 0:
                    raise ConfigError(f"the state in {state_dir} is only being made", fix="try again in a moment")
            if found < FORMAT:
                connection = _upgraded_copy(connection, found)
        except sqlite3.Error as error:
            raise _unusable(state_dir, error) from error
        return cls(connection, state_dir)

    def read(self, statement: str, values: Values) -> list[Row]:
        try:
            return self._connection.execute(statement, dict(values)).fetchall()
        except sqlite3.Error as error:
            raise _unusable(self._state_dir, error) from error

    @contextmanager
    def transaction(self) -> Iterator[SqliteStateDatabase]:
        try:
            with _transaction(self._connection):
                yield self
        except sqlite3.Error as error:
            raise _unusable(self._state_dir, error) from error

    def run(self, statement: str, values: Values) -> list[Row]:
        return self._connection.execute(statement, dict(values)).fetchall()

    def run_many(self, statement: str, values: Sequence[Values]) -> None:
        self._connection.executemany(statement, [dict(each) for each in values])

    def close(self) -> None:
        self._connection.close()


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _connect_reading(path: Path) -> sqlite3.Connection:
    connection = _connect(f"{path.as_uri()}?mode=ro")
    try:
        with closed_on_error(connection):
            connection.execute("PRAGMA user_version")
    except sqlite3.OperationalError:
        # SQLite needs a log and its index beside the file, and may not make them here. Without a log nothing was
        # written since the last clean end, so the file alone is the whole truth.
        if path.with_name(FILE + "-wal").exists():
            raise
        connection = _connect(f"{path.as_uri()}?mode=ro&immutable=1")
    return connection


def _connect(uri: str) -> sqlite3.Connection:
    # Own transactions (isolation_level None), and the store's own lock around each use from several threads.
    connection = sqlite3.connect(
        uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    connection.row_factory = _row
    return connection


def _row(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, values, strict=True)}


def _format(connection: sqlite3.Connection, path: Path) -> int:
    """The format of the file; 0 for an empty one. Raises ConfigError when it is newer than this program."""
    found = int(connection.execute("PRAGMA user_version").fetchone()["user_version"])
    if found > FORMAT:
        raise ConfigError(
            f"{path} has format {found}, this tailrace reads up to {FORMAT}: a newer tailrace wrote it",
            fix="upgrade with `pip install -U tailrace`, or give the pipeline another `state` folder",
        )
    return found


def _upgraded_copy(connection: sqlite3.Connection, found: int) -> sqlite3.Connection:
    # A reader may not touch the file, and nobody who knows the new format has written to it yet.
    copy = _connect("file::memory:")
    connection.backup(copy)
    connection.close()
    with _transaction(copy):
        upgrade(copy, found, _DIALECT)
    return copy


def _unusable(state_dir: Path, error: Exception) -> DamagedError | UnavailableError:
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
