"""A small database of which each transaction is a new file: a process that is frozen keeps no one waiting.

FOLDER/00000000000000000017.db      the newest version, a whole SQLite database; a few earlier ones are next to it

A transaction works on a copy in memory. It ends by giving its result the number after the version it has read, which
only one process can do: the file is complete before it has its name, and no name is given twice. The process that comes
second learns that it does, and nothing that it did counts. So nothing is ever locked.

The newest version is never removed. A process that slept until its number was used, and removed since, can give it
again: that file is older than the newest one, no one reads it, and the process finds out right after.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tailrace.errors import DamagedError, UnavailableError
from tailrace.state import layout
from tailrace.state.database import Row, RunSql, StateDatabase, Values
from tailrace.state.sqlite import FILE, SqliteStateDatabase, SqliteStore, read_row, upgrade
from tailrace.system.atomic_file import make_private_folder, move_new, sync
from tailrace.system.failpoint import reach

LEADER_FOLDER = "leader"
"""Where a folder that nodes share holds the lease of its senders."""
KEPT_VERSIONS = 8
_SUFFIX = ".db"
_DRAFT = ".draft-"
_DRAFT_SECONDS = 3600.0
_TRIES = 1000
_PAGE_BYTES = 512
_SENDER_TABLES = ("sender_lease", "sender_watermark", "sender_queue")
_NEVER = "9999-12-31T00:00:00+00:00"

T = TypeVar("T")


class _OvertakenError(UnavailableError):
    """Another process has written the next version; this transaction did nothing."""


class VersionedFileDatabase(StateDatabase):
    """One process's view of the versions in a folder. Whatever a transaction does may be run again: see `write`."""

    shared = False
    clock = SqliteStateDatabase.clock
    types = SqliteStateDatabase.types

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._connection: sqlite3.Connection | None = None
        self.place = str(folder)

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[RunSql]:
        with self._translated():
            number = self._load()
            assert self._connection is not None
            before = _image(self._connection) if writes else b""
            self._connection.execute("BEGIN")
            try:
                yield self._run
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            if writes and (after := _image(self._connection)) != before:
                self._store(number + 1, after)

    def write(self, change: Callable[[RunSql], T]) -> T:
        for _ in range(_TRIES):
            with suppress(_OvertakenError):
                return super().write(change)
        raise UnavailableError(f"{self._folder} is written by others all the time", fix="none needed: it is retried")

    def run_many(self, run: RunSql, statement: str, values: Sequence[Values]) -> None:
        assert self._connection is not None, "it was opened by the transaction that this is part of"
        self._connection.executemany(statement, [dict(each) for each in values])

    def prepare(self) -> None:
        """Make the first version. What nodes kept in the SQLite file of the folder above, up to 0.1, is taken over."""
        with self._translated():
            make_private_folder(self._folder)
            earlier = _take_over(self._folder.parent) if not self._newest() else {}
        self.write(lambda run: self._prepare(run, earlier))

    def format(self, run: RunSql) -> int:
        return int(run("PRAGMA user_version", {})[0]["user_version"])

    def upgrade(self, run: RunSql, found: int) -> None:
        upgrade(lambda statement: run(statement, {}), found, self.types)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _prepare(self, run: RunSql, earlier: dict[str, list[Row]]) -> None:
        found = self._known_format(run)
        if found < layout.FORMAT:
            self.upgrade(run, found)
        if found == 0:
            for table, rows in earlier.items():
                for row in rows:
                    names = ", ".join(f'"{name}"' for name in row)
                    marks = ", ".join(f":{name}" for name in row)
                    run(f"INSERT INTO {table} ({names}) VALUES ({marks})", row)  # noqa: S608 - names of ours

    def _run(self, statement: str, values: Values) -> list[Row]:
        assert self._connection is not None
        return self._connection.execute(statement, dict(values)).fetchall()

    def _load(self) -> int:
        """Read the newest version into memory, and give its number; 0 when there is none yet."""
        while True:
            number = self._newest()
            try:
                content = (self._folder / _name(number)).read_bytes() if number else b""
            except FileNotFoundError:
                continue  # many newer ones came since
            self.close()
            self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._connection.row_factory = read_row
            if content:
                self._connection.deserialize(content)
            else:
                self._connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
            return number

    def _newest(self) -> int:
        return max((number for number, _ in self._versions()), default=0)

    def _versions(self) -> Iterator[tuple[int, Path]]:
        for file in self._folder.iterdir():
            if file.suffix == _SUFFIX and file.stem.isdecimal():
                yield int(file.stem), file

    def _store(self, number: int, content: bytes) -> None:
        draft = self._folder / f"{_DRAFT}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            reach("state.version_drafted")
            try:
                move_new(draft, self._folder / _name(number))
            except (FileExistsError, FileNotFoundError):  # taken by another one, or the draft removed as forgotten
                raise _OvertakenError(f"{self._folder} was written by another process") from None
        finally:
            draft.unlink(missing_ok=True)
        reach("state.version_named")
        sync(self._folder)
        if self._newest() != number:
            # Another version was made from this one, or this one came too late. Both are known after another try.
            raise _OvertakenError(f"{self._folder} was written by another process")
        self._prune(number)

    def _prune(self, newest: int) -> None:
        for number, file in list(self._versions()):
            if number <= newest - KEPT_VERSIONS:
                file.unlink(missing_ok=True)
        for draft in self._folder.glob(f"{_DRAFT}*"):
            with suppress(FileNotFoundError):
                if time.time() - draft.stat().st_mtime > _DRAFT_SECONDS:
                    draft.unlink()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise DamagedError(
                f"the newest file in {self._folder} is not sound: {error}",
                fix="stop all nodes and remove that file: the version before it is used, and some events come again",
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"cannot use {self._folder}: {error.strerror}", fix="check the folder's rights and its free space"
            ) from error


def open_leader_database(folder: Path) -> VersionedFileDatabase:
    """The lease and the watermarks that senders on one machine share in a folder. Made where they are missing."""
    database = VersionedFileDatabase(folder.absolute() / LEADER_FOLDER)
    database.prepare()
    return database


def forget_senders(folder: Path, pipeline: str) -> None:
    """Drop what senders of a pipeline have delivered. Not the lease: its epochs are counted on."""
    database = VersionedFileDatabase(folder.absolute() / LEADER_FOLDER)
    if not Path(database.place).is_dir():
        return

    def forget(run: RunSql) -> None:
        if database.format(run):
            for table in ("sender_watermark", "sender_queue"):
                run(f"DELETE FROM {table} WHERE pipeline = :pipeline", {"pipeline": pipeline})  # noqa: S608 - ours

    try:
        database.write(forget)
    finally:
        database.close()


def _take_over(folder: Path) -> dict[str, list[Row]]:
    """What the SQLite file holds of senders. From then on it keeps out the nodes that still go by it."""
    if not (folder / FILE).exists():
        return {}
    database = SqliteStore(state_dir=folder).open_database()
    try:
        with database.transaction() as run:
            found = {table: run(f"SELECT * FROM {table}", {}) for table in _SENDER_TABLES}  # noqa: S608 - ours
            run(
                "UPDATE sender_lease SET epoch = epoch + 1, owner_pid = 0, owner_host = 'a later tailrace',"
                " owner_started = :never, owner_machine = '', lease_until = :never",
                {"never": _NEVER},
            )
    finally:
        database.close()
    return {**found, "sender_lease": [_freed(row) for row in found["sender_lease"]]}


def _freed(row: Row) -> dict[str, Any]:
    """A lease as it was, unless an earlier try to take over was broken off: then no one has it."""
    if row["lease_until"] != _NEVER:
        return dict(row)
    nothing = dict.fromkeys(("owner_pid", "owner_host", "owner_started", "owner_machine", "lease_until"))
    return {**row, **nothing}


def _image(connection: sqlite3.Connection) -> bytes:
    """The file that the database would be. SQLite has no image of one that is still empty."""
    return connection.serialize() if connection.execute("PRAGMA page_count").fetchone()["page_count"] else b""


def _name(number: int) -> str:
    return f"{number:020d}{_SUFFIX}"
