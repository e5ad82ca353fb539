# ruff: noqa: S608 - every name and value in the SQL here is quoted
"""An SQLite file, polled: it is only ever opened for reading, also where nobody may write it."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailrace.capture.column_type import read_column
from tailrace.capture.layout import list_tables, literal, quoted, rowid_name
from tailrace.errors import DamagedError, Finding, PreflightError, SchemaChangedError, UnavailableError, UnfitError
from tailrace.model.digest import row_digests
from tailrace.model.exact import combine
from tailrace.model.schema import TableName, TableSchema
from tailrace.source.poll.connector import Clock, ConnectorOptions, Page, Polled, Query, number_by_name
from tailrace.source.poll.keyset import Keyset, KeyValue, Stretch, conditions, where_clause
from tailrace.source.poll.option import path_of
from tailrace.source.poll.schedule import QuerySpacing, spacing_of
from tailrace.source.poll.version_column import Scale, VersionKind, require_iso
from tailrace.source.sqlite.catalog import ROWID, SCHEMA, make_schema, try_describe
from tailrace.source.sqlite.connection import fetch
from tailrace.source.sqlite.value import cells_of
from tailrace.system import turso_lock

FETCH_KEYS = 500
_STEPS = 10_000
"""How many steps of SQLite's machine go by between two looks at the clock."""


@dataclass(frozen=True)
class SqliteConnector:
    """A file, by `sqlite:///path`."""

    dsn: str
    options: ConnectorOptions = field(default_factory=ConnectorOptions)

    @property
    def path(self) -> Path:
        return path_of(self.dsn)

    def check(self) -> list[Finding]:
        try:
            with self.open() as session:
                session.tables()
        except PreflightError as error:
            return [Finding("error", "file", error.message, error.fix)]
        return [Finding("ok", "file", f"{self.path} can be read")]

    @contextmanager
    def open(self) -> Iterator[SqliteSession]:
        path = self.path
        if not path.is_file():
            raise PreflightError(f"there is no file {path}", fix="correct the path behind sqlite:/// in source.dsn")
        turso_lock.require_not_shared(path)
        with _explained(path):
            connection = _open(path, self.options.statement_seconds)
        try:
            yield SqliteSession(connection, path, self.options, spacing_of(self.dsn, self.options.queries_per_second))
        finally:
            connection.close()


def _open(path: Path, seconds: float) -> sqlite3.Connection:
    def connect(how: str) -> sqlite3.Connection:
        uri = f"{path.resolve().as_uri()}?{how}"
        return sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None, check_same_thread=False)

    connection = connect("mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError:
        # A WAL needs its index file beside it. Where none can be made there is no writer either.
        connection.close()
        wal = path.with_name(path.name + "-wal")
        if os.access(path.parent, os.W_OK) or (wal.exists() and wal.stat().st_size):
            raise
        connection = connect("mode=ro&immutable=1")
    return connection


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_NOTADB:
            raise PreflightError(f"{path} is not an SQLite database", fix="correct source.dsn") from error
        if code == sqlite3.SQLITE_CORRUPT:
            raise DamagedError(f"{path} is damaged: {text}", fix="restore it from a backup") from error
        raise UnavailableError(
            f"{path} could not be read: {text}", fix="see who locks it, or may not read it"
        ) from error


class SqliteSession:
    """The protocol `Session`."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, options: ConnectorOptions, spacing: QuerySpacing
    ) -> None:
        self._connection = connection
        self._path = path
        self._seconds = options.statement_seconds
        self._spacing = spacing

    def _ask(self, query: str, table: str = "") -> list[tuple[Any, ...]]:
        self._spacing.wait()
        deadline = time.monotonic() + self._seconds
        self._connection.set_progress_handler(lambda: int(time.monotonic() > deadline), _STEPS)
        with _explained(self._path):
            try:
                return fetch(self._connection, query)
            except sqlite3.OperationalError as error:
                if str(error).startswith("no such "):
                    raise SchemaChangedError(
                        "the table or one of its columns is no longer there under its name",
                        fix=f"tailrace retry FILE {table}; if it was dropped, take it out of tables.include",
                        table=table,
                    ) from error
                raise

    def tables(self) -> list[TableSchema]:
        self._spacing.wait()
        with _explained(self._path):
            names = set(list_tables(self._connection))
        found = self._ask("SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND sql IS NOT NULL ORDER BY name")
        return [_described(name, text) for name, text in found if name in names]

    def clock(self) -> Clock:
        now = time.time_ns() // 1000
        # A writer's transaction is not seen from outside, nor how long it has been open.
        return Clock(now, now, known=False)

    def scale(self, table: Polled, column: str) -> Scale | None:
        name = quoted(column)
        # Each by itself, which an index answers with one look.
        looks = ", ".join(f"(SELECT {which}({name}) FROM {_table(table)})" for which in ("min", "max"))
        first, latest = self._ask(f"SELECT {looks}", table.name)[0]
        if latest is None:
            # Nothing to go by yet, and nothing to read.
            declared = table.schema.column(column).type
            return Scale(VersionKind.NUMBER) if pa.types.is_integer(declared) else Scale(VersionKind.TEXT)
        if type(first) is not type(latest) or not isinstance(latest, str | int):
            raise UnfitError(
                f"column {column} holds other values than whole numbers alone or texts alone, so that the order of"
                " changes cannot be told",
                fix=f"write {column} in every row as an integer, or as text such as CURRENT_TIMESTAMP",
                table=table.name,
            )
        if isinstance(latest, str):
            return Scale(VersionKind.TEXT, latest=require_iso(latest, table.name, column))
        return Scale(VersionKind.NUMBER, latest=latest)

    def page(self, query: Query) -> Page:
        table = query.table
        where = [*_conditions(table, query.by, query.stretch), *_alive(table, query.deleted)]
        if query.by is not None:
            where.append(f"{quoted(query.by)} IS NOT NULL")
        return self._select(query, f"{where_clause(where)} ORDER BY {_names(table, query.order)} LIMIT {query.rows}")

    def _select(self, query: Query, rest: str) -> Page:
        table = query.table
        columns = table.schema if query.hashed else query.columns
        listed = _names(table, (*(column.name for column in columns.columns), *query.order))
        rows = self._ask(f"SELECT {listed} FROM {_table(table)} {rest}", table.name)
        values = list(zip(*rows, strict=True)) or [()] * (len(columns.columns) + len(query.order))
        parsed = {
            column.name: read_column(cells_of(values[at]), column.type) for at, column in enumerate(columns.columns)
        }
        unfit = {name: one.unfit for name, one in parsed.items() if one.unfit is not None}
        hashes = None
        if query.hashed:
            # Values that the column's type cannot hold are part of the row all the same.
            hashes = row_digests([each for one in parsed.values() for each in (one.array, _or_nulls(one.unfit, rows))])
        shown = [column.name for column in query.columns.columns]
        row = pa.StructArray.from_arrays([parsed[name].array for name in shown], fields=list(query.columns.row_type))
        last = tuple(each[-1] for each in values[len(columns.columns) :]) if rows else None
        return Page(row, combine({name: each for name, each in unfit.items() if name in shown}), hashes, last)

    def hop(self, table: Polled, after: Keyset, rows: int) -> Keyset | None:
        names = _names(table, table.order(None))
        where = where_clause(_conditions(table, None, Stretch(after)))
        query = f"SELECT {names} FROM {_table(table)} {where} ORDER BY {names} LIMIT 1 OFFSET {rows - 1}"
        found = self._ask(query, table.name)
        return tuple(found[0]) if found else None

    def fetch(self, table: Polled, keys: pa.Table, columns: TableSchema) -> Iterator[Page]:
        for start in range(0, keys.num_rows, FETCH_KEYS):
            values = [keys.column(name).slice(start, FETCH_KEYS).to_pylist() for name in table.schema.key]
            rows = ", ".join(f"({', '.join(map(_literal, row))})" for row in zip(*values, strict=True))
            names = _names(table, table.schema.key)
            wanted = f"({names}) IN (VALUES {rows})" if len(values) > 1 else f"{names} IN ({rows})"
            query = Query(table, None, Stretch(), columns, FETCH_KEYS)
            yield self._select(query, where_clause([wanted, *_alive(table, False)]))

    def count_unversioned(self, table: Polled) -> int:
        if table.version is None:
            return 0
        where = where_clause([f"{quoted(table.version)} IS NULL", *_alive(table, False)])
        return int(self._ask(f"SELECT count(*) FROM {_table(table)} {where}", table.name)[0][0])

    def lacks_index(self, table: Polled, column: str) -> bool:
        name = quoted(column)
        query = f"SELECT 1 FROM {_table(table)} WHERE {name} > 0 ORDER BY {name} LIMIT 1"
        plan = self._ask(f"EXPLAIN QUERY PLAN {query}")
        return not any("USING" in str(step[-1]) and "TEMP" not in str(step[-1]) for step in plan)

    def estimate(self, table: Polled) -> int:
        return 0


def _or_nulls(texts: pa.Array[Any] | None, rows: list[Any]) -> pa.Array[Any]:
    return pa.nulls(len(rows)) if texts is None else texts


def _described(name: str, text: str) -> TableSchema:
    """The table; without a key where it has none, nor a rowid that SQL can name, or its text is not understood here."""
    one = try_describe(text)
    if one is None:
        return TableSchema(TableName(SCHEMA, name), (), (), upstream_id=name)
    schema = make_schema(one, {column.name: number_by_name(column.name) for column in one.fields})
    return replace(schema, key=()) if one.lacks_rowid and not one.key else schema


def _name(table: Polled, name: str) -> str:
    """A column in SQL; the rowid has a name of its own where the table does not show it."""
    if table.schema.column(name).upstream_type != ROWID:
        return quoted(name)
    return rowid_name([column.name for column in table.schema.columns])


def _names(table: Polled, names: tuple[str, ...]) -> str:
    return ", ".join(_name(table, name) for name in names)


def _table(table: Polled) -> str:
    return quoted(table.schema.table.name)


def _literal(value: KeyValue) -> str:
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogateescape")
        return f"CAST(X'{raw.hex()}' AS TEXT)" if "\0" in value or not value.isprintable() else literal(value)
    if isinstance(value, float) and math.isinf(value):
        return "9e999" if value > 0 else "-9e999"
    return f"X'{value.hex()}'" if isinstance(value, bytes) else repr(value)


def _conditions(table: Polled, by: str | None, stretch: Stretch) -> list[str]:
    names = [_name(table, name) for name in table.order(by)]
    return conditions(stretch, names, lambda _, value: _literal(value))


def _alive(table: Polled, deleted: bool | None) -> list[str]:
    if table.soft is None or deleted is None:
        return []
    return [f"{quoted(table.soft)} IS {'NOT ' if deleted else ''}NULL"]
