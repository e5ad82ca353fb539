# ruff: noqa: S608 - every name and value in the SQL here is quoted
"""A DuckDB file, polled: `duckdb:///file.duckdb`, never written to.

DuckDB lets one process write a file or several read it, not both at a time. So each query opens and closes the file,
and waits while another process writes. If the file can be opened, no transaction is open.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import duckdb
import numpy as np
import pyarrow as pa

from tailrace.errors import Finding, PreflightError, SchemaChangedError, TailraceError, UnavailableError
from tailrace.model.exact import combine
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.poll.connector import Clock, Connector, ConnectorOptions, Page, Polled, Query, number_by_name
from tailrace.source.poll.keyset import Keyset, KeyValue, Stretch
from tailrace.source.poll.option import path_of
from tailrace.source.poll.schedule import spacing_of
from tailrace.source.poll.sql_session import SqlSession, where_clause

RETRY_SECONDS: Final = 0.05
INTERRUPT_SECONDS: Final = 0.005
_WANTED: Final = "_tailrace_wanted"
"""The name of the joined keys. It hides a table of the same name, so it must be an unlikely one."""

_TYPES: Final[dict[str, pa.DataType]] = {
    "BOOLEAN": pa.bool_(),
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INTEGER": pa.int32(),
    "BIGINT": pa.int64(),
    "UTINYINT": pa.uint8(),
    "USMALLINT": pa.uint16(),
    "UINTEGER": pa.uint32(),
    "UBIGINT": pa.uint64(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
    "BLOB": pa.binary(),
    "DATE": pa.date32(),
    "TIME": pa.time64("us"),
    "TIMESTAMP": pa.timestamp("us"),
    "TIMESTAMP_S": pa.timestamp("us"),
    "TIMESTAMP_MS": pa.timestamp("us"),
    "TIMESTAMP WITH TIME ZONE": pa.timestamp("us", "UTC"),
}
"""Types that are kept as they are. Decimals are kept too; every other type becomes DuckDB's text for it."""
_ENDLESS: Final = ("DATE", "TIMESTAMP", "TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP WITH TIME ZONE")
"""Types that hold infinity, which Arrow's do not."""

_TABLES = """
SELECT c.schema_name, c.table_name, c.column_name, c.data_type, c.is_nullable,
       list_position(k.constraint_column_names, c.column_name)
FROM duckdb_columns() c
JOIN duckdb_tables() t USING (database_oid, schema_oid, table_oid)
LEFT JOIN duckdb_constraints() k
  ON k.database_oid = c.database_oid AND k.table_oid = c.table_oid AND k.constraint_type = 'PRIMARY KEY'
WHERE c.database_name = current_database() AND NOT t.temporary AND NOT t.internal
ORDER BY c.schema_name, c.table_name, c.column_index
"""


class DuckDbConnector(Connector):
    """A file, by `duckdb:///path`."""

    def check(self) -> list[Finding]:
        try:
            with self.open() as session:
                session.tables()
        except TailraceError as error:
            return [Finding("error", "file", error.message, error.fix)]
        return [Finding("ok", "file", f"{path_of(self.dsn)} can be read")]

    @contextmanager
    def open(self) -> Iterator[DuckDbSession]:
        yield DuckDbSession(self.dsn, self.options)


class DuckDbSession(SqlSession):
    """Nothing is open between two calls."""

    fetch_keys = 50_000

    def __init__(self, dsn: str, options: ConnectorOptions) -> None:
        self._path = path_of(dsn)
        self._options = options
        self._spacing = spacing_of(dsn, options.queries_per_second)

    def _open(self) -> duckdb.DuckDBPyConnection:
        deadline = time.monotonic() + self._options.statement_seconds
        while True:
            try:
                return duckdb.connect(str(self._path), read_only=True)
            except duckdb.Error as error:
                text = str(error)
                if not _is_duckdb(self._path):
                    what = f"{self._path} is not a DuckDB database" if self._path.is_file() else f"no file {self._path}"
                    raise PreflightError(what, fix="correct the path after duckdb:/// in source.dsn") from error
                if time.monotonic() >= deadline:
                    raise UnavailableError(
                        f"{self._path} cannot be opened: {text.partition(' (PID')[0]}",
                        fix="let the application close the file between its writes: DuckDB shares it with no reader",
                    ) from error
            time.sleep(RETRY_SECONDS)

    def ask(self, sql: str, table: Polled | None = None) -> list[tuple[Any, ...]]:
        columns = [column.to_pylist() for column in self._answer(sql, table).columns]
        return list(zip(*columns, strict=True))

    def _answer(self, query: str, polled: Polled | None = None, wanted: pa.Table | None = None) -> pa.Table:
        """The answer as Arrow. `wanted` are rows that the query calls _WANTED."""
        table = polled.name if polled else ""
        self._spacing.wait()
        connection = self._open()
        done = threading.Event()
        limit = threading.Thread(target=self._limit, args=(connection, done), daemon=True)
        limit.start()
        try:
            connection.execute("SET TimeZone = 'UTC'; SET enable_progress_bar = false")
            if wanted is not None:
                connection.register(_WANTED, wanted)
            return connection.sql(query).to_arrow_table()
        except (duckdb.CatalogException, duckdb.BinderException) as error:
            raise SchemaChangedError(
                "the table or one of its columns is no longer there under its name",
                fix=f"tailrace retry FILE {table}; if it was dropped, take it out of tables.include",
                table=table,
            ) from error
        except duckdb.InterruptException as error:
            raise UnavailableError(
                f"a query of {self._path} took longer than {self._options.statement_seconds:g} s",
                fix="raise source.statement_timeout, or lower page_rows",
                table=table or None,
            ) from error
        except duckdb.Error as error:
            raise UnavailableError(
                f"{self._path} could not be read: {type(error).__name__}",
                fix="check that `duckdb -readonly` can read the file, and that disk and memory suffice",
                table=table or None,
            ) from error
        finally:
            done.set()
            limit.join()  # a closed connection cannot be interrupted
            connection.close()

    def _limit(self, connection: duckdb.DuckDBPyConnection, done: threading.Event) -> None:
        """Interrupt a query that takes too long; repeatedly, as an interrupt before the query begins has no effect."""
        seconds = self._options.statement_seconds
        while not done.wait(seconds):
            connection.interrupt()
            seconds = INTERRUPT_SECONDS

    def tables(self) -> list[TableSchema]:
        found: dict[TableName, list[tuple[Column, int | None]]] = {}
        for schema, table, name, declared, nullable, place in self.ask(_TABLES):
            column = Column(name, _arrow_type(declared), nullable, declared, number_by_name(name))
            found.setdefault(TableName(schema, table), []).append((column, place))
        return [
            TableSchema(
                table,
                tuple(column for column, _ in columns),
                tuple(column.name for column, place in sorted(columns, key=lambda each: each[1] or 0) if place),
                upstream_id=str(table),
            )
            for table, columns in found.items()
        ]

    def clock(self) -> Clock:
        # No open transaction can hold rows back: the file opens for reading only while no process writes it.
        self._open().close()
        now = time.time_ns() // 1000
        return Clock(now, now, known=True)

    def zone(self) -> str:
        return self._options.zone or self._machine_zone

    @cached_property
    def _machine_zone(self) -> str:
        """The zone of this machine, which is that of the application that shares the file."""
        connection = duckdb.connect()
        try:
            row = connection.execute("SELECT current_setting('TimeZone')").fetchone()
        finally:
            connection.close()
        assert row is not None
        return str(row[0])

    def source(self, table: Polled) -> str:
        return f"{super().source(table)} AS source"

    def column(self, table: Polled, name: str) -> str:
        return f"source.{self.quote(name)}"

    def mark_value(self, table: Polled, name: str) -> str:
        return f"{self.column(table, name)}::VARCHAR"

    def literal(self, table: Polled, name: str, value: KeyValue) -> str:
        return f"CAST({_text(str(value))} AS {table.schema.column(name).upstream_type})"

    def within(self, table: Polled, by: str | None, stretch: Stretch) -> list[str]:
        order, found = table.order(by), []
        if stretch.after:
            ends = ">" if len(stretch.after) == len(order) else ">="
            found.append(self._bound(table, order, stretch.after, ">", ends))
        if stretch.upto is not None:
            ends = "<=" if len(stretch.upto) == len(order) else "<"
            found.append(self._bound(table, order, stretch.upto, "<", ends))
        return found

    def _bound(self, table: Polled, order: Sequence[str], mark: Keyset, sign: str, ends: str) -> str:
        """Rows on one side of a mark, column by column: a lower and an upper bound on row values are an error in
        DuckDB. The condition on the first column alone lets DuckDB skip blocks of rows."""
        if not mark:
            return "false"
        found = ""
        for at, value in reversed([*enumerate(mark)]):
            name, literal = self.column(table, order[at]), self.literal(table, order[at], value)
            deeper = f"({name} {sign} {literal} OR ({name} = {literal} AND {found}))"
            found = deeper if found else f"{name} {ends} {literal}"
        return f"{name} {sign}= {literal} AND {found}"

    def select(self, query: Query) -> Page:
        if query.keys is None:
            return super().select(query)
        # The keys are joined as a table, which is faster than any text of them.
        table, names = query.table, query.table.schema.key
        wanted = query.keys.select(list(names)).rename_columns([f"k{at}" for at in range(len(names))])
        same = [f"{self._shown(table, table.schema.column(name))} = {_WANTED}.k{at}" for at, name in enumerate(names)]
        alive = where_clause(self.alive(table, query.deleted))
        return self.read(query, f"SEMI JOIN {_WANTED} ON {' AND '.join(same)} {alive}", wanted)

    def read(self, query: Query, rest: str, wanted: pa.Table | None = None) -> Page:
        table, columns, marks = query.table, query.columns.columns, query.order
        endless = [column for column in columns if column.upstream_type in _ENDLESS]
        listed = [self._shown(table, column) for column in columns]
        names = [self.column(table, column.name) for column in endless]
        listed += [f"CASE WHEN NOT isfinite({name}) THEN {name}::VARCHAR END" for name in names]
        listed += [self.mark_value(table, name) for name in marks]
        if query.hashed:
            listed.append(f"hash({self.columns(table, [column.name for column in table.schema.columns])})")
        # Use our own names: those of a table may not be distinct for DuckDB.
        answer = ", ".join(f"{each} AS a{at}" for at, each in enumerate(listed))
        found = self._answer(f"SELECT {answer} FROM {self.source(table)} {rest}", table, wanted).combine_chunks()
        arrays = [_one(found.column(at)) for at in range(len(listed))]
        row = pa.StructArray.from_arrays(
            [array.cast(column.type) for array, column in zip(arrays, columns, strict=False)],
            fields=list(query.columns.row_type),
        )
        rest_of = iter(arrays[len(columns) :])
        unfit = {
            column.name: texts for column, texts in zip(endless, rest_of, strict=False) if texts.null_count < len(texts)
        }
        last = tuple(next(rest_of)[-1].as_py() for _ in marks) if len(row) else None
        hashes = None
        if query.hashed:
            hashes = np.asarray(arrays[-1].to_numpy(zero_copy_only=False), np.uint64).view(np.int64)
        return Page(row, combine(unfit), hashes, last)

    def _shown(self, table: Polled, column: Column) -> str:
        """The expression that reads a column: as text if Arrow lacks its type, and null where Arrow lacks the value."""
        name = self.column(table, column.name)
        if column.upstream_type in _ENDLESS:
            return f"CASE WHEN isfinite({name}) THEN {name} END"
        return f"{name}::VARCHAR" if pa.types.is_string(column.type) else name

    def lacks_index(self, table: Polled, column: str) -> bool:
        """Always False: each block of rows stores its lowest and highest value, by which DuckDB skips blocks."""
        return False

    def estimate(self, table: Polled) -> int:
        place = table.schema.table
        query = (
            "SELECT estimated_size FROM duckdb_tables() WHERE database_name = current_database()"
            f" AND schema_name = {_text(place.schema)} AND table_name = {_text(place.name)}"
        )
        found = self.ask(query, table)
        return int(found[0][0]) if found else 0


def _is_duckdb(path: Path) -> bool:
    """Whether the file begins as every DuckDB database does. One that may not be read may be one."""
    try:
        with path.open("rb") as file:
            return file.read(12)[8:] == b"DUCK"
    except FileNotFoundError:
        return False
    except OSError:
        return path.is_file()


def _arrow_type(declared: str) -> pa.DataType:
    if digits := re.fullmatch(r"DECIMAL\((\d+),(\d+)\)", declared):
        return pa.decimal128(int(digits[1]), int(digits[2]))
    return _TYPES.get(declared, pa.string())


def _one(column: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.array([], column.type)])


def _text(value: str) -> str:
    if "\0" in value:
        octets = "".join(f"\\x{octet:02X}" for octet in value.encode())
        return f"decode('{octets}'::BLOB)"
    return "'" + value.replace("'", "''") + "'"
