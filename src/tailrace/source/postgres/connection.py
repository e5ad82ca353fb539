"""Connections to Postgres: settings that make its text output exact, and errors in our own tree.

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

CONNECT_TIMEOUT_SECONDS = 10
SILENCE_SECONDS = float(os.environ.get("TAILRACE_SILENCE_SECONDS", "30"))
"""How long a server that was asked something may be silent before the connection counts as half-open."""


def connection_string(dsn: str, settings: Mapping[str, str] = SESSION, **extra: str) -> str:
    """The user's DSN with what tailrace needs of every session: pinned output settings, keepalives, a name."""
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
    """The one table from a driver's error to what tailrace does about it."""
    state = getattr(error, "sqlstate", None)
    text = " ".join(str(error).split())
    # Where there is a state it decides. Without one only the text is left, but never a name that it quotes.
    signs = "" if state else _QUOTED.sub('""', text)
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
        # The log is decoded by the catalog of its time; whether there is one by now is another question.
        return UnavailableError(f"there was no publication, while {doing}: {text}", fix="tailrace check FILE")
    if state == "22P05" or "has no equivalent in encoding" in signs:
        return TailraceError(
            f"a text of the database has no form in UTF-8, while {doing}: {text}",
            fix="mend the value upstream, then tailrace reset FILE, as the log still holds it, and tailrace run FILE",
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
    if fix := relief(state, signs):
        return UnavailableError(f"Postgres cannot serve now, while {doing}: {text}", fix=fix)
    is_down = isinstance(error, psycopg.OperationalError | ConnectionError | TimeoutError)
    if is_down or (state or "")[:2] in _PASSING or _looks_down(signs):
        fix = "start the server, or correct host and port in the dsn"
        return UnavailableError(f"Postgres does not answer, while {doing}: {text}", fix=fix)
    return TailraceError(f"Postgres failed while {doing}: {text}")


_QUOTED = re.compile(r'"[^"]*"')
_ADBC = "[libpq]"
"""What breaks off while batches come is an error of Arrow; this in its text shows that the driver is behind it."""
_REFUSED = ("authentication failed", "no password supplied", "no pg_hba.conf entry", "not permitted to log in")
_UNFIT = (
    "does not support SSL",
    "invalid sslmode",
    "root certificate file",
    "unrecognized configuration parameter",
    "invalid connection option",  # psycopg knows more of them than ADBC, whose libpq is older
)

_PASSING = ("08", "53", "57", "58")
"""Classes of states that pass: broken connections, no room or memory, a shutdown or a cancel, the system's errors."""


def lacks(what: str, text: str) -> bool:
    """Whether the server says that there is no such thing."""
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
    """A short-lived psycopg session; everything that fails inside says what was being done."""
    with translated(doing), psycopg.connect(connection_string(dsn), autocommit=autocommit) as connection:
        yield connection


@contextmanager
def as_of(connection: psycopg.Connection[Any], snapshot: str | None) -> Iterator[None]:
    """What is asked inside is answered as of an exported snapshot; as of now without one."""
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
    """A session for short questions: one that is not answered in time raises OperationalError instead of waiting on.

    Keepalives do not find every half-open connection: something in between may go on answering them.
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
            raise psycopg.OperationalError(f"no answer for {SILENCE_SECONDS:g} s, the connection is taken for dead")


@cache
def row_settings(dsn: str) -> Mapping[str, str]:
    """The settings for sessions that read rows, which depend on the database's encoding. Asked once per process."""
    with session(dsn, "asking for the encoding") as connection:
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
    # Imported here because it loads pandas, which costs whoever does not need it a quarter of a second.
    from adbc_driver_manager import dbapi

    database = _types.of(address)
    try:
        return dbapi.Connection(database, adbc_driver_manager.AdbcConnection(database._db), autocommit=True)
    finally:
        database.close()


class _Types:
    """What ADBC knows of the types of one server, the last one asked for. It holds no connection.

    The driver reads all of them before it connects. Types that people made are unknown to it or known by an old
    name; no query of ours gives it a value of such a type.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._address = ""
        self._database: Any = None

    def of(self, address: str) -> Any:
        """A share of ADBC's database object, to be closed."""
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
        """Run a replication command; its first row as text. With `copies` the connection is in copy mode after it."""
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
