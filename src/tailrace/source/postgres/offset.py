"""Where a Postgres stream stands: one position in the log, and every table that is not level with it.

    {"log": "<position>", "tables": {"16385": {"phase": "copy", "x": 123, "next": 2, "parts": {"16385": 8}}, …}}

A table waits for a snapshot (`init`), then copies in chunks under snapshots whose first is at LSN x; its log changes
stay in the journal meanwhile. Then it catches up from x, and is ready once it meets the common position. Pure values:
no connection, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.change import Position
from tailrace.source import Phase
from tailrace.source.postgres.lsn import before


@dataclass(frozen=True)
class Entry:
    """One table. `parts` maps each heap to copy (partitions have several) to its number of chunks.

    `member` tells this stay of the table in the publication from another one, between which changes were not sent.
    `skips` are changes to be passed over.
    """

    phase: Phase
    x: int = 0
    next: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)
    at: Position | None = None
    request: int = 0
    member: int = 0
    skips: tuple[Position, ...] = ()

    @property
    def chunks(self) -> int:
        return sum(self.parts.values())

    def position(self, log: Position) -> Position:
        """Up to here the destination has this table's log changes, or will have them from a copy still to begin."""
        if self.at is not None:
            return self.at
        return before(self.x) if self.phase == "copy" else log

    def stop(self, at: Position | None) -> Entry:
        """Not read from now on. Behind `at` it can go on; None: only a new copy helps, and nothing is kept for it."""
        # Nobody knows yet whether the last chunks of a table without key were read under one snapshot.
        if at is None or (self.phase == "copy" and self.next == self.chunks):
            return Entry("stopped", request=self.request, member=self.member)
        return replace(self, phase="stopped", at=at)

    @property
    def holds(self) -> bool:
        return self.at is not None

    def resume(self) -> Entry:
        """Where a stopped table goes on."""
        if self.at is None:
            return replace(self, phase="init")
        if self.next < self.chunks:
            return replace(self, phase="copy", at=None)
        return replace(self, phase="catchup")

    def join(self) -> Entry:
        """Level with the log."""
        return replace(self, phase="ready", parts={}, at=None)

    def restart(self) -> Entry:
        """Waiting for a new copy."""
        return Entry("init", request=self.request, member=self.member)

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {"phase": self.phase}
        raw |= {name: getattr(self, name) for name in ("x", "next", "request", "member") if getattr(self, name)}
        if self.parts and self.phase != "ready":
            raw["parts"] = dict(self.parts)
        if self.skips:
            raw["skips"] = [str(position) for position in self.skips]
        return raw if self.at is None else {**raw, "at": str(self.at)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Entry:
        at = raw.get("at")
        return cls(
            raw["phase"],
            raw.get("x", 0),
            raw.get("next", 0),
            raw.get("parts", {}),
            Position.parse(at) if at else None,
            raw.get("request", 0),
            raw.get("member", 0),
            tuple(map(Position.parse, raw.get("skips", ()))),
        )

    def chunks_since(self, earlier: Entry | None) -> range:
        """The chunks to copy between an earlier state of the table and this one. A new x is a new copy."""
        same_copy = earlier is not None and earlier.x == self.x
        return range(earlier.next if earlier is not None and same_copy else 0, self.next)


@dataclass(frozen=True)
class Chunk:
    """A range of one heap's pages: chunk `index` of the table, `ordinal` of `of` in heap `part`."""

    part: str
    index: int
    ordinal: int
    of: int


def chunks(entry: Entry, wanted: range) -> Iterator[Chunk]:
    """The chunks with these numbers of a copying table."""
    index = 0
    for part, of in entry.parts.items():
        for ordinal in range(of):
            if index in wanted:
                yield Chunk(part, index, ordinal, of)
            index += 1


@dataclass(frozen=True)
class LogOffset:
    """The whole offset; `tables` is keyed by relation OID."""

    log: Position
    tables: Mapping[int, Entry] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> LogOffset:
        return cls(
            Position.parse(raw["log"]), {int(oid): Entry.from_json(entry) for oid, entry in raw["tables"].items()}
        )

    def to_json(self) -> dict[str, Any]:
        return {"log": str(self.log), "tables": {str(oid): self.tables[oid].to_json() for oid in sorted(self.tables)}}

    @property
    def low_water(self) -> Position:
        """Nothing at or before this position is needed again."""
        return min((entry.position(self.log) for entry in self.tables.values()), default=self.log)

    @property
    def high_water(self) -> Position:
        """No table has come further than this position."""
        return max((entry.position(self.log) for entry in self.tables.values()), default=self.log)

    def within(self, *phases: Phase) -> dict[int, Entry]:
        return {oid: entry for oid, entry in self.tables.items() if entry.phase in phases}

    def with_tables(self, changed: Mapping[int, Entry]) -> LogOffset:
        return replace(self, tables={**self.tables, **changed})

    def without(self, gone: Collection[int]) -> LogOffset:
        return replace(self, tables={oid: entry for oid, entry in self.tables.items() if oid not in gone})


@dataclass(frozen=True)
class Reading:
    """What a batch takes from the log for one table: the changes in (after, upto]."""

    after: Position
    upto: Position


def readings(start: LogOffset, end: LogOffset) -> dict[int, Reading]:
    """Per table, the log range that lies between two offsets. Pure: `plan` relies on it."""
    ranges = {}
    for oid, then in end.tables.items():
        if then.phase not in ("ready", "catchup"):
            continue
        now = start.tables.get(oid)
        if now is None or now.phase in ("init", "copy") or then.chunks_since(now):
            continue  # a copy ends the batch before the first log change is read
        if now.phase == "stopped" and now.resume().phase != "catchup":
            continue
        reading = Reading(now.position(start.log), then.position(end.log))
        if reading.upto > reading.after:
            ranges[oid] = reading
    return ranges
