# ruff: noqa: S608 - every name in the SQL here is quoted
"""Capture for one apsw connection: what this connection commits is on the tape, in the same transaction.

The preupdate hook notes every row; a virtual table of our own, enlisted in each writing transaction by temporary
triggers that never fire, is told by SQLite of savepoints and asked to bring its rows in just before the commit.
That is how FTS keeps its index, and it is the one place where SQLite lets a commit be added to.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tailrace.errors import ConfigError, PreflightError, TailraceError
from tailrace.sqlite import layout
from tailrace.sqlite.change import describe_update
from tailrace.sqlite.enlistment import MODULE, VIRTUAL_TABLE, Enlistment
from tailrace.sqlite.layout import COMMIT, DELETE, INSERT, UPDATE, quoted
from tailrace.sqlite.mode import OFF, Captured, Mode, parse_mode
from tailrace.sqlite.record import encode, split
from tailrace.sqlite.schema_change import SchemaChange
from tailrace.sqlite.statement import StatementWatch

if TYPE_CHECKING:
    import apsw

_captures: weakref.WeakKeyDictionary[Any, ConnectionCapture] = weakref.WeakKeyDictionary()


def capture(connection: apsw.Connection, argument: str) -> None:
    """Capture what this connection changes from now on. `argument` is the pragma's: `<mode>[,<table>]` or `off`.

    Asking again for the same changes nothing, for another mode or table switches. It holds for this connection
    alone and ends with it. All or nothing: if it raises, file and connection are as they were. Raises ConfigError
    for a wrong argument or a connection that is not apsw's, PreflightError for what cannot be captured.
    """
    mode = parse_mode(argument)
    _require_apsw(connection)
    running = _captures.get(connection)
    if running is not None and running.mode == mode:
        return
    if mode is None:
        if running is not None:
            running.stop()
            del _captures[connection]
        return
    replacement = ConnectionCapture(connection, mode)
    if running is not None:
        running.stop()
    try:
        replacement.start()
    except BaseException:
        if running is not None:
            running.start()
        raise
    _captures[connection] = replacement


def captured(connection: apsw.Connection) -> Captured:
    """What `capture` was asked for on this connection: (mode, table, version), or ('off', None, None)."""
    running = _captures.get(connection)
    return OFF if running is None else Captured(running.mode.name, running.mode.table, running.version)


def _require_apsw(connection: object) -> None:
    try:
        import apsw
    except ImportError:
        raise ConfigError(
            "capture on one connection needs apsw", fix="pip install 'tailrace[sqlite]', or tailrace sqlite enable FILE"
        ) from None
    if not isinstance(connection, apsw.Connection):
        raise ConfigError(
            f"a connection of {type(connection).__module__} has no hooks to capture with",
            fix="use an apsw.Connection, or capture every writer of the file: tailrace sqlite enable FILE",
        )


_Noted = tuple[int, str, int, Any, Any]
"""A change as it was seen: type, table, rowid, the old values, the new ones. A `SchemaChange` stands for its values."""


class ConnectionCapture:
    """The capture of one connection: the rows of the transaction under way, and how they reach the tape."""

    def __init__(self, connection: apsw.Connection, mode: Mode) -> None:
        self.mode = mode
        self.version = ""
        self._connection = weakref.ref(connection)
        self.noted: list[_Noted] = []
        self._wanted: dict[str, bool] = {}
        self._numbers = itertools.count(1)
        self._refused: dict[str, PreflightError] = {}
        self._schema_version: Any = None
        self._statements: StatementWatch | None = None
        self._first: int | None = None
        self._synced = 0
        self._failure: TailraceError | None = None

    def prepare(self) -> None:
        """Look at what could refuse, and make the tables, in one transaction."""
        connection = self.connection
        with layout.transaction(connection):
            if (triggers := layout.trigger_capture(connection)) is not None:
                raise PreflightError(
                    f"triggers capture this file already ({triggers}); every change would be kept twice",
                    fix="tailrace sqlite disable FILE",
                )
            self.version = layout.ensure(connection, self.mode.table)
            for table in layout.list_tables(connection):
                require_hookable(layout.read_shape(connection, table))
        self._exclude()

    def start(self) -> None:
        self.prepare()
        connection = self.connection
        try:
            module: Any = Enlistment(self)
            connection.create_module(MODULE, module, iVersion=2)
            connection.execute(f"CREATE VIRTUAL TABLE temp.{VIRTUAL_TABLE} USING {MODULE}()")
            self.refresh()
            connection.set_commit_hook(self._guard, id=self)
            connection.set_rollback_hook(self._forget_undone, id=self)
            connection.preupdate_hook(self._make_note(), id=self)
            self._statements = StatementWatch(connection, self)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Leave nothing of the capture on the connection; the tables in the file stay."""
        connection = self.connection
        if connection.in_transaction:
            raise PreflightError("the connection has an open transaction", fix="commit or roll back first")
        if self._statements is not None:
            self._statements.stop()
            self._statements = None
        connection.preupdate_hook(None, id=self)
        connection.set_commit_hook(None, id=self)
        connection.set_rollback_hook(None, id=self)
        for (name,) in connection.execute(
            "SELECT name FROM temp.sqlite_schema WHERE type = 'trigger' AND name LIKE 'tailrace:%'"
        ).fetchall():
            connection.execute(f"DROP TRIGGER temp.{quoted(str(name))}")
        connection.execute(f"DROP TABLE IF EXISTS temp.{VIRTUAL_TABLE}")
        connection.create_module(MODULE, None)
        self._schema_version = None

    @property
    def connection(self) -> apsw.Connection:
        connection = self._connection()
        assert connection is not None
        return connection

    def refresh(self) -> None:
        """Have every table, also one that another connection made, enlist us. Called before each statement; cheap."""
        connection = self.connection
        version = next(connection.execute("PRAGMA main.schema_version"))[0]
        if version == self._schema_version:
            return
        sql = "SELECT tbl_name FROM temp.sqlite_schema WHERE type = 'trigger' AND name LIKE 'tailrace:%'"
        enlisted = {str(name) for (name,) in connection.execute(sql)}
        self._refused.clear()
        for table in layout.list_tables(connection):
            try:
                require_hookable(layout.read_shape(connection, table))
            except PreflightError as error:
                self._refused[table] = error
            else:
                if table not in enlisted:
                    self._enlist(table)
        self._schema_version = version

    def _enlist(self, table: str) -> None:
        """Have every statement that writes this table enlist the virtual table in its transaction."""
        for event in ("INSERT", "UPDATE", "DELETE"):
            # It never fires: being compiled into the statement is what enlists.
            self.connection.execute(
                f"CREATE TEMP TRIGGER {quoted(f'tailrace:{next(self._numbers)}')} "
                f"AFTER {event} ON main.{quoted(table)} WHEN 0 "
                f"BEGIN INSERT INTO {VIRTUAL_TABLE} VALUES (0); END"
            )

    def note_schema(self, changes: Sequence[SchemaChange]) -> None:
        """DDL was run in the open transaction. A table that is new is captured from here on, with what it holds."""
        if not changes:
            return
        self.connection.execute(f"INSERT INTO {VIRTUAL_TABLE} VALUES (0)")
        for change in changes:
            self.noted.append((change.type, layout.SCHEMA_TABLE, change.id, change, None))
            if change.before is None and change.after is not None and change.after[0] == "table":
                self._note_rows(str(change.after[1]))
        self._exclude()

    def _exclude(self) -> None:
        self._wanted.clear()
        self._wanted.update(dict.fromkeys(layout.own_tables(self.connection), False))
        self._wanted.update(dict.fromkeys(("sqlite_stat1", "sqlite_stat4", "sqlite_sequence"), False))

    def _note_rows(self, table: str) -> None:
        # CREATE TABLE … AS SELECT fills the table unseen by the hook.
        if table not in layout.list_tables(self.connection):
            return
        shape = layout.read_shape(self.connection, table)
        require_hookable(shape)
        columns = ", ".join(quoted(field.name) for field in shape.fields)
        for rowid, *row in self.connection.execute(f"SELECT {shape.rowid}, {columns} FROM {quoted(table)}"):
            self.noted.append((INSERT, table, rowid, None, tuple(row) if self.mode.has_after else None))

    def _make_note(self) -> Callable[[apsw.PreUpdate], None]:
        """The hook itself, called once for every row: everything it needs is at hand."""
        noted, wanted, refused = self.noted, self._wanted, self._refused
        keeps_before, keeps_after = self.mode.has_before, self.mode.has_after

        def note(update: apsw.PreUpdate) -> None:
            table = update.table_name
            if not wanted.get(table, True) or update.database_name != "main":
                return
            try:
                if table in refused:
                    raise refused[table]
                operation = update.op
                if operation == "INSERT":
                    noted.append((INSERT, table, update.rowid_new, None, update.new if keeps_after else None))
                    return
                if update.blob_write >= 0:
                    raise PreflightError("a blob was written in place, which cannot be captured", table=table)
                before = update.old if keeps_before else None
                if operation == "DELETE":
                    noted.append((DELETE, table, update.rowid, before, None))
                    return
                after = update.new if keeps_after else None
                if update.rowid == update.rowid_new:
                    noted.append((UPDATE, table, update.rowid, before, after))
                else:
                    noted.append((DELETE, table, update.rowid, before, None))
                    noted.append((INSERT, table, update.rowid_new, None, after))
            except Exception as error:  # noqa: BLE001 - whatever it is, the transaction must not commit without this row
                self._failure = _explain(error, table)
                raise self._failure from None

        return note

    def forget(self) -> None:
        """The transaction is over."""
        self.noted.clear()
        self._first, self._synced, self._failure = None, 0, None

    def undo(self) -> None:
        """The transaction was rolled back, or a part of it, and with it perhaps triggers of ours."""
        self._schema_version = None

    def _forget_undone(self) -> None:
        self.forget()
        self.undo()

    def sync(self) -> None:
        """Put the transaction's rows on the tape. SQLite asks before each commit; a commit that failed asks again."""
        if self._failure is not None:
            raise self._failure
        if self._first is not None:
            # A commit that met a lock: the rows are there from that attempt, but may not be all.
            self.connection.execute(f"DELETE FROM {quoted(self.mode.table)} WHERE change_id >= ?", (self._first,))
        if self.noted:
            self._first = self._first or self._next_id()
            columns = layout.COLUMNS[self.version]
            self.connection.executemany(
                f"INSERT INTO {quoted(self.mode.table)} ({', '.join(map(quoted, columns))}) "
                f"VALUES ({', '.join('?' * len(columns))})",
                self._rows(self._first),
            )
        self._synced = len(self.noted)

    def _next_id(self) -> int:
        sql = (
            "SELECT max(coalesce((SELECT seq FROM sqlite_sequence WHERE name = ?), 0), "
            f"coalesce((SELECT max(change_id) FROM {quoted(self.mode.table)}), 0)) + 1"
        )
        return int(next(self.connection.execute(sql, (self.mode.table,)))[0])

    def _rows(self, first: int) -> Iterable[tuple[Any, ...]]:
        now = int(time.time())
        has_transactions = self.version != "v1"
        middle = (first,) if has_transactions else ()
        for change_id, (kind, table, rowid, old, new) in enumerate(self.noted, first):
            yield change_id, now, *middle, kind, table, rowid, *self._images(old, new)
        if has_transactions:
            yield first + len(self.noted), now, first, COMMIT, None, None, None, None, None

    def _images(self, old: Any, new: Any) -> tuple[bytes | None, bytes | None, bytes | None]:
        if old is None:
            return None, None if new is None else encode(new), None
        if isinstance(old, SchemaChange):
            return self._schema_images(old)
        if new is None:
            return encode(old), None, None
        return describe_update(split(old), split(new))

    def _schema_images(self, change: SchemaChange) -> tuple[bytes | None, bytes | None, bytes | None]:
        before = encode(change.before) if change.before and self.mode.has_before else None
        after = encode(change.after) if change.after and self.mode.has_after else None
        return before, after, change.updates if self.mode.has_updates else None

    def _guard(self) -> bool:
        """Whether to turn the commit into a rollback: it would leave changes behind that are not on the tape."""
        return self._failure is not None or self._synced != len(self.noted)


def require_hookable(shape: layout.Shape) -> None:
    """Raises PreflightError for a table that the hook cannot read in full."""
    layout.require_capturable(shape)
    if shape.generated:
        raise PreflightError(
            f"{shape.table} has generated columns, which SQLite's hook cannot read",
            fix="capture this file by triggers: tailrace sqlite enable FILE",
            table=shape.table,
        )


def _explain(error: Exception, table: str) -> TailraceError:
    if isinstance(error, TailraceError):
        return error
    why = f"a row could not be read for capture ({type(error).__name__})"
    return PreflightError(why, fix="roll back; text must be UTF-8", table=table)
