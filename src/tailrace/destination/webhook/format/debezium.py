"""The format `debezium`: a list of Debezium's envelopes, without schema blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.webhook.format.event import join_texts
from tailrace.destination.webhook.format.image import EventImages, build_images, second_halves
from tailrace.destination.webhook.format.json_value import EventWriter
from tailrace.model.change import Changes, Op, position_texts

_WRITER = EventWriter()
_UNAVAILABLE = '"__debezium_unavailable_value"'
_LETTERS = ["", "c", "u", "d", "r", "t"]
"""By the number of the operation."""


class DebeziumFormat:
    """The envelope of each event, and beside its members `id`, `key` and, of a changed key, `headers`.

    A changed key is a delete and a create, of which each names the key of the other in a header, as with Debezium.
    """

    name = "debezium"
    content_type = "application/json"

    def encode(self, changes: Changes, *, source: str) -> pa.RecordBatch:
        told = build_images(changes, _WRITER, joins=False, placeholder=_UNAVAILABLE)
        ids = told.ids(source)
        table = changes.table.table
        milliseconds = _milliseconds(told)
        texts = pc.binary_join_element_wise(
            '{"id":',
            _WRITER.texts(ids),
            ',"key":',
            pc.fill_null(told.key, "null"),
            _headers(told),
            ',"before":',
            pc.fill_null(told.before, "null"),
            ',"after":',
            pc.fill_null(told.after, "null"),
            f',"source":{{"connector":"tailrace","name":{_WRITER.name(source)},"schema":{_WRITER.name(table.schema)}'
            f',"table":{_WRITER.name(table.name)},"position":"',
            position_texts(changes.numpy("commit")[told.place], changes.numpy("ordinal")[told.place]),
            '","txId":',
            _WRITER.value(told.column("txn")),
            ',"ts_ms":',
            milliseconds,
            ',"snapshot":"',
            pc.if_else(pa.array(told.op == Op.READ), "true", "false"),
            '"},"op":"',
            pa.array(_LETTERS).take(pa.array(told.op)),
            '","ts_ms":',
            milliseconds,
            "}",
            "",
        )
        return told.to_queue(ids, texts)

    def body(self, events: pa.Table, *, service_id: str, node_id: str) -> bytes:
        """Who sent them is no part of these events."""
        return b"[" + join_texts(events.column("event"), ",") + b"]"


def _milliseconds(told: EventImages) -> pa.Array[Any]:
    """The time of the commit. Not that of the encoding: the same event is the same text whenever it is made."""
    at = pc.floor_temporal(told.column("committed_at"), unit="millisecond")
    return _WRITER.value(at.cast(pa.timestamp("ms", "UTC")).cast(pa.int64()))


def _headers(told: EventImages) -> pa.Array[Any]:
    halves = np.searchsorted(told.place, second_halves(told.changes))
    if not len(halves):
        return pa.repeat("", len(told.place))
    other = np.full(len(told.place), -1)
    other[halves], other[halves - 1] = halves - 1, halves
    name = pc.if_else(pa.array(told.op == Op.DELETE), "newkey", "oldkey")
    key = told.key.take(pa.array(other, mask=other < 0))
    return pc.fill_null(pc.binary_join_element_wise(',"headers":{"__debezium.', name, '":', key, "}", ""), "")
