# ruff: noqa: S608 - names and values in the SQL here are quoted by psycopg
"""Postgres, polled: SELECT rights are enough, and every session is read-only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from functools import cache, cached_property
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from tailrace.errors import Finding, PreflightError, SchemaChangedError, TableError
from tailrace.model.schema import TableName, TableSchema
from tailrace.source.poll.connector import Clock, Connector, ConnectorOptions, Page, Polled, Query
from tailrace.source.poll.keyset import KeyValue
from tailrace.source.poll.schedule import spacing_of
from tailrace.source.poll.sql_session import SqlSession
from tailrace.source.postgres.catalog import describe, list_tables
from tailrace.source.postgres.connection import connect, connection_string, row_settings, session, translated
from tailrace.source.postgres.copy_query import Converter, select_list
from tailrace.system.bulk_connection import BulkConnection

_HASH = "_tailrace_hash"
_MOVED = ("42P01", "42703")
_DENIED = "42501"

# A role without access to the statistics of others sees their sessions, but not when their transactions began.
_CLOCK = """
SELECT (extract(epoch FROM clock_timestamp()) * 1e6)::int8,
       (extract(epoch FROM min(a.xact_start)) * 1e6)::int8,
       coalesce(bool_and(a.usesysid IS NULL OR pg_has_role(a.usesysid, 'USAGE')), true)
         OR pg_has_role('pg_read_all_stats', 'USAGE'),
       pg_is_in_recovery(),
       (extract(epoch FROM CASE WHEN pg_is_in_recovery() THEN pg_last_xact_replay_timestamp() END) * 1e6)::int8,
       ARRAY(SELECT transaction::text FROM pg_prepared_xacts WHERE database = current_database())
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()
  AND a.backend_type NOT IN ('walsender', 'autovacuum worker')
"""

# Columns of a user-defined type that is no domain over a built-in type.
_OPAQUE = """
WITH RECURSIVE below AS (
    SELECT a.attname, t.oid, t.typbasetype FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = {} AND a.attname = ANY({}::name[])
  UNION ALL
    SELECT below.attname, t.oid, t.typbasetype FROM below JOIN pg_type t ON t.oid = below.typbasetype
)
SELECT attname::text FROM below WHERE typbasetype = 0 AND oid >= 16384
"""


class PostgresConnector(Connector):
    """A database by its connection string."""

    @contextmanager
    def open(self) -> Iterator[PostgresSession]:
        with ExitStack() as opened:
            yield PostgresSession(self.dsn, self.options, opened)

    def check(self) -> list[Finding]:
        try:
            with session(self.dsn, "checking the source") as connection:
                row = connection.execute(_CLOCK).fetchone()
                role = connection.execute(
                    "SELECT quote_ident(current_user), pg_has_role('pg_read_all_stats', 'USAGE')"
                ).fetchone()
        except PreflightError as error:
            return [Finding("error", "connection", error.message, error.fix)]
        assert row is not None
        assert role is not None
        if row[3]:
            message = "it is a standby and cannot see transactions of its primary, so the last rows are read again"
            return [Finding("warning", "transactions", message, "raise source.look_back above the longest transaction")]
        if not role[1]:
            message = "the role cannot see when transactions of others began, so the last rows are read again"
            fix = f"GRANT pg_read_all_stats TO {role[0]};  -- or raise source.look_back above the longest transaction"
            return [Finding("warning", "transactions", message, fix)]
        return [Finding("ok", "transactions", "open transactions are seen")]

    def unreadable(self) -> list[TableName]:
        with session(self.dsn, "listing the tables") as connection:
            return [one.table for one in list_tables(connection) if not one.can_select and not one.is_partition]


@cache
def _zone_of(dsn: str) -> str:
    """The zone in which the database's own sessions write times without one."""
    with translated("asking for the time zone"), connect(connection_string(dsn, {})) as connection:
        row = connection.execute("SHOW TimeZone").fetchone()
    assert row is not None
    return str(row[0])


class PostgresSession(SqlSession):
    """psycopg for small queries, ADBC for rows, each connected when it is first needed."""

    def __init__(self, dsn: str, options: ConnectorOptions, opened: ExitStack) -> None:
        self._dsn = dsn
        self._options = options
        self._opened = opened
        self._spacing = spacing_of(dsn, options.queries_per_second)
        self._opaque_columns: dict[tuple[str, ...], frozenset[str]] = {}

    @property
    def _settings(self) -> dict[str, str]:
        return {
            **row_settings(self._dsn),
            # Rows that the role may not see stay invisible: polling has no log that would show them.
            "row_security": "on",
            "statement_timeout": str(max(1, round(self._options.statement_seconds * 1000))),
            "default_transaction_read_only": "on",
        }

    @cached_property
    def _asking(self) -> psycopg.Connection[tuple[Any, ...]]:
        self._spacing.wait()  # opening a session is a query, too
        with translated("opening a session"):
            made = connect(connection_string(self._dsn, self._settings))
        self._opened.callback(made.close)
        return made

    @cached_property
    def _bulk(self) -> BulkConnection:
        self._spacing.wait()
        with translated("opening a session"):
            made = BulkConnection(connection_string(self._dsn, self._settings))
        self._opened.callback(made.close)
        return made

    def ask(self, sql: str, table: Polled | None = None) -> list[tuple[Any, ...]]:
        self._spacing.wait()
        with translated(f"reading {table.name}" if table else "asking the source"), _found(table):
            return self._asking.execute(sql.encode()).fetchall()

    def tables(self) -> list[TableSchema]:
        self._spacing.wait()
        with translated("listing the tables"):
            relations = [one for one in list_tables(self._asking) if one.can_select and not one.is_partition]
            return [one.schema for one in describe(self._asking, relations, {})]

    def clock(self) -> Clock:
        now, oldest, known, standby, replayed, prepared = self.ask(_CLOCK)[0]
        if standby:
            # What the primary has already committed may be replayed here at any later time.
            return Clock(now, min(replayed or now, now), known=False)
        return Clock(now, min(oldest or now, now), known, frozenset(prepared))

    def zone(self) -> str:
        return self._options.zone or _zone_of(self._dsn)

    def column(self, table: Polled, name: str) -> str:
        # With its table: in ORDER BY a bare name is the output column, where many types are text, in another order.
        column = f"{self.quote(table.schema.table.name)}.{self.quote(name)}"
        return f'pg_catalog.concat({column}) COLLATE "C"' if name in self._opaque(table) else column

    def mark_value(self, table: Polled, name: str) -> str:
        return f"pg_catalog.concat({self.quote(name)})"

    def literal(self, table: Polled, name: str, value: KeyValue) -> str:
        # Without its type, a literal takes that of the column it is compared with, or the one below a domain. A cast to
        # a user-defined type may call functions of the type's owner, with our rights.
        declared = table.schema.column(name).upstream_type
        return sql.Literal(_text(value)).as_string() + ("" if _is_named(declared) else f"::{declared}")

    def _opaque(self, table: Polled) -> frozenset[str]:
        """The key columns that are compared and ordered as text, because the owner of their type can define casts.

        Which operator compares such values would depend on those casts, and so does whether it orders them as an index
        does. A domain is compared as the type below it.
        """
        named = [name for name in table.schema.key if _is_named(table.schema.column(name).upstream_type)]
        if not named:
            return frozenset()
        key = (table.schema.upstream_id, *named)
        if key not in self._opaque_columns:
            found = self.ask(_OPAQUE.format(int(table.schema.upstream_id), sql.Literal(named).as_string()), table)
            self._opaque_columns[key] = frozenset(row[0] for row in found)
        return self._opaque_columns[key]

    def read(self, query: Query, rest: str) -> Page:
        table, shown = query.table, query.columns
        listed = select_list(shown).as_string()
        if query.hashed:
            listed += f", {self._row_hash(table)} AS {_HASH}"
        self._spacing.wait()
        with translated(f"reading {table.name}"), _found(table), self._bulk.cursor() as cursor:
            cursor.execute(f"SELECT {listed} FROM {self.source(table)} {rest}")
            found = cursor.fetch_arrow_table()
        hashes = None
        if query.hashed:
            hashes = np.asarray(found.column(_HASH).to_numpy(), np.int64)
            found = found.drop_columns([_HASH])
        row, exact = Converter(shown).convert(_one_batch(found))
        last = tuple(_text(row.field(name)[-1].as_py()) for name in query.order) if len(row) else None
        return Page(row, exact, hashes, last)

    def _row_hash(self, table: Polled) -> str:
        columns = ", ".join(self.quote(column.name) for column in table.schema.columns)
        return f'hashtextextended(ROW({columns})::text COLLATE "C", 0)'

    def lacks_index(self, table: Polled, column: str) -> bool:
        name, source = self.quote(column), self.source(table)
        query = f"SELECT 1 FROM {source} WHERE {name} > (SELECT max({name}) FROM {source}) ORDER BY {name} LIMIT 1"
        self._spacing.wait()
        with translated(f"reading the query plan of {table.name}"), self._asking.transaction():
            # Postgres reads a small table in full even if it has an index; what matters is whether there is one.
            self._asking.execute("SET LOCAL enable_seqscan = off")
            plan = self._asking.execute(f"EXPLAIN {query}".encode()).fetchall()
        return any("Seq Scan" in str(line[0]) for line in plan)

    def estimate(self, table: Polled) -> int:
        found = self.ask(
            f"SELECT greatest(reltuples, 0)::int8 FROM pg_class WHERE oid = {int(table.schema.upstream_id)}"
        )
        return int(found[0][0]) if found else 0


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def _is_named(declared: str) -> bool:
    """Whether a declared type is user-defined: with our `search_path` only those are written with their schema."""
    return "." in declared


def _text(value: Any) -> str:
    """The text of a value's output function; an element of an array may have any type."""
    if isinstance(value, list):
        return "{" + ",".join("NULL" if each is None else _element(_text(each)) for each in value) + "}"
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    return value.isoformat() if isinstance(value, date) else str(value)


_PLAIN_ELEMENT = re.compile(r"(?!(?i:null)\Z)[^ \t\n\r\v\f\"\\{},]+")


def _element(text: str) -> str:
    if _PLAIN_ELEMENT.fullmatch(text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@contextmanager
def _found(table: Polled | None) -> Iterator[None]:
    """Queries inside the context are about this table, which may have been dropped since it was listed."""
    try:
        yield
    except Exception as error:
        state = getattr(error, "sqlstate", None)
        if table is not None and state == _DENIED:
            raise TableError(
                "the role may not read it",
                fix=f"GRANT SELECT ON {table.name} TO the role of source.dsn, and USAGE on its schema; then"
                f" tailrace retry FILE {table.name}",
                table=table.name,
            ) from error
        if table is None or state not in _MOVED:
            raise
        raise SchemaChangedError(
            "the table or one of its columns is no longer there under its name",
            fix=f"tailrace retry FILE {table.name}; if the table was dropped, take it out of tables.include",
            table=table.name,
        ) from error
