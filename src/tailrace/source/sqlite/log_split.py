"""Ranges of the tape as splits: which change ids, for which tables, decoded with which version."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tailrace.model.change import Changes
from tailrace.model.collapse import fit
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaHistory
from tailrace.source.split import Split
from tailrace.source.sqlite.connection import CapturedFile
from tailrace.source.sqlite.decode import Indexes
from tailrace.source.sqlite.log import Counted, TapeLog, TapeWindow
from tailrace.source.sqlite.page_reader import decode_rows, read_pages
from tailrace.source.table_range import TableRange


@dataclass(frozen=True, kw_only=True)
class SqliteRange(TableRange):
    """`newest` has the current columns, for rows whose image is not on the tape."""

    newest: TableSchema

    def meets(self, window: TapeWindow) -> bool:
        return window.upto > self.after.commit and window.after < self.upto.commit


@dataclass(frozen=True)
class SqliteLogSplit(Split):
    """A window of the tape and what to read of it, by table; without a window, only their current columns."""

    window: TapeWindow | None = None
    ranges: Mapping[str, SqliteRange] = field(default_factory=dict)

    def only(self, tables: Collection[str]) -> SqliteLogSplit:
        kept = {name: wanted for name, wanted in self.ranges.items() if str(wanted.schema.table) in tables}
        return replace(super().only(tables), ranges=kept)


def log_splits(counted: Mapping[TapeWindow, Mapping[str, Counted]], wanted: Mapping[str, SqliteRange]) -> list[Split]:
    """The windows that concern the tables. Pure.

    A table whose columns changed is in a split even where no window holds rows of it: its destination follows.
    """
    splits: list[Split] = []
    for window, counts in counted.items():
        own = {name: one for name, one in wanted.items() if name in counts and one.meets(window)}
        if own:
            weights = {str(one.schema.table): counts[name].bytes for name, one in own.items()}
            splits.append(_split(own, weights, window))
    changed = {name: one for name, one in wanted.items() if one.has_news}
    if changed:
        splits.append(_split(changed, {str(one.schema.table): 0 for one in changed.values()}, None))
    return splits


def _split(wanted: Mapping[str, SqliteRange], weights: Mapping[str, int], window: TapeWindow | None) -> SqliteLogSplit:
    schemas = {str(one.schema.table): one.schema for one in wanted.values()}
    return SqliteLogSplit(weights=weights, schemas=schemas, window=window, ranges=wanted)


def read_log(engine: CapturedFile, cdc_table: str, split: SqliteLogSplit) -> Iterator[Changes]:
    """The changes of a split, in stream order per table. Raises TableError for a table that cannot be read."""
    for wanted in split.ranges.values():
        wanted.require_allowed()
    if split.window is None or not split.ranges:
        return
    with engine.snapshot("reading changes") as connection:
        log = TapeLog(connection, cdc_table)
        for page in read_pages(log, *split.window, [*split.ranges]):
            for name, wanted in split.ranges.items():
                chosen = _within(wanted, page.rows.change_id, page.of(name))
                for table, rows in _by_version(wanted.history, page.rows.change_id, chosen):
                    for changes in decode_rows(connection, table, wanted.newest, page, rows):
                        yield changes if wanted.shown is None else fit(changes, wanted.shown)


def _within(wanted: SqliteRange, change_id: Indexes, chosen: Indexes) -> Indexes:
    ids = change_id[chosen]
    kept = (ids > wanted.after.commit) & (ids <= wanted.upto.commit)
    if wanted.skips:
        kept &= ~np.isin(ids, [position.commit for position in wanted.skips])
    return chosen[kept]


def _by_version(history: SchemaHistory, change_id: Indexes, chosen: Indexes) -> Iterator[tuple[TableSchema, Indexes]]:
    """The rows of each version in turn. A version found by comparison after a change begins with the next change."""
    firsts = [position.commit + (position.ordinal > 0) for position, _ in history[1:]]
    cuts = np.searchsorted(change_id[chosen], firsts, side="left").tolist()
    for (_, table), begin, end in zip(history, [0, *cuts], [*cuts, len(chosen)], strict=True):
        if end > begin:
            yield table, chosen[begin:end]
