"""Rows as SlateDB itself reads them now: the one authority on folded operands and on what has been overwritten."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa

from tailrace.errors import TableError
from tailrace.source.slatedb import operator
from tailrace.source.slatedb.rule import TableMapping, folds_of
from tailrace.source.slatedb.store import MergeFailedError, SlateDbDatabase, binding, in_time, run_steps, scan_options
from tailrace.source.slatedb.wal import ROWS, columns

_AT_ONCE = 256
_PIECE_ROWS = 2048
_GAIN = 16
"""A row costs so much more when it is asked for than when a scan comes by it."""
_LONGEST_STRIDE = 16


async def _find(database: SlateDbDatabase, keys: Collection[bytes], merges: Any) -> dict[bytes, Any]:
    """The rows of those keys that have one: scanned where they lie close together, else asked for one by one."""
    wanted = sorted(set(keys))
    found: dict[bytes, Any] = {}
    reader = await in_time(database.reader(operator=merges))
    try:
        stride = 1
        while wanted:
            if len(wanted) * _GAIN > _PIECE_ROWS:
                settled = await _sweep(reader, wanted, found)
                # Where they lie far apart, that was in vain, and is tried less and less often.
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
    """Scan for as long as enough of what comes is wanted; how many of the keys that settled."""
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
        # Operands of a row that nobody asked for cannot be folded.
        return settled
    return len(wanted)


def look_up(
    database: SlateDbDatabase, rules: Sequence[TableMapping], rule: TableMapping, keys: Sequence[bytes]
) -> pa.Table:
    """The rows of these keys with everything that is durable by now, in the same order; null rows where there is none.

    Columns as in `wal.ROWS` and `found`. A row may be newer than the change that asked for it: its own change is still
    to come then, and brings the same. Raises TableError when operands cannot be folded.
    """
    folds = folds_of(rules)
    merges = operator.for_reader(folds) if folds else None
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
