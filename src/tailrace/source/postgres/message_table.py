"""Logical messages of other programs, as rows of a table that no database has: `pg_logical.message`.

The receiver writes each message to the journal as an insert into that table, at its place among the changes. So it is
followed, stored and delivered like any row. A message that is not part of a transaction becomes one of its own, with
the message's LSN as its commit, and without a transaction id.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import pyarrow as pa

from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres.catalog import Published
from tailrace.source.postgres.offset import format_lsn
from tailrace.source.postgres.pgoutput.message import LogicalMessage, MessageKind, parse
from tailrace.source.postgres.pgoutput.message_batch import MessageBatch

OID: Final = 1
"""The server gives no table this OID."""
TABLE: Final = TableName("pg_logical", "message")
"""No application has a schema of this name: names that begin with pg_ are the server's."""
OWN_PREFIX: Final = "tailrace"
"""Of heartbeats, and with a dot and more of the event trigger's messages."""

_TEXT, _BYTEA, _BOOLEAN, _PG_LSN = 25, 17, 16, 3220
_SCHEMA: Final = TableSchema(
    TABLE,
    (
        Column("prefix", pa.string(), False, "text", 1),
        Column("content", pa.binary(), False, "bytea", 2),
        Column("transactional", pa.bool_(), False, "boolean", 3),
        Column("lsn", pa.string(), False, "pg_lsn", 4),
    ),
    upstream_id=str(OID),
)
PUBLISHED: Final = Published(_SCHEMA, "n")


def _relation() -> bytes:
    names = zip(_SCHEMA.columns, (_TEXT, _BYTEA, _BOOLEAN, _PG_LSN), strict=True)
    columns = [struct.pack(">B", 0) + _name(column.name) + struct.pack(">Ii", oid, -1) for column, oid in names]
    head = struct.pack(">cI", b"R", OID) + _name(TABLE.schema) + _name(TABLE.name)
    return head + struct.pack(">cH", b"n", len(columns)) + b"".join(columns)


def _name(text: str) -> bytes:
    return text.encode() + b"\0"


_RELATION: Final = _relation()


def as_insert(message: LogicalMessage) -> list[bytes]:
    """The message in pgoutput's own terms: a relation and an insert, between a begin and a commit if it has none."""
    values = [
        message.prefix.encode(),
        b"\\x" + message.content.hex().encode(),
        b"t" if message.transactional else b"f",
        format_lsn(message.lsn).encode(),
    ]
    cells = b"".join(struct.pack(">cI", b"t", len(value)) + value for value in values)
    rows = [_RELATION, struct.pack(">cIcH", b"I", OID, b"N", len(values)) + cells]
    if message.transactional:
        return rows
    begin = struct.pack(">cqqI", b"B", message.lsn, 0, 0)
    return [begin, *rows, struct.pack(">cBqqq", b"C", 0, message.lsn, message.lsn + 1, 0)]


def replace_messages(messages: pa.Array[Any], batch: MessageBatch, *, keeps: bool, ddl_prefix: str) -> pa.Array[Any]:
    """The stream with the messages of other programs as inserts, or without them. The event trigger's stay. Pure."""
    pieces: list[pa.Array[Any]] = []
    done = 0
    for index in batch.places(MessageKind.MESSAGE).tolist():
        message = parse(batch.message(index))
        assert isinstance(message, LogicalMessage)
        if message.transactional and message.prefix == ddl_prefix:
            continue
        is_own = message.prefix == OWN_PREFIX or message.prefix.startswith(f"{OWN_PREFIX}.")
        pieces.append(messages.slice(done, index - done))
        if keeps and not is_own:
            pieces.append(pa.array(as_insert(message), messages.type))
        done = index + 1
    return pa.concat_arrays([*pieces, messages.slice(done)]) if pieces else messages
