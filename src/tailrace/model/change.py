"""The change model: positions, operations, and changes as Arrow columns.

A `Changes` holds many changes of one table at one schema version as one Arrow record batch. No object is created per
row anywhere between source and destination.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model.schema import TableSchema


class Op(IntEnum):
    """What a change does. The numbers are stored, so their meaning never changes."""

    INSERT = 1
    UPDATE = 2
    DELETE = 3
    READ = 4  # a copied row
    TRUNCATE = 5  # removes all rows of the table; `row` holds nulls
    MERGE = 6  # an operand to be folded into the row
    SCHEMA = 7  # a new version of the table begins
    COMMIT = 8  # a transaction boundary


class Position(NamedTuple):
    """A position in an upstream's log: the commit, then the ordinal of the change within it.

    As text it is 32 hex digits. They sort in stream order.
    """

    commit: int
    ordinal: int

    def __str__(self) -> str:
        return f"{self.commit:016x}{self.ordinal:016x}"

    @classmethod
    def parse(cls, text: str) -> Position:
        if len(text) != 32:
            raise ValueError(f"a position has 32 hex digits, not {text!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))


START = Position(0, 0)
LAST_ORDINAL = 2**63 - 1


def end_of(commit: int) -> Position:
    """A position after every change of a commit."""
    return Position(commit, LAST_ORDINAL)


def just_before(at: Position) -> Position:
    return Position(at.commit, at.ordinal - 1) if at.ordinal else end_of(at.commit - 1)


EXACT = "_tailrace_exact"
"""The extra column that holds `exact` where rows are sent or stored without the rest of their change."""

UNCHANGED = "_tailrace_unchanged"
"""The extra column that names the `unchanged` columns, in the same places."""


def changes_type(row_type: pa.StructType) -> pa.Schema:
    """The layout of `Changes.batch`.

    op, commit, ordinal   the operation and its position
    txn, committed_at     the upstream's transaction id and commit time (null where it has none)
    unchanged             bitmap over the columns, least significant bit first (`numpy.packbits(bitorder="little")`):
                          columns the upstream did not send and that keep their value; null: all were sent
    exact                 JSON object {column: text}: values the column's type cannot hold, e.g. {"until": "infinity"};
                          the column itself is then null. Null when every value fits
    row                   the new image; for a delete the old image, in which at least the key is set
    before                the whole old image if the upstream sends it; otherwise null
    """
    return pa.schema(
        [
            pa.field("op", pa.int8(), False),
            pa.field("commit", pa.int64(), False),
            pa.field("ordinal", pa.int64(), False),
            pa.field("txn", pa.int64()),
            pa.field("committed_at", pa.timestamp("us", "UTC")),
            pa.field("unchanged", pa.binary()),
            pa.field("exact", pa.string()),
            pa.field("row", row_type),
            pa.field("before", row_type),
        ]
    )


@dataclass(frozen=True)
class Changes:
    """Many changes of one table at one schema version, in stream order, as columns."""

    table: TableSchema
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @classmethod
    def build(
        cls,
        table: TableSchema,
        row: pa.StructArray,
        *,
        op: Op | npt.NDArray[np.int8],
        commit: int | npt.NDArray[np.int64],
        ordinal: npt.NDArray[np.int64] | None = None,
        txn: pa.Array[Any] | None = None,
        committed_at: pa.Array[Any] | None = None,
        unchanged: pa.Array[Any] | None = None,
        exact: pa.Array[Any] | None = None,
        before: pa.StructArray | None = None,
    ) -> Changes:
        """Changes from columns. A single `op` or `commit` applies to every row; columns not given are null."""
        count = len(row)
        layout = changes_type(table.row_type)

        def column(name: str, given: pa.Array[Any] | None) -> pa.Array[Any]:
            return pa.nulls(count, layout.field(name).type) if given is None else given

        arrays = [
            pa.array(np.full(count, op, np.int8) if isinstance(op, Op) else op, pa.int8()),
            pa.array(np.full(count, commit, np.int64) if isinstance(commit, int) else commit, pa.int64()),
            pa.array(np.arange(count, dtype=np.int64) if ordinal is None else ordinal, pa.int64()),
            column("txn", txn),
            column("committed_at", committed_at),
            column("unchanged", unchanged),
            column("exact", exact),
            row,
            column("before", before),
        ]
        return cls(table, pa.RecordBatch.from_arrays(arrays, schema=layout))

    def numpy(self, name: str) -> npt.NDArray[Any]:
        """One of op, commit, ordinal as numpy, without a copy."""
        values: npt.NDArray[Any] = self.batch.column(name).to_numpy(zero_copy_only=False)
        return values

    @property
    def row(self) -> pa.StructArray:
        return self.batch.column("row")

    @property
    def first(self) -> Position:
        return Position(self.batch.column("commit")[0].as_py(), self.batch.column("ordinal")[0].as_py())

    @property
    def last(self) -> Position:
        return Position(self.batch.column("commit")[-1].as_py(), self.batch.column("ordinal")[-1].as_py())

    def unchanged_mask(self) -> npt.NDArray[np.bool_] | None:
        """A (rows, columns) mask, True where a column keeps its value; None when no column does."""
        bitmap = self.batch.column("unchanged")
        if bitmap.null_count == len(bitmap):
            return None
        width = (len(self.table.columns) + 7) // 8
        dense = pc.fill_null(bitmap, bytes(width)).cast(pa.binary(width))
        bits = np.frombuffer(dense.buffers()[1], np.uint8, len(bitmap) * width, dense.offset * width)
        return np.unpackbits(bits.reshape(-1, width), axis=1, count=len(self.table.columns), bitorder="little").astype(
            bool
        )

    def unchanged_names(self) -> pa.Array[Any]:
        """For each change, the list of columns that keep their value; null when none does."""
        mask = self.unchanged_mask()
        if mask is None:
            return pa.nulls(len(self), pa.list_(pa.string()))
        names = pa.array([column.name for column in self.table.columns], pa.string())
        return name_lists(mask.sum(axis=1), names.take(pa.array(np.nonzero(mask)[1])))


def name_lists(counts: npt.NDArray[np.int64], names: pa.Array[Any]) -> pa.Array[Any]:
    """Split `names` into lists of the given lengths, with null instead of an empty list."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
    return pc.if_else(pa.array(counts > 0), pa.ListArray.from_arrays(offsets, names), None)


def pack_unchanged(mask: npt.NDArray[np.bool_]) -> pa.Array[Any]:
    """The `unchanged` column for a (rows, columns) mask; rows without a set bit become null."""
    packed = np.packbits(mask, axis=1, bitorder="little")
    width = packed.shape[1]
    fixed = pa.Array.from_buffers(pa.binary(width), len(packed), [None, pa.py_buffer(np.ascontiguousarray(packed))])
    return pc.if_else(pa.array(mask.any(axis=1)), fixed.cast(pa.binary()), None)


@cache
def _op_names() -> pa.Array[Any]:
    # Not at import: the first array made of Python values makes pyarrow import pandas, which takes half a second.
    return pa.array([None, *(op.name.lower() for op in Op)], pa.string())


def op_names(op: npt.NDArray[np.int8]) -> pa.Array[Any]:
    """The operations as lower-case names: `insert`, `update`, …"""
    return _op_names().take(pa.array(op))


def position_texts(commit: npt.NDArray[np.int64], ordinal: npt.NDArray[np.int64]) -> pa.Array[Any]:
    """`str(Position)` of every row, computed in one pass."""
    pairs = np.empty((len(commit), 2), ">i8")
    pairs[:, 0], pairs[:, 1] = commit, ordinal
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    octets = pairs.view(np.uint8).reshape(len(commit), 16)
    text = np.empty((len(commit), 32), np.uint8)
    text[:, 0::2], text[:, 1::2] = digits[octets >> 4], digits[octets & 15]
    offsets = np.arange(len(commit) + 1, dtype=np.int64) * 32
    wide = pa.LargeStringArray.from_buffers(len(commit), pa.py_buffer(offsets), pa.py_buffer(text))
    return wide.cast(pa.string())
