"""Stretches of the log as splits: which frames, for which tables, read by which of their versions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from tailrace.journal import FrameRef, JournalReader, grouped
from tailrace.model.change import Changes, Op
from tailrace.model.collapse import fit
from tailrace.source.postgres.frame_builder import FrameMeta, messages_of
from tailrace.source.postgres.pgoutput.decode import decode
from tailrace.source.split import Split
from tailrace.source.table_range import TableRange

SPLIT_BYTES = 4 * 1024 * 1024
"""A task is worth its start from about this much of the log on."""
MOST_SPLIT_BYTES = 12 * 1024 * 1024
"""What one split holds is decoded at once, so a huge transaction is many of them."""


@dataclass(frozen=True)
class PgRange(TableRange):
    """`truncates`: whether the destination follows a TRUNCATE."""

    truncates: bool = True


@dataclass(frozen=True)
class PostgresLogSplit(Split):
    """Some journal frames and what is wanted of them, by OID."""

    frames: tuple[FrameRef, ...] = ()
    ranges: Mapping[int, PgRange] = field(default_factory=dict)

    def only(self, tables: Collection[str]) -> PostgresLogSplit:
        kept = {oid: wanted for oid, wanted in self.ranges.items() if str(wanted.schema.table) in tables}
        frames = tuple(ref for ref in self.frames if not kept.keys().isdisjoint(FrameMeta.from_bytes(ref.meta).rows))
        return replace(super().only(tables), ranges=kept, frames=frames)


def log_splits(refs: Sequence[FrameRef], wanted: Mapping[int, PgRange], parallel: int) -> list[Split]:
    """The frames that concern the tables, in pieces for `parallel` tasks. Pure.

    A table whose columns changed is in a split even where no frame holds rows of it: its destination follows.
    """
    concerned = [ref for ref in refs if _concerned(ref, wanted)]
    size = sum(ref.length for ref in concerned)
    share = min(max(SPLIT_BYTES, math.ceil(size / (2 * parallel))), MOST_SPLIT_BYTES)
    splits: list[Split] = [_split(group, wanted) for group in grouped(concerned, share)]
    changed = {oid: one for oid, one in wanted.items() if len(one.history) > 1}
    if changed:
        splits.append(
            PostgresLogSplit(
                weights={str(one.schema.table): 0 for one in changed.values()},
                schemas={str(one.schema.table): one.schema for one in changed.values()},
                ranges=changed,
            )
        )
    return splits


def _concerned(ref: FrameRef, wanted: Mapping[int, PgRange]) -> list[int]:
    return [
        oid
        for oid in FrameMeta.from_bytes(ref.meta).rows
        if oid in wanted and ref.last > wanted[oid].after and ref.first <= wanted[oid].upto
    ]


def _split(group: Sequence[FrameRef], wanted: Mapping[int, PgRange]) -> PostgresLogSplit:
    weights: dict[str, int] = {}
    own: dict[int, PgRange] = {}
    for ref in group:
        rows = FrameMeta.from_bytes(ref.meta).rows
        for oid in _concerned(ref, wanted):
            own[oid] = wanted[oid]
            name = str(wanted[oid].schema.table)
            weights[name] = weights.get(name, 0) + ref.length * rows[oid] // max(ref.count, 1)
    schemas = {str(one.schema.table): one.schema for one in own.values()}
    return PostgresLogSplit(weights=weights, schemas=schemas, frames=tuple(group), ranges=own)


def read_log(journal: str, split: PostgresLogSplit) -> Iterator[Changes]:
    """The changes of a split, in stream order per table. Raises TableError for a table that cannot be read."""
    for wanted in split.ranges.values():
        wanted.require_allowed()
    with closing(JournalReader(journal)) as reader:
        for ref in split.frames:
            frame = reader.read(ref)
            meta = FrameMeta.from_bytes(ref.meta)
            here = {oid: split.ranges[oid] for oid in _concerned(ref, split.ranges)}
            decoded = decode(
                messages_of(frame.payload),
                relations=meta.parsed_relations(),
                transaction=meta.transaction,
                tables={oid: wanted.history for oid, wanted in here.items()},
                bounds={oid: (wanted.after, wanted.upto) for oid, wanted in here.items()},
                skips={oid: wanted.skips for oid, wanted in here.items() if wanted.skips},
            )
            for changes in decoded:
                shown = _shown(changes, here[int(changes.table.upstream_id)])
                if len(shown):
                    yield shown


def _shown(changes: Changes, wanted: PgRange) -> Changes:
    if not wanted.truncates:
        kept = changes.numpy("op") != Op.TRUNCATE
        changes = changes if kept.all() else Changes(changes.table, changes.batch.filter(pa.array(np.asarray(kept))))
    return changes if wanted.shown is None or not len(changes) else fit(changes, wanted.shown)
