"""An event of the queue, and what a body format must do with it.

Executors encode changes to events; the sender joins the texts of some events into the body of a request. The text of an
event is fixed when it enters the queue, so every attempt and every node sends the same bytes for it.
"""

from __future__ import annotations

from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import ConfigError
from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema

QUEUE_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string(), False),
        pa.field("commit", pa.int64(), False),
        pa.field("ordinal", pa.int64(), False),
        pa.field("copied", pa.bool_(), False),
        pa.field("marker", pa.bool_(), False),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("id", pa.string(), False),
        pa.field("event", pa.string(), False),
    ]
)
"""Events in the order of the queue.

table           `schema.table`
commit, ordinal the position in the upstream's history; for an update that changed its key, that of its second half
copied          a row of a copy
marker          no event, but a statement about the rows before it: everything of the table up to here is in the queue
                (with the name EVERY: of every table that the leader has sent from); id and event are ""
at              when it was committed, null where the upstream does not report it
id              the same for the same event, however often and from whichever node it is sent
event           JSON in the configured format
"""


EVERY = "*"
"""Stands for all tables, in a marker and in its watermark. No table has this name: names of tables have a dot."""


class Format(Protocol):
    """How events look on the wire. Configuration only: frozen and picklable."""

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        ...

    @property
    def content_type(self) -> str:
        """The media type of a body."""
        ...

    def encode(self, changes: Changes, *, source: str) -> pa.RecordBatch:
        """The changes as rows of QUEUE_SCHEMA, in their order. Called on executors; a repeat gives the same rows.

        `source` is the name of the pipeline. Both halves of a changed key must be in the same `changes`.
        """
        ...

    def body(self, events: pa.Table, *, service_id: str, node_id: str) -> bytes:
        """The body of one request with these events of the queue, at least one, none of them a marker."""
        ...


class StreamFormat(Format, Protocol):
    """A format that also has events for the boundaries of transactions and for the columns of tables."""

    def boundary(
        self, kind: str, *, positions: pa.Array[Any], txn: pa.Array[Any], at: pa.Array[Any], source: str
    ) -> pa.Array[Any]:
        """The texts of begins or commits (`kind`); each at the position of the change next to it."""
        ...

    def relation(self, table: TableSchema, *, position: str, source: str) -> str:
        """The text that names a table's columns, before the change at this position."""
        ...


def format_of(name: str) -> Format:
    """The format with this name. Raises ConfigError for an unknown one."""
    from tailrace.destination.webhook.format.cloudevents import CloudEventsFormat
    from tailrace.destination.webhook.format.debezium import DebeziumFormat
    from tailrace.destination.webhook.format.rqlite import RqliteFormat

    formats: list[Format] = [RqliteFormat(), CloudEventsFormat(), DebeziumFormat()]
    known = {each.name: each for each in formats}
    if name not in known:
        raise ConfigError(f"there is no webhook format {name}", fix=f"format: {' | '.join(known)}")
    return known[name]


def stream_format_of(name: str) -> StreamFormat:
    """The format with this name. Raises ConfigError for one that has changes only."""
    from tailrace.destination.webhook.format.cloudevents import CloudEventsFormat
    from tailrace.destination.webhook.format.debezium import DebeziumFormat

    formats: list[StreamFormat] = [CloudEventsFormat(), DebeziumFormat()]
    known = {each.name: each for each in formats}
    if name not in known:
        raise ConfigError(f"the webhook format {name} has changes only", fix=f"format: {' | '.join(known)}")
    return known[name]


def member(name: str, text: pa.Array[Any]) -> pa.Array[Any]:
    """`,"name":text`, and nothing where there is no text."""
    return pc.fill_null(pc.binary_join_element_wise(f',"{name}":', text, ""), "")


def columns_of(table: TableSchema) -> list[dict[str, Any]]:
    """The columns of a table as a relation names them: the upstream's type, and whether a value may be missing."""
    return [
        {"name": column.name, "type": column.upstream_type or str(column.type), "optional": column.nullable}
        for column in table.columns
    ]


def join_texts(texts: pa.Array[Any] | pa.ChunkedArray[Any], separator: str) -> bytes:
    """All texts as one, in UTF-8."""
    whole = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    every = pa.ListArray.from_arrays(pa.array([0, len(whole)], pa.int32()), whole)
    return bytes(pc.binary_join(every, separator)[0].as_buffer())
