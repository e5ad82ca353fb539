"""Sessions that read rows of the upstream as Arrow: by the compiled reader where there is one, else by ADBC."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import adbc_driver_manager
import psycopg
import pyarrow as pa
from psycopg import generators, pq

from tailrace.model.schema import Column
from tailrace.source.postgres import row_reader
from tailrace.source.postgres.bulk import bulk
from tailrace.source.postgres.connection import PgConnection, connect, connection_string, row_settings, translated
from tailrace.system.bulk_connection import BulkConnection, BulkCursor
from tailrace.system.silence import SILENCE_SECONDS, SilentError, is_working, wait_bounded

READ_BYTES = 16 * 1024 * 1024
"""How much ADBC puts into one Arrow batch."""
_IN_TRANSACTION = (pq.TransactionStatus.INTRANS, pq.TransactionStatus.INERROR)
IDLE_SECONDS = 2.0
"""How long a session waits for the next chunk of the same copy."""


class RowSession(Protocol):
    """A session in autocommit."""

    has_binary: bool
    """Whether `read` reads every type of `copy_query.reading_of`, for `select_list`."""

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """Run a statement; its rows, if it returns any."""

    def read(self, query: str, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        """The result of a SELECT of `copy_query.select_list`. The query runs before this returns."""


class CompiledSession:
    """By psycopg, and its rows by the compiled reader."""

    has_binary = True

    def __init__(self, dsn: str) -> None:
        self._address = connection_string(dsn, row_settings(dsn))
        self._connection: PgConnection = connect(self._address, prepare_threshold=None)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(query.encode())
        if cursor.description is None:
            return []
        # Text comes as bytes from a database whose encoding is SQL_ASCII.
        return [
            tuple(value.decode() if isinstance(value, bytes) else value for value in row) for row in cursor.fetchall()
        ]

    def read(self, query: str, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        pgconn = self._connection.pgconn
        pgconn.send_query(f"COPY ({query}) TO STDOUT (FORMAT binary)".encode())
        began = wait_bounded(generators.execute(pgconn), pgconn, self._address)[-1]
        if began.status != pq.ExecStatus.COPY_OUT:
            raise self._error(began)
        return self._batches(columns)

    def _batches(self, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        pgconn = self._connection.pgconn
        deadline = time.monotonic() + SILENCE_SECONDS

        def check() -> None:
            nonlocal deadline
            if time.monotonic() > deadline:
                if not is_working(self._address, pgconn.backend_pid):
                    raise SilentError
                deadline = time.monotonic() + SILENCE_SECONDS

        for batch in row_reader.read_rows(self._connection, columns, check):
            yield batch
            deadline = time.monotonic() + SILENCE_SECONDS
        ended = wait_bounded(generators.fetch_many(pgconn), pgconn, self._address)[-1]
        if ended.status != pq.ExecStatus.COMMAND_OK:
            raise self._error(ended)

    def _error(self, result: pq.abc.PGresult) -> psycopg.Error:
        return psycopg.errors.error_from_result(result, encoding="utf-8")

    @property
    def is_idle(self) -> bool:
        return self._connection.pgconn.transaction_status == pq.TransactionStatus.IDLE

    def end_transaction(self) -> None:
        """The session is idle afterwards, unless rows of it were not read to their end."""
        if self._connection.pgconn.transaction_status in _IN_TRANSACTION:
            self.ask("ROLLBACK")

    def close(self) -> None:
        self._connection.close()


class BulkSession:
    """By ADBC."""

    has_binary = False

    def __init__(self, connection: BulkConnection) -> None:
        self._connection = connection

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            return cursor.fetchall()

    def read(self, query: str, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        cursor = self._connection.cursor()
        cursor.set_batch_bytes(READ_BYTES)
        cursor.execute(query)
        return self._batches(cursor)

    def _batches(self, cursor: BulkCursor) -> Iterator[pa.RecordBatch]:
        with cursor:
            yield from cursor.fetch_batches()


class _Kept:
    """The session that was used last, for the next chunk that this process reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[str, CompiledSession] | None = None
        self._process = 0
        self._timer: threading.Timer | None = None

    def take(self, dsn: str) -> CompiledSession | None:
        with self._lock:
            held, self._held = self._held, None
            if self._timer is not None:
                self._timer.cancel()
        if held is None or self._process != os.getpid():
            return None
        if held[0] == dsn and held[1].is_idle:
            return held[1]
        held[1].close()
        return None

    def give(self, dsn: str, session: CompiledSession) -> None:
        with self._lock:
            before, self._held = self._held, (dsn, session)
            self._process = os.getpid()
            self._timer = threading.Timer(IDLE_SECONDS, self._let_go, [session])
            self._timer.daemon = True
            self._timer.start()
        if before is not None:
            before[1].close()

    def _let_go(self, session: CompiledSession) -> None:
        with self._lock:
            if self._held is None or self._held[1] is not session:
                return
            self._held = None
        session.close()


_kept = _Kept()


@contextmanager
def row_session(dsn: str, doing: str) -> Iterator[RowSession]:
    """A session that reads rows. Errors inside it state what was being done."""
    if not row_reader.is_available():
        with bulk(dsn, doing) as connection:
            yield BulkSession(connection)
        return
    with translated(doing):
        session = _kept.take(dsn)
        if session is not None:
            with suppress(psycopg.Error):
                session.ask("SELECT 1")
            if not session.is_idle:  # the server ended it meanwhile
                session.close()
                session = None
        session = session or CompiledSession(dsn)
        is_whole = False
        try:
            yield session
            session.end_transaction()
            is_whole = True
        finally:
            if is_whole and session.is_idle:
                _kept.give(dsn, session)
            else:
                session.close()


def sqlstate_of(error: Exception) -> str | None:
    """The server's code for an error of either driver."""
    return error.sqlstate if isinstance(error, psycopg.Error | adbc_driver_manager.Error) else None
