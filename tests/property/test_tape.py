"""Any history, captured: applied to a copy it gives the same database, undone it gives back the start."""

from __future__ import annotations

import shutil
import sqlite3
import struct
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture import capture, change_buffer, ddl_watch, enable, hook
from tailrace.capture.layout import own_tables
from tailrace.capture.replica import apply, revert

START = """
CREATE TABLE t(id INTEGER PRIMARY KEY, a UNIQUE, b REAL);
CREATE TABLE u(k TEXT, v, w NUMERIC DEFAULT 3, UNIQUE (k, v));
CREATE TABLE log(what);
CREATE TRIGGER said AFTER DELETE ON t BEGIN INSERT INTO log VALUES (OLD.a); END;
INSERT INTO t VALUES (1, 'one', 1.5), (2, NULL, -0.0);
INSERT INTO u VALUES ('x', 1, 'text'), (NULL, x'00', 9);
"""

values = st.one_of(
    st.none(),
    st.sampled_from([0, 1, -1, 127, -129, 2**31, -(2**47), 2**63 - 1, -(2**63)]),
    st.integers(0, 3),
    st.sampled_from([0.0, -0.0, 1.5, 5e-324, 1.7976931348623157e308, float("inf"), 0.1]),
    st.text(st.sampled_from("ab\0é🜂'"), max_size=3),
    st.binary(max_size=3),
)
ids = st.integers(1, 4)
Step = tuple[str, tuple[Any, ...]]


def _step(sql: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    return st.tuples(st.just(sql), st.tuples(*parts))


steps = st.one_of(
    _step("INSERT INTO t(id, a, b) VALUES (?, ?, ?)", ids, values, values),
    _step("INSERT INTO t(a, b) VALUES (?, ?), (?, ?)", values, values, values, values),
    _step("INSERT OR FAIL INTO t(a, b) VALUES (?, ?), (?, ?)", values, values, values, values),
    _step("INSERT OR IGNORE INTO t(id, a) VALUES (?, ?)", ids, values),
    _step("REPLACE INTO t(id, a, b) VALUES (?, ?, ?)", ids, values, values),
    _step("INSERT INTO t(id, a) VALUES (?, ?) ON CONFLICT(id) DO UPDATE SET b = ?", ids, values, values),
    _step("INSERT INTO t(id, a) VALUES (?, ?) ON CONFLICT(id) DO UPDATE SET id = ?", ids, values, ids),
    _step("UPDATE t SET a = ? WHERE id = ?", values, ids),
    _step("UPDATE OR REPLACE t SET a = ?, id = ? WHERE id = ?", values, ids, ids),
    _step("UPDATE t SET id = ? WHERE id = ?", ids, ids),
    _step("UPDATE t SET b = ?", values),
    _step("DELETE FROM t WHERE id = ?", ids),
    _step("DELETE FROM t"),
    _step("INSERT INTO u(k, v) VALUES (?, ?)", values, values),
    _step("REPLACE INTO u(k, v, w) VALUES (?, ?, ?)", values, values, values),
    _step("UPDATE u SET w = ? WHERE v = ?", values, values),
    _step("UPDATE u SET rowid = rowid + ?", ids),
    _step("DELETE FROM u WHERE k IS ?", values),
    _step("BEGIN"),
    _step("COMMIT"),
    _step("ROLLBACK"),
    _step("SAVEPOINT s"),
    _step("ROLLBACK TO s"),
    _step("RELEASE s"),
    _step("ALTER TABLE t ADD COLUMN c DEFAULT 'q'"),
    _step("ALTER TABLE u ADD COLUMN extra TEXT"),
    _step("UPDATE t SET c = ? WHERE id = ?", values, ids),
    _step("UPDATE u SET extra = ?", values),
)


def picture(path: Path) -> list[Any]:
    """Everything the application sees in the file, exactly: the dump, which cuts text at a NUL, and every value."""
    with closing(sqlite3.connect(path)) as connection:
        own = own_tables(connection) | {"sqlite_sequence"}
        connection.execute("PRAGMA writable_schema = ON")
        lines = [line for line in connection.iterdump() if not any(name in line for name in own)]
        seen: list[Any] = [lines]
        names = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name").fetchall()
        for (name,) in names:
            if name not in own:
                rows = connection.execute(f"SELECT rowid, * FROM {name} ORDER BY rowid").fetchall()
                seen.append((name, [[_exact(value) for value in row] for row in rows]))
        return seen


def _exact(value: object) -> object:
    return ("real", struct.pack(">d", value)) if isinstance(value, float) else (type(value).__name__, value)


def _run_hooked(path: Path, history: list[Step]) -> None:
    with closing(apsw.Connection(str(path))) as connection:
        capture(connection, "full")
        for sql, parameters in history:
            with suppress(apsw.SQLError, apsw.ConstraintError, apsw.MismatchError):
                connection.execute(sql, parameters).fetchall()
        if connection.in_transaction:
            connection.execute("COMMIT")


def _run_hooked_in_batches(path: Path, history: list[Step]) -> None:
    with pytest.MonkeyPatch.context() as patch, closing(apsw.Connection(str(path))) as connection:
        patch.setattr(change_buffer, "STREAK", 1)
        patch.setattr(change_buffer, "WORTH", 2)
        for module in (change_buffer, hook):
            patch.setattr(module, "LONG", 3)
        patch.setattr(ddl_watch, "_MANY", 1)
        capture(connection, "full")
        for sql, parameters in history:
            with suppress(apsw.SQLError, apsw.ConstraintError, apsw.MismatchError):
                if sql.startswith(("INSERT", "REPLACE")):
                    connection.executemany(sql, [parameters])
                else:
                    connection.execute(sql, parameters).fetchall()
        if connection.in_transaction:
            connection.execute("COMMIT")


def _run_triggered(path: Path, history: list[Step]) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        enable(connection)
        for sql, parameters in history:
            with suppress(sqlite3.OperationalError, sqlite3.IntegrityError):
                connection.execute(sql, parameters).fetchall()
        if connection.in_transaction:
            connection.execute("COMMIT")
        enable(connection)


@pytest.mark.parametrize("run", [_run_hooked, _run_hooked_in_batches, _run_triggered])
@given(history=st.lists(steps, max_size=25))
@settings(max_examples=120)
def test_a_history_applies_to_a_copy_and_undoes_to_the_start(run: Any, history: list[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, copy = Path(folder, "app.db"), Path(folder, "copy.db")
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript("PRAGMA synchronous = OFF;" + START)
        shutil.copy(path, copy)
        start = picture(path)
        run(path, history)
        end = picture(path)
        apply(path, copy, start=0)
        assert picture(copy) == end
        assert apply(path, copy).changes == 0
        revert(path, to=0)
        assert picture(path) == start
        apply(path, copy)
        assert picture(copy) == start
