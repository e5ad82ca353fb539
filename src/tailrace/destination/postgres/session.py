"""A session of the database: its bookkeeping, its transactions, and what Postgres's errors mean here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import adbc_driver_manager
import psycopg
import pyarrow as pa
from psycopg import conninfo

from tailrace.destination.postgres.name import BOOK_SCHEMA, place_of
from tailrace.destination.postgres.option import PostgresDestinationOptions
from tailrace.destination.replica.bookkeeping import Bookkeeping
from tailrace.destination.replica.sql_name import quote
from tailrace.errors import PreflightError, TableError, TailraceError, UnavailableError, UnfitError
from tailrace.model.schema import TableName
from tailrace.system import failpoint
from tailrace.system.bulk_connection import BulkConnection
from tailrace.system.libpq import EXACT_TEXT, read_dsn, relief
from tailrace.system.silence import KEEPALIVES

_SETTINGS = {
    **EXACT_TEXT,
    "statement_timeout": "0",
    # A runner that is frozen in the middle of a batch does not lock out the one that took its place for ever.
    "lock_timeout": "60000",
    "idle_in_transaction_session_timeout": "300000",
    "row_security": "off",
}
_CREATING = "tailrace creates tables"


def address_of(options: PostgresDestinationOptions) -> str:
    """The user's connection string with what every session needs: pinned output, keepalives, a name."""
    given = read_dsn(options.dsn.reveal(), "destination")
    settings = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in _SETTINGS.items())
    merged: dict[str, Any] = {"application_name": "tailrace destination", **KEEPALIVES, **given}
    merged["options"] = f"{given.get('options', '')} {settings}".strip()
    return conninfo.make_conninfo("", **merged)


def place_name(options: PostgresDestinationOptions) -> str:
    return f"the database of {options.dsn.masked}"


class ReplicaProblem(NamedTuple):
    message: str
    fix: str


class Session:
    """One connection: statements and Arrow, in autocommit outside `transaction`."""

    def __init__(self, connection: BulkConnection, options: PostgresDestinationOptions) -> None:
        self._connection = connection
        self.options = options

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement with a value for each `?`, and return its rows."""
        numbers = iter(range(1, len(values) + 1))
        if values:
            sql = re.sub(r"\?", lambda _: f"${next(numbers)}", sql)
        with self._connection.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchall() if sql.startswith("SELECT") else []

    def ask(self, sql: str) -> pa.Table:
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetch_arrow_table()

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        with self._connection.cursor() as cursor:
            cursor.execute(sql)
            yield from cursor.fetch_batches()

    @contextmanager
    def incoming(self, rows: pa.Table) -> Iterator[str]:
        name = "_tailrace incoming"
        with self._connection.cursor() as cursor:
            cursor.ingest(name, rows)
        yield f"pg_temp.{quote(name)}"
        self.run(f"DROP TABLE pg_temp.{quote(name)}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit all of the block or nothing."""
        self._connection.begin()
        try:
            yield
            failpoint.reach("postgres_destination.before_commit")
            self._connection.commit()
        except BaseException:
            # The connection may be what failed.
            with suppress(adbc_driver_manager.Error, psycopg.Error):
                self._connection.rollback()
            raise
        failpoint.reach("postgres_destination.committed")

    def lock(self, what: str) -> None:
        """Wait for everyone else who holds this lock, until the end of the transaction."""
        self.run("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))::text", (f"tailrace {what}",))

    def bookkeeping(self) -> Bookkeeping:
        def is_taken(table: TableName) -> bool:
            place = place_of(table, self.options.schema_name)
            return bool(
                self.run(
                    "SELECT 1::int8 FROM pg_class WHERE relname = ? AND relnamespace = "
                    "(SELECT oid FROM pg_namespace WHERE nspname = ?)",
                    (place.name, place.schema),
                )
            )

        return Bookkeeping(
            run=self.run,
            place=lambda name: f"{quote(BOOK_SCHEMA)}.{quote(name)}",
            key=str,
            unique=lambda table: str(place_of(table, self.options.schema_name)),
            is_taken=is_taken,
            holder="the database",
        )

    def has_book(self) -> bool:
        # The catalog shows a schema also to a role that may not use it.
        return bool(self.run("SELECT 1::int8 FROM pg_namespace WHERE nspname = ?", (BOOK_SCHEMA,)))

    def replica_problem(self, table: TableName) -> ReplicaProblem | None:
        """Why an upstream table must not be kept: it is the replica of another one, in this very database."""
        found = self.run(f"SELECT upstream FROM {quote(BOOK_SCHEMA)}.{quote('table')} WHERE name = ?", (str(table),))  # noqa: S608
        if not found or found[0][0] == str(table):
            return None
        return ReplicaProblem(
            f"it is the replica of {found[0][0]} in the same database, and its own replica would have one, too",
            f"add {table.schema}.* to tables.exclude, or name another database in destination.dsn",
        )

    def create_schema(self, schema: str) -> None:
        """Create a schema that is missing, inside a transaction. Of several lanes that need it, one does."""
        known = "SELECT 1::int8 FROM pg_namespace WHERE nspname = ?"
        if self.run(known, (schema,)):
            return
        self.lock(_CREATING)
        if not self.run(known, (schema,)):
            self.run(f"CREATE SCHEMA {quote(schema)}")

    def create_book(self) -> None:
        with self.transaction():
            self.lock(_CREATING)
            if not self.has_book():
                self.run(f"CREATE SCHEMA {quote(BOOK_SCHEMA)}")
                self.bookkeeping().create()


@contextmanager
def opened(options: PostgresDestinationOptions, *, creates: bool = False) -> Iterator[Session]:
    """A session for the length of the block. `creates`: the tables of the bookkeeping, if they are missing."""
    with BulkConnection(address_of(options)) as connection:
        session = Session(connection, options)
        if creates and not session.has_book():
            session.create_book()
        yield session


@contextmanager
def reaching(options: PostgresDestinationOptions, table: str | None) -> Iterator[None]:
    """Turn the driver's errors into tailrace errors, which say whether a retry helps. No message holds a value."""
    try:
        yield
    except (adbc_driver_manager.Error, psycopg.Error, OSError, pa.ArrowException) as error:
        if not isinstance(error, adbc_driver_manager.Error | psycopg.Error) and "[libpq]" not in str(error):
            raise
        raise _translated(error, place_name(options), table) from error


_LOGIN = ("28P01", "28000", "3D000")
_REFUSED = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "does not exist")


def _translated(error: Exception, place: str, table: str | None) -> TailraceError:
    state = getattr(error, "sqlstate", None) or ""
    unnamed = re.sub(r'"[^"]*"', '""', str(error))
    again = f"tailrace retry FILE {table}"
    if state in _LOGIN or (not state and any(sign in unnamed for sign in _REFUSED)):
        return PreflightError(
            f"{place} refused the login ({state or 'no such role, database or password'})",
            fix="check user, password and database in destination.dsn, and pg_hba.conf",
        )
    if state == "42501":
        return TableError(
            f"the role lacks a right in {place}",
            table=table,
            fix=f"tailrace check FILE names the GRANTs; then {again}",
        )
    if state in ("2BP01", "0A000"):
        return TableError(
            f"a view or another object in {place} depends on the table or a column that changes",
            table=table,
            fix=f"drop it, then {again}, and create it again",
        )
    if state.startswith("22"):
        return UnfitError(
            f"a value does not fit its column in {place} ({state})",
            table=table,
            fix="text must not hold the character NUL, nor a value that the column's type refuses;"
            f" set native_types: false, or correct it upstream, then tailrace resync FILE {table}",
        )
    if state.startswith("23"):
        return TableError(
            f"a constraint in {place} refuses a row ({state})",
            table=table,
            fix=f"drop constraints and triggers that were added to the table, then {again}",
        )
    if not state or state[:2] in ("08", "53", "57", "58", "40", "55", "25"):
        fix = relief(state or None, unnamed) or "start the server, or correct destination.dsn; tailrace retries"
        return UnavailableError(f"{place} does not answer ({state or type(error).__name__})", table=table, fix=fix)
    return TableError(
        f"Postgres reported an error in {place}: {state}",
        table=table,
        fix=f"check what was added to the table; to copy it again: tailrace resync FILE {table}",
    )
