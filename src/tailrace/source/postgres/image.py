"""The row images of one relation's messages: typed columns of the new rows and of the old ones sent with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.schema import TableSchema
from tailrace.source import exact
from tailrace.source.postgres.frame import Indexes, MessageBatch
from tailrace.source.postgres.mapping import read_column
from tailrace.source.postgres.message import MalformedError, MessageKind, Relation
from tailrace.source.postgres.row_tuple import UNCHANGED, TupleCells, walk

Mask = npt.NDArray[np.bool_]

_NEW, _KEY, _OLD = ord("N"), ord("K"), ord("O")
_MARKER = 5  # behind the kind and the relation's OID
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
            cells, behind = walk(frame, at[self.old_rows], len(order))
            if (frame.bytes[behind] != _NEW).any():
                raise MalformedError("an update without its new row")
            at[self.old_rows] = behind + 1
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
                # A value that was not sent is not null: where the old image is, it does not hold that column. The log
                # of a partition may also call an old image whole that is but a key, by the identity of its root.
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
        """Whether an old image is null in a column of the key, and so tells of no row."""
        deleted = self.kinds == MessageKind.DELETE
        return any(
            not self._new[index].present[deleted].all() or (self._old and not self._old[index].present.all())
            for index, column in enumerate(self._table.columns)
            if column.name in self._table.key
        )

    def key_changed(self) -> Mask:
        """For each of `old_rows`, whether the key is another one than before."""
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
