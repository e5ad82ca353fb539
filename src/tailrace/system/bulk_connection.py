"""A Postgres session whose results and rows are Arrow, by ADBC.

Not by its DB-API, which loads pandas: a quarter of a second in every process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import adbc_driver_manager
import adbc_driver_postgresql
import pyarrow as pa

from tailrace.system.libpq import ports_of
from tailrace.system.silence import SocketWatch, is_working

_TO_TABLE: Final = "adbc.ingest.target_table"
_MODE: Final = "adbc.ingest.mode"
_CREATE: Final = "adbc.ingest.mode.create"
_TEMPORARY: Final = "adbc.ingest.temporary"
_BATCH_BYTES: Final = "adbc.postgresql.batch_size_hint_bytes"


class BulkConnection:
    """A session; the second one to the same address is opened in a twentieth of the time.

    A call that stays unanswered raises SilentError, unless the server is still working on it.
    """

    def __init__(self, address: str) -> None:
        self._watch = SocketWatch(ports_of(address), lambda: is_working(address, self._pid))
        with self._watch.opening():
            self._types = _latest_types.of(address)
            self._connection = adbc_driver_manager.AdbcConnection(self._types.database)
        self._cursors = weakref.WeakSet[BulkCursor]()
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
        made = BulkCursor(adbc_driver_manager.AdbcStatement(self._connection), self._watch)
        self._cursors.add(made)
        return made

    def begin(self) -> None:
        """Begin a transaction: no longer in autocommit, until `commit` or `rollback`."""
        self._connection.set_autocommit(False)

    def commit(self) -> None:
        with self._watch.watching():
            self._connection.commit()
        self._connection.set_autocommit(True)

    def rollback(self) -> None:
        with self._watch.watching():
            self._connection.rollback()
        self._connection.set_autocommit(True)

    def close(self) -> None:
        for cursor in list(self._cursors):
            cursor.close()
        self._connection.close()
        self._watch.close()


class BulkCursor:
    """A statement and its result."""

    def __init__(self, statement: Any, watch: SocketWatch) -> None:
        self._statement = statement
        self._watch = watch
        self._result: pa.RecordBatchReader | None = None
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._end_result()
            self._statement.close()

    def set_batch_bytes(self, size: int) -> None:
        """How large the batches of later results are."""
        self._statement.set_options(**{_BATCH_BYTES: size})

    def execute(self, query: str, values: Sequence[Any] = ()) -> None:
        self._end_result()
        with self._watch.watching():
            self._statement.set_sql_query(query)
            self._statement.prepare()
            if values:
                names = [str(index) for index in range(len(values))]
                self._statement.bind(pa.record_batch([pa.array([value]) for value in values], names=names))
            stream, _ = self._statement.execute_query()
            self._result = pa.RecordBatchReader._import_from_c(stream.address)

    def fetchone(self) -> tuple[Any, ...] | None:
        """The only row of a result, or the first one."""
        return next(iter(self.fetchall()), None)

    def fetchall(self) -> list[tuple[Any, ...]]:
        table = self.fetch_arrow_table()
        return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

    def fetch_arrow_table(self) -> pa.Table:
        with self._watch.watching():
            return self._opened().read_all()

    def fetch_batches(self) -> Iterator[pa.RecordBatch]:
        """The result, a batch at a time. Each may be read by another thread than the one before it."""
        return iter(partial(self._next, self._opened()), None)

    def _next(self, reader: pa.RecordBatchReader) -> pa.RecordBatch | None:
        with self._watch.watching():
            return next(reader, None)

    def ingest(self, table: str, rows: Any) -> None:
        """Create a temporary table with these rows."""
        self._statement.set_options(**{_TO_TABLE: table, _MODE: _CREATE, _TEMPORARY: "true"})
        if isinstance(rows, pa.RecordBatch):
            self._statement.bind(rows)
        else:
            self._statement.bind_stream(rows)
        with self._watch.watching():
            self._statement.execute_update()

    def _opened(self) -> pa.RecordBatchReader:
        assert self._result is not None, "nothing was executed"
        return self._result

    def _end_result(self) -> None:
        if self._result is not None:
            self._result.close()
            self._result = None


class _Types:
    """ADBC's type catalog of one server. It holds no connection, and is closed after the last that was opened by it.

    The driver reads all types before it connects. It may not know a user-defined type, or only by an old name; no query
    of ours returns a value of such a type.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.database = adbc_driver_postgresql.connect(address)

    def __del__(self) -> None:
        # Never made, or its connection was not closed either.
        with suppress(AttributeError, RuntimeError):
            self.database.close()


class _LatestTypes:
    """The catalog that was used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._types: _Types | None = None

    def of(self, address: str) -> _Types:
        with self._lock:
            if self._types is None or self._types.address != address:
                self._types = _Types(address)
            return self._types


_latest_types = _LatestTypes()
