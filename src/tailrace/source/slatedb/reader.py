"""A table's rows as the database has them now, for `tailrace verify`."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, cast

from tailrace.model.schema import TableSchema
from tailrace.model.table_rows import RowBatches, copied_rows
from tailrace.source.slatedb.copy import SlateDbCopySplit, range_of
from tailrace.source.slatedb.follower import read_clock

if TYPE_CHECKING:
    from tailrace.source.slatedb.source import SlateDbSource


def read_rows(source: SlateDbSource, table: TableSchema) -> RowBatches:
    """The whole table, read as one chunk of a copy."""
    # Reading rows stores their expiries: under a separate reader, so that they are deleted with it.
    reader = source.for_reader(f"verify-{uuid.uuid4().hex}")
    low, high = range_of(reader.rule(table), (), 0)
    latest = cast(str, None)  # not a checkpoint, but what is durable now
    split = SlateDbCopySplit(copies=table, checkpoint=latest, low=low, high=high, clock=read_clock())
    try:
        yield from copied_rows(reader.read(split))
    finally:
        reader.reset()
