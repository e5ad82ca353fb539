"""A look at raw messages that does not decode rows: what the receiver needs to cut and to acknowledge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.source.postgres.frame import ORDINALS_PER_CHANGE, Frame, OpenTransaction, Places
from tailrace.source.postgres.message import EPOCH_US, Kind


@dataclass(frozen=True)
class Scan:
    """What a run of messages holds. Indexes count messages from 0.

    begins, commits         indexes of the Begin and Commit messages
    commit_lsn, end_lsn     of each Commit; cutting behind `commits[i]` ends at `end_lsn[i]`
    committed_at_us         of each Commit
    rows                    row changes (insert, update, delete) per relation OID
    changes                 all changes, truncates included
    relations               index and raw bytes of each Relation message, for `message.parse`
    start, end              the transaction open before the first and behind the last message
    """

    begins: Places
    commits: Places
    commit_lsn: Places
    end_lsn: Places
    committed_at_us: Places
    rows: dict[int, int]
    changes: int
    relations: tuple[tuple[int, bytes], ...]
    start: OpenTransaction | None
    end: OpenTransaction | None
    _frame: Frame

    def open_at(self, index: int) -> OpenTransaction | None:
        """The transaction that is open before message `index`: what a frame cut there must be decoded with."""
        begun = int(np.searchsorted(self.begins, index))
        if int(np.searchsorted(self.commits, index)) == begun + (self.start is not None):
            return None
        change = int(np.searchsorted(self._frame.changes, index))
        if begun == 0:
            assert self.start is not None
            return OpenTransaction(
                self.start.commit_lsn,
                self.start.xid,
                self.start.committed_at_us,
                self.start.next_ordinal + change * ORDINALS_PER_CHANGE,
            )
        begin = int(self.begins[begun - 1])
        at = self._frame.starts[begin : begin + 1]
        return OpenTransaction(
            int(self._frame.int64(at + 1)[0]),
            int(self._frame.uint32(at + 17)[0]),
            int(self._frame.int64(at + 9)[0]) + EPOCH_US,
            (change - int(np.searchsorted(self._frame.changes, begin))) * ORDINALS_PER_CHANGE,
        )

    def cut_after(self, size: int) -> int | None:
        """How many messages to take so that they end at the first commit at or past `size` bytes; None without one."""
        behind = self._frame.ends[self.commits]
        found = int(np.searchsorted(behind, size))
        return int(self.commits[found]) + 1 if found < len(behind) else None


def scan(messages: pa.Array[Any], transaction: OpenTransaction | None = None) -> Scan:
    """Look at messages in stream order; `transaction` is the one they begin in the middle of. Pure.

    Raises MalformedError for bytes that are no pgoutput messages of version 1.
    """
    frame = Frame(messages)
    kinds = frame.kinds
    begins, commits = np.flatnonzero(kinds == Kind.BEGIN), np.flatnonzero(kinds == Kind.COMMIT)
    at = frame.starts[commits]
    changed = frame.changes
    oids, counts = np.unique(frame.relation_oids(changed[kinds[changed] != Kind.TRUNCATE]), return_counts=True)
    relations = tuple((index, frame.message(index)) for index in np.flatnonzero(kinds == Kind.RELATION).tolist())
    found = Scan(
        begins,
        commits,
        frame.int64(at + 2),
        frame.int64(at + 10),
        frame.int64(at + 18) + EPOCH_US,
        dict(zip(oids.tolist(), counts.tolist(), strict=True)),
        len(changed),
        relations,
        transaction,
        None,
        frame,
    )
    object.__setattr__(found, "end", found.open_at(len(frame)))
    return found
