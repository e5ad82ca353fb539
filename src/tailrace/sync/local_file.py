# ruff: noqa: S608 - every name in the SQL here is quoted
"""The local file of a sync: an ordinary SQLite file whose changes triggers capture, with the state of its sync in it.

Next to it lies `FILE-remote`, the remote as of the last pull. The tape is only ever appended to: what a pull brings is
on it too, so a pipeline that follows the file keeps its place.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tailrace.capture import trigger
from tailrace.capture.layout import DEFAULT_TABLE, SYNC_TABLES, has_table, list_tables, quoted, transaction
from tailrace.capture.record import SURROGATE
from tailrace.capture.replica import open_file
from tailrace.capture.tape import Tape, TapeMark, check_sequence, read_tape_mark
from tailrace.errors import DamagedError, OwnedError, PreflightError
from tailrace.sync.preflight import MARK_TABLE, require_syncable
from tailrace.sync.remote import Remote, part_of
from tailrace.sync.schema import describe
from tailrace.sync.statement import OwnChange
from tailrace.system import failpoint
from tailrace.system.atomic_file import sync as sync_folder
from tailrace.system.file_lock import try_lock

STATE, CONFLICTS = SYNC_TABLES
_FORMAT = "1"
_START_OVER = "move the file away and sync again: it is made again from the remote; changes not pushed yet stay in it"


def image_of(path: Path) -> Path:
    return path.with_name(path.name + "-remote")


@contextmanager
def checking_image(path: Path) -> Iterator[None]:
    """Raise DamagedError for an error of SQLite, if the image is no whole database. The next pull makes it again."""
    try:
        yield
    except sqlite3.DatabaseError:
        if _is_whole(image_of(path)):
            raise
        image_of(path).unlink()
        raise DamagedError(
            f"the pages that the remote sent for {path} are no whole database",
            fix="sync again, which fetches all of them; if it stays, try PRAGMA integrity_check on the remote",
        ) from None


def _is_whole(image: Path) -> bool:
    try:
        with closing(sqlite3.connect(f"{image.resolve().as_uri()}?immutable=1", uri=True)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.DatabaseError:
        return False


@contextmanager
def syncing_alone(path: Path) -> Iterator[None]:
    """Hold the file's sync for this process. Raises OwnedError while another one holds it."""
    if not path.parent.is_dir():
        raise PreflightError(f"there is no folder {path.parent}", fix="create it")
    file = os.open(f"{path}-remote.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(file):
            raise OwnedError(f"another process syncs {path}", fix="wait for it, or stop it")
        yield
    finally:
        os.close(file)


def bootstrap(path: Path, address: str, remote: Remote) -> int:
    """Make the file as a copy of the remote, and return how many rows it has. A repeat after a crash begins again."""
    image = image_of(path)
    for leftover in (image, part_of(image)):
        leftover.unlink(missing_ok=True)
    revision = remote.pull("", image)
    assert revision is not None
    draft = path.with_name(path.name + ".new")
    for leftover in (draft, Path(f"{draft}-wal"), Path(f"{draft}-shm"), Path(f"{draft}-journal")):
        leftover.unlink(missing_ok=True)
    shutil.copyfile(image, draft)
    with checking_image(path), closing(sqlite3.connect(draft, isolation_level=None)) as connection:
        require_syncable(connection)
        tables = [name for name in list_tables(connection) if name != MARK_TABLE]
        rows = sum(connection.execute(f"SELECT count(*) FROM {quoted(name)}").fetchone()[0] for name in tables)
        connection.execute(f"DROP TABLE IF EXISTS {MARK_TABLE}")
        trigger.enable(connection)
        with transaction(connection):
            connection.execute(f"CREATE TABLE {STATE} (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
            connection.execute(
                f"CREATE TABLE {CONFLICTS} (id INTEGER PRIMARY KEY, at INTEGER, kind TEXT, table_name TEXT, "
                'change_id INTEGER, kept TEXT, reason TEXT, "before" BLOB, "after" BLOB)'
            )
            local = LocalFile(connection, path)
            local.set(format=_FORMAT, client=f"tailrace-{uuid.uuid4()}", remote=address, revision=revision)
            local.set(sent="0", mark="0")
            local.set(schema=describe(connection, "main"))
            local.set_base()
    failpoint.reach("sync.bootstrap")
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.rename(path)
    sync_folder(path.parent)
    return int(rows)


def _decode(text: bytes) -> str:
    return text.decode("utf-8", SURROGATE)


@contextmanager
def opened(path: Path, address: str) -> Iterator[LocalFile]:
    """The synced file. Raises PreflightError for a file that is not synced with this remote by tailrace."""
    with open_file(path) as connection:
        if not has_table(connection, STATE):
            raise PreflightError(
                f"{path} exists and was never synced by tailrace",
                fix="give a new path, which is made from the remote; to start from this file, serve it: "
                f"tailrace serve-sync {path}",
            )
        local = LocalFile(connection, path)
        if local.get("format") != _FORMAT:
            raise PreflightError(f"{path} was synced by a newer tailrace", fix="use that one")
        if local.get("remote") != address:
            raise PreflightError(f"{path} is synced with another remote", fix="use that remote, or a new path")
        connection.execute("PRAGMA recursive_triggers = OFF")
        connection.text_factory = _decode  # as on the tape
        trigger.enable(connection)
        require_syncable(connection)
        yield local


class LocalFile:
    """State and own changes of the file. Everything is read and written in the caller's transaction."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.connection = connection
        self.path = path

    def get(self, name: str) -> str:
        row = self.connection.execute(f"SELECT value FROM {STATE} WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise PreflightError(f"the sync state of {self.path} lacks {name}", fix=_START_OVER)
        return str(row[0])

    def set(self, **values: str) -> None:
        self.connection.executemany(f"INSERT OR REPLACE INTO {STATE} VALUES (?, ?)", values.items())

    def check_mark(self, mark: int) -> None:
        """Raise PreflightError if the remote has pushes of this client that this file never sent."""
        if mark > int(self.get("sent")):
            raise PreflightError(
                f"{self.path} is a copy of another replica or was put back from a backup: the remote has later changes "
                "of the same replica",
                fix=_START_OVER,
            )

    def set_base(self) -> None:
        """From here on, what is on the tape are own changes on top of the remote."""
        (last,) = self.connection.execute(f"SELECT coalesce(max(change_id), 0) FROM {DEFAULT_TABLE}").fetchone()
        self.set(base=str(read_tape_mark(self.connection, DEFAULT_TABLE, int(last))))

    def own_changes(self, mark: int = 0) -> list[OwnChange]:
        """The own changes of rows after the last pull and after `mark`. Own DDL is found by comparing the schemas.

        Raises LostError if the tape lost some of them.
        """
        base = TapeMark.parse(self.get("base"))
        check_sequence(self.connection, DEFAULT_TABLE, base, fix=_START_OVER)
        after = max(base.change_id, mark)
        groups = Tape(self.connection, DEFAULT_TABLE).transactions(after)
        return [OwnChange.of(change) for group in groups for change in group.changes]
