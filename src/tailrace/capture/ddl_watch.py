"""DDL on a captured connection: met as it begins, written down as it ends, committed with what it did.

SQLite's hooks do not see changes of sqlite_schema. A statement is met before it runs (apsw's execution trace) and
again when the cursor's `execute` returns; in between it runs in a savepoint, so that its rows are in its transaction.
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
"""Rows from which on two statements of DDL cost less than a savepoint for each row."""


class Listener(Protocol):
    def refresh(self) -> None:
        """A statement is about to run."""
        ...

    def enlisted(self, table: str) -> AbstractContextManager[None]:
        """Many rows are about to be inserted into this table, in the transaction that is open."""
        ...

    def note_schema(self, changes: Sequence[SchemaChange]) -> None:
        """These changes of the schema were made just now, in the transaction that is open."""
        ...


class StatementWatch:
    """Watches the statements of one connection until `stop`. The application's own trace keeps being called."""

    def __init__(self, connection: apsw.Connection, listener: Listener) -> None:
        self._connection = weakref.ref(connection)
        self._listener = listener
        self._pending: tuple[str, dict[int, SchemaRow]] | None = None
        self._depth = 0
        self._resting = False
        self._asking: apsw.Cursor | None = None
        self._trace_before = connection.exec_trace
        self._factory_before = connection.cursor_factory
        connection.cursor_factory = _watching_class(self._factory_before, self)
        connection.exec_trace = self._trace

    def stop(self) -> None:
        if (connection := self._connection()) is not None:
            connection.exec_trace = self._trace_before
            connection.cursor_factory = self._factory_before
        # Cursors and a trace of the application may still call us.
        self._resting = True

    @contextmanager
    def untraced(self, sql: str, rows: object) -> Iterator[None]:
        """For a statement that is no DDL, run for each of these rows: only the application's own trace is called."""
        if self._pending is not None and not self._resting:
            self._finish()
        if not self._resting:
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
        # Rows that are not made yet could, while being made, end the transaction; so could a trace.
        is_long = isinstance(rows, list | tuple) and len(rows) >= _MANY
        if not is_long or self._resting or self._trace_before is not None or not self._open().in_transaction:
            return nullcontext()
        if (match := _INSERT.match(sql)) is None or ";" in sql.rstrip("; \n"):
            return nullcontext()
        return self._listener.enlisted(match[1] or match[2])

    @contextmanager
    def rest(self) -> Iterator[None]:
        """For statements of our own: nobody is told of them."""
        connection = self._open()
        traced, rested = connection.exec_trace, self._resting
        connection.exec_trace, self._resting = None, True
        try:
            yield
        finally:
            connection.exec_trace, self._resting = traced, rested

    @property
    def is_resting(self) -> bool:
        return self._resting

    def enter(self, cursor: apsw.Cursor, sql: object) -> None:
        """`execute` of a cursor is about to begin. Raises PreflightError for DDL that the cursor hides from us."""
        if not self._resting:
            if cursor.exec_trace is not None and any(map(_DDL.match, str(sql).split(";"))):
                raise PreflightError(
                    "a cursor with a trace of its own hides a statement that changes the schema",
                    fix="run it on a cursor without one, or set the trace on the connection",
                )
            self._attach()
        self._depth += 1

    def _attach(self) -> None:
        """The application may have set a trace since, or make the rows of an `executemany` as it runs."""
        connection = self._open()
        if (trace := connection.exec_trace) != self._trace:
            self._trace_before = trace
            connection.exec_trace = self._trace

    def leave(self, *, failed: bool) -> None:
        """`execute` of a cursor is about to return or raise. Raises what kept the DDL from being captured."""
        self._depth -= 1
        if self._pending is not None and not self._resting:
            self._abandon() if failed else self._finish()

    def _trace(self, cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        # The application's own trace may call the one that it found, which is this one.
        if self._resting or cursor is self._asking:
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
        self._resting = True
        try:
            self._listener.refresh()
        finally:
            self._resting = False

    def _begin(self, sql: str) -> None:
        if not self._depth:
            raise PreflightError(
                "a statement that changes the schema cannot be captured from here",
                fix="run it alone, on a cursor made after capture began",
            )
        connection = self._open()
        self._resting = True
        try:
            connection.execute(f"SAVEPOINT {_SAVEPOINT}")
            self._pending = (sql.strip().rstrip(";").rstrip(), read_schema(connection))
        finally:
            self._resting = False

    def _finish(self) -> None:
        assert self._pending is not None
        statement, before = self._pending
        connection = self._open()
        self._resting = True
        try:
            self._listener.note_schema(compare(before, read_schema(connection), statement))
            connection.execute(f"RELEASE {_SAVEPOINT}")
            self._pending = None
        except BaseException:
            self._abandon()
            raise
        finally:
            self._resting = False

    def _abandon(self) -> None:
        self._pending = None
        connection = self._open()
        if connection.in_transaction:
            self._resting = True
            try:
                connection.execute(f"ROLLBACK TO {_SAVEPOINT}; RELEASE {_SAVEPOINT}")
            finally:
                self._resting = False

    def _open(self) -> apsw.Connection:
        connection = self._connection()
        assert connection is not None
        return connection


def _watching_class(factory: Any, watch: StatementWatch) -> Any:
    """A cursor class, derived from the one the application uses, that tells `watch` when `execute` ends."""
    if not isinstance(factory, type):
        raise PreflightError(
            "the connection's cursor_factory is not a class, so DDL could not be captured",
            fix="set connection.cursor_factory to a subclass of apsw.Cursor",
        )

    class WatchedCursor(factory):  # type: ignore[misc]
        def execute(self, *args: Any, **kwargs: Any) -> Any:
            return _run(watch, self, super().execute, args, kwargs)

        def executemany(self, *args: Any, **kwargs: Any) -> Any:
            if watch.is_resting:
                return super().executemany(*args, **kwargs)
            # The trace is called for every row; it is only there to meet DDL.
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
