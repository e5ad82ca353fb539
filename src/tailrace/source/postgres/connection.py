"""Connections to Postgres, with settings that make its text output exact and driver errors as tailrace errors.

Three drivers share one connection string: psycopg for statements, its `pq` layer for the replication protocol, ADBC
(`bulk.py`) for results as Arrow. No wait for the server is without bound in any of them (`tailrace.system.silence`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import adbc_driver_manager
import psycopg
import pyarrow as pa
from psycopg import conninfo, generators, pq, sql

from tailrace.errors import OwnedError, PreflightError, TableError, TailraceError, UnavailableError
from tailrace.source.postgres.copy_query import SESSION, session_for
from tailrace.system.libpq import read_dsn, relief
from tailrace.system.silence import KEEPALIVES, BoundedConnection, wait_bounded

PgConnection = psycopg.Connection[tuple[Any, ...]]


def connection_string(dsn: str, settings: Mapping[str, str] = SESSION, **extra: str) -> str:
    """The user's DSN with what every tailrace session needs: pinned output settings, keepalives, a name."""
    given = read_dsn(dsn, "source")
    options = " ".join(f"-c {name}={_escape(value)}" for name, value in settings.items())
    merged: dict[str, Any] = {"application_name": "tailrace", **KEEPALIVES, **given, **extra}
    merged["options"] = f"{given.get('options', '')} {options}".strip()
    return conninfo.make_conninfo("", **merged)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Driver errors become UnavailableError, PreflightError or OwnedError; messages carry no connection string."""
    try:
        yield
    except TailraceError:
        raise
    except (psycopg.Error, adbc_driver_manager.Error, ConnectionError, TimeoutError) as error:
        raise translate(error, doing) from error
    except (OSError, pa.ArrowException) as error:
        if _ADBC not in str(error):
            raise
        raise translate(error, doing) from error


class DeniedError(PreflightError):
    """The role lacks a right. Where only one table was read, it stops that table: see `of_table`."""


@contextmanager
def of_table(table: str) -> Iterator[None]:
    """A right that is missing for what the block reads of one table stops that table, and no other."""
    try:
        yield
    except DeniedError as error:
        fix = f"{error.fix}; then tailrace retry FILE {table}"
        raise TableError(error.message, table=table, fix=fix) from error


def translate(error: Exception, doing: str) -> TailraceError:
    """Map a driver's error to the tailrace error that says what to do about it. The only such mapping."""
    state = getattr(error, "sqlstate", None)
    # ADBC appends the query, which may hold values of keys.
    text = " ".join(str(error).split()).partition(" Query was: ")[0]
    # The SQLSTATE decides if there is one. Otherwise the text does, without the names that it quotes.
    unnamed = _QUOTED.sub('""', text)
    signs = "" if state else unnamed
    if state in {"28P01", "28000"} or any(sign in signs for sign in _REFUSED) or lacks("role", signs):
        return PreflightError(
            f"Postgres refused the login while {doing}: {text}",
            fix="check user and password in the dsn (an environment variable can hold them) and pg_hba.conf",
        )
    if state == "3D000" or lacks("database", signs):
        return PreflightError(f"the database does not exist, while {doing}: {text}", fix="correct the dsn's database")
    if state == "55006" or "is active for PID" in signs:
        return OwnedError(
            f"the replication slot is in use, while {doing}: {text}",
            fix="stop the other reader, or give this pipeline a slot of its own with source.slot",
        )
    if state == "42501" or "permission denied" in signs or "must be superuser" in signs:
        return DeniedError(f"the role lacks a right, while {doing}: {text}", fix="tailrace check FILE names the GRANTs")
    if state in _UNKNOWN_SYNTAX:
        return PreflightError(
            f"the server does not understand what was sent to it, while {doing}: {text}",
            fix="use PostgreSQL 14 or later, and connect to the server itself: a pooler does not speak replication",
        )
    if lacks("publication", text):
        # The log is decoded with the catalog of its time, so the publication may exist by now.
        return UnavailableError(f"there was no publication, while {doing}: {text}", fix="tailrace check FILE")
    if state == "22P05" or "has no equivalent in encoding" in signs:
        return TailraceError(
            f"the database holds text that cannot be converted to UTF-8, while {doing}: {text}",
            fix="fix the value upstream, then tailrace reset FILE, as the log still holds it, and tailrace run FILE",
        )
    if state == "22021":
        return TailraceError(
            f"the database holds bytes that are not UTF-8 in a name, while {doing}: {text}",
            fix="rename that table or column upstream",
        )
    if any(sign in signs for sign in _UNFIT):
        return PreflightError(
            f"the dsn's settings do not fit the server, while {doing}: {text}",
            fix="correct sslmode, the other TLS options and `options` in the dsn",
        )
    if fix := relief(state, unnamed):
        return UnavailableError(f"Postgres cannot serve now, while {doing}: {text}", fix=fix)
    is_down = isinstance(error, psycopg.OperationalError | ConnectionError | TimeoutError)
    if is_down or (state or "")[:2] in _PASSING or _looks_down(signs):
        fix = "start the server, or correct host and port in the dsn"
        return UnavailableError(f"Postgres does not answer, while {doing}: {text}", fix=fix)
    return TailraceError(f"Postgres failed while {doing}: {text}")


_QUOTED = re.compile(r'"[^"]*"')
_ADBC = "[libpq]"
"""A connection that breaks while batches arrive is an Arrow error. This in its text shows that it is the driver's."""
_REFUSED = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "not permitted to log in")
_UNFIT = (
    "does not support SSL",
    "invalid sslmode",
    "root certificate file",
    "unrecognized configuration parameter",
    "invalid connection option",  # psycopg accepts more of them than ADBC, whose libpq is older
)

_UNKNOWN_SYNTAX = ("42601", "0A000")
"""A syntax error, and a feature that is not supported: no wait helps."""
_PASSING = ("08", "53", "57", "58")
"""SQLSTATE classes of temporary errors: broken connection, no disk or memory, shutdown or cancel, system error."""


def lacks(what: str, text: str) -> bool:
    """Whether the server reports that a thing of this kind does not exist."""
    return f'{what} "' in text and "does not exist" in text


def _looks_down(text: str) -> bool:
    signs = (
        "server closed",
        "connection",
        "terminating",
        "starting up",
        "shutting down",
        "timeout",
        "could not connect",
    )
    return any(sign in text.lower() for sign in signs)


@contextmanager
def session(dsn: str, doing: str, *, autocommit: bool = True) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A short-lived psycopg session. Errors inside it state what was being done."""
    with translated(doing), connect(connection_string(dsn)) as connection:
        connection.autocommit = autocommit
        yield connection


@contextmanager
def as_of(connection: psycopg.Connection[Any], snapshot: str | None) -> Iterator[None]:
    """Queries inside see an exported snapshot; without one, the current state."""
    if snapshot is None:
        yield
        return
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    try:
        try:
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
        except psycopg.Error as error:
            raise UnavailableError("the copy's snapshot ended with its session") from error
        yield
    finally:
        connection.execute("ROLLBACK")


# Set once the server's version is known, because an older one refuses the connection for a setting it does not have.
# A role's own timeouts must not end a copy, nor the snapshot that its tasks share; and where a table was is never to be
# a view, whose owner's functions would be called with our rights.
_LATER_SETTINGS = (
    ("idle_session_timeout", "0", (140000,)),
    ("transaction_timeout", "0", (170000,)),
    ("restrict_nonsystem_relation_kind", "view", (120020, 130016, 140013, 150008, 160004, 170000)),
)


def later_settings(server_version: int) -> dict[str, str]:
    """The settings of a session that only newer servers have; `server_version` is as in 160004."""

    def has(since: Sequence[int]) -> bool:
        of_same = next((first for first in since if first // 10000 == server_version // 10000), since[-1])
        return server_version >= of_same

    return {name: value for name, value, since in _LATER_SETTINGS if has(since)}


def connect(address: str, **options: Any) -> PgConnection:
    """A session with bounded waits and every setting that this server has. The caller closes it."""
    made: PgConnection = BoundedConnection.connect(address, autocommit=True, **options)
    settings = later_settings(made.info.server_version)
    calls = sql.SQL(", ").join(sql.SQL("set_config({}, {}, false)").format(*pair) for pair in settings.items())
    try:
        if settings:
            made.execute(sql.SQL("SELECT {}").format(calls))
    except BaseException:
        made.close()
        raise
    return made


@cache
def row_settings(dsn: str) -> Mapping[str, str]:
    """The settings for sessions that read rows, which depend on the database's encoding. Queried once per process."""
    with session(dsn, "reading the encoding") as connection:
        settings = session_for(connection.info.parameter_status("server_encoding") or "")
        return {**settings, **later_settings(connection.info.server_version)}


class Replication:
    """A connection that speaks the replication protocol."""

    def __init__(self, dsn: str) -> None:
        # A new slot waits for every open transaction, however long that takes.
        settings = {**row_settings(dsn), "lock_timeout": "0"}
        self._address = connection_string(dsn)
        address = connection_string(dsn, settings, replication="database")
        with translated("opening a replication connection"):
            self._connection: PgConnection = BoundedConnection.connect(address, autocommit=True)
        self.pgconn = self._connection.pgconn
        self.server_version = self.pgconn.server_version
        # Whoever streams flushes what it sends.
        self.pgconn.nonblocking = 0

    def __enter__(self) -> Replication:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def execute(self, command: str, *, copies: bool = False) -> list[str | None]:
        """Run a replication command; returns its first row as text. `copies` leaves the connection in copy mode."""
        self.pgconn.send_query(command.encode())
        with translated(f"sending {command.split('(')[0].strip()}"):
            result = wait_bounded(generators.execute(self.pgconn), self.pgconn, self._address)[-1]
        expected = pq.ExecStatus.COPY_BOTH if copies else pq.ExecStatus.TUPLES_OK
        if result.status != expected and not (not copies and result.status == pq.ExecStatus.COMMAND_OK):
            sqlstate = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
            message = result.get_error_message()
            raise translate(_error_of(sqlstate, message), f"sending {command.split('(')[0].strip()}")
        if copies or not result.ntuples:
            return []
        values = (result.get_value(0, i) for i in range(result.nfields))
        return [None if value is None else value.decode() for value in values]


def _error_of(sqlstate: str, message: str) -> psycopg.Error:
    """The driver's error for a refused replication command.

    An internal error (XX) may be one of decoding a catalog that is just being changed: it is worth another try.
    """
    try:
        kind = psycopg.errors.lookup(sqlstate)
    except KeyError:
        kind = psycopg.OperationalError
    return psycopg.OperationalError(message) if sqlstate.startswith("XX") else kind(message)
