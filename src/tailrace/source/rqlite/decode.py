"""Turns events into changes: the lines of journal frames, as columns of one table at one version.

Events without the image they need are completed first (see `missing_row`). A changed key becomes a delete at the
event's own even ordinal, and an insert at the odd ordinal after it.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.capture.column_type import Affinity, affinity_of, read_column
from tailrace.capture.column_type import DecodedColumn as Typed
from tailrace.errors import TableError
from tailrace.model.change import Changes, Op, Position, pack_unchanged
from tailrace.model.exact import combine
from tailrace.model.schema import Column, TableSchema
from tailrace.source.rqlite.catalog import INFERRED, stored_names
from tailrace.source.sqlite.catalog import ALIAS, ROWID, rowid_column
from tailrace.source.sqlite.decode import SqliteImage, unfit_key
from tailrace.source.sqlite.value import cells_of

# Converts columns of JSON values, from the API and from events, into typed Arrow columns.
# JSON has no storage classes. A BLOB is base64 text that only the declared type distinguishes from TEXT, and 2.0 is
# sent as 2: a REAL column makes it a float again, any other column takes the number as it is.

_INT64 = range(-(2**63), 2**63)
_NONE = type(None)


def read_values(column: Column, values: Sequence[Any], *, encoded: bool) -> Typed:
    """One column. With `encoded`, text in a BLOB column is base64; without, blobs are bytes.

    A value that the type cannot hold is null, and its exact text is returned next to it. Cells are checked one by one
    only in a column that holds such a value.
    """
    kinds = set(map(type, values)) - {_NONE}
    if pa.types.is_string(column.type):
        if column.upstream_type == INFERRED and kinds - {str}:
            values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
            kinds = {str}
        if kinds <= {str}:
            return Typed(pa.array(values, pa.string()), None)
    elif pa.types.is_int64(column.type) and kinds <= {int}:
        try:
            return Typed(pa.array(values, pa.int64()), None)
        except OverflowError:
            pass  # a float without a fraction that is larger than any integer of SQLite
    elif pa.types.is_float64(column.type) and kinds <= {int, float}:
        try:
            return Typed(pa.array(values, pa.float64()), None)
        except pa.ArrowInvalid:
            pass  # an integer that a float cannot hold exactly
    elif pa.types.is_binary(column.type):
        if kinds <= {bytes}:
            return Typed(pa.array(values, pa.binary()), None)
        if encoded and kinds <= {str}:
            try:
                octets = [None if value is None else binascii.a2b_base64(value, strict_mode=True) for value in values]
                return Typed(pa.array(octets, pa.binary()), None)
            except ValueError:
                pass  # text stored in a BLOB column
    return _read_mixed(column, values, encoded=encoded)


def _read_mixed(column: Column, values: Sequence[Any], *, encoded: bool) -> Typed:
    is_real = affinity_of(column.upstream_type) is Affinity.REAL or column.upstream_type == INFERRED
    is_blob = encoded and pa.types.is_binary(column.type)

    def stored(value: Any) -> Any:
        if isinstance(value, int):
            return float(value) if (is_real and pa.types.is_float64(column.type)) or value not in _INT64 else int(value)
        return _octets(value) if is_blob and isinstance(value, str) else value

    return read_column(cells_of([stored(value) for value in values]), column.type)


def _octets(text: str) -> bytes | str:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        return text


EventDict = dict[str, Any]
Mask = npt.NDArray[np.bool_]

_OPS = {"INSERT": Op.INSERT, "UPDATE": Op.UPDATE, "DELETE": Op.DELETE}


@dataclass
class Events:
    """Events in their order, each with the line it was read from."""

    events: list[EventDict] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.events)

    def part(self, begin: int, end: int) -> Events:
        return Events(self.events[begin:end], self.lines[begin:end])

    def position(self, at: int) -> Position:
        return position_of(self.events[at])


def position_of(event: EventDict) -> Position:
    return Position(event["index"], event["ordinal"])


def read_lines(payload: bytes | bytearray | memoryview) -> Events:
    """The events of a frame."""
    lines = bytes(payload).splitlines()
    return Events(json.loads(b"[" + b",".join(lines) + b"]"), lines)


def needs_image(event: EventDict, *, by_rowid: bool) -> bool:
    """Whether the event lacks an image without which it cannot be applied. A rowid is enough to delete by."""
    if event["op"] == "DELETE":
        return not by_rowid and "before" not in event
    return "after" not in event


def identifies_row(event: EventDict, *, by_rowid: bool) -> bool:
    """Whether the event has the image it needs, or shows which row to query. An insert has no former key."""
    if by_rowid or not needs_image(event, by_rowid=False):
        return True
    return event["op"] == "INSERT" and ("new_row_id" in event or "old_row_id" in event)


def unreadable(table: TableSchema, events: Events, at: int, why: str, fix: str | None = None) -> TableError:
    """The error for one event; its line goes to the dead letter."""
    error = TableError(
        f"a change that rqlite sent cannot be read: {why}",
        fix=fix or f"tailrace resync FILE {table.table} copies the table again; tailrace errors skip FILE ID skips it",
        table=str(table.table),
        position=str(events.position(at)),
    )
    error.raw = events.lines[at]
    return error


def decode(table: TableSchema, events: Events, gone: Sequence[set[str]] | None = None) -> Changes:
    """The changes of these events, which lack no image that they need.

    `gone` names, per event, columns whose value is no longer known: they keep their current value downstream. Raises
    TableError for an event whose columns are not the table's, UnfitError for a key that is null or no value of its
    type.
    """
    found, count = events.events, len(events)
    names = stored_names(table)
    blank = dict.fromkeys(names)
    ops = [_OPS[event["op"]] for event in found]
    olds = [event.get("before") or blank for event in found]
    news = [old if op is Op.DELETE else event["after"] for event, old, op in zip(found, olds, ops, strict=True)]
    _require_columns(table, events, [*news, *olds], names)
    # A rowid of 0 is left out by rqlite.
    old_ids = pa.array([event.get("old_row_id", 0) for event in found], pa.int64())
    new_ids = pa.array([event.get("new_row_id", 0) for event in found], pa.int64())
    op = np.array(ops, np.int8)
    deleted = op == Op.DELETE
    image = _read(table, news, pc.if_else(pa.array(deleted), old_ids, new_ids))
    row = image.struct(table)
    _require_key(table, events, row)
    has_before = np.fromiter(("before" in event for event in found), bool, count)
    earlier = _read(table, olds, old_ids)
    changes = Changes.build(
        table,
        row,
        op=op,
        commit=np.fromiter((event["index"] for event in found), np.int64, count),
        ordinal=np.fromiter((event["ordinal"] for event in found), np.int64, count),
        committed_at=_times(found),
        unchanged=_unchanged(table, gone),
        exact=combine(image.exact),
        before=earlier.struct(table, has_before),
    )
    return _split_moved(changes, earlier.struct(table), has_before, old_ids, new_ids)


def _read(table: TableSchema, images: Sequence[EventDict], rowids: pa.Array[Any]) -> SqliteImage:
    columns: list[pa.Array[Any]] = []
    exact: dict[str, pa.Array[Any]] = {}
    for column in table.columns:
        if column.upstream_type in (ROWID, ALIAS):
            columns.append(rowids)
            continue
        name = column.name
        array, unfit = read_values(column, [image[name] for image in images], encoded=True)
        columns.append(array)
        if unfit is not None:
            exact[name] = unfit
    return SqliteImage(columns, exact)


def _require_columns(table: TableSchema, events: Events, images: Sequence[EventDict], names: Sequence[str]) -> None:
    expected = frozenset(names)
    wrong = next((at for at, image in enumerate(images) if image.keys() != expected), None)
    if wrong is not None:
        raise unreadable(table, events, wrong % len(events), "its columns are not those of the table's version")


def _require_key(table: TableSchema, events: Events, row: pa.StructArray) -> None:
    for name in table.key:
        column = row.field(name)
        if column.null_count:
            at = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            error = unfit_key(table, name, str(events.position(at)))
            error.raw = events.lines[at]
            raise error


def _times(found: Sequence[EventDict]) -> pa.Array[Any]:
    # rqlite can be configured to omit the time; 0 (1970) is not a commit time.
    milliseconds = pa.array([event.get("at") or None for event in found], pa.int64())
    return pc.multiply(milliseconds, 1000).cast(pa.timestamp("us", "UTC"))


def _unchanged(table: TableSchema, gone: Sequence[set[str]] | None) -> pa.Array[Any] | None:
    if gone is None or not any(gone):
        return None
    return pack_unchanged(np.array([[column.name in lost for column in table.columns] for lost in gone], bool))


def _split_moved(
    changes: Changes, earlier: pa.StructArray, has_before: Mask, old_ids: pa.Array[Any], new_ids: pa.Array[Any]
) -> Changes:
    """Updates that changed the key become a delete of the old row and an insert of the new one."""
    table, batch, count = changes.table, changes.batch, len(changes)
    op = changes.numpy("op")
    if rowid_column(table) is not None:
        differs = pc.not_equal(old_ids, new_ids).to_numpy(zero_copy_only=False)
    else:
        differs = np.zeros(count, bool)
        for name in table.key:
            unequal = pc.not_equal(changes.row.field(name), earlier.field(name))
            differs |= pc.fill_null(unequal, False).to_numpy(zero_copy_only=False)
        differs &= has_before
    moved: Mask = differs & (op == Op.UPDATE)
    if not moved.any():
        return changes
    order = np.repeat(np.arange(count), 1 + moved)
    second = np.zeros(len(order), bool)
    second[1:] = order[1:] == order[:-1]
    first = moved[order] & ~second
    taken = batch.take(pa.array(order))
    images = pa.concat_arrays([changes.row, earlier]).take(pa.array(np.where(first, order + count, order)))
    no_before = second | ~has_before[order]
    before = earlier.take(pa.array(order))
    unchanged = pc.if_else(pa.array(first), pa.scalar(None, pa.binary()), taken.column("unchanged"))
    return Changes.build(
        table,
        images,
        op=np.where(first, np.int8(Op.DELETE), np.where(second, np.int8(Op.INSERT), op[order])).astype(np.int8),
        commit=taken.column("commit").to_numpy(),
        ordinal=taken.column("ordinal").to_numpy() + second,
        committed_at=taken.column("committed_at"),
        unchanged=unchanged,
        exact=pc.if_else(pa.array(first), pa.scalar(None, pa.string()), taken.column("exact")),
        before=pa.StructArray.from_arrays(before.flatten(), fields=list(table.row_type), mask=pa.array(no_before)),
    )
