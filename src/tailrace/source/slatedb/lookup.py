"""Rows as SlateDB itself reads them now: the one authority on folded operands and on what has been overwritten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tailrace.errors import TableError
from tailrace.source.slatedb import operator
from tailrace.source.slatedb.rule import Rule, folds_of
from tailrace.source.slatedb.store import Database, MergeFailedError, run
from tailrace.source.slatedb.wal import ROWS, columns

_AT_ONCE = 64


async def _get(database: Database, keys: Sequence[bytes], merges: Any) -> list[Any]:
    reader = await database.reader(operator=merges)
    try:
        found: list[Any] = []
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            found += await asyncio.gather(*(reader.get_key_value(key) for key in some))
        return found
    finally:
        await reader.shutdown()


def look_up(database: Database, rules: Sequence[Rule], rule: Rule, keys: Sequence[bytes]) -> pa.Table:
    """The rows of these keys with everything that is durable by now, in the same order; null rows where there is none.

    Columns as in `wal.ROWS` and `found`. A row may be newer than the change that asked for it: its own change is still
    to come then, and brings the same. Raises TableError when operands cannot be folded.
    """
    folds = folds_of(rules)
    merges = operator.for_reader(folds) if folds else None
    try:
        rows = run(_get(database, keys, merges), "looking up rows")
    except MergeFailedError as error:
        raise merge_error(rule, error.message) from error
    found = columns([row for row in rows if row is not None], is_log=False)
    places = pa.array([row is not None for row in rows])
    index = iter(range(found.num_rows))
    picks = pa.array([next(index) if row is not None else None for row in rows], pa.int64())
    taken = found.take(picks)
    return pa.table({**{name: taken.column(name) for name in ROWS.names}, "found": places})


def merge_error(rule: Rule, why: str) -> TableError:
    return TableError(
        f"merge operands cannot be folded into rows: {why}",
        table=rule.name,
        fix=f"set `merge` in tables.settings.{rule.name}.mapping to the writer's operator, or `keep: changelog`,"
        f" then tailrace resync FILE {rule.name}",
    )
