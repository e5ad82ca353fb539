"""The format `cloudevents`: batches of CloudEvents 1.0 in JSON."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote as quote_uri

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination.webhook.format.event import columns_of, join_texts, member
from tailrace.destination.webhook.format.image import EventImages, build_images
from tailrace.destination.webhook.format.json_value import EventWriter
from tailrace.model.change import Changes, op_names, position_texts
from tailrace.model.schema import TableSchema

_WRITER = EventWriter()


class CloudEventsFormat:
    """Each event has its `id`; a changed key is one update with `old_key` next to `key`."""

    name = "cloudevents"
    content_type = "application/cloudevents-batch+json"

    def encode(self, changes: Changes, *, source: str) -> pa.RecordBatch:
        images = build_images(changes, _WRITER, joins=True)
        ids = images.ids(source)
        texts = pc.binary_join_element_wise(
            '{"specversion":"1.0","id":',
            _WRITER.texts(ids),
            f',"source":{_WRITER.name(quote_uri(source))},"type":"tailrace.',
            op_names(images.op),
            f'","subject":{_WRITER.name(str(changes.table.table))}',
            member("time", _WRITER.moments(images.column("committed_at"))),
            ',"datacontenttype":"application/json","data":{"position":"',
            position_texts(changes.numpy("commit")[images.place], changes.numpy("ordinal")[images.place]),
            '","txn":',
            _WRITER.value(images.column("txn")),
            ',"key":',
            pc.fill_null(images.key, "null"),
            member("old_key", pc.if_else(pa.array(images.moved), images.old_key, None)),
            ',"before":',
            pc.fill_null(images.before, "null"),
            ',"after":',
            pc.fill_null(images.after, "null"),
            ',"unchanged":',
            _unchanged(images),
            "}}",
            "",
        )
        return images.to_queue(ids, texts)

    def boundary(
        self, kind: str, *, positions: pa.Array[Any], txn: pa.Array[Any], at: pa.Array[Any], source: str
    ) -> pa.Array[Any]:
        return pc.binary_join_element_wise(
            '{"specversion":"1.0","id":',
            _WRITER.texts(pc.binary_join_element_wise(f"{source}:{kind}:", positions, "")),
            f',"source":{_WRITER.name(quote_uri(source))},"type":"tailrace.{kind}"',
            member("time", _WRITER.moments(at)),
            ',"datacontenttype":"application/json","data":{"position":"',
            positions,
            '","txn":',
            _WRITER.value(txn),
            "}}",
            "",
        )

    def relation(self, table: TableSchema, *, position: str, source: str) -> str:
        event = {
            "specversion": "1.0",
            "id": f"{source}:{table.table}:relation:{position}",
            "source": quote_uri(source),
            "type": "tailrace.relation",
            "subject": str(table.table),
            "datacontenttype": "application/json",
            "data": {"position": position, "key": list(table.key), "columns": columns_of(table)},
        }
        return json.dumps(event, ensure_ascii=False, separators=(",", ":"))

    def body(self, events: pa.Table, *, service_id: str, node_id: str) -> bytes:
        """Ignores the names of service and node: they are not part of these events."""
        return b"[" + join_texts(events.column("event"), ",") + b"]"


def _unchanged(images: EventImages) -> pa.Array[Any]:
    """The names of columns that were not sent, as a list. There are few distinct lists; each is encoded once."""
    encoded = images.column("unchanged").dictionary_encode()
    names = images.changes.table.row_type.names
    lists = [
        json.dumps(
            [name for index, name in enumerate(names) if bitmap[index // 8] >> index % 8 & 1], ensure_ascii=False
        )
        for bitmap in encoded.dictionary.to_pylist()
    ]
    return pc.fill_null(pa.array(lists, pa.string()).take(encoded.indices), "[]")
