"""Connections to Postgres, with settings that make its text output exact and driver errors as tailrace errors.

Three drivers share one connection string: psycopg for statements, its `pq` layer for the replication
protocol, ADBC for bulk results as Arrow.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import adbc_driver_manager
import psycopg
import pyarrow as pa
from psycopg import conninfo, pq, sql

from tailrace.errors import OwnedError, PreflightError, TailraceError, UnavailableError
from tailrace.source.postgres.copy_query import SESSION, session_for
from tailrace.system.libpq import read_dsn, relief

PgConnection = psycopg.Connection[tuple[Any, ...]]

CONNECT_TIMEOUT_SECONDS = 10
SILENCE_SECONDS = float(os.environ.get("TAILRACE_SILENCE_SECONDS", "30"))
"""How long a server may leave a request unanswered before the connection counts as half-open."""


def connection_string(dsn: str, settings: Mapping[str, str] = SESSION, **extra: str) -> str:
    """The user's DSN with what every tailrace session needs: pinned output settings, keepalives, a name."""
    given = read_dsn(dsn, "source")
    options = " ".join(f"-c {name}={_escape(value)}" for name, value in settings.items())
    defaults = {
        "application_name": "tailrace",
        "connect_timeout": str(CONNECT_TIMEOUT_SECONDS),
        # A half-open connection is noticed within about half a minute.
        "keepalives_idle": "10",
        "keepalives_interval": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "30000",
    }
    merged: dict[str, Any] = {**defaults, **given, **extra}
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


def translate(error: Exception, doing: str) -> TailraceError:
    """Map a driver's error to the tailrace error that says what to do about it. The only such mapping."""
    state = getattr(error, "sqlstate", None)
    text = " ".join(str(error).split())
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
        return PreflightError(f"the role lacks a right, while {doing}: {text}", fix="tailrace check names the GRANTs")
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
    with translated(doing), psycopg.connect(connection_string(dsn), autocommit=autocommit) as connection:
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


class BoundedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A session for short queries: one that is not answered in time raises OperationalError instead of waiting on.

    Keepalives do not detect every half-open connection: something in between may keep answering them.
    """

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
        return super().wait(_bounded(gen, time.monotonic() + SILENCE_SECONDS), *arguments, **options)


def _bounded(steps: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
    ready = None
    while True:
        try:
            wanted = steps.send(ready)
        except StopIteration as done:
            return done.value
        ready = yield wanted
        if not ready and time.monotonic() > deadline:
            raise psycopg.OperationalError(f"no answer for {SILENCE_SECONDS:g} s, the connection counts as broken")


@cache
def row_settings(dsn: str) -> Mapping[str, str]:
    """The settings for sessions that read rows, which depend on the database's encoding. Queried once per process."""
    with session(dsn, "reading the encoding") as connection:
        return session_for(connection.info.parameter_status("server_encoding") or "")


@contextmanager
def bulk(dsn: str, doing: str) -> Iterator[Any]:
    """An ADBC connection in autocommit: SELECTs come back as Arrow, several statements may share a transaction."""
    with translated(doing):
        connection = connect_adbc(connection_string(dsn, row_settings(dsn)))
        try:
            yield connection
        finally:
            connection.close()


def connect_adbc(address: str) -> Any:
    """A new ADBC connection in autocommit; the second one to the same address takes a twentieth of the time."""
    # Imported here because it loads pandas, which takes a quarter of a second.
    from adbc_driver_manager import dbapi

    database = _types.of(address)
    try:
        return dbapi.Connection(database, adbc_driver_manager.AdbcConnection(database._db), autocommit=True)
    finally:
        database.close()


class _Types:
    """ADBC's type catalog of one server, the last one that was used. It holds no connection.

    The driver reads all types before it connects. It may not know a user-defined type, or only by an old name; no query
    of ours returns a value of such a type.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address = ""
        self._database: Any = None

    def of(self, address: str) -> Any:
        """A shared handle to ADBC's database object. The caller closes it."""
        with self._lock:
            if address != self._address:
                import adbc_driver_postgresql
                from adbc_driver_manager.dbapi import _SharedDatabase

                known = _SharedDatabase(adbc_driver_postgresql.connect(address))
                if self._database is not None:
                    self._database.close()
                self._address, self._database = address, known
            return self._database.clone()


_types = _Types()


class Replication:
    """A connection that speaks the replication protocol."""

    def __init__(self, dsn: str) -> None:
        self.pgconn = pq.PGconn.connect(connection_string(dsn, row_settings(dsn), replication="database").encode())
        if self.pgconn.status != pq.ConnStatus.OK:
            message = self.pgconn.get_error_message()
            self.pgconn.finish()
            raise translate(psycopg.OperationalError(message), "opening a replication connection")

    def __enter__(self) -> Replication:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.pgconn.finish()

    def execute(self, command: str, *, copies: bool = False) -> list[str | None]:
        """Run a replication command; returns its first row as text. `copies` leaves the connection in copy mode."""
        result = self.pgconn.exec_(command.encode())
        expected = pq.ExecStatus.COPY_BOTH if copies else pq.ExecStatus.TUPLES_OK
        if result.status != expected and not (not copies and result.status == pq.ExecStatus.COMMAND_OK):
            sqlstate = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
            message = result.get_error_message()
            error = (
                psycopg.errors.lookup(sqlstate)(message) if sqlstate in _STATES else psycopg.OperationalError(message)
            )
            raise translate(error, f"sending {command.split('(')[0].strip()}")
        if copies or not result.ntuples:
            return []
        values = (result.get_value(0, i) for i in range(result.nfields))
        return [None if value is None else value.decode() for value in values]


_STATES = {"55006", "42704", "42501", "28P01", "28000", "42710", "55000", "58P01", "53100", "53200", "53300", "53400"}
