"""Rows of SlateDB as changes of one table."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.change import Changes, Op, Position
from tailrace.errors import UnfitError
from tailrace.schema import TableSchema
from tailrace.source.slatedb.key import MisfitError
from tailrace.source.slatedb.rule import TableMapping
from tailrace.source.slatedb.wal import MERGE, TOMBSTONE

Indexes = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Partition:
    """The keys of one of several consumers."""

    of: int
    index: int

    def mask(self, keys: pa.Array[Any]) -> Mask:
        hashes = np.fromiter(map(zlib.crc32, keys.to_pylist()), np.uint32, len(keys))
        chosen: Mask = hashes % self.of == self.index
        return chosen


@dataclass(frozen=True)
class WalRows:
    """Rows in the layout of `wal.ROWS`, each with its place in the stream."""

    batch: pa.RecordBatch
    commit: Indexes
    ordinal: Indexes

    @classmethod
    def of_log(cls, batch: pa.RecordBatch) -> WalRows:
        """Rows of whole WAL files. All rows of a write batch have its `seq`, and are counted from 0 by even numbers.

        An odd one behind a delete would make the two a changed key, which a key-value store does not have.
        """
        seq = batch.column("seq").to_numpy()
        at = np.arange(len(seq))
        begins = np.flatnonzero(np.diff(seq, prepend=-1))
        lengths = np.diff(begins, append=len(seq))
        return cls(batch, seq, 2 * (at - np.repeat(begins, lengths)))

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def where(self, mask: Mask) -> WalRows:
        if mask.all():
            return self
        return WalRows(self.batch.filter(pa.array(mask)), self.commit[mask], self.ordinal[mask])

    def without(self, places: Sequence[Position]) -> WalRows:
        """Those that are not at one of the places."""
        mask = np.ones(len(self), bool)
        for place in places:
            mask &= (self.commit != place.commit) | (self.ordinal != place.ordinal)
        return self.where(mask)

    def numpy(self, name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self.batch.column(name).to_numpy(zero_copy_only=False)
        return values


def by_table(rows: WalRows, rules: Sequence[TableMapping]) -> Iterator[tuple[TableMapping, WalRows]]:
    """The rows of each table that has some: the longest prefix wins. `rules` have the longest first."""
    left = np.ones(len(rows), bool)
    keys = rows.batch.column("key")
    for rule in rules:
        mask = left if not rule.prefix else left & _starts(keys, rule.prefix)
        if mask.any():
            yield rule, rows.where(mask)
            left &= ~mask
        if not left.any():
            return


def _starts(keys: pa.Array[Any], prefix: bytes) -> Mask:
    mask: Mask = pc.starts_with(keys, prefix).to_numpy(zero_copy_only=False)
    return mask


def build(rule: TableMapping, table: TableSchema, rows: WalRows, *, copied: bool = False) -> Changes:
    """The rows as changes of their table. Raises UnfitError, with its place, for the first that its layout refuses."""
    kind = rows.numpy("kind")
    gone = pa.array(kind == TOMBSTONE)
    keys = rows.batch.column("key")
    values = pc.if_else(gone, None, rows.batch.column("value"))
    try:
        cells = [*rule.key.decode(keys), *rule.value.decode(values)]
    except MisfitError as error:
        raise _unfit(rule, rows, error) from error
    created = rows.batch.column("create_ts")
    times = {"seq": rows.batch.column("seq"), "create_ts": _instant(created)}
    times["expire_ts"] = _instant(rows.batch.column("expire_ts"))
    cells += [times[name] for name in rule.metadata]
    op = np.full(len(rows), Op.READ if copied else Op.INSERT, np.int8)
    op[kind == TOMBSTONE] = Op.DELETE
    op[kind == MERGE] = Op.MERGE
    return Changes.build(
        table,
        pa.StructArray.from_arrays(cells, fields=list(table.row_type)),
        op=op,
        commit=rows.commit,
        ordinal=rows.ordinal,
        txn=None if copied else pa.array(rows.commit),
        committed_at=_instant(created),
    )


def _instant(milliseconds: pa.Array[Any]) -> pa.Array[Any]:
    return milliseconds.cast(pa.timestamp("ms", "UTC")).cast(pa.timestamp("us", "UTC"))


def _unfit(rule: TableMapping, rows: WalRows, misfit: MisfitError) -> UnfitError:
    at = misfit.index
    error = UnfitError(
        f"a row does not fit the mapping of its table: {misfit.reason}",
        table=rule.name,
        position=str(Position(int(rows.commit[at]), int(rows.ordinal[at]))),
        fix=f"mend tables.settings.{rule.name}.mapping and tailrace resync FILE {rule.name}, or pass over the row",
    )
    error.raw = (rows.batch.column("value")[at].as_py() or b"") or rows.batch.column("key")[at].as_py()
    return error
