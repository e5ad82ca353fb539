"""Stretches of a cluster's journal as splits: which frames, for which tables, read by which of their versions."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from tailrace.errors import revive
from tailrace.journal import FrameRef, JournalReader, grouped
from tailrace.model.change import Changes, Position
from tailrace.model.collapse import fit
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaHistory
from tailrace.source.rqlite.api import Api
from tailrace.source.rqlite.catalog import Kinds
from tailrace.source.rqlite.decode import Events, decode, position_of, read_lines
from tailrace.source.rqlite.missing_row import complete
from tailrace.source.split import Split
from tailrace.source.table_range import TableRange

SPLIT_BYTES = 8 * 1024 * 1024
"""A task is worth its start from about this much of the log on."""
DECODE_BYTES = 4 * 1024 * 1024
"""Requests are small; so many bytes of them are decoded at once."""


class EventColumns(NamedTuple):
    """The columns that events have from a position on, with the kinds of their values."""

    at: Position
    kinds: Kinds


@dataclass(frozen=True)
class Summary:
    """What a frame holds of one table. `missing` events have no images and belong to no shape."""

    rows: int
    bytes: int
    missing: int
    shapes: tuple[EventColumns, ...]


@lru_cache(maxsize=4096)
def summaries(meta: bytes) -> Mapping[str, Summary]:
    """A frame's tables, from its meta."""
    tables: dict[str, Any] = json.loads(meta)["tables"]
    return {
        name: Summary(
            one["rows"],
            one["bytes"],
            one["missing"],
            tuple(EventColumns(Position.parse(at), kinds) for at, kinds in one["shapes"]),
        )
        for name, one in tables.items()
    }


@dataclass(frozen=True)
class RqliteRange(TableRange):
    """`failure` is an error that keeps the table from being read at all."""

    failure: Mapping[str, str | None] | None = None


@dataclass(frozen=True)
class RqliteLogSplit(Split):
    """Some frames of a service's journal and what is wanted of them, by table. `asks`: it has an API to ask."""

    service: str = ""
    asks: bool = False
    frames: tuple[FrameRef, ...] = ()
    ranges: Mapping[str, RqliteRange] = field(default_factory=dict)

    def only(self, tables: Collection[str]) -> RqliteLogSplit:
        kept = {name: wanted for name, wanted in self.ranges.items() if str(wanted.schema.table) in tables}
        frames = tuple(ref for ref in self.frames if not kept.keys().isdisjoint(summaries(ref.meta)))
        return replace(super().only(tables), ranges=kept, frames=frames)


def log_splits(service: str, refs: Sequence[FrameRef], wanted: Mapping[str, RqliteRange], *, asks: bool) -> list[Split]:
    """The frames that concern the tables, in pieces. Pure.

    A table whose columns changed, or that cannot be read, is in a split even where no frame holds rows of it.
    """
    concerned = (ref for ref in refs if _concerned(ref, wanted))
    splits: list[Split] = [_split(service, group, wanted, asks=asks) for group in grouped(concerned, SPLIT_BYTES)]
    told = {name: one for name, one in wanted.items() if len(one.history) > 1 or one.failure is not None}
    if told:
        splits.append(failing_split(service, told))
    return splits


def failing_split(service: str, wanted: Mapping[str, RqliteRange]) -> RqliteLogSplit:
    """A split without rows: it tells of new columns, or fails."""
    return RqliteLogSplit(
        weights={str(one.schema.table): 0 for one in wanted.values()},
        schemas={str(one.schema.table): one.schema for one in wanted.values()},
        service=service,
        ranges=wanted,
    )


def _concerned(ref: FrameRef, wanted: Mapping[str, RqliteRange]) -> list[str]:
    return [
        name
        for name in summaries(ref.meta)
        if name in wanted and ref.last > wanted[name].after and ref.first <= wanted[name].upto
    ]


def _split(service: str, group: Sequence[FrameRef], wanted: Mapping[str, RqliteRange], *, asks: bool) -> RqliteLogSplit:
    weights: dict[str, int] = {}
    own: dict[str, RqliteRange] = {}
    for ref in group:
        for name in _concerned(ref, wanted):
            own[name] = wanted[name]
            table = str(wanted[name].schema.table)
            weights[table] = weights.get(table, 0) + summaries(ref.meta)[name].bytes
    schemas = {str(one.schema.table): one.schema for one in own.values()}
    return RqliteLogSplit(weights=weights, schemas=schemas, service=service, asks=asks, frames=tuple(group), ranges=own)


def read_log(journal: str, split: RqliteLogSplit, api: Api | None, *, passes: bool) -> Iterator[Changes]:
    """The changes of a split, in stream order per table. Raises TableError for a table that cannot be read."""
    for wanted in split.ranges.values():
        if wanted.failure is not None:
            raise revive(wanted.failure)
        wanted.require_allowed()
    with closing(JournalReader(journal)) as reader:
        for group in grouped(split.frames, DECODE_BYTES):
            for name, events in _gather(reader, group, split.ranges).items():
                wanted = split.ranges[name]
                for table, part in _by_version(wanted.history, events):
                    completed = complete(table, part, api, passes=passes)
                    if len(completed.events):
                        changes = decode(table, completed.events, completed.gone)
                        yield changes if wanted.shown is None else fit(changes, wanted.shown)


def _gather(reader: JournalReader, group: Sequence[FrameRef], wanted: Mapping[str, RqliteRange]) -> dict[str, Events]:
    """The wanted events of some frames, by table."""
    found: dict[str, Events] = {}
    skips = {name: frozenset(one.skips) for name, one in wanted.items()}
    for ref in group:
        if not _concerned(ref, wanted):
            continue
        frame = read_lines(reader.read(ref).payload)
        for event, line in zip(frame.events, frame.lines, strict=True):
            name = event["table"]
            if name not in wanted:
                continue
            position = position_of(event)
            if wanted[name].after < position <= wanted[name].upto and position not in skips[name]:
                events = found.setdefault(name, Events())
                events.events.append(event)
                events.lines.append(line)
    return found


def _by_version(history: SchemaHistory, events: Events) -> Iterator[tuple[TableSchema, Events]]:
    """The events of each version in turn."""
    places = [position_of(event) for event in events.events]
    cuts = [0, *(bisect_left(places, at) for at, _ in history[1:]), len(places)]
    for (_, table), (begin, end) in zip(history, pairwise(cuts), strict=True):
        if end > begin:
            yield table, events.part(begin, end)
