"""The pgoutput messages that are read one by one: relations, truncates and logical messages.

They are few, so plain Python parses them. `pgoutput.decode` reads rows, many at a time, and `scan` the messages that
begin and end transactions.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

EPOCH_US = 946_684_800_000_000
"""Postgres counts microseconds from 2000-01-01, Arrow from 1970-01-01."""


class MalformedError(ValueError):
    """Bytes that are not messages of pgoutput version 1 in text format. The error's text quotes none of them."""


class MessageKind(IntEnum):
    """The first byte of a message."""

    BEGIN = ord("B")
    COMMIT = ord("C")
    RELATION = ord("R")
    INSERT = ord("I")
    UPDATE = ord("U")
    DELETE = ord("D")
    TRUNCATE = ord("T")
    TYPE = ord("Y")
    ORIGIN = ord("O")
    MESSAGE = ord("M")


@dataclass(frozen=True)
class RelationColumn:
    """A published column. `identifies` marks the replica identity; under FULL every column is marked."""

    name: str
    type_oid: int
    typmod: int
    identifies: bool


@dataclass(frozen=True)
class Relation:
    """The columns of the rows that follow for one table, until the next Relation of the same OID.

    `replica_identity` is `d`, `n`, `f` or `i` as in `pg_class.relreplident`.
    """

    oid: int
    schema: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True)
class Truncate:
    """Some tables were emptied by one statement."""

    oids: tuple[int, ...]


@dataclass(frozen=True)
class LogicalMessage:
    """A message written with `pg_logical_emit_message`. `lsn` is where it is in the log."""

    transactional: bool
    prefix: str
    content: bytes
    lsn: int = 0


Control = Relation | Truncate | LogicalMessage


def parse(raw: bytes) -> Control:
    """Parse one message. Raises MalformedError for a row message and for bytes that are no message."""
    try:
        return _parse(raw)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedError(f"a pgoutput message of {len(raw)} bytes is cut short or damaged") from error


def _parse(raw: bytes) -> Control:
    body = _Reader(raw)
    match kind := raw[0]:
        case MessageKind.RELATION:
            (oid,) = body.take("I")
            schema, name = body.text() or "pg_catalog", body.text()
            identity, count = body.take("cH")
            columns = tuple(_relation_column(body) for _ in range(count))
            return Relation(oid, schema, name, identity.decode("ascii"), columns)
        case MessageKind.TRUNCATE:
            count, _ = body.take("IB")
            return Truncate(body.take(f"{count}I"))
        case MessageKind.MESSAGE:
            flags, lsn = body.take("Bq")
            prefix = body.text()
            (length,) = body.take("I")
            return LogicalMessage(bool(flags & 1), prefix, body.bytes(length), lsn)
    raise MalformedError(f"a message of kind {chr(kind)!r} cannot be parsed on its own")


def _relation_column(body: _Reader) -> RelationColumn:
    (flags,) = body.take("B")
    name = body.text()
    type_oid, typmod = body.take("Ii")
    return RelationColumn(name, type_oid, typmod, bool(flags & 1))


class _Reader:
    """Walks a message after its first byte."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 1

    def take(self, layout: str) -> tuple[Any, ...]:
        layout = ">" + layout
        values = struct.unpack_from(layout, self._raw, self._at)
        self._at += struct.calcsize(layout)
        return values

    def text(self) -> str:
        end = self._raw.find(b"\0", self._at)
        if end < 0:
            raise IndexError("no end of a name")
        text = self._raw[self._at : end].decode()
        self._at = end + 1
        return text

    def bytes(self, length: int) -> bytes:
        if self._at + length > len(self._raw):
            raise IndexError("no end of the content")
        return self._raw[self._at : self._at + length]
