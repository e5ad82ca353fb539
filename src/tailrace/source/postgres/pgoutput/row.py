"""Tuples inside row messages: finds every column in many messages at once, and builds the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import exact
from tailrace.model.schema import TableSchema
from tailrace.source.postgres.copy_query import read_column
from tailrace.source.postgres.pgoutput.message import MalformedError, MessageKind, Relation
from tailrace.source.postgres.pgoutput.message_batch import Indexes, MessageBatch
from tailrace.source.postgres.pgoutput.text import slice_texts

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
        """Replace the cells at `rows` with those of `source`."""
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
    """The kind and the length at each place. Only the last row can be so close to the end that a word does not fit."""
    last = len(frame.words) - 1
    over = int(at[-1]) - last
    if over <= 0:
        return frame.words[at]
    if over > 7:
        raise MalformedError("a row is longer than its message")
    at = at.copy()
    at[-1] = last
    words = frame.words[at]
    words[-1] >>= np.uint64(8 * over)
    return words


# The row images of one relation's messages: typed columns of the new rows and of the old ones sent with them.

Mask = npt.NDArray[np.bool_]

_NEW, _KEY, _OLD = ord("N"), ord("K"), ord("O")
_MARKER = 5  # after the kind and the relation's OID
_TUPLE = 6


@dataclass(frozen=True)
class PostgresImage:
    """Rows as columns, with the `exact` texts of what the columns cannot hold."""

    columns: list[pa.Array[Any]]
    exact: pa.Array[Any] | None


class Images:
    """Reads the row messages `rows` (indexes into `frame`, ascending) of one relation.

    rows              the image of each message: the new row, or of a delete the old one
    old_rows          which of them are updates that came with an old image
    is_full           for each message, whether its old image is the whole row
    unchanged         (messages, columns) mask of values that were not sent and that no old image holds; None for none
    """

    def __init__(self, frame: MessageBatch, rows: Indexes, relation: Relation, table: TableSchema) -> None:
        self._frame, self._table = frame, table
        starts = frame.starts[rows]
        self.kinds = frame.kinds[rows]
        markers = frame.bytes[starts + _MARKER]
        _check_markers(self.kinds, markers)
        self.is_full = markers == _OLD
        self.old_rows = np.flatnonzero((self.kinds == MessageKind.UPDATE) & (markers != _NEW))
        place = {column.name: index for index, column in enumerate(relation.columns)}
        order = [place[column.name] for column in table.columns]
        at = starts + _TUPLE
        self._old: list[TupleCells] = []
        if len(self.old_rows):
            cells, ends = walk(frame, at[self.old_rows], len(order))
            if (frame.bytes[ends] != _NEW).any():
                raise MalformedError("an update without its new row")
            at[self.old_rows] = ends + 1
            self._old = [cells[index] for index in order]
        cells, ends = walk(frame, at, len(order))
        if (ends != frame.ends[rows]).any():
            raise MalformedError("a row does not end where its message does")
        self._new = [cells[index] for index in order]
        self._fill()

    def _fill(self) -> None:
        """Take values that were not sent again from the old image, where it has them."""
        masks: dict[int, Mask] = {}
        for index, cells in enumerate(self._new):
            if (unchanged := cells.are(UNCHANGED)) is None:
                continue
            if self._old:
                # A value that was not sent is not null, so an old image that is null there does not hold the column.
                # The log of a partition, by its root's identity, may also call an old image whole that is only a key.
                filled = np.flatnonzero(unchanged[self.old_rows] & self._old[index].present)
                cells.fill(self.old_rows[filled], self._old[index].take(filled))
            if (left := cells.are(UNCHANGED)) is not None:
                masks[index] = left
        self.unchanged: Mask | None = None
        if masks:
            self.unchanged = np.zeros((len(self.kinds), len(self._new)), bool)
            for index, left in masks.items():
                self.unchanged[:, index] = left

    def has_lost_key(self) -> bool:
        """Whether an old image is null in a key column, and so identifies no row."""
        deleted = self.kinds == MessageKind.DELETE
        return any(
            not self._new[index].present[deleted].all() or (self._old and not self._old[index].present.all())
            for index, column in enumerate(self._table.columns)
            if column.name in self._table.key
        )

    def key_changed(self) -> Mask:
        """For each of `old_rows`, whether the key changed."""
        changed = np.zeros(len(self.old_rows), bool)
        for index, column in enumerate(self._table.columns):
            if column.name in self._table.key:
                before = self._old[index].texts(self._frame.data)
                after = self._new[index].take(self.old_rows).texts(self._frame.data)
                changed |= pc.fill_null(pc.not_equal(before, after), True).to_numpy(zero_copy_only=False)
        return changed

    def read(self) -> PostgresImage:
        """The image of each message."""
        return self._typed(self._new)

    def read_old(self) -> PostgresImage:
        """The old image of each of `old_rows`; outside the key null where the upstream sent the key alone."""
        return self._typed(self._old)

    def _typed(self, cells: list[TupleCells]) -> PostgresImage:
        columns: list[pa.Array[Any]] = []
        unfit: dict[str, pa.Array[Any]] = {}
        for column, found in zip(self._table.columns, cells, strict=True):
            parsed = read_column(self._table, column, found.texts(self._frame.data))
            columns.append(parsed.array)
            if parsed.unfit is not None:
                unfit[column.name] = parsed.unfit
        return PostgresImage(columns, exact.combine(unfit))


def _check_markers(kinds: npt.NDArray[np.uint8], markers: npt.NDArray[np.uint8]) -> None:
    is_new, is_old = markers == _NEW, (markers == _KEY) | (markers == _OLD)
    fits = np.where(kinds == MessageKind.INSERT, is_new, np.where(kinds == MessageKind.DELETE, is_old, is_new | is_old))
    if not fits.all():
        raise MalformedError("a row message without its row")
