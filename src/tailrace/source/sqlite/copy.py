# ruff: noqa: S608 - every name in the SQL here is quoted
"""The copy of a table: its chunks, each a range of rowids read in a transaction of its own, and single rows by key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.capture.layout import CaptureConnection, TableShape, has_table, quoted, read_table_shape, trigger_capture
from tailrace.capture.trigger import read_status
from tailrace.errors import StaleCopyError, TableError
from tailrace.model.change import START, Changes, Op, Position
from tailrace.model.exact import combine
from tailrace.model.schema import TableSchema
from tailrace.source.split import Split
from tailrace.source.sqlite.catalog import rowid_column, stored_columns
from tailrace.source.sqlite.connection import FIRST_ROWS, CapturedFile, fetch, next_rows
from tailrace.source.sqlite.decode import Pictures, SqliteImage, read_pictures, unfit_key
from tailrace.source.sqlite.value import cells_of

FETCH_KEYS = 200


@dataclass(frozen=True)
class SqliteCopySplit(Split):
    """The rows of one table with rowids in (low, high]; None: from the first. `x` is the position of the copy."""

    low: int | None = None
    high: int = 0
    snapshot_position: Position = START


def chunk_bounds(connection: CaptureConnection, table: str, chunk_rows: int) -> tuple[int, ...]:
    """The last rowid of each chunk of so many rows. At least one; all current rows are at or below the last bound."""
    shape = read_table_shape(connection, table)
    rowid, name = shape.rowid, quoted(table)
    bounds: list[int] = []
    last = connection.execute(f"SELECT max({rowid}) FROM {name}").fetchone()[0]
    sql = f"SELECT {rowid} FROM {name} WHERE {rowid} > ? ORDER BY {rowid} LIMIT 1 OFFSET ?"
    first = f"SELECT {rowid} FROM {name} ORDER BY {rowid} LIMIT 1 OFFSET ?"
    row = connection.execute(first, (chunk_rows - 1,)).fetchone()
    while row is not None and row[0] < last:
        bounds.append(int(row[0]))
        row = connection.execute(sql, (row[0], chunk_rows - 1)).fetchone()
    return (*bounds, int(last or 0))


def read_chunk(engine: CapturedFile, split: SqliteCopySplit) -> Iterator[Changes]:
    """The current rows of a chunk. Raises StaleCopyError when the table has other columns than its copy."""
    table = split.copies
    assert table is not None
    ordinal = 0
    with engine.snapshot("copying rows") as connection:
        shape = _require_shape(connection, table)
        names = ", ".join([shape.rowid, *(quoted(column.name) for column in stored_columns(table))])
        low, limit = split.low, FIRST_ROWS
        while True:
            above = f"{shape.rowid} > ? AND" if low is not None else ""
            sql = (
                f"SELECT {names} FROM {quoted(table.table.name)} WHERE {above} {shape.rowid} <= ? "
                f"ORDER BY {shape.rowid} LIMIT ?"
            )
            rows = fetch(connection, sql, (split.high, limit) if low is None else (low, split.high, limit))
            if not rows:
                return
            image = _read(table, rows)
            row = image.struct(table)
            for name in table.key:
                if row.field(name).null_count:
                    raise unfit_key(table, name, None)
            places = np.arange(ordinal, ordinal + len(rows), dtype=np.int64)
            yield Changes.build(
                table,
                row,
                op=Op.READ,
                commit=split.snapshot_position.commit,
                ordinal=places,
                exact=combine(image.exact),
            )
            low, ordinal = int(rows[-1][0]), ordinal + len(rows)
            limit = next_rows(len(rows), row.nbytes)


def _require_shape(connection: CaptureConnection, table: TableSchema) -> TableShape:
    """Columns may have been added at the end since the copy began; anything else makes it stale."""
    expected = [column.name for column in stored_columns(table)]
    name = table.table.name
    shape = read_table_shape(connection, name) if has_table(connection, name) else None
    if shape is not None and [field.name for field in shape.fields][: len(expected)] == expected:
        return shape
    if trigger_capture(connection) is not None and read_status(connection).pending:
        raise TableError(
            "the table was changed since its triggers were made",
            fix="tailrace sqlite enable FILE",
            table=str(table.table),
        )
    raise StaleCopyError(
        "the table's columns changed while it was being copied",
        fix="nothing to do: the copy begins again by itself",
        table=str(table.table),
    )


def _read(table: TableSchema, rows: list[tuple[Any, ...]]) -> SqliteImage:
    rowids, *columns = zip(*rows, strict=True)
    cells = [cells_of(values) for values in columns]
    return read_pictures(table, Pictures(cells, np.ones(len(rows), bool)), pa.array(rowids, pa.int64()))


def fetch_rows(engine: CapturedFile, table: TableSchema, keys: pa.Table) -> pa.Table:
    """The current rows of these keys; rows that are gone are left out. A null key finds nothing."""
    batches: list[pa.RecordBatch] = []
    with engine.snapshot("reading rows again") as connection:
        shape = read_table_shape(connection, table.table.name)
        is_rowid = rowid_column(table) is not None
        sought = [shape.rowid if is_rowid else quoted(name) for name in table.key]
        names = ", ".join([shape.rowid, *(quoted(column.name) for column in stored_columns(table))])
        group = f"({', '.join('?' * len(sought))})"
        values = list(zip(*(keys.column(name).to_pylist() for name in table.key), strict=True))
        for start in range(0, len(values), FETCH_KEYS):
            some = values[start : start + FETCH_KEYS]
            found = f"({', '.join(sought)}) IN (VALUES {', '.join([group] * len(some))})"
            sql = f"SELECT {names} FROM {quoted(table.table.name)} WHERE {found}"
            rows = fetch(connection, sql, [value for key in some for value in key])
            if rows:
                batches.append(pa.RecordBatch.from_struct_array(_read(table, rows).struct(table)))
    return pa.Table.from_batches(batches, pa.schema(list(table.row_type)))
