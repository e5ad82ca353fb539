"""Raw pgoutput messages as one buffer: where each begins, what it is, and numbers read from many at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.model.change import Position
from tailrace.source.postgres.pgoutput.message import EPOCH_US, MalformedError, MessageKind

_IS_KIND = np.zeros(256, bool)
_IS_KIND[list(MessageKind)] = True

Indexes = npt.NDArray[np.int64]

_MAX_BYTES = 2**31 - 1  # strings over the buffer have 32-bit bounds

ORDINALS_PER_CHANGE = 2
"""A key change becomes a delete and an insert, so every change reserves two ordinals."""


@dataclass(frozen=True)
class OpenTransaction:
    """The transaction that is open where a batch of messages begins or ends.

    `next_ordinal` is the ordinal of the next row change in it.
    """

    commit_lsn: int
    xid: int
    committed_at_us: int
    next_ordinal: int = 0


@dataclass(frozen=True, eq=False)
class MessageBatch:
    """An Arrow array of messages, read in place. No message is null.

    `data` begins at the first message, so a slice of a large array costs no more than its own bytes.
    """

    data: pa.Buffer
    starts: Indexes
    ends: Indexes
    kinds: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, messages: pa.Array[Any]) -> MessageBatch:
        """Raises MalformedError for bytes that are not messages of pgoutput version 1."""
        width = np.int64 if pa.types.is_large_binary(messages.type) else np.int32
        _, bounds, data = messages.buffers()
        count = len(messages)
        if count == 0 or bounds is None or data is None:
            edges: Indexes = np.zeros(count + 1, np.int64)
            content = pa.py_buffer(b"")
        else:
            edges = np.frombuffer(bounds, width, count + 1, messages.offset * np.dtype(width).itemsize).astype(np.int64)
            content = data.slice(int(edges[0]), int(edges[-1] - edges[0]))
            edges -= edges[0]
            if edges[-1] > _MAX_BYTES:
                raise ValueError(f"a frame of {int(edges[-1])} bytes; cut it below {_MAX_BYTES}")
        starts, ends = edges[:-1], edges[1:]
        if (starts == ends).any():
            raise MalformedError("an empty message is not a pgoutput message")
        kinds = np.frombuffer(content, np.uint8)[starts]
        if not _IS_KIND[kinds].all():
            raise MalformedError("a message of a kind that pgoutput version 1 does not have")
        return cls(content, starts, ends, kinds)

    def head(self, count: int) -> MessageBatch:
        """The first `count` messages, without checking them again."""
        end = int(self.ends[count - 1]) if count else 0
        return MessageBatch(self.data.slice(0, end), self.starts[:count], self.ends[:count], self.kinds[:count])

    def __len__(self) -> int:
        return len(self.starts)

    def places(self, kind: MessageKind) -> Indexes:
        """The indexes of the messages of a kind."""
        return np.flatnonzero(self.kinds == kind)

    def message(self, index: int) -> bytes:
        return self.bytes[self.starts[index] : self.ends[index]].tobytes()

    @cached_property
    def bytes(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.data, np.uint8)

    @cached_property
    def words(self) -> npt.NDArray[np.uint64]:
        """The eight bytes at every offset, least significant first; they overlap, so `words[at]` reads anywhere."""
        return np.ndarray((max(len(self.bytes) - 7, 0),), "<u8", self.data, strides=(1,))

    def uint32(self, at: Indexes) -> Indexes:
        """Network-order numbers of 32 bits."""
        numbers = np.ndarray((max(len(self.bytes) - 3, 0),), ">u4", self.data, strides=(1,))
        return _gather(numbers, at).astype(np.int64)

    def int64(self, at: Indexes) -> Indexes:
        """Network-order numbers of 64 bits."""
        return _gather(self.words, at).byteswap().view(np.int64)

    @cached_property
    def changes(self) -> Indexes:
        """The indexes of messages that count as a change: rows and truncates."""
        kinds = self.kinds
        is_row = (kinds == MessageKind.INSERT) | (kinds == MessageKind.UPDATE) | (kinds == MessageKind.DELETE)
        return np.flatnonzero(is_row | (kinds == MessageKind.TRUNCATE))

    def relation_oids(self, rows: Indexes) -> Indexes:
        """The relation of each of these row messages."""
        return self.uint32(self.starts[rows] + 1)


def _gather(numbers: npt.NDArray[Any], at: Indexes) -> npt.NDArray[Any]:
    try:
        return numbers[at]
    except IndexError:
        raise MalformedError("the last message is cut short") from None


@dataclass(frozen=True)
class Placement:
    """For every change of a frame, in order, the transaction it belongs to and its ordinal there."""

    commit: Indexes
    xid: Indexes
    committed_at_us: Indexes
    ordinal: Indexes

    @classmethod
    def of(cls, frame: MessageBatch, transaction: OpenTransaction | None) -> Placement:
        """Raises MalformedError when a change comes before any Begin and no transaction is open."""
        begins = frame.places(MessageKind.BEGIN)
        # Which transaction each change is in: 0 is the one open at the start, n the one of the n-th Begin.
        number = np.searchsorted(begins, frame.changes)
        if transaction is None and len(number) and number[0] == 0:
            raise MalformedError("a row comes before the Begin of its transaction")
        first = transaction or OpenTransaction(0, 0, 0)
        at = frame.starts[begins]
        counts = np.arange(len(frame.changes)) * ORDINALS_PER_CHANGE
        begin_counts = np.searchsorted(frame.changes, begins) * ORDINALS_PER_CHANGE
        return cls(
            np.append(first.commit_lsn, frame.int64(at + 1))[number],
            np.append(first.xid, frame.uint32(at + 17))[number],
            np.append(first.committed_at_us, frame.int64(at + 9) + EPOCH_US)[number],
            counts - np.append(-first.next_ordinal, begin_counts)[number],
        )

    def before(self, position: Position) -> int:
        """How many of the changes come before a position: the index of the first that does not."""
        return self._count(position, self.ordinal < position.ordinal)

    def upto(self, position: Position) -> int:
        """How many of the changes come before a position or are at it."""
        return self._count(position, self.ordinal <= position.ordinal)

    def _count(self, position: Position, counts: npt.NDArray[np.bool_]) -> int:
        """The changes of earlier commits, and those of the same one that count."""
        return int(np.count_nonzero((self.commit < position.commit) | ((self.commit == position.commit) & counts)))
