# ruff: noqa: S608 - every name in the SQL here is quoted
"""Apply a tape to a replica of its database, or revert a database along its own tape."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tailrace.capture import layout, trigger
from tailrace.capture.change import CapturedChange, Schema
from tailrace.capture.exclusion import excluded, read_excluded
from tailrace.capture.layout import COMMIT, DEFAULT_TABLE, PROGRESS_TABLE, CdcVersion, quoted, transaction
from tailrace.capture.merge import MergeReplay
from tailrace.capture.replay import TapeReplay, require_revertible
from tailrace.capture.tape import Tape, TapeMark, check_sequence, read_tape_mark
from tailrace.errors import ConfigError, Finding, PreflightError, UnavailableError
from tailrace.system import closed_file, turso_lock
from tailrace.system.file_header import MVCC_FIX, MVCC_REASON, is_mvcc

_BUSY_SECONDS = 10.0


@dataclass(frozen=True)
class Applied:
    """The result of `apply`. `copied`: the replica was created as a copy; `last`: the last change that it has now;
    `excluded`: the tables that are not captured, and whose rows the replica therefore does not follow."""

    transactions: int
    changes: int
    last: int
    copied: bool
    excluded: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Reverted:
    """The result of `revert`: the changes undone, and the last change that is still in effect."""

    changes: int
    to: int


@contextmanager
def open_file(path: Path, *, writes: bool = True) -> Iterator[sqlite3.Connection]:
    """A connection to a file that exists. Raises ConfigError if it does not, UnavailableError while it is locked.

    A file that is open in Turso counts as locked too, because SQLite and Turso do not see each other's locks.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}", fix="check the path")
    if not writes:
        turso_lock.require_not_shared(path)
    with _opened(path, writes=writes) as connection:
        try:
            connection.execute("PRAGMA foreign_keys = OFF")
            connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
            yield connection
        except sqlite3.OperationalError as error:
            # An error of the module itself, such as text that is not UTF-8, has no code.
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise UnavailableError(
                    f"{path} is locked by another process", fix="try again, or end that process"
                ) from None
            raise
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_NOTADB:
                if is_mvcc(path):
                    raise ConfigError(f"{path} {MVCC_REASON}", fix=MVCC_FIX) from None
                raise ConfigError(f"{path} is not an SQLite database", fix="check the path") from None
            raise


@contextmanager
def _opened(path: Path, *, writes: bool) -> Iterator[sqlite3.Connection]:
    if not writes:
        with closed_file.opened_by_sqlite(path, timeout_seconds=_BUSY_SECONDS) as connection:
            yield connection
        return
    uri = f"{path.resolve().as_uri()}?mode=rw"
    with (
        turso_lock.shut_out(path),
        closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None)) as connection,
    ):
        yield connection


def apply(
    source: Path, destination: Path, *, table: str = DEFAULT_TABLE, start: int | None = None, merge: bool = False
) -> Applied:
    """Apply to `destination` what `source` has committed, transaction by transaction.

    Progress is a row in the destination, committed with the changes. So after an interruption it continues from there,
    and a repeat does nothing. A destination that does not exist is created as a copy of the source. One that exists but
    has no progress yet needs `start`, the last change that it already contains; except with `merge`, which writes the
    tape's rows by key into whatever the destination holds, and begins at the tape's beginning. Raises LostError if the
    tape was started over.
    """
    if destination.exists() and source.resolve() == destination.resolve():
        raise ConfigError("a file cannot follow its own tape", fix="use another file as the destination")
    with open_file(source, writes=False) as reader:
        copied = not destination.exists()
        if copied:
            _copy(reader, destination, table, source)
        with open_file(destination) as writer:
            if layout.trigger_capture(writer) is not None:
                raise PreflightError("the destination is captured by triggers", fix="tailrace sqlite disable DST")
            begin = 0 if start is None and merge else start
            replay = MergeReplay if merge else TapeReplay
            return _follow(reader, writer, str(source.resolve()), table, begin, copied, replay)


def _follow(
    reader: sqlite3.Connection,
    writer: sqlite3.Connection,
    name: str,
    table: str,
    start: int | None,
    copied: bool,
    replays: type[TapeReplay],
) -> Applied:
    with transaction(reader, "BEGIN"):
        tape = Tape(reader, table)
        tape.require_complete()
        mark = _read_progress(writer, name, start, reader, table)
        check_sequence(reader, table, mark)
        with transaction(writer):
            _write_progress(writer, name, table, mark)
        transactions = changes = 0
        last = mark.change_id
        for group in tape.transactions(last, ignore_schema_changes=False):
            with transaction(writer):
                replay = replays(writer)
                for change in group.changes:
                    replay.replay(change)
                replay.finish()
                last = group.last
                _write_progress(writer, name, table, read_tape_mark(reader, table, last))
            transactions, changes = transactions + 1, changes + len(group.changes)
        left_out = tuple(excluded(reader, table))
    return Applied(transactions, changes, last, copied, left_out)


def _copy(reader: sqlite3.Connection, destination: Path, table: str, source: Path) -> None:
    """Copy the source without its capture tables, under a temporary name until the copy is complete."""
    partial = destination.with_name(destination.name + ".partial")
    partial.unlink(missing_ok=True)
    layout.read_version(reader, table)
    reader.execute("VACUUM INTO ?", (str(partial),))
    with open_file(partial) as writer, transaction(writer):
        last = writer.execute(f"SELECT coalesce(max(change_id), 0) FROM {quoted(table)}").fetchone()[0]
        mark = read_tape_mark(writer, table, last)
        trigger.suspend(writer)
        _empty_excluded(writer, table)
        for (held,) in writer.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
            if held in layout.own_tables(writer) - {layout.VERSION_TABLE} or held.startswith(layout.TURSO_PREFIX):
                writer.execute(f"DROP TABLE {quoted(held)}")
        writer.execute(f"DROP TABLE IF EXISTS {layout.VERSION_TABLE}")
        _write_progress(writer, str(source.resolve()), table, mark)
    partial.rename(destination)


def _empty_excluded(writer: sqlite3.Connection, table: str) -> None:
    """Delete the rows of tables that are not captured: they would be old soon, and if the tape holds such a table one
    day, it begins with all of its rows."""
    left_out = read_excluded(writer, table)
    if left_out:
        replay = TapeReplay(writer)
        for one in left_out:
            if layout.has_table(writer, one.table):
                writer.execute(f"DELETE FROM {quoted(one.table)}")
        replay.finish()


def _read_progress(
    writer: sqlite3.Connection, name: str, start: int | None, reader: sqlite3.Connection, table: str
) -> TapeMark:
    if layout.has_table(writer, PROGRESS_TABLE):
        sql = f"SELECT mark FROM {PROGRESS_TABLE} WHERE source = ? AND table_name = ?"
        if row := writer.execute(sql, (name, table)).fetchone():
            return TapeMark.parse(row[0])
    if start is None:
        raise PreflightError(
            "the destination exists, but this tape was never applied to it",
            fix="use a new file; or give the last change that it already contains: --from CHANGE_ID (0: none); "
            "or write the tape's rows into what it holds: --merge",
        )
    return _mark_at(reader, table, start)


def _mark_at(connection: sqlite3.Connection, table: str, change_id: int) -> TapeMark:
    """The mark of a change. If the tape does not hold the change, `check_sequence` refuses the mark."""
    mark = read_tape_mark(connection, table, change_id)
    return mark if mark.is_on_tape or not change_id else TapeMark(change_id, {str(change_id): -1})


def _write_progress(writer: sqlite3.Connection, name: str, table: str, mark: TapeMark) -> None:
    writer.execute(
        f"CREATE TABLE IF NOT EXISTS {PROGRESS_TABLE} "
        "(source TEXT, table_name TEXT, mark TEXT NOT NULL, PRIMARY KEY (source, table_name))"
    )
    writer.execute(f"INSERT OR REPLACE INTO {PROGRESS_TABLE} VALUES (?, ?, ?)", (name, table, str(mark)))


def revert(path: Path, *, to: int | None = None, last: int | None = None, table: str = DEFAULT_TABLE) -> Reverted:
    """Undo every change after `to`, or the `last` transactions, in one transaction.

    The undoing is recorded on the tape like any other changes: readers of the tape follow it, and it can be reverted
    too. If the tape has no transaction ids, `last` counts changes. Raises LostError for DDL that removed values,
    PreflightError if the tape lacks the old images; then the file is unchanged.
    """
    with open_file(path) as connection, transaction(connection):
        tape = Tape(connection, table)
        tape.require_complete()
        bound = to if to is not None else _bound(tape, last or 0)
        check_sequence(connection, table, _mark_at(connection, table, bound))
        undone = [
            change.reversed()
            for group in tape.transactions(bound, ignore_schema_changes=False)
            for change in group.changes
        ][::-1]
        running = trigger.suspend(connection)
        replay = TapeReplay(connection)
        for change in undone:
            operation = change.into_apply()
            if isinstance(operation, Schema):
                require_revertible(operation.after, operation.before)
            replay.run(operation)
        replay.finish()
        _append(connection, tape, undone)
        trigger.resume(connection, running)
    return Reverted(len(undone), bound)


def _bound(tape: Tape, last: int) -> int:
    """The id of the change before the last `last` transactions."""
    ends = [0]
    for group in tape.transactions(ignore_schema_changes=False):
        ends += [group.last] if group.txn_id is not None else [change.change_id for change in group.changes]
    return ends[max(len(ends) - 1 - last, 0)]


def _append(connection: sqlite3.Connection, tape: Tape, changes: list[CapturedChange]) -> None:
    if not changes:
        return
    now = int(time.time())
    next_id = connection.execute(f"SELECT max(change_id) + 1 FROM {quoted(tape.table)}").fetchone()[0]
    has_commits = tape.version.has_commit_record
    txn = () if tape.version is CdcVersion.V1 else (next_id if has_commits else None,)
    rows = [
        (now, *txn, c.type, c.table, c.id, c.before, c.after, None if tape.by_triggers else c.updates) for c in changes
    ]
    if has_commits:
        rows.append((now, *txn, COMMIT, None, None, None, None, None))
    names = layout.COLUMNS[tape.version][1:]
    connection.executemany(
        f"INSERT INTO {quoted(tape.table)} ({', '.join(map(quoted, names))}) VALUES ({', '.join('?' * len(names))})",
        rows,
    )
