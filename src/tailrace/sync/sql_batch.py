"""Run the statements of a push on a database: only those a push needs, within a time, whole or not at all.

The connection can reach no other file: ATTACH, VACUUM, PRAGMA, virtual tables, triggers, extensions and the schema
table itself are refused. The application's triggers do not fire, because their effects are among the pushed changes.
A push that leaves a table which no replica could sync is rolled back: it would stop all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import apsw

from tailrace.errors import PreflightError
from tailrace.sync.bounded_function import bound_functions
from tailrace.sync.hrana import MalformedBatchError, SqlValue, decode_value, encode_value
from tailrace.sync.preflight import require_syncable, require_uncaptured

_ALLOWED = {
    apsw.SQLITE_SELECT,
    apsw.SQLITE_READ,
    apsw.SQLITE_INSERT,
    apsw.SQLITE_UPDATE,
    apsw.SQLITE_DELETE,
    apsw.SQLITE_TRANSACTION,
    apsw.SQLITE_SAVEPOINT,
    apsw.SQLITE_CREATE_TABLE,
    apsw.SQLITE_CREATE_INDEX,
    apsw.SQLITE_CREATE_VIEW,
    apsw.SQLITE_DROP_TABLE,
    apsw.SQLITE_DROP_INDEX,
    apsw.SQLITE_DROP_VIEW,
    apsw.SQLITE_ALTER_TABLE,
    apsw.SQLITE_REINDEX,
    apsw.SQLITE_FUNCTION,
    apsw.SQLITE_RECURSIVE,
}
_DDL = {apsw.SQLITE_CREATE_TABLE, apsw.SQLITE_CREATE_INDEX, apsw.SQLITE_DROP_TABLE, apsw.SQLITE_ALTER_TABLE}
_REFUSED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}
_CHECK_STEPS = 10_000
_DEPTH = 32
_RESULT_OVERHEAD = 300
"""About what the result of a statement takes as JSON without its names and values."""
_PATTERN_BYTES = 200
"""The longest pattern of LIKE and GLOB: one comparison cannot be interrupted."""
_FORGIVEN = "duplicate column name"
"""Turso's clients send ADD COLUMN again for a column that is there, and expect only that step to fail."""


class SqlBatch:
    """A connection that runs batches. Used by one thread at a time.

    `seconds` limits a batch, `largest_bytes` its results and each of its values.
    """

    def __init__(self, path: Path, *, seconds: float, largest_bytes: int) -> None:
        self._seconds, self._largest = seconds, largest_bytes
        self._is_unchecked, self._schema = False, -1
        self._deadline = float("inf")
        self._left = 0
        self.connection = connection = apsw.Connection(str(path))
        connection.set_busy_timeout(int(seconds * 1000))
        connection.execute("PRAGMA foreign_keys = OFF; PRAGMA synchronous = FULL")
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER, 0)
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        connection.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
        connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 0)
        connection.limit(apsw.SQLITE_LIMIT_ATTACHED, 0)
        connection.limit(apsw.SQLITE_LIMIT_LENGTH, largest_bytes)
        connection.limit(apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _PATTERN_BYTES)
        bound_functions(connection)
        connection.set_progress_handler(self._is_late, _CHECK_STEPS)
        connection.set_commit_hook(lambda: self._is_unchecked)

    def close(self) -> None:
        self.connection.close()

    def pipeline(self, request: Any) -> dict[str, Any]:
        """Answer a whole request. Raises MalformedBatchError for what is not one; no transaction stays open."""
        if not isinstance(request, dict) or not isinstance(request.get("requests"), list):
            raise MalformedBatchError("the body has no list of requests")
        if request.get("baton") is not None:
            raise MalformedBatchError("interactive transactions are not served")
        self._deadline = time.monotonic() + self._seconds
        self._left = self._largest
        self._is_unchecked, self._schema = False, -1
        self.connection.authorizer = self._authorize
        try:
            results = [self._answer(one) for one in request["requests"]]
        finally:
            self._roll_back()
            self._deadline = float("inf")
            self.connection.authorizer = None
        return {"baton": None, "base_url": None, "results": results}

    def _answer(self, request: Any) -> dict[str, Any]:
        kind = request.get("type") if isinstance(request, dict) else None
        if kind == "close":
            return {"type": "ok", "response": {"type": "close"}}
        if kind == "batch":
            return {"type": "ok", "response": {"type": "batch", "result": self._run(request.get("batch"))}}
        if kind == "execute":
            result = self._run({"steps": [{"stmt": request.get("stmt")}]})
            if error := result["step_errors"][0]:
                return {"type": "error", "error": error}
            return {"type": "ok", "response": {"type": "execute", "result": result["step_results"][0]}}
        return {"type": "error", "error": {"message": "only batch, execute and close are served", "code": "UNKNOWN"}}

    def _run(self, batch: Any) -> dict[str, Any]:
        if not isinstance(batch, dict) or not isinstance(batch.get("steps"), list):
            raise MalformedBatchError("a batch has no list of steps")
        results: list[Any] = []
        errors: list[Any] = []
        failed = False
        for step in batch["steps"]:
            result = error = None
            if not isinstance(step, dict):
                raise MalformedBatchError("a step is not an object")
            # After an error nothing more runs, whatever its condition: a push is whole or nothing.
            if not failed and self._holds(step.get("condition"), results, errors):
                try:
                    result = self._execute(step.get("stmt"))
                except (apsw.Error, UnicodeError, OverflowError, MemoryError, PreflightError) as fault:
                    error = _describe(fault)
                    if _FORGIVEN not in error["message"]:
                        failed = True
                        self._roll_back()
            results.append(result)
            errors.append(error)
        self._roll_back()
        return {"step_results": results, "step_errors": errors, "replication_index": None}

    def _execute(self, statement: Any) -> dict[str, Any]:
        if not isinstance(statement, dict) or not isinstance(statement.get("sql"), str):
            raise MalformedBatchError("a statement has no SQL")
        if "\0" in statement["sql"]:
            raise MalformedBatchError("a statement has a NUL in its SQL")
        if statement.get("named_args"):
            raise MalformedBatchError("named arguments are not served")
        args = statement.get("args") or []
        if not isinstance(args, list):
            raise MalformedBatchError("the arguments of a statement are not a list")
        # SQLite looks at the clock only within long statements.
        if self._is_late():
            raise apsw.InterruptError
        before = self.connection.total_changes()
        names, rows = self._answered(statement["sql"], args, wants_rows=statement.get("want_rows") is not False)
        return {
            "cols": [{"name": name, "decltype": None} for name in names],
            "rows": rows,
            "affected_row_count": self.connection.total_changes() - before,
            "last_insert_rowid": None,
            "replication_index": None,
            "rows_read": 0,
            "rows_written": 0,
            "query_duration_ms": 0.0,
        }

    def _answered(self, sql: str, args: list[Any], *, wants_rows: bool) -> tuple[list[str], list[Any]]:
        """Run a statement: the names and rows of its result."""
        values = [decode_value(value) for value in args]
        self._check_schema()
        is_alone = not self.connection.in_transaction
        try:
            return self._result(sql, values, wants_rows=wants_rows)
        except apsw.ConstraintError:
            if not (is_alone and self._is_unchecked):
                raise
        # Its commit was refused, because it changes the schema and nothing was checked: again, in a transaction.
        self.connection.execute("BEGIN IMMEDIATE")
        answered = self._result(sql, values, wants_rows=wants_rows)
        self._check_schema()
        self.connection.execute("COMMIT")
        return answered

    def _result(self, sql: str, values: list[SqlValue], *, wants_rows: bool) -> tuple[list[str], list[Any]]:
        cursor = self.connection.execute(sql, values)
        names, rows = _columns(cursor), list[Any]()
        self._take(_RESULT_OVERHEAD + sum(len(name) for name in names))
        for row in cursor:
            if wants_rows:
                self._take(sum(_size(value) for value in row))
                rows.append([_encode(value) for value in row])
        return names, rows

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise apsw.TooBigError("the result is larger than the server returns")

    def _check_schema(self) -> None:
        """Raise PreflightError if this batch changed the schema to one that replicas cannot sync."""
        if not self._is_unchecked and self._schema >= 0:
            return
        self.connection.authorizer = None
        try:
            (version,) = next(self.connection.execute("PRAGMA schema_version"))
            if self._schema < 0:
                self._schema = version
            if self.connection.in_transaction and version != self._schema:
                require_uncaptured(self.connection)
                require_syncable(self.connection)
        finally:
            self.connection.authorizer = self._authorize
        self._is_unchecked = False

    def _holds(self, condition: Any, results: list[Any], errors: list[Any], depth: int = 0) -> bool:
        if condition is None:
            return True
        if not isinstance(condition, Mapping) or depth > _DEPTH:
            raise MalformedBatchError("a condition is not an object, or nested too deeply")

        def holds(inner: Any) -> bool:
            return self._holds(inner, results, errors, depth + 1)

        step, many = condition.get("step"), condition.get("conds")
        match condition.get("type"):
            case "ok" if isinstance(step, int):
                return 0 <= step < len(results) and results[step] is not None
            case "error" if isinstance(step, int):
                return 0 <= step < len(errors) and errors[step] is not None
            case "not":
                return not holds(condition.get("cond"))
            case "and" if isinstance(many, list):
                return all(holds(one) for one in many)
            case "or" if isinstance(many, list):
                return any(holds(one) for one in many)
            case "is_autocommit":
                return not self.connection.in_transaction
        raise MalformedBatchError("a condition has an unknown type")

    def _roll_back(self) -> None:
        if self.connection.in_transaction:
            self._deadline = float("inf")
            self.connection.execute("ROLLBACK")

    def _is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def _authorize(
        self, action: int, first: str | None, second: str | None, schema: str | None, trigger: str | None
    ) -> int:
        if action in _DDL:
            self._is_unchecked = True
        allowed = action in _ALLOWED and schema in (None, "main")
        if action == apsw.SQLITE_FUNCTION:
            allowed = (second or "").lower() not in _REFUSED_FUNCTIONS
        elif action == apsw.SQLITE_ALTER_TABLE:
            allowed = first in (None, "main")
        return apsw.SQLITE_OK if allowed else apsw.SQLITE_DENY


def _describe(fault: Exception) -> dict[str, str]:
    if isinstance(fault, apsw.InterruptError):
        return {"message": "the statements took longer than the server allows", "code": "SQLITE_INTERRUPT"}
    if isinstance(fault, MemoryError):
        return {"message": "a statement takes more memory than the server allows", "code": "SQLITE_NOMEM"}
    if isinstance(fault, PreflightError):
        return {"message": f"after it, replicas could not sync: {fault.located}", "code": "SQLITE_AUTH"}
    return {"message": str(fault), "code": f"SQLITE_{type(fault).__name__.removesuffix('Error').upper()}"}


def _columns(cursor: apsw.Cursor) -> list[str]:
    try:
        return [column[0] for column in cursor.get_description()]
    except apsw.ExecutionCompleteError:  # it returned no row
        return []


def _size(value: SqlValue) -> int:
    return len(value) + 16 if isinstance(value, str | bytes) else 24


def _encode(value: SqlValue) -> dict[str, Any]:
    try:
        return encode_value(value)
    except ValueError:
        return {"type": "float", "value": None}
