"""Capture DDL on a connection: detect it before it runs, record it when it ends, in the same transaction.

SQLite's hooks do not see changes of sqlite_schema. So a statement is intercepted before it runs (by apsw's execution
trace) and again when the cursor's `execute` returns. In between it runs in a savepoint, so that the rows that record it
are in the same transaction.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from tailrace.capture.schema_change import SchemaChange, SchemaRow, compare, read_schema
from tailrace.errors import PreflightError

if TYPE_CHECKING:
    import apsw

_COMMENT = r"(?:--[^\n]*\n|/\*.*?\*/|\s)*"
_DDL = re.compile(rf"{_COMMENT}(?:CREATE|ALTER|DROP)\b{_COMMENT}(?!TEMP\b|TEMPORARY\b)", re.IGNORECASE | re.DOTALL)
_MAYBE_DDL = re.compile(r"\b(?:CREATE|ALTER|DROP)\b", re.IGNORECASE)
_NAME = r'(?:main\s*\.\s*)?(?:(\w+)\b|"([^"]+)")'
_INSERT = re.compile(
    rf"{_COMMENT}(?:INSERT(?:\s+OR\s+\w+)?|REPLACE)\s+INTO\s+{_NAME}\s*[(v]", re.IGNORECASE | re.DOTALL
)
_SAVEPOINT = "tailrace_ddl"
_MANY = 1000
"""From this number of rows on, two DDL statements cost less than a savepoint for each row."""


class Listener(Protocol):
    def refresh(self) -> None:
        """Called before a statement runs."""
        ...

    def enlisted(self, table: str) -> AbstractContextManager[None]:
        """Called before many rows are inserted into this table in the open transaction."""
        ...

    def note_schema(self, changes: Sequence[SchemaChange]) -> None:
        """Called after these schema changes were made in the open transaction."""
        ...


class StatementWatch:
    """Watches the statements of one connection until `stop`. The application's own trace is still called."""

    def __init__(self, connection: apsw.Connection, listener: Listener) -> None:
        self._connection = weakref.ref(connection)
        self._listener = listener
        self._pending: tuple[str, dict[int, SchemaRow]] | None = None
        self._depth = 0
        self._suspended = False
        self._asking: apsw.Cursor | None = None
        self._trace_before = connection.exec_trace
        self._factory_before = connection.cursor_factory
        connection.cursor_factory = _watching_class(self._factory_before, self)
        connection.exec_trace = self._trace

    def stop(self) -> None:
        if (connection := self._connection()) is not None:
            connection.exec_trace = self._trace_before
            connection.cursor_factory = self._factory_before
        # Existing cursors, or a trace of the application, may still call this object.
        self._suspended = True

    @contextmanager
    def untraced(self, sql: str, rows: object) -> Iterator[None]:
        """For a statement that is not DDL and runs once per row: during the block only the application's trace is
        called."""
        if self._pending is not None and not self._suspended:
            self._finish()
        if not self._suspended:
            self._attach()
            self._refresh()
        connection = self._open()
        traced = connection.exec_trace
        connection.exec_trace = self._trace_before
        try:
            with self._enlisted(sql, rows):
                yield
        finally:
            connection.exec_trace = traced

    def _enlisted(self, sql: str, rows: object) -> AbstractContextManager[None]:
        # Only for rows that exist already: a generator, like a trace, may run code that ends the transaction.
        is_long = isinstance(rows, list | tuple) and len(rows) >= _MANY
        if not is_long or self._suspended or self._trace_before is not None or not self._open().in_transaction:
            return nullcontext()
        if (match := _INSERT.match(sql)) is None or ";" in sql.rstrip("; \n"):
            return nullcontext()
        return self._listener.enlisted(match[1] or match[2])

    @contextmanager
    def suspend(self) -> Iterator[None]:
        """For our own statements: the listener and the application's trace are not called."""
        connection = self._open()
        traced, suspended = connection.exec_trace, self._suspended
        connection.exec_trace, self._suspended = None, True
        try:
            yield
        finally:
            connection.exec_trace, self._suspended = traced, suspended

    @property
    def is_suspended(self) -> bool:
        return self._suspended

    def enter(self, cursor: apsw.Cursor, sql: object) -> None:
        """Called before a cursor's `execute`. Raises PreflightError for DDL that this object would not see."""
        if not self._suspended:
            if cursor.exec_trace is not None and any(map(_DDL.match, str(sql).split(";"))):
                raise PreflightError(
                    "a statement that changes the schema runs on a cursor with its own trace, so it cannot be captured",
                    fix="run it on a cursor without a trace, or set the trace on the connection",
                )
            self._attach()
        self._depth += 1

    def _attach(self) -> None:
        """Install our trace again: the application may have set its own, even while `executemany` asks it for rows."""
        connection = self._open()
        if (trace := connection.exec_trace) != self._trace:
            self._trace_before = trace
            connection.exec_trace = self._trace

    def leave(self, *, failed: bool) -> None:
        """Called before a cursor's `execute` returns or raises. Raises the error if DDL could not be captured."""
        self._depth -= 1
        if self._pending is not None and not self._suspended:
            self._abandon() if failed else self._finish()

    def _trace(self, cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        # The application's trace may call the trace that was installed before it, which is this one.
        if self._suspended or cursor is self._asking:
            return True
        if self._pending is not None:
            self._finish()
        if not self._ask(cursor, sql, bindings):
            return False
        self._refresh()
        if _DDL.match(sql):
            self._begin(sql)
        return True

    def _ask(self, cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        """Whether the application's own trace lets the statement run."""
        if self._trace_before is None:
            return True
        asking, self._asking = self._asking, cursor
        try:
            return bool(self._trace_before(cursor, sql, bindings))
        finally:
            self._asking = asking

    def _refresh(self) -> None:
        self._suspended = True
        try:
            self._listener.refresh()
        finally:
            self._suspended = False

    def _begin(self, sql: str) -> None:
        if not self._depth:
            raise PreflightError(
                "a statement that changes the schema cannot be captured on this cursor",
                fix="run it alone, on a cursor that was created after capture began",
            )
        connection = self._open()
        self._suspended = True
        try:
            connection.execute(f"SAVEPOINT {_SAVEPOINT}")
            self._pending = (sql.strip().rstrip(";").rstrip(), read_schema(connection))
        finally:
            self._suspended = False

    def _finish(self) -> None:
        assert self._pending is not None
        statement, before = self._pending
        connection = self._open()
        self._suspended = True
        try:
            self._listener.note_schema(compare(before, read_schema(connection), statement))
            connection.execute(f"RELEASE {_SAVEPOINT}")
            self._pending = None
        except BaseException:
            self._abandon()
            raise
        finally:
            self._suspended = False

    def _abandon(self) -> None:
        self._pending = None
        connection = self._open()
        if connection.in_transaction:
            self._suspended = True
            try:
                connection.execute(f"ROLLBACK TO {_SAVEPOINT}; RELEASE {_SAVEPOINT}")
            finally:
                self._suspended = False

    def _open(self) -> apsw.Connection:
        connection = self._connection()
        assert connection is not None
        return connection


def _watching_class(factory: Any, watch: StatementWatch) -> Any:
    """A subclass of the application's cursor class that calls `watch` before and after `execute`."""
    if not isinstance(factory, type):
        raise PreflightError(
            "the connection's cursor_factory is not a class, so DDL cannot be captured",
            fix="set connection.cursor_factory to a subclass of apsw.Cursor",
        )

    class WatchedCursor(factory):  # type: ignore[misc]
        def execute(self, *args: Any, **kwargs: Any) -> Any:
            return _run(watch, self, super().execute, args, kwargs)

        def executemany(self, *args: Any, **kwargs: Any) -> Any:
            if watch.is_suspended:
                return super().executemany(*args, **kwargs)
            # apsw calls the trace for every row, but it is only needed to detect DDL.
            if args and isinstance(args[0], str) and not _MAYBE_DDL.search(args[0]):
                rows = args[1] if len(args) > 1 else kwargs.get("sequenceofbindings")
                with watch.untraced(args[0], rows):
                    return super().executemany(*args, **kwargs)
            return _run(watch, self, super().executemany, args, kwargs)

    return WatchedCursor


def _run(watch: StatementWatch, cursor: apsw.Cursor, execute: Any, args: Any, kwargs: Any) -> Any:
    watch.enter(cursor, args[0] if args else kwargs.get("statements"))
    try:
        result = execute(*args, **kwargs)
    except BaseException:
        watch.leave(failed=True)
        raise
    watch.leave(failed=False)
    return result
