"""Inspects the lake from outside: whether it equals the source, and when a change became readable."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import adbc_driver_postgresql.dbapi
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, QueryBuilder

from bench.workload import KEY

RANGE_KEYS = 4_000_000


def require_equal(dsn: str, lake: Path, tables: list[str]) -> int:
    """Compare every value of the tables on both sides; returns the number of rows. Raises AssertionError."""
    return sum(_require_equal(dsn, lake / "public" / table, table) for table in tables)


def _require_equal(dsn: str, path: Path, table: str) -> int:
    """Compare so many keys at a time as fit into memory, and those past the last one."""
    with adbc_driver_postgresql.dbapi.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT max({KEY}) FROM {table}")
        last = (cursor.fetchone() or [None])[0] or 0
        handle, rows = QueryBuilder().register(table, DeltaTable(str(path))), 0
        for low in range(0, last + 1, RANGE_KEYS):
            which = f"{KEY} >= {low}" + (f" AND {KEY} < {low + RANGE_KEYS}" if low + RANGE_KEYS <= last else "")
            query = f"SELECT * FROM {table} WHERE {which} ORDER BY {KEY}"
            cursor.execute(query)
            rows += _require_same(cursor.fetch_arrow_table(), pa.table(handle.execute(query).read_all()), table)
    return rows


def _require_same(source: pa.Table, copy: pa.Table, table: str) -> int:
    assert copy.num_rows == source.num_rows, (
        f"{table}: {copy.num_rows} rows in the lake, {source.num_rows} at the source"
    )
    for name in source.column_names:
        sent = source.column(name)
        sent = _as(sent, copy.column(name).type if sent.type.id != pa.string().id else sent.type)
        kept = copy.column(name).cast(sent.type)
        assert kept.equals(sent), f"{table}.{name}: the lake differs from the source"
    return int(copy.num_rows)


def _as(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if isinstance(values.type, pa.BaseExtensionType):
        values = pa.chunked_array([chunk.storage for chunk in values.chunks])
    return values.cast(kind)


def first_seen(table: Path, wanted: Mapping[int, int], column: str, since: float) -> dict[int, float]:
    """For each key, the time when its wanted value in `column` became readable, if that was after `since`.

    A commit is readable once its log entry exists, and the entry's time says when that was. So this can run
    afterwards, when it costs the pipeline nothing.
    """
    seen: dict[int, float] = {}
    for at, files in _commits(table, since):
        for file in files:
            rows = pq.read_table(file, columns=[KEY, column], filters=pc.field(KEY).isin(list(wanted)))
            for key, value in zip(rows.column(0).to_pylist(), rows.column(1).to_pylist(), strict=True):
                if wanted[key] == value:
                    seen.setdefault(key, at)
    return seen


def _commits(table: Path, since: float) -> Iterator[tuple[float, list[Path]]]:
    """When each commit was made, and the files that it brought. A file whose rows are only marked is no new one."""
    for entry in sorted((table / "_delta_log").glob("*.json")):
        at = entry.stat().st_mtime
        if at < since:
            continue
        actions = map(json.loads, entry.read_text().splitlines())
        added = [table / action["add"]["path"] for action in actions if "add" in action]
        yield at, [path for path in added if path.exists() and path.stat().st_mtime >= since]
