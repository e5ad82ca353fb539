"""The format `rqlite`: what a node of rqlite posts, to the byte.

{"service_id":…,"node_id":…,"payload":[{"index":…,"commit_timestamp":…,"events":[…]}]}
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.webhook.format.event import join_texts, member
from tailrace.destination.webhook.format.image import EventImages, build_images
from tailrace.destination.webhook.format.json_value import GoWriter
from tailrace.model.change import Changes, Op, op_names
from tailrace.model.schema import TableSchema

_WRITER = GoWriter()
_ROW_ID = "rowid"


class RqliteFormat:
    """Events without their own id: a receiver identifies them by index and order, like those of rqlite."""

    name = "rqlite"
    content_type = "application/json"

    def encode(self, changes: Changes, *, source: str) -> pa.RecordBatch:
        shown = _shown_row_id(changes.table)
        row_id = shown or _key_row_id(changes.table)
        names = sorted(column.name for column in changes.table.columns if column.name != shown)
        images = build_images(changes, _WRITER, joins=True, names=names)
        op = np.where(images.op == Op.READ, np.int8(Op.INSERT), images.op)
        texts = pc.binary_join_element_wise(
            '{"op":"',
            pc.utf8_upper(op_names(op)),
            f'","table":{_WRITER.name(changes.table.table.name)}',
            *_row_ids(images, row_id),
            member("before", images.before),
            member("after", images.after),
            "}",
            "",
        )
        return images.to_queue(images.ids(source), texts)

    def body(self, events: pa.Table, *, service_id: str, node_id: str) -> bytes:
        commit = events.column("commit").to_numpy()
        at = pc.fill_null(events.column("at").cast(pa.int64()), 0).to_numpy()
        begins = np.ones(len(commit), bool)
        begins[1:] = (commit[1:] != commit[:-1]) | (at[1:] != at[:-1])
        texts = pc.binary_join_element_wise(
            pc.if_else(pa.array(begins), _entries(commit, at // 1000, begins), ","), _whole(events.column("event")), ""
        )
        service = f'"service_id":{_WRITER.name(service_id)},' if service_id else ""
        head = f'{{{service}"node_id":{_WRITER.name(node_id)},"payload":['
        return head.encode() + join_texts(texts, "") + b"]}]}"


def _entries(
    commit: npt.NDArray[np.int64], milliseconds: npt.NDArray[np.int64], begins: npt.NDArray[np.bool_]
) -> pa.Array[Any]:
    """The text before the first event of each entry: the end of the previous entry, and the beginning of its own."""
    is_first = np.cumsum(begins) == 1
    return pc.binary_join_element_wise(
        pc.if_else(pa.array(is_first), '{"index":', ']},{"index":'),
        pa.array(commit).cast(pa.string()),
        ',"commit_timestamp":',
        pa.array(milliseconds).cast(pa.string()),
        ',"events":[',
        "",
    )


def _whole(column: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    return pa.concat_arrays(column.chunks)


def _shown_row_id(table: TableSchema) -> str | None:
    """The column that only shows SQLite's row id: its upstream type or its name is `rowid`."""
    candidates = [column for column in table.columns if pa.types.is_integer(column.type)]
    typed = [column.name for column in candidates if column.upstream_type == _ROW_ID]
    return next(iter([*typed, *(column.name for column in candidates if column.name == _ROW_ID)]), None)


def _key_row_id(table: TableSchema) -> str | None:
    """The column that is the row id: a key that is one whole number."""
    if len(table.key) != 1 or not pa.types.is_integer(table.column(table.key[0]).type):
        return None
    return table.key[0]


def _row_ids(images: EventImages, column: str | None) -> list[Any]:
    """`new_row_id` and `old_row_id`, each where an event has it. rqlite leaves out 0, and so do we."""
    if column is None:
        return []
    index = images.changes.table.row_type.get_field_index(column)
    row = images.changes.row.flatten()[index]
    old = pc.coalesce(images.changes.batch.column("before").flatten()[index], row)
    has_new = (images.op != Op.DELETE) & (images.op != Op.TRUNCATE)
    has_old = (images.op == Op.DELETE) | (images.op == Op.UPDATE)
    return [
        member(name, _unless_zero(values.take(pa.array(places)), has).cast(pa.string()))
        for name, values, places, has in (
            ("new_row_id", row, images.place, has_new),
            ("old_row_id", old, images.old_place, has_old),
        )
    ]


def _unless_zero(ids: pa.Array[Any], has: npt.NDArray[np.bool_]) -> pa.Array[Any]:
    return pc.if_else(pc.and_(pa.array(has), pc.not_equal(ids, 0)), ids, None)
