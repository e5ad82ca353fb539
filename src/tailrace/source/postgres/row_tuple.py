"""Tuples inside row messages: every column's place in many messages at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.source.postgres.frame import Indexes, MessageBatch
from tailrace.source.postgres.message import MalformedError
from tailrace.source.postgres.text import slice_texts

NULL, UNCHANGED, TEXT = ord("n"), ord("u"), ord("t")

_KIND = np.uint64(0xFF)
_LENGTH_SHIFT = np.uint64(8)


@dataclass
class TupleCells:
    """One column of many tuples: where its text is, how long, and its kind (null, unchanged or text).

    `kinds` is None when every cell is text. The length of a cell without text is 0.
    """

    starts: Indexes
    lengths: Indexes
    kinds: npt.NDArray[np.uint8] | None

    def texts(self, data: pa.Buffer) -> pa.Array[Any]:
        return slice_texts(data, self.starts, self.lengths, None if self.kinds is None else self.present)

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """The cells that are text."""
        return np.ones(len(self.starts), bool) if self.kinds is None else self.kinds == TEXT

    def take(self, rows: Indexes) -> TupleCells:
        return TupleCells(self.starts[rows], self.lengths[rows], None if self.kinds is None else self.kinds[rows])

    def are(self, kind: int) -> npt.NDArray[np.bool_] | None:
        """The cells of this kind; None when there is none."""
        if self.kinds is None:
            return None
        found = self.kinds == kind
        return found if found.any() else None

    def fill(self, rows: Indexes, source: TupleCells) -> None:
        """Put the cells of `source` in the place of those at `rows`."""
        if self.kinds is None:
            self.kinds = np.full(len(self.starts), TEXT, np.uint8)
        self.starts[rows] = source.starts
        self.lengths[rows] = source.lengths
        self.kinds[rows] = TEXT if source.kinds is None else source.kinds


def walk(frame: MessageBatch, at: Indexes, columns: int) -> tuple[list[TupleCells], Indexes]:
    """The cells of the tuples that begin at `at`, in ascending order, and where each tuple ends.

    Raises MalformedError for a tuple of another width and for values in binary format.
    """
    if not len(at):
        none = np.empty(0, np.int64)
        return [TupleCells(none, none, None) for _ in range(columns)], at
    counts = frame.bytes[at].astype(np.int64) << 8 | frame.bytes[at + 1]
    if (counts != columns).any():
        raise MalformedError(f"a row of {int(counts[counts != columns][0])} columns where its relation has {columns}")
    cells = list[TupleCells]()
    at = at + 2
    for _ in range(columns):
        column, at = _step(frame, at)
        cells.append(column)
    return cells, at


def _step(frame: MessageBatch, at: Indexes) -> tuple[TupleCells, Indexes]:
    words = _read(frame, at)
    kinds = (words & _KIND).astype(np.uint8)
    lengths = (words >> _LENGTH_SHIFT).astype(np.uint32).byteswap().astype(np.int64)
    present = kinds == TEXT
    if present.all():
        starts = at + 5
        return TupleCells(starts, lengths, None), starts + lengths
    if not (present | (kinds == NULL) | (kinds == UNCHANGED)).all():
        raise MalformedError("a value that is not text; start replication with binary 'false'")
    lengths *= present
    starts = at + np.where(present, 5, 1)
    return TupleCells(starts, lengths, kinds), starts + lengths


def _read(frame: MessageBatch, at: Indexes) -> npt.NDArray[np.uint64]:
    """The kind and the length at each place. Only the last row can be so near the end that the word would not fit."""
    last = len(frame.words) - 1
    over = int(at[-1]) - last
    if over <= 0:
        return frame.words[at]
    if over > 7:
        raise MalformedError("a row goes on behind the end of its message")
    at = at.copy()
    at[-1] = last
    words = frame.words[at]
    words[-1] >>= np.uint64(8 * over)
    return words
