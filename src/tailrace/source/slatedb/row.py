"""Rows of SlateDB as changes of one table, and single rows by key."""

from __future__ import annotations

import asyncio
import zlib
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import TableError, UnfitError
from tailrace.model.change import Changes, Op, Position
from tailrace.model.schema import TableSchema
from tailrace.source.slatedb import merge_operator
from tailrace.source.slatedb.key_layout import MisfitError
from tailrace.source.slatedb.object_store import (
    MergeFailedError,
    SlateDbDatabase,
    binding,
    in_time,
    run_steps,
    scan_options,
)
from tailrace.source.slatedb.table_mapping import TableMapping, folds_of
from tailrace.source.slatedb.wal import MERGE, ROWS, TOMBSTONE, columns

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
    """Rows in the layout of `wal.ROWS`, each with its position in the stream."""

    batch: pa.RecordBatch
    commit: Indexes
    ordinal: Indexes

    @classmethod
    def of_log(cls, batch: pa.RecordBatch) -> WalRows:
        """Rows of whole WAL files. All rows of a write batch have its `seq`, and are counted from 0 by even numbers.

        An odd ordinal after a delete would turn the two into a key change, which a key-value store does not have.
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
        """The rows that are not at one of these positions."""
        mask = np.ones(len(self), bool)
        for place in places:
            mask &= (self.commit != place.commit) | (self.ordinal != place.ordinal)
        return self.where(mask)

    def numpy(self, name: str) -> npt.NDArray[Any]:
        values: npt.NDArray[Any] = self.batch.column(name).to_numpy(zero_copy_only=False)
        return values


def by_table(rows: WalRows, rules: Sequence[TableMapping]) -> Iterator[tuple[TableMapping, WalRows]]:
    """The rows of each table that has some: the longest prefix wins. `rules` are sorted, longest first."""
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
    """The rows as changes of their table. Raises UnfitError, with its position, for the first row that does not fit."""
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
        fix=f"correct tables.settings.{rule.name}.mapping and tailrace resync FILE {rule.name}, or skip the row",
    )
    error.raw = (rows.batch.column("value")[at].as_py() or b"") or rows.batch.column("key")[at].as_py()
    return error


# Rows as SlateDB itself reads them now: only SlateDB knows the folded operands and what was overwritten.

_AT_ONCE = 256
_PIECE_ROWS = 2048
_GAIN = 16
"""How many times more a single lookup costs than a row of a scan."""
_LONGEST_STRIDE = 16


async def _find(database: SlateDbDatabase, keys: Collection[bytes], merges: Any) -> dict[bytes, Any]:
    """The rows of those keys that have one: scanned where they are close together, otherwise looked up one by one."""
    wanted = sorted(set(keys))
    found: dict[bytes, Any] = {}
    reader = await in_time(database.reader(operator=merges))
    try:
        stride = 1
        while wanted:
            if len(wanted) * _GAIN > _PIECE_ROWS:
                settled = await _sweep(reader, wanted, found)
                # Where keys are far apart a scan does not pay: try it less and less often.
                stride = 1 if settled * _GAIN >= _PIECE_ROWS else min(stride * 2, _LONGEST_STRIDE)
                wanted = wanted[settled:]
            for _ in range(stride):
                some, wanted = wanted[:_AT_ONCE], wanted[_AT_ONCE:]
                rows = await in_time(asyncio.gather(*map(reader.get_key_value, some)))
                found |= {key: row for key, row in zip(some, rows, strict=True) if row is not None}
        return found
    finally:
        await in_time(reader.shutdown())


async def _sweep(reader: Any, wanted: Sequence[bytes], found: dict[bytes, Any]) -> int:
    """Scan as long as enough of the rows are wanted. Returns how many of the keys are done."""
    api = binding()
    keys = api.KeyRange(start=wanted[0], start_inclusive=True, end=wanted[-1], end_inclusive=True)
    settled = 0
    try:
        scan = await in_time(reader.scan_with_options(keys, scan_options()))
        while rows := await in_time(scan.next_batch(_PIECE_ROWS)):
            passed = bisect_right(wanted, rows[-1].key, settled)
            here = {row.key: row for row in rows}
            found |= {key: here[key] for key in wanted[settled:passed] if key in here}
            dense = (passed - settled) * _GAIN >= len(rows)
            settled = passed
            if not dense:
                return settled
    except api.Error.Invalid:
        # The scan met operands that cannot be folded, of a row that may not be wanted: look the rest up one by one.
        return settled
    return len(wanted)


def look_up(
    database: SlateDbDatabase, rules: Sequence[TableMapping], rule: TableMapping, keys: Sequence[bytes]
) -> pa.Table:
    """The current durable rows of these keys, in the same order; null rows where there is none.

    Columns as in `wal.ROWS` and `found`. A row may be newer than the change it is looked up for: its own change then
    follows, with the same row. Raises TableError when operands cannot be folded.
    """
    folds = folds_of(rules)
    merges = merge_operator.for_reader(folds) if folds else None
    try:
        rows = run_steps(_find(database, keys, merges), "looking up rows")
    except MergeFailedError as error:
        raise merge_error(rule, error.message) from error
    place = {key: index for index, key in enumerate(rows)}
    picks = pa.array(map(place.get, keys), pa.int64())
    taken = columns(list(rows.values()), is_log=False).take(picks)
    return pa.table({**{name: taken.column(name) for name in ROWS.names}, "found": picks.is_valid()})


def merge_error(rule: TableMapping, why: str) -> TableError:
    return TableError(
        f"merge operands cannot be folded into rows: {why}",
        table=rule.name,
        fix=f"set `merge` in tables.settings.{rule.name}.mapping to the writer's operator, or `keep: changelog`,"
        f" then tailrace resync FILE {rule.name}",
    )
