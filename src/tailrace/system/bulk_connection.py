"""A Postgres session whose results and rows are Arrow, by ADBC."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import adbc_driver_manager
import pyarrow as pa

from tailrace.system.libpq import ports_of
from tailrace.system.silence import SocketWatch, is_working


class BulkConnection:
    """A session; the second one to the same address is opened in a twentieth of the time.

    A call that stays unanswered raises SilentError, unless the server is still working on it.
    """

    def __init__(self, address: str) -> None:
        # Imported here because it loads pandas, which takes a quarter of a second.
        from adbc_driver_manager import dbapi

        self._watch = SocketWatch(ports_of(address), lambda: is_working(address, self._pid))
        with self._watch.opening():
            database = _types.of(address)
            try:
                made = adbc_driver_manager.AdbcConnection(database._db)
                self._connection = dbapi.Connection(database, made, autocommit=True)
            finally:
                database.close()
        self._pid = 0
        with self.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            self._pid = cursor.fetchall()[0][0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cursor(self) -> BulkCursor:
        return BulkCursor(self._connection.cursor(), self._watch)

    def begin(self) -> None:
        """Begin a transaction: no longer in autocommit, until `commit` or `rollback`."""
        self._connection.adbc_connection.set_autocommit(False)

    def commit(self) -> None:
        with self._watch.watching():
            self._connection.commit()
        self._connection.adbc_connection.set_autocommit(True)

    def rollback(self) -> None:
        with self._watch.watching():
            self._connection.rollback()
        self._connection.adbc_connection.set_autocommit(True)

    def close(self) -> None:
        self._connection.close()
        self._watch.close()


class BulkCursor:
    """The part of a DB-API cursor that is used here."""

    def __init__(self, cursor: Any, watch: SocketWatch) -> None:
        self._cursor = cursor
        self._watch = watch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cursor.close()

    def set_batch_bytes(self, size: int) -> None:
        """How large the batches of later results are."""
        self._cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": size})

    def execute(self, query: str, values: Sequence[Any] = ()) -> None:
        with self._watch.watching():
            self._cursor.execute(query, values or None)

    def fetchone(self) -> tuple[Any, ...] | None:
        with self._watch.watching():
            row: tuple[Any, ...] | None = self._cursor.fetchone()
            return row

    def fetchall(self) -> list[tuple[Any, ...]]:
        with self._watch.watching():
            rows: list[tuple[Any, ...]] = self._cursor.fetchall()
            return rows

    def fetch_arrow_table(self) -> pa.Table:
        with self._watch.watching():
            return self._cursor.fetch_arrow_table()

    def fetch_batches(self) -> Iterator[pa.RecordBatch]:
        """The result, a batch at a time. Each may be read by another thread than the one before it."""
        reader: pa.RecordBatchReader = self._cursor.fetch_record_batch()
        return iter(partial(self._next, reader), None)

    def _next(self, reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
        with self._watch.watching():
            return next(reader, None)

    def ingest(self, table: str, rows: Any) -> None:
        """Create a temporary table with these rows."""
        with self._watch.watching():
            self._cursor.adbc_ingest(table, rows, mode="create", temporary=True)


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
