# ruff: noqa: S608 - every name in the SQL here is quoted
"""Reads a range of the capture table, page by page, and groups its rows by table, version and kind of image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.layout import DELETE, UPDATE, CaptureConnection, has_table, quoted, read_table_shape, side_tables
from tailrace.capture.record_decode import CellKind, RecordCells
from tailrace.errors import SchemaChangedError
from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema
from tailrace.source.sqlite.catalog import rowid_column, stored_columns
from tailrace.source.sqlite.connection import FIRST_ROWS, fetch, next_rows
from tailrace.source.sqlite.decode import CapturedRows, Indexes, Pictures, decode, malformed, missing, read_records
from tailrace.source.sqlite.log import TapeLog
from tailrace.source.sqlite.value import cells_of

NATIVE_ROWS = 5_000
LOOKUP_ROWS = 500


@dataclass(frozen=True)
class TapePage:
    """Some rows of the capture table: the names of their tables, and everything else as columns.

    `widths` and `values` are the native images stored next to the tape: how many old and new values, and the values.
    """

    tables: pa.Array[Any]
    rows: CapturedRows
    widths: tuple[Indexes, Indexes] | None
    values: Sequence[Sequence[Any]]

    def of(self, table: str) -> Indexes:
        found: Indexes = np.flatnonzero(pc.equal(self.tables, table).to_numpy(zero_copy_only=False))
        return found


def read_pages(log: TapeLog, after: int, upto: int, tables: Sequence[str]) -> Iterator[TapePage]:
    """The changes of some tables in (after, upto], in order."""
    names = ["change_id", "change_time", "change_txn_id", "change_type", "table_name", "id", "before", "after"]
    chosen = [f"tape.{quoted(name)}" for name in names] + ["tape.updates IS NULL"]
    if not log.has_transactions:
        chosen[2] = "NULL"
    source = f"{quoted(log.table)} AS tape"
    if log.by_triggers:
        chosen.append("image.*")
        image = quoted(side_tables(log.table)[0])
        source += f" LEFT JOIN {image} AS image ON image.change_id = tape.change_id"
    marks = ", ".join("?" * len(tables))
    sql = (
        f"SELECT {', '.join(chosen)} FROM {source} WHERE tape.change_id > ? AND tape.change_id <= ? "
        f"AND tape.table_name IN ({marks}) ORDER BY tape.change_id LIMIT ?"
    )
    limit = FIRST_ROWS
    while rows := fetch(log.connection, sql, (after, upto, *tables, limit)):
        after = rows[-1][0]
        page = _page(list(zip(*rows, strict=True)))
        yield page
        if len(rows) < limit:
            return
        limit = next_rows(len(rows), page.rows.before.nbytes + page.rows.after.nbytes)
        limit = min(limit, NATIVE_ROWS) if log.by_triggers else limit


def _page(columns: Sequence[Sequence[Any]]) -> TapePage:
    change_id, change_time, txn_id, kind, tables, rowid, before, after, plain, *image = columns
    rows = CapturedRows(
        np.array(change_id, np.int64),
        pa.array(change_time, pa.int64()),
        pa.array(txn_id, pa.int64()),
        np.array(kind, np.int64),
        _integers(rowid),
        pa.array(before, pa.binary()),
        pa.array(after, pa.binary()),
        np.array(plain, bool),
    )
    widths = None
    if image:
        widths = (_widths(image[0], image[1]), _widths(image[0], image[2]))
    return TapePage(pa.array(tables, pa.string()), rows, widths, image[3:])


def _integers(values: Sequence[Any]) -> pa.Array[Any]:
    if set(map(type, values)) <= {int, type(None)}:
        return pa.array(values, pa.int64())
    return pa.array([value if type(value) is int else None for value in values], pa.int64())


_NO_IMAGE = -1


def _widths(present: Sequence[Any], widths: Sequence[Any]) -> Indexes:
    """How many values the image has; -1 where there is none."""
    held = pa.array(present, pa.int64()).is_valid()
    found: Indexes = pc.fill_null(pc.if_else(held, pa.array(widths, pa.int64()), None), _NO_IMAGE).to_numpy()
    return found


def decode_rows(
    connection: CaptureConnection, table: TableSchema, newest: TableSchema, page: TapePage, chosen: Indexes
) -> Iterator[Changes]:
    """The changes of the chosen rows of one table at one version, in order. Raises as `decode.decode` does.

    If the capture did not keep the new image, the current row is read from the table; `newest` has its current columns.
    A row that is gone is left out: its delete follows.
    """
    parts: list[Changes] = []
    native = np.zeros(len(chosen), bool)
    if page.widths is not None:
        native = (page.widths[0][chosen] != _NO_IMAGE) | (page.widths[1][chosen] != _NO_IMAGE)
        parts += _decode_native(connection, table, newest, page, chosen[native])
    stored = page.rows.take(chosen[~native]).normal()
    lacking = (stored.type != DELETE) & missing(stored.after)
    if lacking.any():
        rest = stored.take(np.flatnonzero(lacking))
        kept = read_records(table, rest, rest.before)
        parts += _look_up(connection, table, newest, rest, kept)
    whole = stored.take(np.flatnonzero(~lacking))
    if len(whole):
        gone = pa.array(whole.type == DELETE)
        main = read_records(table, whole, pc.if_else(gone, whole.before, whole.after))
        before = read_records(table, whole, whole.before) if whole.before.null_count < len(whole) else None
        parts.append(decode(table, whole, main, before))
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        yield parts[0]
    elif parts:
        yield _merge(table, parts)


def _merge(table: TableSchema, parts: Sequence[Changes]) -> Changes:
    batch = pa.Table.from_batches([part.batch for part in parts]).combine_chunks().to_batches()[0]
    order = np.lexsort((batch.column("ordinal").to_numpy(), batch.column("commit").to_numpy()))
    return Changes(table, batch.take(pa.array(order)))


def _decode_native(
    connection: CaptureConnection, table: TableSchema, newest: TableSchema, page: TapePage, chosen: Indexes
) -> Iterator[Changes]:
    """Images that triggers keep as native values: rows with the same number of values are read together."""
    assert page.widths is not None
    old, new = page.widths[0][chosen], page.widths[1][chosen]
    for pair in np.unique(np.stack([old, new]), axis=1).T:
        before_width, after_width = (int(width) for width in pair)
        part = chosen[(old == before_width) & (new == after_width)]
        rows = page.rows.take(part)
        start = max(before_width, 0)
        before = _pictures(table, rows, page, part, 0, before_width)
        after = _pictures(table, rows, page, part, start, after_width)
        gone = rows.type == DELETE
        if after_width == _NO_IMAGE and not gone.all():
            lacking = np.flatnonzero(~gone)
            kept = Pictures([cells.take(lacking) for cells in before.cells], before.valid[lacking])
            yield from _look_up(connection, table, newest, rows.take(lacking), kept)
            rows, part = rows.take(np.flatnonzero(gone)), part[gone]
            before = _pictures(table, rows, page, part, 0, before_width)
        if len(rows):
            yield decode(table, rows, before if after_width == _NO_IMAGE else after, before)


def _pictures(
    table: TableSchema, rows: CapturedRows, page: TapePage, chosen: Indexes, start: int, width: int
) -> Pictures:
    count = len(stored_columns(table))
    if width > count:
        raise malformed(table, rows, 0, b"", "its image has more values than the table has columns")
    absent = RecordCells(np.full(len(chosen), CellKind.ABSENT, np.uint8), None, None, None)
    picks = chosen.tolist()
    cells = [
        cells_of([values[row] for row in picks] if len(picks) < len(values) else values)
        for values in page.values[start : start + max(width, 0)]
    ]
    return Pictures([*cells, *[absent] * (count - len(cells))], np.full(len(chosen), width != _NO_IMAGE))


def _look_up(
    connection: CaptureConnection, table: TableSchema, newest: TableSchema, rows: CapturedRows, before: Pictures
) -> Iterator[Changes]:
    """Changes with the current rows, found by rowid. Later changes of a row follow with their own entries.

    A row that is gone may have had another key when it was deleted: delete its old key here.
    """
    found = read_rows(connection, table, newest, np.unique(rows.id.drop_null().to_numpy()))
    ids = rows.id.fill_null(0).to_numpy()
    kept = np.flatnonzero(np.isin(ids, found.ids))
    places = np.searchsorted(found.ids, ids)
    main = Pictures([cells.take(places[kept]) for cells in found.cells], np.ones(len(kept), bool))
    old = Pictures([cells.take(kept) for cells in before.cells], before.valid[kept])
    yield decode(table, rows.take(kept), main, old)
    if rowid_column(table) is None:
        lost = np.flatnonzero(~np.isin(ids, found.ids) & before.valid & (rows.type == UPDATE))
        gone = replace(rows.take(lost), type=np.full(len(lost), DELETE, np.int64))
        last = Pictures([cells.take(lost) for cells in before.cells], before.valid[lost])
        yield decode(table, gone, last, None)


@dataclass(frozen=True)
class FoundRows:
    """Current rows of a table: their rowids, ascending, and the cells of the stored columns."""

    ids: Indexes
    cells: list[RecordCells]


def read_rows(connection: CaptureConnection, table: TableSchema, newest: TableSchema, ids: Indexes) -> FoundRows:
    """The rows with these rowids that exist. Columns that the table no longer has are null."""
    if not has_table(connection, newest.table.name):
        return FoundRows(np.zeros(0, np.int64), [cells_of([]) for _ in stored_columns(table)])
    now = {column.number: column.name for column in stored_columns(newest)}
    names = [now.get(column.number) for column in stored_columns(table)]
    shape = read_table_shape(connection, newest.table.name)
    missing_names = [name for name in names if name is not None and name not in {field.name for field in shape.fields}]
    if missing_names:
        raise SchemaChangedError(
            "its columns changed, so rows of changes without images cannot be read",
            fix=f"tailrace resync FILE {table.table}",
            table=str(table.table),
        )
    chosen = ", ".join([shape.rowid, *(quoted(name) if name is not None else "NULL" for name in names)])
    rows: list[tuple[Any, ...]] = []
    for start in range(0, len(ids), LOOKUP_ROWS):
        some = ids[start : start + LOOKUP_ROWS].tolist()
        marks = ", ".join("?" * len(some))
        sql = f"SELECT {chosen} FROM {quoted(newest.table.name)} WHERE {shape.rowid} IN ({marks}) ORDER BY 1"
        rows += fetch(connection, sql, some)
    columns = list(zip(*rows, strict=True)) if rows else [()] * (len(names) + 1)
    return FoundRows(np.array(columns[0], np.int64), [cells_of(values) for values in columns[1:]])
