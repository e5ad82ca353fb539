# ruff: noqa: S608 - every name and value in the SQL here is quoted
"""An SQLite file, polled: it is only ever opened for reading, even if the file is read-only."""

from __future__ import annotations

import math
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailrace.capture.column_type import read_column
from tailrace.capture.layout import list_tables, literal, quoted, rowid_name
from tailrace.errors import DamagedError, Finding, PreflightError, SchemaChangedError, UnavailableError, UnfitError
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.poll.connector import Connector, ConnectorOptions, Page, Polled, Query, number_by_name
from tailrace.source.poll.keyset import Keyset, KeyValue
from tailrace.source.poll.option import path_of
from tailrace.source.poll.schedule import QuerySpacing, spacing_of
from tailrace.source.poll.sql_session import SqlSession
from tailrace.source.poll.version_column import Scale, VersionKind, require_iso
from tailrace.source.sqlite.catalog import ROWID, SCHEMA, make_schema, try_describe
from tailrace.source.sqlite.connection import fetch
from tailrace.source.sqlite.decode import unfit_key
from tailrace.source.sqlite.value import cells_of
from tailrace.system import closed_file, turso_lock

_STEPS = 10_000
"""How many steps SQLite's virtual machine runs between two checks of the clock."""


class SqliteConnector(Connector):
    """A file, by `sqlite:///path`."""

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
            raise PreflightError(f"there is no file {path}", fix="correct the path after sqlite:/// in source.dsn")
        turso_lock.require_not_shared(path)
        with ExitStack() as opened:
            with _explained(path):
                connection = _open(path, self.options.statement_seconds, opened)
            yield SqliteSession(connection, path, self.options, spacing_of(self.dsn, self.options.queries_per_second))


def _open(path: Path, seconds: float, opened: ExitStack) -> sqlite3.Connection:
    connection = opened.enter_context(closed_file.opened_by_sqlite(path, timeout_seconds=seconds))
    try:
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    except sqlite3.OperationalError:
        # A WAL needs its index file next to it. Where none can be made there is no writer either.
        wal = path.with_name(path.name + "-wal")
        if os.access(path.parent, os.W_OK) or (wal.exists() and wal.stat().st_size):
            raise
        uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
        alone = sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None, check_same_thread=False)
        return opened.enter_context(closing(alone))
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
            f"{path} could not be read: {text}", fix="check which process locks it, and that this user may read it"
        ) from error


class SqliteSession(SqlSession):
    """Values keep their own classes, whatever type their column declares."""

    fetch_keys = 500
    key_list = "VALUES "

    def __init__(
        self, connection: sqlite3.Connection, path: Path, options: ConnectorOptions, spacing: QuerySpacing
    ) -> None:
        self._connection = connection
        self._path = path
        self._seconds = options.statement_seconds
        self._spacing = spacing

    def ask(self, sql: str, table: Polled | None = None) -> list[tuple[Any, ...]]:
        self._spacing.wait()
        deadline = time.monotonic() + self._seconds
        self._connection.set_progress_handler(lambda: int(time.monotonic() > deadline), _STEPS)
        with _explained(self._path):
            try:
                return fetch(self._connection, sql)
            except sqlite3.OperationalError as error:
                if table is not None and str(error).startswith("no such "):
                    raise SchemaChangedError(
                        "the table or one of its columns is no longer there under its name",
                        fix=f"tailrace retry FILE {table.name}; if it was dropped, take it out of tables.include",
                        table=table.name,
                    ) from error
                raise

    def tables(self) -> list[TableSchema]:
        self._spacing.wait()
        with _explained(self._path):
            names = set(list_tables(self._connection))
        found = self.ask("SELECT name, sql FROM sqlite_schema WHERE type = 'table' AND sql IS NOT NULL ORDER BY name")
        return [_described(name, text) for name, text in found if name in names]

    def scale(self, table: Polled, column: str) -> Scale | None:
        name = quoted(column)
        # Query each separately, which an index answers at once.
        looks = ", ".join(f"(SELECT {which}({name}) FROM {self.source(table)})" for which in ("min", "max"))
        first, latest = self.ask(f"SELECT {looks}", table)[0]
        if latest is None:
            # No value to derive the format from yet, and nothing to read.
            declared = table.schema.column(column).type
            return Scale(VersionKind.NUMBER) if pa.types.is_integer(declared) else Scale(VersionKind.TEXT)
        if type(first) is not type(latest) or not isinstance(latest, str | int):
            raise UnfitError(
                f"column {column} holds other values than whole numbers alone or texts alone, so the order of"
                " changes is not known",
                fix=f"write {column} in every row as an integer, or as text such as CURRENT_TIMESTAMP",
                table=table.name,
            )
        if isinstance(latest, str):
            return Scale(VersionKind.TEXT, latest=require_iso(latest, table.name, column))
        return Scale(VersionKind.NUMBER, latest=latest)

    def source(self, table: Polled) -> str:
        return quoted(table.schema.table.name)

    def column(self, table: Polled, name: str) -> str:
        """The rowid has a name of its own where the table does not show it."""
        if table.schema.column(name).upstream_type != ROWID:
            return quoted(name)
        return rowid_name([column.name for column in table.schema.columns])

    def literal(self, table: Polled, name: str, value: KeyValue) -> str:
        if isinstance(value, str):
            raw = value.encode("utf-8", "surrogateescape")
            return f"CAST(X'{raw.hex()}' AS TEXT)" if "\0" in value or not value.isprintable() else literal(value)
        if isinstance(value, float) and math.isinf(value):
            return "9e999" if value > 0 else "-9e999"
        return super().literal(table, name, value)

    def read(self, query: Query, rest: str) -> Page:
        page = super().read(query, rest)
        for name in query.table.schema.key:
            if name in query.columns.key and page.rows.field(name).null_count:
                raise unfit_key(query.table.schema, name, None)
        return page

    def chunk_bound(self, table: Polled, after: Keyset, rows: int) -> Keyset | None:
        bound = super().chunk_bound(table, after, rows)
        for name, value in zip(table.schema.key, bound or (), strict=False):
            if value is None:
                raise unfit_key(table.schema, name, None)
        return bound

    def count_keyless(self, table: Polled) -> int:
        """A key that is not the rowid may be null in SQLite, unless its column is declared NOT NULL."""
        where = " OR ".join(f"{self.column(table, name)} IS NULL" for name in table.schema.key)
        return int(self.ask(f"SELECT count(*) FROM {self.source(table)} WHERE {where}", table)[0][0])

    def parse(self, values: Sequence[Any], column: Column) -> tuple[pa.Array[Any], pa.Array[Any] | None]:
        found = read_column(cells_of(values), column.type)
        return found.array, found.unfit

    def lacks_index(self, table: Polled, column: str) -> bool:
        name = quoted(column)
        query = f"SELECT 1 FROM {self.source(table)} WHERE {name} > 0 ORDER BY {name} LIMIT 1"
        plan = self.ask(f"EXPLAIN QUERY PLAN {query}")
        return not any("USING" in str(step[-1]) and "TEMP" not in str(step[-1]) for step in plan)


def _described(name: str, text: str) -> TableSchema:
    """The table; without a key where it has none, nor a rowid that SQL can name, or its text cannot be parsed here."""
    one = try_describe(text)
    if one is None:
        return TableSchema(TableName(SCHEMA, name), (), (), upstream_id=name)
    schema = make_schema(one, {column.name: number_by_name(column.name) for column in one.fields})
    return replace(schema, key=()) if one.lacks_rowid and not one.key else schema
