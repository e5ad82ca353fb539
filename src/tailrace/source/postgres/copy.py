"""The initial copy: snapshots, chunks and reading them.

Many tasks share one exported snapshot. Its LSN x splits history: what committed before x is in the snapshot,
everything else is in the log. A restart opens a new snapshot for the remaining chunks; because the log is applied
from the *first* snapshot's x, every key still ends at its last change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import adbc_driver_manager
import psycopg
import pyarrow as pa
from psycopg import sql

from tailrace.errors import StaleCopyError, TailraceError, UnavailableError
from tailrace.model.change import EXACT, Changes, Op
from tailrace.model.schema import TableSchema
from tailrace.source.postgres.connection import (
    Replication,
    as_of,
    connect,
    connection_string,
    of_table,
    session,
    translated,
)
from tailrace.source.postgres.copy_query import Converter, output_text, select_list
from tailrace.source.postgres.offset import Chunk, parse_lsn
from tailrace.source.postgres.pgoutput.instant import DAY_US, format_microsecond
from tailrace.source.postgres.pgoutput.message import EPOCH_US
from tailrace.source.postgres.row_session import RowSession, row_session, sqlstate_of
from tailrace.source.postgres.slot import snapshot_slot_command
from tailrace.source.split import Split

NO_HEAP = "0.0"
"""The heap of a partitioned table without partitions. Its copy has no rows, and so removes those of an earlier copy."""


class PostgresSnapshot:
    """An exported snapshot, kept open by its own session until `close`."""

    def __init__(self, dsn: str) -> None:
        with Replication(dsn) as replication:
            slot = f"tailrace_round_{replication.pgconn.backend_pid}"
            _, x, snapshot, _ = replication.execute(snapshot_slot_command(slot, replication.server_version))
            assert x is not None
            assert snapshot is not None
            self.x = parse_lsn(x)
            with translated("opening a snapshot for the copy"):
                self._session = connect(connection_string(dsn))
                # The slot would hold WAL for as long as the copy takes; the snapshot outlives it.
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
SELECT c.oid, pg_relation_filenode(c.oid), pg_relation_size(c.oid) / current_setting('block_size')::int
FROM tree JOIN pg_class c USING (oid) WHERE c.relkind = 'r' ORDER BY 1
"""

_FILES = "SELECT oid, relfilenode FROM pg_class WHERE oid = ANY(%s)"


def measure_heaps(dsn: str, oids: Sequence[int], snapshot: str) -> dict[int, dict[str, int]] | None:
    """By table, the heaps that hold its rows (itself, or its leaf partitions) with their size in pages.

    None when one was rewritten since the snapshot, which cannot see its current rows.

    A heap is named by its OID and its file, as in `16385.16390`: rows that were moved to another file (by VACUUM FULL,
    or an ALTER TABLE that rewrites) are on other pages, and invisible to older snapshots.

    Uses a separate session: the snapshot's session would hold every lock until the copy ends, and so block anyone who
    wants to truncate or alter a table.
    """
    with session(dsn, "measuring a table for the copy") as connection:
        found = {oid: connection.execute(_HEAPS, [oid]).fetchall() for oid in oids}
        with as_of(connection, snapshot):
            then = dict(connection.execute(_FILES, [[heap for rows in found.values() for heap, *_ in rows]]).fetchall())
    if any(then.get(heap, file) != file for rows in found.values() for heap, file, _ in rows):
        return None
    return {
        oid: {f"{heap}.{file}": int(pages) for heap, file, pages in rows if pages is not None} or {NO_HEAP: 0}
        for oid, rows in found.items()
    }


class SnapshotOpening:
    """Opens a snapshot in a thread: creating one waits for every open write transaction."""

    def __init__(self, dsn: str) -> None:
        self._snapshot: PostgresSnapshot | None = None
        self._error: Exception | None = None
        self._abandoned = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._open, args=[dsn], name="tailrace-snapshot", daemon=True)
        self._thread.start()

    def _open(self, dsn: str) -> None:
        try:
            opened = PostgresSnapshot(dsn)
            with self._lock:
                if self._abandoned:
                    opened.close()
                else:
                    self._snapshot = opened
        except Exception as error:  # noqa: BLE001 - raised again by `wait`
            self._error = error

    def wait(self, seconds: float) -> PostgresSnapshot | None:
        """The snapshot once it is open, None until then. Raises the error that opening it raised."""
        self._thread.join(seconds)
        if self._error is not None:
            raise self._error
        return self._snapshot

    def abandon(self) -> None:
        """The snapshot is no longer needed: close it, now or once it is open."""
        with self._lock:
            self._abandoned = True
            if self._snapshot is not None:
                self._snapshot.close()


@dataclass(frozen=True)
class PostgresCopySplit(Split):
    """Some pages of one heap, under one snapshot. The last range of a heap has no end: the heap may have grown.

    `filtered_by` is the OID of the publication's entry whose row filter applies, 0 for none.
    """

    part: str = ""
    first_page: int = 0
    end_page: int | None = None
    snapshot: str = ""
    snapshot_position: int = 0
    filtered_by: int = 0


def copy_split(
    table: TableSchema, chunk: Chunk, chunk_pages: int, snapshot: PostgresSnapshot, x: int, filtered_by: int
) -> PostgresCopySplit:
    last = chunk.ordinal == chunk.of - 1
    return PostgresCopySplit(
        copies=table,
        part=chunk.part,
        first_page=chunk.ordinal * chunk_pages,
        end_page=None if last else (chunk.ordinal + 1) * chunk_pages,
        snapshot=snapshot.snapshot,
        snapshot_position=x,
        filtered_by=filtered_by,
    )


READ_ATTEMPTS = 3


def read_chunk(dsn: str, split: PostgresCopySplit) -> Iterator[Changes]:
    """The rows of one chunk as Arrow, a batch at a time, with the columns the table had when its copy began.

    Raises StaleCopyError when the table changed since in a way that needs a new copy.
    """
    table = split.copies
    assert table is not None
    converter = Converter(table)
    with of_table(str(table.table)), row_session(dsn, f"copying {table.table}") as session:
        for batch in _open_chunk(session, table, split):
            row, exact = converter.convert(batch)
            yield Changes.build(table, row, op=Op.READ, commit=split.snapshot_position - 1, exact=exact)


def _open_chunk(session: RowSession, table: TableSchema, split: PostgresCopySplit) -> Iterable[pa.RecordBatch]:
    for attempt in range(1, READ_ATTEMPTS + 1):
        heap = _Heap.find(session, split.part, table)
        if heap is None:
            break  # dropped since the snapshot: its rows are gone as well
        row_filter = _find_filter(session, table, split.filtered_by) if split.filtered_by else None
        session.ask("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        try:
            session.ask(f"SET TRANSACTION SNAPSHOT '{_snapshot(split.snapshot)}'")
        except Exception as error:
            raise UnavailableError(f"the copy's snapshot ended with its session ({type(error).__name__})") from error
        try:
            heap.lock(session)
            query = _query(table, heap, split, row_filter, binary=session.has_binary)
            return session.read(query.as_string(), table.columns)
        except (adbc_driver_manager.Error, psycopg.Error) as error:
            # Renamed or dropped between the lookup and the lock.
            if sqlstate_of(error) not in _MOVED or attempt == READ_ATTEMPTS:
                raise
            session.ask("ROLLBACK")
    return ()


_MOVED = ("42P01", "42703")


@dataclass(frozen=True)
class _Heap:
    """A heap under its current name. `columns` has the current name of each copied column, None if dropped."""

    oid: int
    file: int
    name: tuple[str, str]
    columns: Mapping[str, str | None]
    table: TableSchema
    partitioned: bool

    @classmethod
    def find(cls, session: RowSession, part: str, table: TableSchema) -> _Heap | None:
        # Not under the snapshot, which shows the old names; a SELECT needs the current ones.
        oid, file = map(int, part.split("."))
        found = session.ask(_HEAP_NAME.format(sql.Literal(oid)).as_string())
        if not found:
            return None
        columns_now = session.ask(_COLUMNS_NOW.format(sql.Literal(int(table.upstream_id))).as_string())
        now = {number: (name, declared) for number, name, declared in columns_now}
        columns: dict[str, str | None] = {}
        for column in table.columns:
            name, declared = now.get(column.number, (None, None))
            if declared is not None and declared != column.upstream_type:
                raise StaleCopyError(
                    f"the type of column {column.name} changed to {declared} while the table was copied",
                    table=str(table.table),
                )
            columns[column.name] = name
        schema, name, partitioned = found[0]
        return cls(oid, file, (schema, name), columns, table, partitioned)

    def lock(self, session: RowSession) -> None:
        """Lock the heap until the transaction ends. Raises StaleCopyError when its name or its file changed."""
        session.ask(sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(self.identifier).as_string())
        locked = _LOCKED.format(sql.Literal(self.oid), sql.Literal(self.identifier.as_string()))
        if session.ask(locked.as_string()) != [(self.file, self.oid)]:
            raise StaleCopyError(
                "the table was rewritten, truncated or renamed while it was copied", table=str(self.table.table)
            )

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(*self.name)


_HEAP_NAME = sql.SQL(
    "SELECT n.nspname::text, c.relname::text, c.relkind = 'p'"
    " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = {}"
)
_LOCKED = sql.SQL("SELECT pg_relation_filenode({}::oid)::int8, to_regclass({})::oid::int8")
_COLUMNS_NOW = sql.SQL(
    "SELECT attnum::int8, attname::text, format_type(atttypid, atttypmod) FROM pg_attribute"
    " WHERE attrelid = {} AND attnum > 0 AND NOT attisdropped"
)


_FILTER = sql.SQL("SELECT pg_get_expr(prqual, prrelid) FROM pg_publication_rel WHERE oid = {}")


def _find_filter(session: RowSession, table: TableSchema, entry: int) -> str:
    """The row filter with the current column names. Raises StaleCopyError when the publication's entry is gone."""
    found = session.ask(_FILTER.format(sql.Literal(entry)).as_string())
    if not found:
        raise StaleCopyError("the publication changed while the table was copied", table=str(table.table))
    return str(found[0][0])


def _query(
    table: TableSchema, heap: _Heap, split: PostgresCopySplit, row_filter: str | None, *, binary: bool
) -> sql.Composed:
    bounds = [sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({split.first_page},0)"))]
    if split.end_page is not None:
        bounds.append(sql.SQL("ctid < {}::tid").format(sql.Literal(f"({split.end_page},0)")))
    if row_filter:
        # The publication's own expression, as the catalog prints it; only its owner can write it.
        bounds.append(sql.SQL("({})").format(sql.SQL(row_filter)))
    return sql.SQL("SELECT {} FROM ONLY {} WHERE {}").format(
        select_list(table, heap.columns, binary=binary), heap.identifier, sql.SQL(" AND ").join(bounds)
    )


def _snapshot(name: str) -> str:
    if not all(character in "0123456789ABCDEFabcdef-" for character in name):
        raise TailraceError(f"{name!r} is not a snapshot's name")
    return name


FETCH_ROWS = 1000


def fetch(dsn: str, table: TableSchema, keys: pa.Table) -> pa.Table:
    """The current rows of these keys, in the layout of a copy. Rarely needed: for values that the log left out.

    Columns that were renamed since are found, dropped ones are null. Raises StaleCopyError when a type changed.
    """
    converter = Converter(table)
    found: list[pa.RecordBatch] = []
    texts: list[pa.Array[Any]] = []
    with of_table(str(table.table)), row_session(dsn, f"re-reading rows of {table.table}") as session:
        session.ask("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
        now = _lock_current(session, table)
        types = {} if now is None else _key_types(session, table)
        for start in range(0, keys.num_rows if now is not None else 0, FETCH_ROWS):
            assert now is not None
            query = _fetch_query(table, now, types, keys.slice(start, FETCH_ROWS), binary=session.has_binary)
            for batch in session.read(query.as_string(), table.columns):
                row, unfit = converter.convert(batch)
                found.append(pa.RecordBatch.from_struct_array(row))
                texts.append(pa.nulls(len(row), pa.string()) if unfit is None else unfit)
    rows = pa.Table.from_batches(found, pa.schema(list(table.row_type)))
    exact = pa.chunked_array(texts, pa.string())
    return rows if exact.null_count == len(exact) else rows.append_column(EXACT, exact)


def _lock_current(session: RowSession, table: TableSchema) -> _Heap | None:
    """The table under its current name, with a lock that keeps its name and its types; None if it was dropped."""
    part = f"{table.upstream_id}.0"
    found = _Heap.find(session, part, table)
    while found is not None:
        session.ask(sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(found.identifier).as_string())
        locked = _Heap.find(session, part, table)
        if locked == found:
            break
        found = locked
    return found


# The type below a column's domains. Of type names only the server's own are used: any other may be a domain by the time
# it is used, and a cast to a domain calls the functions of its owner, with our rights.
_KEY_TYPES = sql.SQL("""
WITH RECURSIVE below AS (
    SELECT a.attnum, t.oid, t.typbasetype FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = {} AND a.attnum > 0 AND NOT a.attisdropped
  UNION ALL
    SELECT below.attnum, t.oid, t.typbasetype FROM below JOIN pg_type t ON t.oid = below.typbasetype
)
SELECT attnum::int8, format_type(oid, -1) FROM below WHERE typbasetype = 0 AND oid < 16384
""")


def _key_types(session: RowSession, table: TableSchema) -> dict[int, str]:
    """The built-in types of columns, by number. Columns of user-defined types are not in it."""
    query = _KEY_TYPES.format(sql.Literal(int(table.upstream_id)))
    found: list[tuple[int, str]] = session.ask(query.as_string())
    return dict(found)


def _fetch_query(
    table: TableSchema, now: _Heap, types: Mapping[int, str], keys: pa.Table, *, binary: bool
) -> sql.Composed:
    texts = [_key_texts(keys.column(name).combine_chunks()) for name in table.key]
    stored: list[sql.Composable] = []
    wanted: list[sql.Composable] = []
    for index, name in enumerate(table.key):
        column, alias = sql.Identifier(now.columns[name] or name), sql.Identifier(f"k{index}")
        builtin = types.get(table.column(name).number)
        if builtin is not None:
            stored.append(column)
            wanted.append(sql.SQL("{}::" + builtin).format(alias))
            continue
        # Without an index: values of user-defined types are compared as text, and arrays as arrays of texts.
        kind = sql.SQL("text[]" if pa.types.is_list(table.column(name).type) else "text")
        stored.append(sql.SQL("{}::{}").format(output_text(column), kind))
        wanted.append(sql.SQL("{}::{}").format(alias, kind))
    # Tables that inherit from one have their own rows, whose keys may be the same.
    only = sql.SQL("" if now.partitioned else "ONLY ")
    return sql.SQL("SELECT {} FROM {}{} WHERE ({}) IN (SELECT {} FROM unnest({}) AS wanted({}))").format(
        select_list(table, now.columns, binary=binary),
        only,
        now.identifier,
        sql.SQL(", ").join(stored),
        sql.SQL(", ").join(wanted),
        sql.SQL(", ").join(sql.SQL("{}::text[]").format(sql.Literal(values)) for values in texts),
        sql.SQL(", ").join(sql.Identifier(f"k{index}") for index in range(len(table.key))),
    )


def _key_texts(values: pa.Array[Any]) -> list[str | None]:
    """Values as text that Postgres can read. Python has no dates before year 1 or after 9999."""
    kind = values.type
    if pa.types.is_list(kind):
        return ["{" + ",".join(_element(text) for text in _key_texts(each.values)) + "}" for each in values]
    if pa.types.is_temporal(kind):
        unit, zone = (DAY_US, "") if pa.types.is_date(kind) else (1, "+00" if kind.tz else "")
        counts = values.view(pa.int32() if pa.types.is_date(kind) else pa.int64()).to_pylist()
        return [None if count is None else format_microsecond(count * unit - EPOCH_US, zone) for count in counts]
    return [
        None if value is None else "\\x" + value.hex() if isinstance(value, bytes) else str(value)
        for value in values.to_pylist()
    ]


def _element(text: str | None) -> str:
    return "NULL" if text is None else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
