"""The state of several pipelines in one schema of a Postgres database, for runners on several machines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, LiteralString, Self

import psycopg
from psycopg import conninfo, sql
from psycopg.rows import DictRow, dict_row

from tailrace.errors import ConfigError, PreflightError, TailraceError, UnavailableError
from tailrace.state.database import Row, RunSql, StateDatabase, Values
from tailrace.state.layout import FORMAT, ColumnTypes
from tailrace.state.store import SCHEMA, StoreAddress
from tailrace.system.libpq import read_dsn, relief
from tailrace.system.silence import KEEPALIVES, BoundedConnection

_SETTINGS = {
    "application_name": "tailrace state",
    **KEEPALIVES,
}

# Everything is set for one transaction only, so that a pooler between us and the server does no harm. A process that
# is frozen in the middle of a write loses its session before the next runner, which waits for it, loses patience.
_BEGIN = sql.SQL(
    "BEGIN ISOLATION LEVEL READ COMMITTED {access}; SET LOCAL search_path TO {schema}, pg_temp;"
    " SET LOCAL lock_timeout = '10s'; SET LOCAL idle_in_transaction_session_timeout = '3s'"
)
_MAKING = 0x7461696C72616365  # an advisory lock, held while the tables are made


@dataclass(frozen=True)
class PostgresStore(StoreAddress):
    """A schema of the database at `dsn`, which several pipelines may share."""

    dsn: str = field(default="", repr=False)
    schema: str = SCHEMA

    @classmethod
    def from_options(cls, options: Any, *, name: str, state_dir: Path) -> Self:
        return cls(name, state_dir, options.dsn.reveal(), options.schema_name)

    def connect(self, *, writes: bool) -> PostgresStateDatabase:
        if not self.dsn:
            raise ConfigError("a Postgres store needs a dsn", fix="add `dsn: ${STATE_DSN}` to `store`")
        return PostgresStateDatabase(self.dsn, self.schema)


class PostgresStateDatabase(StateDatabase):
    """One connection, opened when first used and again when it was lost."""

    locking = " FOR UPDATE"
    clock = "SELECT clock_timestamp() AS at"
    types = ColumnTypes(text='TEXT COLLATE "C"')

    def __init__(self, dsn: str, schema: str) -> None:
        self._conninfo = conninfo.make_conninfo("", **{**_SETTINGS, **read_dsn(dsn, "store")})
        self._schema = schema
        self._connection: psycopg.Connection[DictRow] | None = None
        self.place = f"schema {schema} of the state database"

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[RunSql]:
        access = sql.SQL("READ WRITE" if writes else "READ ONLY")
        try:
            connection = self._begin(_BEGIN.format(access=access, schema=sql.Identifier(self._schema)))
            try:
                yield partial(_run, connection)
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back(connection)
                raise
        except psycopg.Error as error:
            raise _translate(error, self.place, self._schema) from error

    def run_many(self, run: RunSql, statement: str, values: Sequence[Values]) -> None:
        assert self._connection is not None, "it was opened by the transaction that this is part of"
        with self._connection.cursor() as cursor:
            cursor.executemany(_adapt(statement), [dict(each) for each in values])

    def format(self, run: RunSql) -> int:
        # The server's own catalog, which also shows tables that this role may not use.
        found = run(
            "SELECT 1 FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace"
            " WHERE nspname = :name AND relname = 'format'",
            {"name": self._schema},
        )
        return int(run("SELECT version FROM format", {})[0]["version"]) if found else 0

    def upgrade(self, run: RunSql, found: int) -> None:
        # Of several processes that start at once one makes the tables, and the others wait and find them.
        run("SELECT pg_advisory_xact_lock(:key)", {"key": _MAKING})
        if not run("SELECT 1 FROM pg_namespace WHERE nspname = :name", {"name": self._schema}):
            assert self._connection is not None
            self._connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(self._schema)))
        found = self.format(run)
        if found < FORMAT:
            super().upgrade(run, found)

    def _begin(self, statement: sql.Composed) -> psycopg.Connection[DictRow]:
        if self._connection is not None:
            try:
                self._connection.execute(statement)
            except psycopg.OperationalError:
                # It was lost while no one used it. Nothing was done yet, so a new one serves as well.
                self.close()
            else:
                return self._connection
        self._connection = BoundedConnection[DictRow].connect(
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


def _run(connection: psycopg.Connection[DictRow], statement: str, values: Values) -> list[Row]:
    cursor = connection.execute(_adapt(statement), dict(values))
    return list(cursor.fetchall()) if cursor.description else []


@lru_cache(maxsize=256)
def _adapt(statement: str) -> LiteralString:
    """`:name` as the driver writes it. Statements are this package's own texts, never made from values."""
    return re.sub(r":([a-z_]+)", r"%(\1)s", statement)


def _translate(error: psycopg.Error, place: str, schema: str) -> TailraceError:
    """What an error of the server or the driver means. Only its first sentence is kept: details may quote a row."""
    state = error.sqlstate or ""
    said = error.diag.message_primary or str(error).split("\n")[0]
    # Only an error while connecting has no SQLSTATE. Where there is one, the text does not count: it may quote names.
    signs = "" if state else said
    if state.startswith("28") or any(sign in signs for sign in ("authentication failed", "pg_hba.conf", "no password")):
        return PreflightError(
            f"Postgres refused the login for the state: {said}", fix="check user and password in `store.dsn`"
        )
    if state == "3D000" or ('database "' in signs and "does not exist" in signs):
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
