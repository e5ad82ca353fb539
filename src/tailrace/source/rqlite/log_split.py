"""Ranges of a cluster's journal as splits: which frames, for which tables, decoded with which version."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from tailrace.errors import revive
from tailrace.journal import FrameReader, FrameRef, grouped
from tailrace.model.change import Changes, Position
from tailrace.model.collapse import fit
from tailrace.model.schema import TableSchema
from tailrace.source.follower import SchemaHistory
from tailrace.source.journal_log import FrameSplit
from tailrace.source.rqlite.api import Api
from tailrace.source.rqlite.catalog import Kinds
from tailrace.source.rqlite.decode import Events, decode, position_of, read_lines
from tailrace.source.rqlite.missing_row import complete
from tailrace.source.table_range import TableRange

DECODE_BYTES = 4 * 1024 * 1024
"""How many bytes are decoded at once: a single request is small."""


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

    @property
    def has_news(self) -> bool:
        return super().has_news or self.failure is not None


@dataclass(frozen=True)
class RqliteLogSplit(FrameSplit):
    """Some frames of a service's journal and what to read of them, by table. `asks`: the cluster has an API."""

    ranges: Mapping[str, RqliteRange] = field(default_factory=dict)
    service: str = ""
    asks: bool = False

    @staticmethod
    def weigh(ref: FrameRef) -> Mapping[str, int]:
        return {name: summary.bytes for name, summary in summaries(ref.meta).items()}


def read_log(journal: str, split: RqliteLogSplit, api: Api | None, *, passes: bool) -> Iterator[Changes]:
    """The changes of a split, in stream order per table. Raises TableError for a table that cannot be read."""
    for wanted in split.ranges.values():
        if wanted.failure is not None:
            raise revive(wanted.failure)
        wanted.require_allowed()
    with closing(FrameReader(journal)) as reader:
        for group in grouped(split.frames, DECODE_BYTES):
            for name, events in _gather(reader, group, split).items():
                wanted = split.ranges[name]
                for table, part in _by_version(wanted.history, events):
                    completed = complete(table, part, api, passes=passes)
                    if len(completed.events):
                        changes = decode(table, completed.events, completed.gone)
                        yield changes if wanted.shown is None else fit(changes, wanted.shown)


def _gather(reader: FrameReader, group: Sequence[FrameRef], split: RqliteLogSplit) -> dict[str, Events]:
    """The wanted events of some frames, by table."""
    found: dict[str, Events] = {}
    wanted = split.ranges
    skips = {name: frozenset(one.skips) for name, one in wanted.items()}
    for ref in group:
        if not split.concerned(ref):
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
