"""Builds journal frames from raw pgoutput messages; each frame can be decoded on its own.

A frame ends at a commit if possible; only a transaction larger than a frame is cut. Its `meta` holds what the decoder
needs to start in the middle of the stream: the relations its rows use and the open transaction.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace import journal
from tailrace.model.change import Position
from tailrace.source.postgres.message_table import replace_messages
from tailrace.source.postgres.offset import before
from tailrace.source.postgres.pgoutput.message import (
    EPOCH_US,
    MalformedError,
    MessageKind,
    Relation,
    Truncate,
    parse,
)
from tailrace.source.postgres.pgoutput.message_batch import ORDINALS_PER_CHANGE, Indexes, MessageBatch, OpenTransaction

# A scan of raw messages that does not decode rows: what the receiver needs to cut frames and to acknowledge.

_COMMIT_BYTES = 26


@dataclass(frozen=True)
class Scan:
    """What a frame of messages holds. Indexes count messages from 0.

    begins, commits         indexes of the Begin and Commit messages
    commit_lsn, end_lsn     of each Commit; a cut after `commits[i]` ends at `end_lsn[i]`
    rows                    row changes (insert, update, delete) per relation OID
    changes                 all changes, truncates included
    relations               index and raw bytes of each Relation message, for `message.parse`
    start, end              the transaction open before the first and after the last message
    """

    frame: MessageBatch
    begins: Indexes
    commits: Indexes
    commit_lsn: Indexes
    end_lsn: Indexes
    rows: dict[int, int]
    changes: int
    relations: tuple[tuple[int, bytes], ...]
    start: OpenTransaction | None
    end: OpenTransaction | None

    def open_at(self, index: int) -> OpenTransaction | None:
        """The transaction that is open before message `index`: what a frame cut there must be decoded with."""
        begun = int(np.searchsorted(self.begins, index))
        if int(np.searchsorted(self.commits, index)) == begun + (self.start is not None):
            return None
        change = int(np.searchsorted(self.frame.changes, index))
        if begun == 0:
            assert self.start is not None
            return OpenTransaction(
                self.start.commit_lsn,
                self.start.xid,
                self.start.committed_at_us,
                self.start.next_ordinal + change * ORDINALS_PER_CHANGE,
            )
        begin = int(self.begins[begun - 1])
        at = self.frame.starts[begin : begin + 1]
        return OpenTransaction(
            int(self.frame.int64(at + 1)[0]),
            int(self.frame.uint32(at + 17)[0]),
            int(self.frame.int64(at + 9)[0]) + EPOCH_US,
            (change - int(np.searchsorted(self.frame.changes, begin))) * ORDINALS_PER_CHANGE,
        )


def scan(frame: MessageBatch, transaction: OpenTransaction | None = None) -> Scan:
    """Scan messages in stream order; `transaction` is the one that is open before the first. Pure.

    Raises MalformedError when a message is cut short.
    """
    begins, commits = frame.places(MessageKind.BEGIN), frame.places(MessageKind.COMMIT)
    at = frame.starts[commits]
    if (frame.ends[commits] - at < _COMMIT_BYTES).any():
        raise MalformedError("a Commit is cut short")
    changed = frame.changes
    oids, counts = np.unique(
        frame.relation_oids(changed[frame.kinds[changed] != MessageKind.TRUNCATE]), return_counts=True
    )
    relations = tuple((index, frame.message(index)) for index in frame.places(MessageKind.RELATION).tolist())
    found = Scan(
        frame,
        begins,
        commits,
        frame.int64(at + 2),
        frame.int64(at + 10),
        dict(zip(oids.tolist(), counts.tolist(), strict=True)),
        len(changed),
        relations,
        transaction,
        None,
    )
    object.__setattr__(found, "end", found.open_at(len(frame)))
    return found


FRAME_BYTES = 8 * 1024 * 1024

_LAYOUT = pa.schema([pa.field("message", pa.binary(), False)])


DDL_PREFIX = "tailrace.ddl"
"""The prefix of the logical messages with which the event trigger reports schema changes."""


@dataclass(frozen=True)
class SchemaEvent:
    """A Relation message, or one of the event trigger, and the position of the first change it applies to."""

    at: Position
    raw: bytes


@dataclass(frozen=True)
class FrameMeta:
    """The metadata of a frame: changes per relation, the relations valid at its start, the open transaction, and in
    order the messages inside it that may bring a table's next version."""

    rows: Mapping[int, int]
    relations: Mapping[int, bytes]
    transaction: OpenTransaction | None
    shapes: tuple[SchemaEvent, ...] = ()

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "rows": {str(oid): count for oid, count in self.rows.items()},
                "relations": {str(oid): base64.b64encode(raw).decode() for oid, raw in self.relations.items()},
                "transaction": self.transaction and astuple(self.transaction),
                "shapes": [[str(shape.at), base64.b64encode(shape.raw).decode()] for shape in self.shapes],
            }
        ).encode()

    @staticmethod
    @lru_cache(maxsize=4096)
    def from_bytes(raw: bytes) -> FrameMeta:
        meta = json.loads(raw)
        return FrameMeta(
            {int(oid): count for oid, count in meta["rows"].items()},
            {int(oid): base64.b64decode(text) for oid, text in meta["relations"].items()},
            OpenTransaction(*meta["transaction"]) if meta["transaction"] else None,
            tuple(SchemaEvent(Position.parse(at), base64.b64decode(raw)) for at, raw in meta.get("shapes", ())),
        )

    def parsed_relations(self) -> dict[int, Relation]:
        return {oid: _relation(raw) for oid, raw in self.relations.items()}


@lru_cache(maxsize=4096)
def _relation(raw: bytes) -> Relation:
    relation = parse(raw)
    assert isinstance(relation, Relation)
    return relation


def messages_of(payload: pa.Buffer | memoryview | bytes) -> pa.Array[Any]:
    """The messages inside a frame's payload, without copying them."""
    with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
        return reader.read_next_batch().column(0)


class FrameBuilder:
    """Cuts a stream of messages into frames. After a stream broke, create a new one from what is durable."""

    def __init__(self, skip_below: int, *, takes_messages: bool = False) -> None:
        self.durable_end = skip_below
        """The end LSN of the last complete transaction in a frame; earlier ones that arrive again are skipped."""
        self._takes_messages = takes_messages
        self._relations: dict[int, bytes] = {}
        self._transaction: OpenTransaction | None = None
        self._carry: pa.Array[Any] | None = None

    @property
    def idle(self) -> bool:
        """True between transactions."""
        return self._transaction is None and self._carry is None

    def feed(self, messages: pa.Array[Any]) -> list[journal.Frame]:
        """Frames for the messages so far; the beginning of an unfinished transaction waits unless it is large."""
        if self._carry is not None:
            messages = pa.concat_arrays([self._carry, messages])
            self._carry = None
        batch = MessageBatch.of(messages)
        # Those of other programs may be of any size, and are of use only where they are wanted.
        ours = replace_messages(messages, batch, keeps=self._takes_messages, ddl_prefix=DDL_PREFIX)
        if ours is not messages:
            messages, batch = ours, MessageBatch.of(ours)
        commits = batch.places(MessageKind.COMMIT)
        cut = int(commits[-1]) + 1 if len(commits) else 0
        frames = self._frame(messages.slice(0, cut), batch.head(cut)) if cut else []
        rest = messages.slice(cut)
        is_open = self._transaction is not None or bool((batch.kinds[cut:] == MessageKind.BEGIN).any())
        # A piece without a change would have no position of its own.
        has_change = bool(len(batch.changes) and batch.changes[-1] >= cut)
        if is_open and has_change and batch.ends[-1] - batch.starts[cut] > FRAME_BYTES:
            frames += self._frame(rest, MessageBatch.of(rest))
        elif is_open and len(rest):
            self._carry = rest
        return frames

    def _frame(self, messages: pa.Array[Any], batch: MessageBatch) -> list[journal.Frame]:
        found = scan(batch, self._transaction)
        known = dict(self._relations)
        self._relations.update((int.from_bytes(raw[1:5], "big"), raw) for _, raw in found.relations)
        # Commits arrive in order, so what is known already is a prefix. Its relations apply to the rows after it.
        known_commits = int(np.searchsorted(found.commit_lsn, self.durable_end))
        is_known = found.end is not None and found.end.commit_lsn < self.durable_end  # and what follows of it
        if is_known or (known_commits == len(found.commits) and found.end is None):
            self._transaction = found.end
            return []
        if known_commits:
            cut = int(found.commits[known_commits - 1]) + 1
            known |= {int.from_bytes(raw[1:5], "big"): raw for index, raw in found.relations if index < cut}
            messages = messages.slice(cut)
            found = scan(MessageBatch.of(messages))
        first = _position(found.start or found.open_at(int(found.begins[0]) + 1))
        self._transaction = found.end
        if found.end is None:
            self.durable_end = int(found.end_lsn[-1])
            last = before(self.durable_end)
        else:
            following = _position(found.end)
            last = Position(following.commit, max(following.ordinal - 1, 0))
        shapes = _shapes(found, known)
        if not found.changes and not shapes and found.start is None and found.end is None:
            return []  # a heartbeat, or nothing that was published: only its end matters
        rows = _changes_per_relation(found)
        meta = FrameMeta(rows, {oid: known[oid] for oid in rows if oid in known}, found.start, shapes)
        return [journal.Frame(first, last, found.end is None, found.changes, meta.to_bytes(), _payload(messages))]


def _position(transaction: OpenTransaction | None) -> Position:
    assert transaction is not None
    return Position(transaction.commit_lsn, transaction.next_ordinal)


def _shapes(found: Scan, known: Mapping[int, bytes]) -> tuple[SchemaEvent, ...]:
    """The messages that may bring a new version: relations that differ from the known ones, and the event trigger's."""
    seen = dict(known)
    shapes: list[tuple[int, bytes]] = []
    for index, raw in found.relations:
        oid = int.from_bytes(raw[1:5], "big")
        if seen.get(oid) != raw:
            shapes.append((index, raw))
        seen[oid] = raw
    shapes += [(index, found.frame.message(index)) for index in found.frame.places(MessageKind.MESSAGE).tolist()]
    return tuple(SchemaEvent(_position(found.open_at(index)), raw) for index, raw in sorted(shapes))


def _changes_per_relation(found: Scan) -> dict[int, int]:
    rows = dict(found.rows)
    for index in found.frame.places(MessageKind.TRUNCATE).tolist():
        truncate = parse(found.frame.message(index))
        assert isinstance(truncate, Truncate)
        for oid in truncate.oids:
            rows[oid] = rows.get(oid, 0) + 1
    return rows


def _payload(messages: pa.Array[Any]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _LAYOUT) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([messages], schema=_LAYOUT))
    return sink.getvalue()
