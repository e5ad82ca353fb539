"""The initial copy: rounds, chunks and reading them.

A round is one exported snapshot that many tasks share. Its LSN x splits history: what committed before x is in
the snapshot, everything else is in the log. A restart opens a new round for the chunks that are left; because
the log is applied from the *first* round's x, every key still ends at its last change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from tailrace.change import Changes, Op
from tailrace.errors import TailraceError, UnavailableError
from tailrace.schema import TableSchema
from tailrace.source import Split
from tailrace.source.postgres.connection import Replication, bulk, connection_string, session, translated
from tailrace.source.postgres.lsn import parse_lsn
from tailrace.source.postgres.mapping import Converter, select_list
from tailrace.source.postgres.offset import Chunk

READ_BYTES = 16 * 1024 * 1024
"""How much ADBC puts into one Arrow batch."""


class Round:
    """An exported snapshot, held open by a session of its own until `close`."""

    def __init__(self, dsn: str) -> None:
        with Replication(dsn) as replication:
            slot = f"tailrace_round_{replication.pgconn.backend_pid}"
            _, x, snapshot, _ = replication.execute(
                f"CREATE_REPLICATION_SLOT \"{slot}\" TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
            )
            assert x is not None
            assert snapshot is not None
            self.x = parse_lsn(x)
            with translated("opening a snapshot for the copy"):
                self._session = psycopg.connect(connection_string(dsn), autocommit=True)
                # The slot would hold WAL for as long as the copy takes; the snapshot outlives it.
                self._session.execute("SET idle_in_transaction_session_timeout = 0")
                self._session.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                self._session.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
                row = self._session.execute("SELECT pg_export_snapshot()").fetchone()
        assert row is not None
        self.snapshot: str = row[0]

    def close(self) -> None:
        self._session.close()


_HEAPS = """
WITH RECURSIVE tree AS (
    SELECT %s::oid AS oid
  UNION
    SELECT i.inhrelid FROM tree JOIN pg_inherits i ON i.inhparent = tree.oid JOIN pg_class c ON c.oid = i.inhrelid
    WHERE c.relispartition
)
SELECT c.oid, pg_relation_size(c.oid) / current_setting('block_size')::int
FROM tree JOIN pg_class c USING (oid) WHERE c.relkind = 'r' ORDER BY 1
"""


def measure_heaps(dsn: str, oid: int) -> dict[str, int]:
    """The heaps that hold a table's rows (itself, or its leaf partitions) with their size in pages.

    In a session of its own: the round's would hold every lock it takes until the copy ends, and with it up
    whoever wants to truncate or alter a table.
    """
    with session(dsn, "measuring a table for the copy") as connection:
        return {str(heap): int(pages) for heap, pages in connection.execute(_HEAPS, [oid]) if pages is not None}


class Opening:
    """A round being opened beside the stream: creating a snapshot waits for every open write transaction."""

    def __init__(self, dsn: str) -> None:
        self._round: Round | None = None
        self._error: Exception | None = None
        self._abandoned = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._open, args=[dsn], name="tailrace-round", daemon=True)
        self._thread.start()

    def _open(self, dsn: str) -> None:
        try:
            opened = Round(dsn)
            with self._lock:
                if self._abandoned:
                    opened.close()
                else:
                    self._round = opened
        except Exception as error:  # noqa: BLE001 - raised again by `wait`
            self._error = error

    def wait(self, seconds: float) -> Round | None:
        """The round once it is open, None while it is not. Raises what opening it raised."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return self._round

    def abandon(self) -> None:
        """Nobody wants the round any more: it is closed, now or once it is open."""
        with self._lock:
            self._abandoned = True
            if self._round is not None:
                self._round.close()


@dataclass(frozen=True)
class CopySplit(Split):
    """Some pages of one heap, under one snapshot. The last range of a heap has no end: the heap may have grown."""

    part: int = 0
    first_page: int = 0
    end_page: int | None = None
    snapshot: str = ""
    x: int = 0
    row_filter: str | None = None


def copy_split(
    table: TableSchema, chunk: Chunk, chunk_pages: int, round_: Round, x: int, row_filter: str | None
) -> CopySplit:
    last = chunk.ordinal == chunk.of - 1
    return CopySplit(
        copies=table,
        starts=chunk.index == 0,
        part=chunk.part,
        first_page=chunk.ordinal * chunk_pages,
        end_page=None if last else (chunk.ordinal + 1) * chunk_pages,
        snapshot=round_.snapshot,
        x=x,
        row_filter=row_filter,
    )


def read_chunk(dsn: str, split: CopySplit) -> Iterator[Changes]:
    """The rows of one chunk as Arrow, a batch at a time."""
    table = split.copies
    assert table is not None
    converter = Converter(table)
    with bulk(dsn, f"copying {table.table}") as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            cursor.execute(f"SET TRANSACTION SNAPSHOT '{_snapshot(split.snapshot)}'")
        except Exception as error:
            raise UnavailableError(f"the copy's snapshot ended with its session ({type(error).__name__})") from error
        heap = _heap_name(cursor, split.part)
        if heap is None:
            return  # a partition dropped since the round began: its rows went with it
        cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": READ_BYTES})
        cursor.execute(_query(table, heap, split).as_string())
        for batch in cursor.fetch_record_batch():
            row, exact = converter.convert(batch)
            yield Changes.build(table, row, op=Op.READ, commit=split.x - 1, exact=exact)


def _query(table: TableSchema, heap: Sequence[str], split: CopySplit) -> sql.Composed:
    bounds = [sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({split.first_page},0)"))]
    if split.end_page is not None:
        bounds.append(sql.SQL("ctid < {}::tid").format(sql.Literal(f"({split.end_page},0)")))
    if split.row_filter:
        # The publication's own expression, as the catalog prints it; only its owner can write it.
        bounds.append(sql.SQL("({})").format(sql.SQL(split.row_filter)))
    return sql.SQL("SELECT {} FROM ONLY {} WHERE {}").format(
        select_list(table), sql.Identifier(*heap), sql.SQL(" AND ").join(bounds)
    )


def _heap_name(cursor: Any, oid: int) -> tuple[str, str] | None:
    query = sql.SQL(
        "SELECT n.nspname::text, c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.oid = {}"
    )
    cursor.execute(query.format(sql.Literal(oid)).as_string())
    found = cursor.fetchone()
    return None if found is None else (found[0], found[1])


def _snapshot(name: str) -> str:
    if not all(character in "0123456789ABCDEFabcdef-" for character in name):
        raise TailraceError(f"{name!r} is not a snapshot's name")
    return name


FETCH_ROWS = 1000


def fetch(dsn: str, table: TableSchema, keys: pa.Table) -> pa.Table:
    """The rows of these keys as they are now, in the layout of a copy. A log rarely leaves out what this reads."""
    converter = Converter(table)
    found: list[pa.RecordBatch] = []
    with bulk(dsn, f"re-reading rows of {table.table}") as connection, connection.cursor() as cursor:
        for start in range(0, keys.num_rows, FETCH_ROWS):
            cursor.execute(_fetch_query(table, keys.slice(start, FETCH_ROWS)).as_string())
            for batch in cursor.fetch_record_batch():
                row, _ = converter.convert(batch)
                found.append(pa.RecordBatch.from_struct_array(row))
    return pa.Table.from_batches(found, pa.schema(list(table.row_type)))


def _fetch_query(table: TableSchema, keys: pa.Table) -> sql.Composed:
    texts = [[_key_text(value) for value in keys.column(name).to_pylist()] for name in table.key]
    aliases = [sql.Identifier(f"k{i}") for i in range(len(table.key))]
    return sql.SQL("SELECT {} FROM {} WHERE ({}) IN (SELECT {} FROM unnest({}) AS wanted({}))").format(
        select_list(table),
        sql.Identifier(table.table.schema, table.table.name),
        sql.SQL(", ").join(sql.Identifier(name) for name in table.key),
        sql.SQL(", ").join(
            # The declared type is the catalog's own spelling of it.
            sql.SQL("{}::" + table.column(name).upstream_type).format(alias)
            for name, alias in zip(table.key, aliases, strict=True)
        ),
        sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(values)) for values in texts),
        sql.SQL(", ").join(aliases),
    )


def _key_text(value: Any) -> str:
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    return value.isoformat() if isinstance(value, date) else str(value)
