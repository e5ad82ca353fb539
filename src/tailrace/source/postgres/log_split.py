"""Ranges of the log as splits: which frames, for which tables, read with which of their versions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from tailrace.journal import FrameReader, FrameRef, JournalPlace
from tailrace.model.change import Changes, Op
from tailrace.model.collapse import fit
from tailrace.source.journal_log import FrameSplit, split_frames
from tailrace.source.postgres.frame_builder import FrameMeta, messages_of
from tailrace.source.postgres.pgoutput.decode import decode
from tailrace.source.split import Split
from tailrace.source.table_range import TableRange

SPLIT_BYTES = 4 * 1024 * 1024
"""From about this much log on, a task is worth its start."""
MOST_SPLIT_BYTES = 12 * 1024 * 1024
"""A split is decoded as a whole, so a huge transaction becomes many splits."""


@dataclass(frozen=True)
class PgRange(TableRange):
    """`truncates`: whether the destination follows a TRUNCATE."""

    truncates: bool = True


@dataclass(frozen=True)
class PostgresLogSplit(FrameSplit):
    """Some journal frames and the ranges to read from them, by OID."""

    ranges: Mapping[int, PgRange] = field(default_factory=dict)

    @staticmethod
    def weigh(ref: FrameRef) -> Mapping[int, int]:
        rows = FrameMeta.from_bytes(ref.meta).rows
        return {oid: ref.length * count // max(ref.count, 1) for oid, count in rows.items()}

    @staticmethod
    def trim(ref: FrameRef, names: Collection[int]) -> FrameRef:
        # Tasks read the relations from the frame itself, and a hundred lanes would carry those of all tables each.
        rows = FrameMeta.from_bytes(ref.meta).rows
        return replace(ref, meta=FrameMeta({oid: rows[oid] for oid in names if oid in rows}, {}, None).to_bytes())


def log_splits(refs: Sequence[FrameRef], wanted: Mapping[int, PgRange], parallel: int) -> list[Split]:
    """Split the frames that hold changes of the tables, for `parallel` tasks. Pure."""

    def share(size: int) -> int:
        return min(max(SPLIT_BYTES, math.ceil(size / (2 * parallel))), MOST_SPLIT_BYTES)

    return split_frames(PostgresLogSplit, refs, wanted, share)


def read_log(journal: JournalPlace, split: PostgresLogSplit) -> Iterator[Changes]:
    """The changes of a split, in stream order per table. Raises TableError for a table that cannot be read."""
    for wanted in split.ranges.values():
        wanted.require_allowed()
    with closing(FrameReader(journal)) as reader:
        for ref, frame in zip(split.frames, reader.read_all(split.frames), strict=True):
            meta = FrameMeta.from_bytes(frame.meta)
            here = {oid: split.ranges[oid] for oid in split.concerned(ref)}
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
