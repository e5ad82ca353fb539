# ruff: noqa: S608 - every name in the SQL here is quoted
"""Capture for one apsw connection: what it commits is on the tape, written in the same transaction.

The preupdate hook records every row. Our own virtual table takes part in each writing transaction; temporary triggers
that never fire enlist it. SQLite notifies it of savepoints and calls it just before the commit, when it writes the
recorded rows. FTS maintains its index in the same way; SQLite offers no other place to add to a commit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from tailrace.capture import layout
from tailrace.capture.change_buffer import LONG, ChangeBatch, ChangeBuffer, SingleChange
from tailrace.capture.ddl_watch import StatementWatch
from tailrace.capture.exclusion import ExcludedTable, write_excluded
from tailrace.capture.hook_table import sort_tables
from tailrace.capture.layout import DELETE, INSERT, OFF, UPDATE, CaptureState, CdcVersion, Mode, parse_mode, quoted
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
    """Capture what this connection changes from now on. `argument` is `<mode>[,<table>]` or `off`, as for Turso.

    A repeat with the same argument does nothing; another mode or table replaces the current one. Capture applies to
    this connection only and ends with it. A table that cannot be captured, one WITHOUT ROWID or with generated columns,
    is left out, and `excluded` tells which and why. If this raises, file and connection are unchanged. Raises
    ConfigError for a wrong argument or a connection that is not apsw's, PreflightError for a file that cannot be
    captured.
    """
    mode = parse_mode(argument)
    _require_apsw(connection)
    running = _captures.get(connection)
    if running is not None and running.mode == mode and layout.has_table(connection, running.mode.table):
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
    """The capture that is active on this connection: (mode, table, version), or ('off', None, None)."""
    running = _captures.get(connection)
    return OFF if running is None else CaptureState(running.mode.name, running.mode.table, str(running.version))


def _require_apsw(connection: object) -> None:
    try:
        import apsw
    except ImportError:
        raise ConfigError(
            "capture on one connection needs apsw", fix="pip install 'tailrace[sqlite]', or tailrace sqlite enable FILE"
        ) from None
    if not isinstance(connection, apsw.Connection):
        raise ConfigError(
            f"a connection of {type(connection).__module__} has no hooks for capture",
            fix="use an apsw.Connection, or capture every writer of the file: tailrace sqlite enable FILE",
        )


class ConnectionCapture:
    """The capture of one connection: collects the rows of the open transaction and writes them to the tape."""

    def __init__(self, connection: apsw.Connection, mode: Mode) -> None:
        self.mode = mode
        self.version = CdcVersion.V2
        self._connection = weakref.ref(connection)
        self._wanted: dict[str, bool] = {}
        self._refused: dict[str, PreflightError] = {}
        self._hookable: set[str] = set()
        self._excluded: dict[str, ExcludedTable] = {}
        self._stored: set[str] = set()
        self._touched: set[str] = set()
        self.notes = ChangeBuffer(keeps_new=mode.has_after)
        self._triggers = TriggerSet()
        self._schema_version: Any = None
        self._statements: StatementWatch | None = None
        self._first: int | None = None
        self._synced = 0
        self._failure: TailraceError | None = None

    def prepare(self) -> None:
        """Check that the file can be captured and create the capture tables, in one transaction."""
        connection = self.connection
        with layout.transaction(connection):
            if (triggers := layout.trigger_capture(connection)) is not None:
                raise PreflightError(
                    f"triggers capture this file already ({triggers}); every change would be recorded twice",
                    fix="tailrace sqlite disable FILE",
                )
            self.version = layout.ensure(connection, self.mode.table)
            if self.version is CdcVersion.TRIGGERS:
                raise PreflightError(
                    f"{self.mode.table} is the tape of triggers, which a connection cannot continue",
                    fix="tailrace sqlite disable FILE --drop, or capture into another table: full,TABLE",
                )
            self._hookable, self._excluded = sort_tables(connection)
            write_excluded(connection, self.mode.table, self._excluded.values())
            self._stored = set(self._excluded)
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
            connection.set_rollback_hook(self._forget_rolled_back, id=self)
            connection.preupdate_hook(self._make_note(), id=self)
            self._statements = StatementWatch(connection, self)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Remove the capture from the connection; the tables in the file stay."""
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
        """Create the enlisting triggers that are missing, also for tables that another connection created.

        Called before each statement; cheap if the schema has not changed.
        """
        connection = self.connection
        version = next(connection.execute("PRAGMA main.schema_version"))[0]
        if version == self._schema_version:
            return
        self.notes.close()
        self._refused.clear()
        hookable, left_out = sort_tables(connection)
        for table, one in left_out.items():
            if table in self._hookable:
                # Changes of it are on the tape: to leave it out from now on would be a gap that no reader can see.
                why = f"{table} was captured, but no longer can be: {one.reason}"
                self._refused[table] = PreflightError(why, fix=one.fix, table=table)
                hookable.add(table)
        self._hookable = hookable
        self._excluded.clear()
        self._excluded.update((table, one) for table, one in left_out.items() if table not in hookable)
        for (table,) in connection.execute(_SHADOWS):
            self._refused[table] = PreflightError(
                "the contents of a virtual table cannot be captured",
                fix="write to it on another connection, or capture the ordinary tables: tailrace sqlite enable FILE",
                table=table,
            )
        # A table that is left out enlists as well until the file says so, which happens with its first change.
        self._triggers.create(connection, hookable | self._excluded.keys() - self._stored)
        self._schema_version = version

    @contextmanager
    def enlisted(self, table: str) -> Iterator[None]:
        """For many inserts into one table in the open transaction: enlist once, not with each insert."""
        assert self._statements is not None
        with self._statements.suspend(), _kept_rowid(self.connection):
            self.connection.execute(ENLIST)
            self._schema_version = None
            self._triggers.drop(self.connection, table, "INSERT")
        try:
            yield
        finally:
            with self._statements.suspend():
                self.refresh()

    def note_schema(self, changes: Sequence[SchemaChange]) -> None:
        """Record DDL of the open transaction. A new table is captured from now on, with the rows it already has."""
        layout.forget_dropped(self.connection)
        if not changes:
            return
        with _kept_rowid(self.connection):
            self.connection.execute(ENLIST)
        for change in changes:
            self.notes.add_single(
                SingleChange(change.type, layout.SCHEMA_TABLE, change.id, self._schema_images(change))
            )
        self._note_tables(changes)
        self._exclude()

    def _note_tables(self, changes: Sequence[SchemaChange]) -> None:
        """Capture from now on what can be captured now, with the rows it has; leave out what cannot be."""
        hookable, left_out = sort_tables(self.connection)
        for table, one in left_out.items():
            if table in self._hookable and not any(
                change.type == DELETE and change.before is not None and change.before[1] == table for change in changes
            ):
                why = f"{table} is captured, and after this statement it could not be: {one.reason}"
                raise PreflightError(why, fix=one.fix, table=table)
        for change in changes:
            if change.after is None or change.after[0] != "table" or (table := str(change.after[1])) not in hookable:
                continue
            if change.before is None or str(change.before[1]) in self._stored | self._excluded.keys():
                self._note_rows(table)
        self._hookable = hookable
        self._excluded.clear()
        self._excluded.update(left_out)
        self._store_excluded()

    def _exclude(self) -> None:
        self._wanted.clear()
        self._wanted.update(dict.fromkeys(layout.own_tables(self.connection), False))
        self._wanted.update(dict.fromkeys(("sqlite_stat1", "sqlite_stat4", "sqlite_sequence"), False))

    def _note_rows(self, table: str) -> None:
        # The hook does not see the rows that CREATE TABLE … AS SELECT inserts.
        shape = layout.read_table_shape(self.connection, table)
        columns = ", ".join(quoted(field.name) for field in shape.fields)
        for rowid, *row in self.connection.execute(f"SELECT {shape.rowid}, {columns} FROM {quoted(table)}"):
            self.notes.add(INSERT, table, rowid, None, row if self.mode.has_after else None)

    def _make_note(self) -> Callable[[apsw.PreUpdate], None]:
        """The preupdate hook. It is called for every row, so everything it needs is in local variables."""
        import apsw

        notes, add, wanted, refused = self.notes, self.notes.add, self._wanted, self._refused
        left_out, touched = self._excluded, self._touched
        keeps_before, keeps_after = self.mode.has_before, self.mode.has_after
        inserted, deleted = apsw.SQLITE_INSERT, apsw.SQLITE_DELETE

        def note(update: apsw.PreUpdate) -> None:
            table = update.table_name
            run = notes.run
            try:
                if table == run.inserts and update.opcode == inserted and update.database_name == "main":
                    # The same table and operation as the previous row, so the checks below have already passed.
                    run.new += update.new  # type: ignore[arg-type]
                    rowids = run.rowids
                    rowids.append(update.rowid_new)
                    if len(rowids) >= LONG:
                        notes.close()
                    return
                if not wanted.get(table, True) or update.database_name != "main":
                    return
                if table in left_out:
                    touched.add(table)
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
                        fix="roll back, and write the blob with UPDATE",
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
            except Exception as error:  # noqa: BLE001 - after any error the transaction must not commit without this row
                self._failure = _explain(error, table)
                raise self._failure from None

        return note

    def forget(self) -> None:
        """Drop the recorded changes; the transaction has ended."""
        self.notes.clear()
        self._touched.clear()
        self._first, self._synced, self._failure = None, 0, None

    def undo(self) -> None:
        """Check the schema again: a rollback of the transaction, or of a part of it, may have removed our triggers."""
        self._schema_version = None
        self._stored.clear()

    def _forget_rolled_back(self) -> None:
        self.forget()
        self.undo()

    def sync(self) -> None:
        """Write the transaction's rows to the tape. SQLite calls this before each commit, also when one is retried."""
        if self._failure is not None:
            raise self._failure
        self.notes.close()
        if self._touched - self._stored:
            assert self._statements is not None
            with self._statements.suspend():
                self._store_excluded()
        if self.notes.entries or self._first is not None:
            assert self._statements is not None
            is_long = any(isinstance(entry, ChangeBatch) for entry in self.notes.entries)
            with (
                self._statements.suspend(),
                _kept_rowid(self.connection),
                self._unhooked() if is_long else nullcontext(),
            ):
                self._write()
        self._synced = len(self.notes)

    def _store_excluded(self) -> None:
        with _kept_rowid(self.connection):
            write_excluded(self.connection, self.mode.table, self._excluded.values())
        self._stored = set(self._excluded)

    def _write(self) -> None:
        try:
            self._write_changes()
        except Exception:
            if layout.has_table(self.connection, self.mode.table):
                raise
            raise PreflightError(
                f"the capture table {self.mode.table} was dropped, and this transaction cannot be captured",
                fix=f"roll back; then stop the capture ('off'), or create the table again: {str(self.mode)!r}",
                table=self.mode.table,
            ) from None

    def _write_changes(self) -> None:
        writer = TapeWriter(self.connection, self.mode.table, self.version)
        if self._first is not None:
            # An earlier commit failed on a lock. Its rows are on the tape, but more changes may have come after them.
            writer.erase(self._first)
        if self.notes.entries:
            self._first = self._first or writer.next_id()
            writer.write(self.notes.entries, self._first)

    @contextmanager
    def _unhooked(self) -> Iterator[None]:
        """Remove the hook during the block: writing many rows to the tape is faster without a call for each."""
        connection = self.connection
        sql = (
            "SELECT 1 FROM (SELECT type, tbl_name FROM main.sqlite_schema UNION ALL "
            "SELECT type, tbl_name FROM temp.sqlite_schema) WHERE type = 'trigger' AND tbl_name = ? COLLATE NOCASE"
        )
        if connection.execute(sql, (self.mode.table,)).fetchone():
            # Keep the hook: a trigger on the tape may write to a table that cannot be captured, which the hook refuses.
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
        """Whether to turn the commit into a rollback, because some of its changes are not on the tape."""
        return self._failure is not None or self._synced != len(self.notes)


@contextmanager
def _kept_rowid(connection: apsw.Connection) -> Iterator[None]:
    """Keep what the application reads as `last_insert_rowid()`: the rows that the block inserts are not its rows."""
    rowid = connection.last_insert_rowid()
    try:
        yield
    finally:
        connection.set_last_insert_rowid(rowid)


def _explain(error: Exception, table: str) -> TailraceError:
    if isinstance(error, TailraceError):
        return error
    why = f"a row could not be read for capture ({type(error).__name__})"
    return PreflightError(why, fix="roll back; text must be UTF-8", table=table)
