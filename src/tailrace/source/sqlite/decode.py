"""Turns rows of the capture table into changes: many at once, by columns, without an object per row.

Images are SQLite records, or native values where triggers store them next to the tape. Turso's peculiarities are
corrected here: it puts the new row of a changed rowid into `before`, and also the new row of an upsert that updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.column_type import read_column
from tailrace.capture.layout import DELETE, INSERT, UPDATE
from tailrace.capture.record_decode import RecordCells, decode_records
from tailrace.errors import TableError, UnfitError
from tailrace.model.change import Changes, Op, Position
from tailrace.model.exact import combine
from tailrace.model.schema import TableSchema
from tailrace.source.sqlite.catalog import rowid_column, stored_columns
from tailrace.source.sqlite.offset import FIRST_HALF, SECOND_HALF

Indexes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_OPS = np.zeros(3, np.int8)
_OPS[[INSERT, UPDATE, DELETE]] = Op.INSERT, Op.UPDATE, Op.DELETE


@dataclass(frozen=True)
class CapturedRows:
    """Rows of the capture table that belong to one table, as columns.

    Images are records, null where there is none; `plain` rows have no `updates`. An `id` that is no integer is null.
    """

    change_id: Indexes
    change_time: pa.Array[Any]
    txn_id: pa.Array[Any]
    type: Indexes
    id: pa.Array[Any]
    before: pa.Array[Any]
    after: pa.Array[Any]
    plain: Mask

    def __len__(self) -> int:
        return len(self.change_id)

    def take(self, rows: Indexes) -> CapturedRows:
        if len(rows) == len(self):
            return self
        chosen = pa.array(rows)
        return CapturedRows(
            self.change_id[rows],
            self.change_time.take(chosen),
            self.txn_id.take(chosen),
            self.type[rows],
            self.id.take(chosen),
            self.before.take(chosen),
            self.after.take(chosen),
            self.plain[rows],
        )

    def normal(self) -> CapturedRows:
        """The same, with Turso's peculiarities corrected."""
        before, after = self.before, self.after
        moved = (self.type == INSERT) & missing(after)
        if moved.any():
            after = pc.if_else(pa.array(moved), before, after)
            before = pc.if_else(pa.array(moved), pa.scalar(None, before.type), before)
        upserted = (self.type == UPDATE) & self.plain & ~missing(before)
        if upserted.any():
            equal = pc.fill_null(pc.equal(before, after), False).to_numpy(zero_copy_only=False)
            before = pc.if_else(pa.array(upserted & equal), pa.scalar(None, before.type), before)
        return replace(self, before=before, after=after)


def missing(images: pa.Array[Any]) -> Mask:
    found: Mask = pc.is_null(images).to_numpy(zero_copy_only=False)
    return found


@dataclass(frozen=True)
class Pictures:
    """Row images as cells of the stored columns; not `valid` where a row has none."""

    cells: Sequence[RecordCells]
    valid: Mask


@dataclass(frozen=True)
class SqliteImage:
    """Row images as the table's typed columns. `exact` holds the texts of values that do not fit."""

    columns: list[pa.Array[Any]]
    exact: Mapping[str, pa.Array[Any]]

    def struct(self, table: TableSchema, valid: Mask | None = None) -> pa.StructArray:
        mask = None if valid is None or valid.all() else pa.array(~valid)
        return pa.StructArray.from_arrays(self.columns, fields=list(table.row_type), mask=mask)


def read_pictures(table: TableSchema, pictures: Pictures, rowids: pa.Array[Any]) -> SqliteImage:
    """The table's columns. The rowid fills the column that shows it, also where a row has no image."""
    cells, valid = pictures.cells, pictures.valid
    rowid = rowid_column(table)
    typed = dict(zip([column.name for column in stored_columns(table)], cells, strict=True))
    columns: list[pa.Array[Any]] = []
    exact: dict[str, pa.Array[Any]] = {}
    for column in table.columns:
        if column.name == rowid:
            columns.append(rowids)
            continue
        array, unfit = read_column(typed[column.name], column.type, column.initial)
        if column.initial is not None and not valid.all():
            array = pc.if_else(pa.array(valid), array, pa.scalar(None, column.type))
        columns.append(array)
        if unfit is not None:
            exact[column.name] = unfit
    return SqliteImage(columns, exact)


def decode(table: TableSchema, rows: CapturedRows, main: Pictures, before: Pictures | None) -> Changes:
    """The changes of these rows, in order; an update that changes the key becomes two.

    `main` are the new images, for deletes the old ones. Raises TableError for an inconsistent row and UnfitError
    for one whose key is null or does not fit its type.
    """
    _require_sense(table, rows)
    image = read_pictures(table, main, rows.id)
    row = image.struct(table)
    old = None
    if before is not None and before.valid.any():
        old = read_pictures(table, before, rows.id).struct(table, before.valid)
    _require_key(table, rows, row, main.valid)
    changes = Changes.build(
        table,
        row,
        op=_OPS[rows.type],
        commit=rows.change_id,
        ordinal=np.full(len(rows), FIRST_HALF, np.int64),
        txn=rows.txn_id,
        committed_at=pc.multiply(rows.change_time, 1_000_000).cast(pa.timestamp("us", "UTC")),
        exact=combine(image.exact),
        before=old,
    )
    return _split_moved(changes, rows) if old is not None and rowid_column(table) is None else changes


def read_records(table: TableSchema, rows: CapturedRows, images: pa.Array[Any]) -> Pictures:
    """Records as cells. Raises TableError, with its bytes, for the first one that is malformed."""
    decoded = decode_records(images, len(stored_columns(table)))
    if decoded.malformed.any():
        row = int(np.flatnonzero(decoded.malformed)[0])
        raise malformed(
            table, rows, row, images[row].as_py() or b"", "its image is not a record of the table's columns"
        )
    return Pictures(decoded.columns, ~missing(images))


def _require_sense(table: TableSchema, rows: CapturedRows) -> None:
    if rows.id.null_count:
        raise malformed(table, rows, int(np.flatnonzero(missing(rows.id))[0]), b"", "its row has no rowid")
    known = (rows.type >= DELETE) & (rows.type <= INSERT)
    if not known.all():
        raise malformed(table, rows, int(np.flatnonzero(~known)[0]), b"", "it is of an unknown type")


def malformed(table: TableSchema, rows: CapturedRows, row: int, raw: bytes, why: str) -> TableError:
    """The error for a row that cannot be read; `raw` goes to its dead letter."""
    change_id = int(rows.change_id[row])
    error = TableError(
        f"change {change_id} of the tape cannot be read: {why}",
        fix=f"tailrace errors skip FILE ID skips it; tailrace resync FILE {table.table} copies the table again",
        table=str(table.table),
        position=str(Position(change_id, FIRST_HALF)),
    )
    error.raw = raw
    return error


def _require_key(table: TableSchema, rows: CapturedRows, row: pa.StructArray, valid: Mask) -> None:
    for name in table.key:
        column = row.field(name)
        if not column.null_count:
            continue
        at = int(np.flatnonzero(missing(column))[0])
        position = str(Position(int(rows.change_id[at]), FIRST_HALF))
        if rows.type[at] == DELETE and not valid[at]:
            raise TableError(
                f"the capture does not show which row was deleted: its key is ({', '.join(table.key)}), not the rowid",
                fix=f"capture in mode full, then tailrace resync FILE {table.table}",
                table=str(table.table),
                position=position,
            )
        raise unfit_key(table, name, position)


def unfit_key(table: TableSchema, name: str, position: str | None) -> UnfitError:
    return UnfitError(
        f"the key column {name} is null or holds a value that is no {table.column(name).type}",
        fix=f"give the row a valid key, or exclude the table; then tailrace resync FILE {table.table}",
        table=str(table.table),
        position=position,
    )


def _split_moved(changes: Changes, rows: CapturedRows) -> Changes:
    """Updates that changed the key become a delete of the old row and an insert of the new one."""
    row, before = changes.row, changes.batch.column("before")
    differs = np.zeros(len(rows), bool)
    for name in changes.table.key:
        unequal = pc.not_equal(pc.struct_field(row, name), pc.struct_field(before, name))
        differs |= pc.fill_null(unequal, False).to_numpy(zero_copy_only=False)
    moved = np.flatnonzero(differs & (rows.type == UPDATE))
    if not len(moved):
        return changes
    order = np.sort(np.concatenate([np.arange(len(rows)), moved]), kind="stable")
    first = np.zeros(len(order), bool)
    first[np.searchsorted(order, moved)] = True
    second = np.zeros(len(order), bool)
    second[np.searchsorted(order, moved) + 1] = True
    taken = changes.batch.take(pa.array(order))
    op = np.where(first, np.int8(Op.DELETE), np.where(second, np.int8(Op.INSERT), taken.column("op").to_numpy()))
    images = pa.concat_arrays([row, before]).take(pa.array(np.where(first, order + len(rows), order)))
    exact = taken.column("exact")
    old = taken.column("before")
    return Changes.build(
        changes.table,
        images,
        op=op.astype(np.int8),
        commit=taken.column("commit").to_numpy(),
        ordinal=np.where(second, SECOND_HALF, FIRST_HALF).astype(np.int64),
        txn=taken.column("txn"),
        committed_at=taken.column("committed_at"),
        exact=pc.if_else(pa.array(first), pa.scalar(None, pa.string()), exact),
        before=_nulled(old, second),
    )


def _nulled(images: pa.StructArray, where: Mask) -> pa.StructArray:
    mask = pa.array(where | missing(images))
    return pa.StructArray.from_arrays(images.flatten(), fields=list(images.type), mask=mask)
