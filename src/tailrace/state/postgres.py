"""The state of several pipelines in one schema of a Postgres database, for runners on several machines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import LiteralString

import psycopg
from psycopg import conninfo, sql
from psycopg.rows import DictRow, dict_row

from tailrace.errors import ConfigError, PreflightError, TailraceError, UnavailableError
from tailrace.state import layout
from tailrace.state.database import Row, Values, closed_on_error
from tailrace.system.libpq import read_dsn, relief

_DIALECT = layout.Dialect("BIGINT", "DOUBLE PRECISION", "BYTEA", 'TEXT COLLATE "C"')
_SETTINGS = {
    "application_name": "tailrace state",
    "connect_timeout": "10",
    # A half-open connection is noticed within about half a minute.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}

# Everything is set for one transaction only, so that a pooler between us and the server does no harm. Whoever is
# frozen in the middle of a write loses its session before the next runner, which waits for it, loses patience.
_BEGIN = sql.SQL(
    "BEGIN ISOLATION LEVEL READ COMMITTED {access}; SET LOCAL search_path TO {schema}, pg_catalog;"
    " SET LOCAL lock_timeout = '10s'; SET LOCAL idle_in_transaction_session_timeout = '3s'"
)
_WRITE, _READ = sql.SQL("READ WRITE"), sql.SQL("READ ONLY")
_MAKING = 0x7461696C72616365  # an advisory lock, held while the tables are made
_OLDEST = 2  # formats from here on only added tables, so who reads can read them all


class PostgresStateDatabase:
    """One connection, opened when first used and again when it was lost."""

    shared = True
    locking = " FOR UPDATE"
    clock = "SELECT clock_timestamp() AS at"

    def __init__(self, dsn: str, schema: str) -> None:
        self._conninfo = conninfo.make_conninfo("", **{**_SETTINGS, **read_dsn(dsn, "store")})
        self._schema = schema
        self._connection: psycopg.Connection[DictRow] | None = None
        self.place = f"schema {schema} of the state database"

    @classmethod
    def open_writing(cls, dsn: str, schema: str) -> PostgresStateDatabase:
        """The schema and its tables are made on first use; those of an older format get what they lack."""
        engine = cls(dsn, schema)
        with closed_on_error(engine):
            if engine._format() < layout.FORMAT:
                engine._make()
        return engine

    @classmethod
    def open_reading(cls, dsn: str, schema: str) -> PostgresStateDatabase:
        """Raises ConfigError when no pipeline has its state there yet."""
        engine = cls(dsn, schema)
        with closed_on_error(engine):
            if engine._format() == 0:
                raise ConfigError(
                    f"{engine.place} holds no state: the pipeline has not run yet",
                    fix="start it with `tailrace run FILE`",
                )
        return engine

    def _make(self) -> None:
        with self.transaction() as cursor:
            cursor.run("SELECT pg_advisory_xact_lock(:key)", {"key": _MAKING})
            if not cursor.run("SELECT 1 FROM pg_namespace WHERE nspname = :name", {"name": self._schema}):
                cursor.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._schema)))
            if not cursor.run(_HAS_FORMAT, {"name": self._schema}):
                cursor.run("CREATE TABLE format AS SELECT 0 AS version", {})
            found = int(cursor.run("SELECT version FROM format", {})[0]["version"])
            if found < layout.FORMAT:
                for statement in layout.statements(_DIALECT, found):
                    cursor.run(statement, {})
                cursor.run(f"UPDATE format SET version = {layout.FORMAT}", {})  # noqa: S608 - a number of ours

    def _format(self) -> int:
        """The format of the tables; 0 where there are none. Raises ConfigError for one this program does not know."""
        if not self.read(_HAS_FORMAT, {"name": self._schema}):
            return 0
        found = int(self.read("SELECT version FROM format", {})[0]["version"])
        if not _OLDEST <= found <= layout.FORMAT:
            raise ConfigError(
                f"{self.place} has format {found}, this tailrace uses {layout.FORMAT}: another tailrace made it",
                fix="use that version of tailrace, or give the store another `schema`",
            )
        return found

    def read(self, statement: str, values: Values) -> list[Row]:
        with self._begun(_READ) as cursor:
            return cursor.run(statement, values)

    @contextmanager
    def transaction(self) -> Iterator[PostgresStateCursor]:
        with self._begun(_WRITE) as cursor:
            yield cursor

    @contextmanager
    def _begun(self, access: sql.SQL) -> Iterator[PostgresStateCursor]:
        try:
            connection = self._begin(_BEGIN.format(access=access, schema=sql.Identifier(self._schema)))
            try:
                yield PostgresStateCursor(connection)
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(connection)
                raise
        except psycopg.Error as error:
            raise _translate(error, self.place, self._schema) from error

    def _begin(self, statement: sql.Composed) -> psycopg.Connection[DictRow]:
        if self._connection is not None:
            try:
                self._connection.execute(statement)
            except psycopg.OperationalError:
                # It was lost while nobody used it. Nothing was done yet, so a new one serves as well.
                self.close()
            else:
                return self._connection
        self._connection = psycopg.connect(
            self._conninfo, autocommit=True, prepare_threshold=None, row_factory=dict_row
        )
        self._connection.execute(statement)
        return self._connection

    def _roll_back(self, connection: psycopg.Connection[DictRow]) -> None:
        try:
            connection.execute("ROLLBACK")
        except psycopg.Error:
            # Whatever is left of the transaction goes with the connection.
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class PostgresStateCursor:
    """Runs the store's statements inside one transaction."""

    def __init__(self, connection: psycopg.Connection[DictRow]) -> None:
        self._connection = connection

    def run(self, statement: str, values: Values) -> list[Row]:
        cursor = self._connection.execute(_adapt(statement), dict(values))
        return list(cursor.fetchall()) if cursor.description else []

    def run_many(self, statement: str, values: Sequence[Values]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(_adapt(statement), [dict(each) for each in values])

    def execute(self, statement: sql.Composed) -> None:
        self._connection.execute(statement)


_HAS_FORMAT = (
    "SELECT 1 FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace"
    " WHERE nspname = :name AND relname = 'format'"
)


@lru_cache(maxsize=256)
def _adapt(statement: str) -> LiteralString:
    """`:name` as the driver writes it. Statements are this package's own texts, never made from values."""
    return re.sub(r":([a-z_]+)", r"%(\1)s", statement)


def _translate(error: psycopg.Error, place: str, schema: str) -> TailraceError:
    """What an error of the server or the driver means. Only its first sentence is kept: details may quote a row."""
    state = error.sqlstate or ""
    said = error.diag.message_primary or str(error).split("\n")[0]
    if state.startswith("28") or any(sign in said for sign in ("authentication failed", "pg_hba.conf", "no password")):
        return PreflightError(
            f"Postgres refused the login for the state: {said}", fix="check user and password in `store.dsn`"
        )
    if state == "3D000" or ('database "' in said and "does not exist" in said):
        return PreflightError(f"the database for the state does not exist: {said}", fix="correct `store.dsn`")
    if state == "42501":
        return PreflightError(
            f"the role may not use {place}: {said}",
            fix=f'CREATE SCHEMA "{schema}" AUTHORIZATION <the role of store.dsn>;',
        )
    if fix := relief(state, said):
        return UnavailableError(f"{place} cannot serve now: {said}", fix=fix)
    if state in ("", "25006", "25P03", "25P04", "55P03", "40001", "40P01") or isinstance(
        error, psycopg.OperationalError | psycopg.InterfaceError
    ):
        return UnavailableError(
            f"cannot use {place}: {said}", fix="start the server, or correct host and port in `store.dsn`"
        )
    return TailraceError(f"{place} failed: {said}", fix="restore it from a backup, or give the store another `schema`")
