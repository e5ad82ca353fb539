"""A look at raw messages that does not decode rows: what the receiver needs to cut and to acknowledge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tailrace.source.postgres.frame import ORDINALS_PER_CHANGE, Indexes, MessageBatch, OpenTransaction
from tailrace.source.postgres.message import EPOCH_US, MalformedError, MessageKind

_COMMIT_BYTES = 26


@dataclass(frozen=True)
class Scan:
    """What a frame of messages holds. Indexes count messages from 0.

    begins, commits         indexes of the Begin and Commit messages
    commit_lsn, end_lsn     of each Commit; cutting behind `commits[i]` ends at `end_lsn[i]`
    rows                    row changes (insert, update, delete) per relation OID
    changes                 all changes, truncates included
    relations               index and raw bytes of each Relation message, for `message.parse`
    start, end              the transaction open before the first and behind the last message
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
    """Look at messages in stream order; `transaction` is the one they begin in the middle of. Pure.

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
