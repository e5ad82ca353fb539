"""The format `debezium`: a list of Debezium's envelopes, without schema blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.webhook.format.event import columns_of, join_texts
from tailrace.destination.webhook.format.image import EventImages, build_images, second_halves
from tailrace.destination.webhook.format.json_value import EventWriter
from tailrace.model.change import Changes, Op, position_texts
from tailrace.model.schema import TableSchema

_WRITER = EventWriter()
_UNAVAILABLE = '"__debezium_unavailable_value"'
LETTERS = ["", "c", "u", "d", "r", "t", "o"]
"""By the number of the operation. Debezium has no merge operands; the letter is ours."""


class DebeziumFormat:
    """The envelope of each event, with the additional members `id`, `key` and, for a changed key, `headers`.

    A changed key is a delete and a create; each names the other's key in a header, as with Debezium.
    """

    name = "debezium"
    content_type = "application/json"

    def encode(self, changes: Changes, *, source: str) -> pa.RecordBatch:
        images = debezium_images(changes)
        ids = images.ids(source)
        lead = ['{"id":', _WRITER.texts(ids), ',"key":', pc.fill_null(images.key, "null"), _headers(images), ","]
        texts = join_envelopes(images, lead, source)
        return images.to_queue(ids, texts)

    def boundary(
        self, kind: str, *, positions: pa.Array[Any], txn: pa.Array[Any], at: pa.Array[Any], source: str
    ) -> pa.Array[Any]:
        return pc.binary_join_element_wise(
            '{"id":',
            _WRITER.texts(pc.binary_join_element_wise(f"{source}:{kind}:", positions, "")),
            f',"status":"{"BEGIN" if kind == "begin" else "END"}"'
            f',"source":{{"connector":"tailrace","name":{_WRITER.name(source)},"position":"',
            positions,
            '","txId":',
            _WRITER.value(txn),
            '},"ts_ms":',
            _as_milliseconds(at),
            "}",
            "",
        )

    def relation(self, table: TableSchema, *, position: str, source: str) -> str:
        name = table.table
        shape = {"primaryKeyColumnNames": list(table.key), "columns": columns_of(table)}
        event = {
            "id": f"{source}:{name}:relation:{position}",
            "source": {
                "connector": "tailrace",
                "name": source,
                "schema": name.schema,
                "table": name.name,
                "position": position,
            },
            "tableChanges": [{"type": "ALTER", "id": str(name), "table": shape}],
        }
        return json.dumps(event, ensure_ascii=False, separators=(",", ":"))

    def body(self, events: pa.Table, *, service_id: str, node_id: str) -> bytes:
        """Ignores the names of service and node: they are not part of these events."""
        return b"[" + join_texts(events.column("event"), ",") + b"]"


def debezium_images(changes: Changes) -> EventImages:
    """The events of the changes, as Debezium divides them: a changed key is a delete and a create."""
    return build_images(changes, _WRITER, joins=False, placeholder=_UNAVAILABLE)


def join_envelopes(images: EventImages, lead: Sequence[Any], source: str, *, more: str = "") -> pa.Array[Any]:
    """The envelope of each event. `lead` begins it, up to its first member; `more` are members of its `source`."""
    changes, table = images.changes, images.changes.table.table
    milliseconds = _milliseconds(images)
    return pc.binary_join_element_wise(
        *lead,
        '"before":',
        pc.fill_null(images.before, "null"),
        ',"after":',
        pc.fill_null(images.after, "null"),
        f',"source":{{"connector":"tailrace","name":{_WRITER.name(source)},"schema":{_WRITER.name(table.schema)}'
        f',"table":{_WRITER.name(table.name)}{more},"position":"',
        position_texts(changes.numpy("commit")[images.place], changes.numpy("ordinal")[images.place]),
        '","txId":',
        _WRITER.value(images.column("txn")),
        ',"ts_ms":',
        milliseconds,
        ',"snapshot":"',
        pc.if_else(pa.array(images.op == Op.READ), "true", "false"),
        '"},"op":"',
        pa.array(LETTERS).take(pa.array(images.op)),
        '","ts_ms":',
        milliseconds,
        "}",
        "",
    )


def other_keys(images: EventImages) -> tuple[pa.Array[Any], pa.Array[Any]] | None:
    """For the halves of changed keys the name of a header, and in it the key of the other half; null for the rest.

    None when no key changed.
    """
    halves = np.searchsorted(images.place, second_halves(images.changes))
    if not len(halves):
        return None
    other = np.full(len(images.place), -1)
    other[halves], other[halves - 1] = halves - 1, halves
    name = pc.if_else(pa.array(images.op == Op.DELETE), "__debezium.newkey", "__debezium.oldkey")
    return name, images.key.take(pa.array(other, mask=other < 0))


def _milliseconds(images: EventImages) -> pa.Array[Any]:
    """The time of the commit, not of the encoding: an event is the same text whenever it is encoded."""
    return _as_milliseconds(images.column("committed_at"))


def _as_milliseconds(moments: pa.Array[Any]) -> pa.Array[Any]:
    at = pc.floor_temporal(moments, unit="millisecond")
    return _WRITER.value(at.cast(pa.timestamp("ms", "UTC")).cast(pa.int64()))


def _headers(images: EventImages) -> pa.Array[Any]:
    if (found := other_keys(images)) is None:
        return pa.repeat("", len(images.place))
    name, key = found
    return pc.fill_null(pc.binary_join_element_wise(',"headers":{"', name, '":', key, "}", ""), "")
