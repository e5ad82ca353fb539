"""The initial copy: a detached checkpoint, scanned in key ranges by as many tasks as there are.

A checkpoint holds what is in SlateDB's tables: rows up to the manifest's `last_l0_seq`. Newer rows are in the WAL files
after the manifest's replay point. So the copy is the state at x = (replay point, last_l0_seq), and the log continues
from there: the writer's memtable, which only the writer can flush, need not be flushed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tailrace.model.change import Changes
from tailrace.source.slatedb import merge_operator
from tailrace.source.slatedb.expiry_index import live
from tailrace.source.slatedb.log_split import note
from tailrace.source.slatedb.object_store import Loop, MergeFailedError, SlateDbDatabase, binding, run, scan_options
from tailrace.source.slatedb.offset import NOWHERE, WalPoint
from tailrace.source.slatedb.row import WalRows, build, by_table, merge_error
from tailrace.source.slatedb.table_mapping import TableMapping, folds_of
from tailrace.source.slatedb.wal import columns
from tailrace.source.split import Split
from tailrace.system.failpoint import reach

if TYPE_CHECKING:
    from tailrace.source.slatedb.source import SlateDbSource

_LIFETIME_SECONDS = 3600.0
"""A checkpoint that is never deleted expires after this long."""
_PIECE_ROWS = 20_000
_MOST_RANGES = 64


@dataclass(frozen=True)
class SlateDbCopySplit(Split):
    """One key range of a table: low ≤ key < high. `index` is its number within the copy."""

    checkpoint: str = ""
    snapshot_position: WalPoint = NOWHERE
    copy: int = 0
    index: int = 0
    low: bytes = b""
    high: bytes | None = None
    clock: int = 0


class SlateDbSnapshot:
    """A checkpoint, kept alive while tables are copied from it. The owner must delete it with `close`."""

    def __init__(self, database: SlateDbDatabase, name: str) -> None:
        self._database = database
        self.checkpoint, self.snapshot_position, self._tables = run(self._open(name), "making a checkpoint")
        self._refreshed = time.monotonic()
        reach("slatedb.checkpoint")

    async def _open(self, name: str) -> tuple[str, WalPoint, list[tuple[bytes, int]]]:
        api, admin = binding(), self._database.admin()
        await _delete_named(admin, name)
        lifetime = int(_LIFETIME_SECONDS * 1000)
        made = await admin.create_detached_checkpoint(
            api.CheckpointOptions(lifetime_ms=lifetime, source=None, name=name)
        )
        manifest = await admin.read_manifest(made.manifest_id)
        return made.id, WalPoint(manifest.replay_after_wal_id, manifest.last_l0_seq), _tables_of(manifest)

    def keep_alive(self) -> None:
        """Extend the checkpoint's lifetime when half of it is over. Called between batches."""
        if time.monotonic() - self._refreshed > _LIFETIME_SECONDS / 2:
            work = self._database.admin().refresh_checkpoint(self.checkpoint, int(_LIFETIME_SECONDS * 1000))
            run(work, "extending a checkpoint")
            self._refreshed = time.monotonic()

    def cuts(self, rule: TableMapping, chunk_bytes: int) -> tuple[str, ...]:
        """Keys, in hex, that split a table into ranges of about the same size: the first keys of SlateDB's SSTs."""
        end = prefix_end(rule.prefix)
        inside = sorted(
            (first, size) for first, size in self._tables if first > rule.prefix and (end is None or first < end)
        )
        share = max(chunk_bytes, sum(size for _, size in inside) // _MOST_RANGES)
        found: list[str] = []
        gathered = 0
        for first, size in inside:
            if gathered >= share and first.hex() not in found:
                found.append(first.hex())
                gathered = 0
            gathered += size
        return tuple(found)

    def close(self) -> None:
        """Delete the checkpoint. A second call, or one after it expired, changes nothing."""
        run(self._database.admin().delete_checkpoint(self.checkpoint), "deleting a checkpoint")


def _tables_of(manifest: Any) -> list[tuple[bytes, int]]:
    trees = [manifest, *manifest.segments]
    views = [view for tree in trees for view in [*tree.l0, *(v for run_ in tree.compacted for v in run_.sst_views)]]
    return [(view.sst.info.first_entry or b"", view.estimated_size_bytes) for view in views]


async def _delete_named(admin: Any, name: str) -> None:
    for left in await admin.list_checkpoints(name):
        await admin.delete_checkpoint(left.id)


def delete_leftovers(database: SlateDbDatabase, name: str) -> None:
    """Delete the checkpoints that an earlier run did not delete."""
    run(_delete_named(database.admin(), name), "deleting checkpoints of an earlier run")


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key after all keys with the prefix; None when there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def range_of(rule: TableMapping, cuts: Sequence[str], index: int) -> tuple[bytes, bytes | None]:
    """The keys of one range: low ≤ key < high."""
    edges = [rule.prefix, *(bytes.fromhex(cut) for cut in cuts), prefix_end(rule.prefix)]
    low = edges[index]
    assert low is not None
    return low, edges[index + 1]


def read_range(source: SlateDbSource, split: SlateDbCopySplit) -> Iterator[Changes]:
    """The rows of a range in the checkpoint, a few MB at a time. A changelog begins empty."""
    assert split.copies is not None
    rule = source.rule(split.copies)
    if rule.changelog:
        return
    try:
        for number, batch in enumerate(_pieces(source, split)):
            rows = WalRows(
                batch, np.full(batch.num_rows, split.snapshot_position.seq, np.int64), np.arange(batch.num_rows)
            )
            if source.partition is not None:
                rows = rows.where(source.partition.mask(batch.column("key")))
            for owner, own in by_table(rows, source.rules):
                if owner.name != rule.name:
                    continue
                if rule.expires:
                    own = own.where(live(own.batch.column("expire_ts"), split.clock).to_numpy(zero_copy_only=False))
                    note(source, rule, own, f"copy-{split.copy}-{split.index}-{number}")
                if len(own):
                    yield build(rule, split.copies, own, copied=True)
    except MergeFailedError as error:
        raise merge_error(rule, error.message) from error


def _pieces(source: SlateDbSource, split: SlateDbCopySplit) -> Iterator[pa.RecordBatch]:
    """The scan, piece by piece, fetched on demand."""
    api, folds = binding(), folds_of(source.rules)
    keys = api.KeyRange(start=split.low or None, start_inclusive=True, end=split.high, end_inclusive=False)
    with Loop() as loop:
        opening = source.database.reader(
            checkpoint=split.checkpoint, operator=merge_operator.for_reader(folds) if folds else None
        )
        reader = loop.run(opening, "opening a checkpoint")
        try:
            scan = loop.run(reader.scan_with_options(keys, scan_options()), "scanning a checkpoint")
            while rows := loop.run(scan.next_batch(_PIECE_ROWS), "scanning a checkpoint"):
                yield columns(rows, is_log=False)
        finally:
            loop.run(reader.shutdown(), "closing a checkpoint")
