# ruff: noqa: S608 - every name in the SQL here is quoted
"""Capture for one apsw connection: what this connection commits is on the tape, in the same transaction.

The preupdate hook notes every row; a virtual table of our own, enlisted in each writing transaction by temporary
triggers that never fire, is told by SQLite of savepoints and asked to bring its rows in just before the commit.
That is how FTS keeps its index, and it is the one place where SQLite lets a commit be added to.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tailrace.capture import layout
from tailrace.capture.change_buffer import LONG, ChangeBatch, ChangeBuffer, SingleChange
from tailrace.capture.ddl_watch import StatementWatch
from tailrace.capture.layout import DELETE, INSERT, OFF, UPDATE, CaptureState, Mode, parse_mode, quoted
from tailrace.capture.record import encode
from tailrace.capture.schema_change import SchemaChange
from tailrace.capture.tape_writer import TapeWriter
from tailrace.capture.virtual_table import ENLIST, MODULE, VIRTUAL_TABLE, Enlistment, TriggerSet
from tailrace.errors import ConfigError, PreflightError, TailraceError

if TYPE_CHECKING:
    import apsw

_SHADOWS = "SELECT name FROM pragma_table_list WHERE schema = 'main' AND type = 'shadow'"
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


def captured(connection: apsw.Connection) -> CaptureState:
    """What `capture` was asked for on this connection: (mode, table, version), or ('off', None, None)."""
    running = _captures.get(connection)
    return OFF if running is None else CaptureState(running.mode.name, running.mode.table, running.version)


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


class ConnectionCapture:
    """The capture of one connection: the rows of the transaction under way, and how they reach the tape."""

    def __init__(self, connection: apsw.Connection, mode: Mode) -> None:
        self.mode = mode
        self.version = ""
        self._connection = weakref.ref(connection)
        self._wanted: dict[str, bool] = {}
        self._refused: dict[str, PreflightError] = {}
        self.notes = ChangeBuffer(keeps_new=mode.has_after)
        self._triggers = TriggerSet()
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
                require_hookable(layout.read_table_shape(connection, table))
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
        self._triggers.drop(connection)
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
        self.notes.close()
        self._refused.clear()
        hookable = []
        for table in layout.list_tables(connection):
            try:
                require_hookable(layout.read_table_shape(connection, table))
            except PreflightError as error:
                self._refused[table] = error
            else:
                hookable.append(table)
        for (table,) in connection.execute(_SHADOWS):
            self._refused[table] = PreflightError(
                "what a virtual table keeps cannot be captured",
                fix="write it on another connection, or capture the ordinary tables: tailrace sqlite enable FILE",
                table=table,
            )
        self._triggers.create(connection, hookable)
        self._schema_version = version

    @contextmanager
    def enlisted(self, table: str) -> Iterator[None]:
        """For many inserts into one table in the open transaction: enlist once, not with every one of them."""
        assert self._statements is not None
        with self._statements.rest():
            self.connection.execute(ENLIST)
            self._schema_version = None
            self._triggers.drop(self.connection, table, "INSERT")
        try:
            yield
        finally:
            with self._statements.rest():
                self.refresh()

    def note_schema(self, changes: Sequence[SchemaChange]) -> None:
        """DDL was run in the open transaction. A table that is new is captured from here on, with what it holds."""
        if not changes:
            return
        self.connection.execute(ENLIST)
        for change in changes:
            self.notes.add_single(
                SingleChange(change.type, layout.SCHEMA_TABLE, change.id, self._schema_images(change))
            )
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
        shape = layout.read_table_shape(self.connection, table)
        require_hookable(shape)
        columns = ", ".join(quoted(field.name) for field in shape.fields)
        for rowid, *row in self.connection.execute(f"SELECT {shape.rowid}, {columns} FROM {quoted(table)}"):
            self.notes.add(INSERT, table, rowid, None, row if self.mode.has_after else None)

    def _make_note(self) -> Callable[[apsw.PreUpdate], None]:
        """The hook itself, called once for every row: everything it needs is at hand."""
        import apsw

        notes, add, wanted, refused = self.notes, self.notes.add, self._wanted, self._refused
        keeps_before, keeps_after = self.mode.has_before, self.mode.has_after
        inserted, deleted = apsw.SQLITE_INSERT, apsw.SQLITE_DELETE

        def note(update: apsw.PreUpdate) -> None:
            table = update.table_name
            run = notes.run
            try:
                if table == run.inserts and update.opcode == inserted and update.database_name == "main":
                    # As the one before it, which was wanted.
                    run.new += update.new  # type: ignore[arg-type]
                    rowids = run.rowids
                    rowids.append(update.rowid_new)
                    if len(rowids) >= LONG:
                        notes.close()
                    return
                if not wanted.get(table, True) or update.database_name != "main":
                    return
                if table in refused:
                    raise refused[table]
                operation = update.opcode
                if operation == inserted:
                    add(INSERT, table, update.rowid_new, None, update.new if keeps_after else None)
                    return
                if update.blob_write >= 0:
                    raise PreflightError(
                        "a blob was written in place, which cannot be captured",
                        fix="roll back, and write it by UPDATE",
                        table=table,
                    )
                before = update.old if keeps_before else None
                if operation == deleted:
                    add(DELETE, table, update.rowid, before, None)
                    return
                after = update.new if keeps_after else None
                if update.rowid == update.rowid_new:
                    add(UPDATE, table, update.rowid, before, after)
                else:
                    add(DELETE, table, update.rowid, before, None)
                    add(INSERT, table, update.rowid_new, None, after)
            except Exception as error:  # noqa: BLE001 - whatever it is, the transaction must not commit without this row
                self._failure = _explain(error, table)
                raise self._failure from None

        return note

    def forget(self) -> None:
        """The transaction is over."""
        self.notes.clear()
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
        self.notes.close()
        if self.notes.entries or self._first is not None:
            assert self._statements is not None
            is_long = any(isinstance(entry, ChangeBatch) for entry in self.notes.entries)
            with self._statements.rest(), self._unhooked() if is_long else nullcontext():
                self._write()
        self._synced = len(self.notes)

    def _write(self) -> None:
        writer = TapeWriter(self.connection, self.mode.table, self.version)
        if self._first is not None:
            # A commit that met a lock: the rows are there from that attempt, but may not be all.
            writer.erase(self._first)
        if self.notes.entries:
            self._first = self._first or writer.next_id()
            writer.write(self.notes.entries, self._first)

    @contextmanager
    def _unhooked(self) -> Iterator[None]:
        """Many rows go to the tape quicker when the hook does not look at each of them."""
        connection = self.connection
        sql = (
            "SELECT 1 FROM (SELECT type, tbl_name FROM main.sqlite_schema UNION ALL "
            "SELECT type, tbl_name FROM temp.sqlite_schema) WHERE type = 'trigger' AND tbl_name = ? COLLATE NOCASE"
        )
        if connection.execute(sql, (self.mode.table,)).fetchone():
            # A trigger on the tape may touch a table that the hook refuses.
            yield
            return
        connection.preupdate_hook(None, id=self)
        try:
            yield
        finally:
            connection.preupdate_hook(self._make_note(), id=self)

    def _schema_images(self, change: SchemaChange) -> tuple[bytes | None, bytes | None, bytes | None]:
        before = encode(change.before) if change.before and self.mode.has_before else None
        after = encode(change.after) if change.after and self.mode.has_after else None
        return before, after, change.updates if self.mode.has_updates else None

    def _guard(self) -> bool:
        """Whether to turn the commit into a rollback: it would leave changes behind that are not on the tape."""
        return self._failure is not None or self._synced != len(self.notes)


def require_hookable(shape: layout.TableShape) -> None:
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
