"""The state in one SQLite file of the pipeline's `state` folder."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailrace.errors import ConfigError, DamagedError, UnavailableError
from tailrace.state import layout
from tailrace.state.database import Row, RunSql, StateDatabase, Values, closed_on_error
from tailrace.state.layout import FORMAT, ColumnTypes
from tailrace.state.store import StoreAddress
from tailrace.system.atomic_file import make_private_folder

# State files of older formats, upgraded in place.

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


def upgrade(run: Callable[[str], Any], found: int, types: layout.ColumnTypes) -> None:
    """Bring the tables from format `found` (0: there are none) to the newest, inside the caller's transaction."""
    old = _TABLES_OF_1 if found == 1 else ()
    for name in old:
        run(f"ALTER TABLE {name} RENAME TO old_{name}")
    for statement in layout.statements(types, found):
        run(statement)
    if old:
        for statement in _FROM_1.strip().split(";\n"):
            run(statement)
    for name in old:
        run(f"DROP TABLE old_{name}")
    run(f"PRAGMA user_version = {layout.FORMAT}")


FILE = "state.db"
_BUSY_SECONDS = 10.0


@dataclass(frozen=True)
class SqliteStore(StoreAddress):
    """A file in `state_dir`."""

    def connect(self, *, writes: bool) -> SqliteStateDatabase:
        """The folder and the file are made where they are missing.

        Without `writes` it works next to a running writer and in a folder that cannot be written; a file of an older
        format is read through an upgraded copy. Raises ConfigError when the pipeline has no state yet.
        """
        return _open_writing(Path(self.state_dir)) if writes else _open_reading(Path(self.state_dir))


class SqliteStateDatabase(StateDatabase):
    """One connection to `state.db`. A write is on disk when its transaction ends."""

    shared = False
    clock = "SELECT strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now') AS at"
    types = ColumnTypes("INTEGER", "REAL", "BLOB", "TEXT", " STRICT")

    def __init__(self, connection: sqlite3.Connection, state_dir: Path) -> None:
        self._connection = connection
        self._state_dir = state_dir
        self.place = str(state_dir)

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[RunSql]:
        with _translated(self._state_dir):
            self._connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                yield self._run
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")

    def read(self, statement: str, values: Values) -> list[Row]:
        # One statement sees one state of the file, with or without a transaction around it.
        with _translated(self._state_dir):
            return self._run(statement, values)

    def _run(self, statement: str, values: Values) -> list[Row]:
        return self._connection.execute(statement, dict(values)).fetchall()

    def run_many(self, run: RunSql, statement: str, values: Sequence[Values]) -> None:
        self._connection.executemany(statement, [dict(each) for each in values])

    def format(self, run: RunSql) -> int:
        return int(run("PRAGMA user_version", {})[0]["user_version"])

    def upgrade(self, run: RunSql, found: int) -> None:
        upgrade(self._connection.execute, found, self.types)

    def copy_to_memory(self) -> SqliteStateDatabase:
        """The same state in memory, of the newest format."""
        copy = SqliteStateDatabase(_connect("file::memory:"), self._state_dir)
        with closed_on_error(copy):
            self._connection.backup(copy._connection)
            copy.prepare()
        return copy

    def close(self) -> None:
        self._connection.close()


def _open_writing(state_dir: Path) -> SqliteStateDatabase:
    path = state_dir.absolute() / FILE
    with _translated(state_dir):
        make_private_folder(path.parent)
        with suppress(FileExistsError):  # SQLite would let others read it; its log gets the mode of the file
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        connection = _connect(path.as_uri())
        with closed_on_error(connection):
            connection.execute("PRAGMA journal_mode = WAL")
            # As FULL; on a file system without WAL, a power cut could undo a commit with that.
            connection.execute("PRAGMA synchronous = EXTRA")
    return SqliteStateDatabase(connection, state_dir)


def _open_reading(state_dir: Path) -> SqliteStateDatabase:
    path = state_dir.absolute() / FILE
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: the pipeline has not run yet", fix="start it with `tailrace run FILE`"
        )
    with _translated(state_dir):
        database = SqliteStateDatabase(_connect_reading(path), state_dir)
        with closed_on_error(database):
            # A reader may come between the making of the file and its first row.
            if not (database.is_prepared() and database.read("SELECT 1 FROM pipeline", {})):
                raise ConfigError(f"the state in {state_dir} is only being made", fix="try again in a moment")
            if database.format(database.read) == FORMAT:
                return database
            # A reader may not touch the file, and no program that knows the new format has written to it yet.
            copy = database.copy_to_memory()
        database.close()
        return copy


def _connect_reading(path: Path) -> sqlite3.Connection:
    connection = _connect(f"{path.as_uri()}?mode=ro")
    try:
        with closed_on_error(connection):
            connection.execute("PRAGMA user_version")
    except sqlite3.OperationalError:
        # SQLite needs a log and its index next to the file, and may not make them here. Without a log nothing was
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
    connection.row_factory = read_row
    return connection


def read_row(cursor: sqlite3.Cursor, values: tuple[Any, ...]) -> dict[str, Any]:
    """A row by the names of its columns."""
    return {column[0]: value for column, value in zip(cursor.description, values, strict=True)}


@contextmanager
def _translated(state_dir: Path) -> Iterator[None]:
    """What an error of SQLite or the file system means to the person who runs the pipeline."""
    path = state_dir / FILE
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            raise DamagedError(
                f"{path} is not a sound state file: {error}",
                fix="restore it from a backup, or move the `state` folder away and copy the tables again",
            ) from error
        raise UnavailableError(
            f"cannot use {path}: {error}", fix="check the folder's rights, its free space and who else uses the file"
        ) from error
