"""WAL files and due expiries as splits: what a task reads, and the changes it makes of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import StaleCopyError, TableError
from tailrace.model.change import Changes, Position
from tailrace.model.digest import row_digests
from tailrace.model.schema import TableSchema
from tailrace.source.slatedb.expiry_index import ExpiryIndex, live
from tailrace.source.slatedb.object_store import CollectedError
from tailrace.source.slatedb.offset import WalPoint
from tailrace.source.slatedb.row import WalRows, build, by_table, look_up, merge_error
from tailrace.source.slatedb.table_mapping import TableMapping
from tailrace.source.slatedb.wal import MERGE, ROWS, TOMBSTONE, VALUE
from tailrace.source.slatedb.wal_archive import read_archived
from tailrace.source.slatedb.wal_buffer import read_buffered
from tailrace.source.split import Split

if TYPE_CHECKING:
    from tailrace.source.slatedb.source import SlateDbSource


_BEHIND_WRITES = 2**62
"""Ordinals from here on are greater than those of all rows of a write batch."""


@dataclass(frozen=True)
class WalRange:
    """What a batch takes from the log for one table: rows in (after, upto] except `skips`, as of a clock."""

    schema: TableSchema
    after: WalPoint
    upto: WalPoint
    clock: int
    skips: tuple[Position, ...] = ()


@dataclass(frozen=True)
class WalSplit(Split):
    """The WAL files first … last, and what to read of them, by table.

    `bytes` is about how large the files are; `readers` is how many tasks may read them at the same time.
    """

    first: int = 0
    last: int = 0
    ranges: Mapping[str, WalRange] = field(default_factory=dict)
    bytes: int = 0
    readers: int = 1

    def only(self, tables: Collection[str]) -> WalSplit:
        wanted = {name: one for name, one in self.ranges.items() if name in tables}
        return replace(super().only(tables), ranges=wanted)


@dataclass(frozen=True)
class ExpirySplit(Split):
    """The keys of one table that may have expired in (since, clock]."""

    table: TableSchema | None = None
    since: int = 0
    clock: int = 0

    def only(self, tables: Collection[str]) -> ExpirySplit:
        kept = super().only(tables)
        return kept if kept.weights else replace(kept, table=None)


def read_wal(source: SlateDbSource, split: WalSplit) -> Iterator[Changes]:
    """The changes of the files, per table in stream order. Raises TableError for a table that cannot be read."""
    if not split.ranges:
        return
    try:
        if source.keep_wal is not None:
            batches = [read_archived(source.keep_wal, number) for number in range(split.first, split.last + 1)]
        else:
            batches = read_buffered(source.database, source.wal_buffer, split.first, split.last)
    except CollectedError as error:
        raise _collected(source, split, error) from error
    whole = pa.Table.from_batches(batches, ROWS).combine_chunks().to_batches()
    if not whole:
        return
    rows = WalRows.of_log(whole[0])
    if source.partition is not None:
        rows = rows.where(source.partition.mask(rows.batch.column("key")))
    for rule, own in by_table(rows, source.rules):
        wanted = split.ranges.get(rule.name)
        if wanted is None:
            continue
        own = own.where((own.commit > wanted.after.seq) & (own.commit <= wanted.upto.seq)).without(wanted.skips)
        if not rule.changelog:
            own = settle(source, rule, own, wanted.clock, f"wal-{split.first}-{split.last}")
        if len(own):
            yield build(rule, wanted.schema, own)


def settle(source: SlateDbSource, rule: TableMapping, rows: WalRows, clock: int, name: str) -> WalRows:
    """The rows for a table of current state: operands folded, expired rows removed, later expiries stored."""
    merges = rows.numpy("kind") == MERGE
    if merges.any():
        rows = _fold(source, rule, rows)
    if rule.expires:
        expire_ts = rows.batch.column("expire_ts")
        kind = rows.numpy("kind")
        gone = (kind == VALUE) & ~live(expire_ts, clock).to_numpy(zero_copy_only=False)
        if gone.any():
            kind = np.where(gone, np.int8(TOMBSTONE), kind)
            rows = replace(rows, batch=rows.batch.set_column(0, ROWS.field("kind"), pa.array(kind)))
        note(source, rule, rows, name)
    return rows


def note(source: SlateDbSource, rule: TableMapping, rows: WalRows, name: str) -> None:
    """Store durably which of the rows will expire, before they reach the destination."""
    batch = rows.batch
    later = pc.and_(batch.column("expire_ts").is_valid(), pc.equal(batch.column("kind"), VALUE))
    due = batch.filter(later)
    ExpiryIndex(source.expiry_folder, rule.name).note(
        name, due.column("expire_ts"), due.column("key"), due.column("seq")
    )


def _fold(source: SlateDbSource, rule: TableMapping, rows: WalRows) -> WalRows:
    """Replace each key's last operand by the row as SlateDB folds it now, which includes the earlier operands."""
    merges = np.flatnonzero(rows.numpy("kind") == MERGE)
    keys = rows.batch.column("key").take(pa.array(merges)).to_pylist()
    first = Position(int(rows.commit[merges[0]]), int(rows.ordinal[merges[0]]))
    if not rule.folds:
        error = merge_error(rule, "no operator is configured")
        error.position = str(first)
        raise error
    last = dict(zip(keys, merges.tolist(), strict=True))
    kept = rows.numpy("kind") != MERGE
    kept[list(last.values())] = True
    rows = rows.where(kept)
    merge = rows.numpy("kind") == MERGE
    wanted = rows.batch.column("key").filter(pa.array(merge)).to_pylist()
    found = look_up(source.database, source.rules, rule, wanted)
    mask = pa.array(merge)
    kind = pc.if_else(found.column("found"), pa.scalar(VALUE, pa.int8()), pa.scalar(TOMBSTONE, pa.int8()))
    arrays = {
        "kind": _replaced(rows.batch.column("kind"), mask, kind),
        "key": rows.batch.column("key"),
        # The delete of a row that is gone gets the position of its operand.
        "seq": _replaced(rows.batch.column("seq"), mask, pc.coalesce(found.column("seq"), _own(rows, "seq", mask))),
        "create_ts": _replaced(
            rows.batch.column("create_ts"), mask, pc.coalesce(found.column("create_ts"), _own(rows, "create_ts", mask))
        ),
        **{name: _replaced(rows.batch.column(name), mask, found.column(name)) for name in ("value", "expire_ts")},
    }
    batch = pa.RecordBatch.from_arrays([arrays[name] for name in ROWS.names], schema=ROWS)
    return replace(rows, batch=batch)


def _own(rows: WalRows, name: str, mask: pa.Array[Any]) -> pa.Array[Any]:
    return rows.batch.column(name).filter(mask)


def _replaced(values: pa.Array[Any], mask: pa.Array[Any], new: Any) -> pa.Array[Any]:
    dense = new.combine_chunks() if isinstance(new, pa.ChunkedArray) else new
    return pc.replace_with_mask(values, mask, dense)


def read_expired(source: SlateDbSource, split: ExpirySplit) -> Iterator[Changes]:
    """Deletes for the keys that SlateDB no longer has, or whose rows have expired by the split's clock.

    Each delete has the position of the row's last write, before anything newer, with an ordinal of its own: keys that
    were written in one batch may expire together. A row with operands is read again: an expired operand may have
    changed it.
    """
    if split.table is None:
        return
    rule = source.rule(split.table)
    due = ExpiryIndex(source.expiry_folder, rule.name).between(split.since, split.clock)
    if not due.num_rows:
        return
    keys = due.column("key").combine_chunks()
    found = look_up(source.database, source.rules, rule, keys.to_pylist())
    alive = pc.and_(found.column("found"), live(found.column("expire_ts"), split.clock))
    seq = due.column("seq_max").combine_chunks()
    batch = pa.RecordBatch.from_arrays(
        [
            pc.if_else(alive, pa.scalar(VALUE, pa.int8()), pa.scalar(TOMBSTONE, pa.int8())).combine_chunks(),
            keys,
            found.column("value").combine_chunks(),
            pc.coalesce(found.column("seq").combine_chunks(), seq),
            found.column("create_ts").combine_chunks(),
            found.column("expire_ts").combine_chunks(),
        ],
        schema=ROWS,
    )
    commit, ordinal = seq.to_numpy(), _BEHIND_WRITES | row_digests([keys]) & (_BEHIND_WRITES - 2)
    order = np.lexsort((ordinal, commit))
    rows = WalRows(batch.take(pa.array(order)), commit[order], ordinal[order])
    alive = alive.take(pa.array(order))
    if rule.folds:
        note(source, rule, rows, f"again-{split.clock}")
    else:
        rows = rows.where(~alive.combine_chunks().to_numpy(zero_copy_only=False))
    if len(rows):
        yield build(rule, split.table, rows)


def _collected(source: SlateDbSource, split: WalSplit, error: CollectedError) -> TableError:
    table = next(iter(split.ranges))
    if source.options.on_collected == "resnapshot":
        return StaleCopyError(f"{error.message}; the table is copied again", table=table)
    return TableError(
        f"{error.message}: changes are lost, and only a new snapshot helps",
        table=table,
        fix=f"re-snapshot: tailrace resync FILE {table}; a larger min_age of the writer's garbage collector, or"
        " keep_wal, prevents it",
    )
