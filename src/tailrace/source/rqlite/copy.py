# ruff: noqa: S608 - every name in the SQL here is quoted
"""The copy of a table through the API: its chunks, each read by one task.

X is the end of the journal when a copy begins. Everything up to X was committed before the first query, so a
linearizable read sees it. Everything that was committed later arrives after X, in order, whether or not the copy has
already seen it, so every key ends at its last change. A table without an API has an empty copy, before its first event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.capture.layout import quoted
from tailrace.errors import StaleCopyError, TableError, revive
from tailrace.model.change import START, Changes, Op, Position
from tailrace.model.exact import combine
from tailrace.model.schema import TableSchema
from tailrace.source.rqlite.api import Api, QueryRefusedError
from tailrace.source.rqlite.query import QueryRow, Selection, lacks_rowid, parameter, read_image, rowid_name
from tailrace.source.split import Split
from tailrace.source.sqlite.catalog import TableDefinition
from tailrace.source.sqlite.decode import unfit_key

WHOLE = (0,)
"""The bounds of a table that is copied as one chunk: one without rowids, or one whose rows cannot be queried."""


@dataclass(frozen=True)
class RqliteCopySplit(Split):
    """A chunk: the rows with rowids in (low, high], or, `by_key`, all of them. `empty`: rows cannot be queried.

    `failure` is raised in place of the rows.
    """

    low: int | None = None
    high: int = 0
    snapshot_position: Position = START
    rows: int = 0
    by_key: bool = False
    empty: bool = False
    failure: Mapping[str, str | None] | None = None


def chunk_bounds(api: Api, table: TableDefinition, chunk_rows: int) -> tuple[int, ...]:
    """The last rowid of each chunk of `chunk_rows` rows. At least one; all current rows are at or below the last bound.

    Raises UnavailableError when rqlite refuses the query, for example for a table dropped since it was listed.
    """
    if table.lacks_rowid:
        return WHOLE
    rowid, name = rowid_name([field.name for field in table.fields]), quoted(table.name)
    numbered = f"SELECT t.{rowid} AS r, row_number() OVER (ORDER BY t.{rowid}) AS n FROM {name} AS t"
    try:
        cuts, ends = api.query_many(
            [
                (f"SELECT r FROM ({numbered}) WHERE n % ? = 0 ORDER BY r", chunk_rows),
                (f"SELECT max(t.{rowid}) FROM {name} AS t",),
            ]
        )
    except QueryRefusedError as error:
        # Do not take it for an empty table: it may have been dropped since it was listed, or the node is too busy to
        # answer.
        raise api.unavailable(f"it does not count the rows of {table.name}: {error}") from None
    last = int(ends[0][0] or 0)
    return (*(int(cut) for (cut,) in cuts if cut < last), last)


def read_chunk(api: Api | None, split: RqliteCopySplit) -> Iterator[Changes]:
    """The current rows of a chunk. Raises StaleCopyError when the table has other columns than its copy."""
    table = split.copies
    assert table is not None
    if split.failure is not None:
        raise revive(split.failure)
    if split.empty:
        return
    if api is None:
        raise TableError(
            "its rows cannot be read: no API is configured for this cluster",
            fix=f"give source.api for {table.table.schema}, then tailrace resync FILE {table.table}",
            table=str(table.table),
        )
    ordinal = 0
    for selection, rows in _pages(api, table, split):
        image = read_image(table, selection, rows)
        row = image.struct(table)
        for name in table.key:
            if row.field(name).null_count:
                raise unfit_key(table, name, None)
        yield Changes.build(
            table,
            row,
            op=Op.READ,
            commit=split.snapshot_position.commit,
            ordinal=np.arange(ordinal, ordinal + len(rows), dtype=np.int64),
            exact=combine(image.exact),
        )
        ordinal += len(rows)


def _pages(api: Api, table: TableSchema, split: RqliteCopySplit) -> Iterator[tuple[Selection, list[QueryRow]]]:
    selection = Selection(table, lacks_rowid=split.by_key and lacks_rowid(table))
    try:
        if not split.by_key:
            above, values = ("", []) if split.low is None else (f"{selection.rowid} > ? AND", [split.low])
            where = f" WHERE {above} {selection.rowid} <= ? ORDER BY {selection.rowid}"
            if rows := api.query(selection.sql + where, *values, split.high):
                yield selection, rows
            return
        key = ", ".join(f"t.{quoted(name)}" for name in table.key)
        marks = ", ".join("?" * len(table.key))
        last: list[Any] | None = None
        while True:
            where = "" if last is None else f" WHERE ({key}) > ({marks})"
            sql = f"{selection.sql}{where} ORDER BY {key} LIMIT ?"
            rows = api.query(sql, *(last or ()), split.rows)
            if not rows:
                return
            yield selection, rows
            ends = dict(zip(selection.columns, selection.values(rows[-1:]), strict=True))
            last = [parameter(ends[name][0]) for name in table.key]
    except QueryRefusedError:
        raise StaleCopyError(
            "the table's columns changed while it was being copied",
            fix="nothing to do: the copy begins again by itself",
            table=str(table.table),
        ) from None
