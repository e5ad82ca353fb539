"""Connections that understand Turso's words for capture: the pragma, and the two SQL functions that read records.

SQLite ignores pragmas that it does not know. So a connection that `connect` opens looks for them before a statement
runs.
"""

from __future__ import annotations

import re
import sqlite3
import weakref
from functools import cache
from typing import TYPE_CHECKING, Any

from tailrace.capture.hook import capture, captured
from tailrace.capture.layout import CaptureConnection
from tailrace.capture.record import bin_record_json_object, table_columns_json_array
from tailrace.errors import ConfigError, PreflightError

if TYPE_CHECKING:
    import apsw

_NAME = r"PRAGMA\s+(?:main\s*\.\s*)?(?:unstable_)?capture_data_changes_conn\b"
_BLANK = r"(?:--[^\n]*\n|/\*.*?\*/|\s)*"
_VALUE = r"""(?:=\s*(?P<assigned>[^;()]*?)|\(\s*(?P<called>[^;()]*?)\s*\))?"""
_PRAGMA = re.compile(rf"{_BLANK}{_NAME}\s*{_VALUE}\s*;?\s*", re.IGNORECASE | re.DOTALL)
_AMONG_OTHERS = re.compile(rf"(?:^|;){_BLANK}{_NAME}", re.IGNORECASE | re.DOTALL)
_MVCC = re.compile(
    r"(?:^|;)\s*PRAGMA\s+(?:\w+\s*\.\s*)?journal_mode\s*[=(]\s*['\"]?(?:experimental_)?mvcc\b", re.IGNORECASE
)
_WORTH_A_LOOK = re.compile(r"capture_data_changes_conn|mvcc", re.IGNORECASE)
_STATE = 'SELECT ? AS mode, ? AS "table", ? AS version'


def connect(path: str, **options: Any) -> apsw.Connection:
    """An apsw connection on which `PRAGMA capture_data_changes_conn('<mode>[,<table>]')` works as it does in Turso.

    Without an argument the pragma returns (mode, table, version). The SQL functions of `register_functions` are there
    too. `options` are those of `apsw.Connection`. Raises ConfigError without apsw; the pragma raises as `capture` does.
    """
    try:
        import apsw
    except ImportError:
        raise ConfigError("this connection needs apsw", fix="pip install 'tailrace[sqlite]'") from None

    class CapturingConnection(apsw.Connection):
        def pragma(self, name: str, value: Any = None, **more: Any) -> Any:
            # apsw's own method does not go through a cursor.
            if _WORTH_A_LOOK.search(f"{name} {value}"):
                return self.execute(f"PRAGMA {name}" + ("" if value is None else f"('{value}')")).get
            return super().pragma(name, value, **more)

    connection = CapturingConnection(path, **options)
    connection.cursor_factory = _pragma_cursor()
    register_functions(connection)
    return connection


def register_functions(connection: CaptureConnection) -> None:
    """Make `bin_record_json_object` and `table_columns_json_array` callable from SQL on this connection.

    For connections of sqlite3 and apsw; Turso's have both. Safe to repeat. Raises ConfigError for any other. A
    connection of sqlite3 then stays open until it is closed: it cannot be referred to weakly.
    """
    if isinstance(connection, sqlite3.Connection):
        opened = connection
        connection.create_function("bin_record_json_object", 2, bin_record_json_object, deterministic=True)
        connection.create_function("table_columns_json_array", 1, lambda table: table_columns_json_array(opened, table))
        return
    create = getattr(connection, "create_scalar_function", None)
    if create is not None:
        reference = weakref.ref(connection)

        def columns_of(table: str) -> str:
            running = reference()
            assert running is not None  # it calls this function
            return table_columns_json_array(running, table)

        create("bin_record_json_object", bin_record_json_object, 2, deterministic=True)
        create("table_columns_json_array", columns_of, 1)
    elif not type(connection).__module__.startswith("turso"):
        raise ConfigError(
            f"a connection of {type(connection).__module__} takes no functions", fix="use sqlite3, apsw or pyturso"
        )


@cache
def _pragma_cursor() -> Any:
    import apsw

    class PragmaCursor(apsw.Cursor):
        def execute(self, statements: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(statements, str) and _WORTH_A_LOOK.search(statements):
                if (match := _PRAGMA.fullmatch(statements)) is not None:
                    return self._run_pragma(match["assigned"] or match["called"])
                _require_neither(self.connection, statements)
            return super().execute(statements, *args, **kwargs)

        def _run_pragma(self, argument: str | None) -> Any:
            connection = self.connection
            if argument is None:
                return super().execute(_STATE, tuple(captured(connection)))
            capture(connection, argument.strip().strip("'\""))
            return super().execute(f"{_STATE} WHERE 0", (None, None, None))

    return PragmaCursor


def _require_neither(connection: apsw.Connection, sql: str) -> None:
    if _AMONG_OTHERS.search(sql):
        raise PreflightError(
            "the capture pragma is one of several statements",
            fix="run it alone: PRAGMA capture_data_changes_conn('full')",
        )
    if _MVCC.search(sql):
        if captured(connection).table is not None:
            raise PreflightError(
                "capture and MVCC exclude each other, and this connection is captured",
                fix="PRAGMA capture_data_changes_conn('off')",
            )
        raise PreflightError("SQLite has no MVCC, and a file in this mode cannot be captured", fix="stay with WAL")
