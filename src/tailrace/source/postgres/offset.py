"""How far a Postgres stream has read: one common log position, and the state of every table that is not at it.

    {"log": "<position>", "tables": {"16385": {"phase": "copy", "x": 123, "next": 2, "parts": {"16385": 8}}, …}}

A table waits for a snapshot (`init`), then copies in chunks under snapshots whose first is at LSN x; its log changes
stay in the journal meanwhile. Then it catches up from x, and is ready once it reaches the common position. Pure values:
no connection, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from tailrace.model.change import Position, end_of
from tailrace.source import offset

# Log sequence numbers: Postgres's WAL positions, and how they become positions of tailrace.


def parse_lsn(text: str) -> int:
    """`16/B374D848` as an integer."""
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def format_lsn(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def before(lsn: int) -> Position:
    """The position after every commit whose record starts before `lsn`, and before all others.

    A commit at LSN c ends at e, and the next commit starts at e or later; so `before(e)` is the end of c.
    """
    return end_of(lsn - 1)


@dataclass(frozen=True)
class PostgresTableOffset(offset.TableOffset[Position]):
    """One table. The LSN of its first snapshot identifies a copy.

    `parts` maps each heap to copy (partitioned tables have several) to its number of chunks. `member` changes when the
    table leaves the publication and comes back, `publication` when the options of the publication change: changes in
    between may not have been sent. 0 in `publication`: not known.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    member: int = 0
    publication: int = 0

    @property
    def snapshot_position(self) -> Position:
        return before(self.copy)

    @property
    def chunks(self) -> int:
        return sum(self.parts.values())

    def position(self, log: Position) -> Position:
        return self.place(log)

    def stop(self, at: Position | None) -> PostgresTableOffset:
        # It is not known yet whether the last chunks of a table without key were read under one snapshot.
        return super().stop(None if self.phase == "copy" and self.next == self.chunks else at)

    def join(self) -> PostgresTableOffset:
        return replace(super().join(), parts={})

    def recopy(self) -> PostgresTableOffset:
        return PostgresTableOffset("init", request=self.request, member=self.member, publication=self.publication)

    def to_json(self) -> Mapping[str, Any]:
        """Made once for each entry, and shared: not to be changed."""
        return self._raw

    @cached_property
    def _raw(self) -> Mapping[str, Any]:
        raw: dict[str, Any] = {"phase": self.phase}
        numbers = {"x": self.copy, "next": self.next, "request": self.request, "member": self.member}
        numbers["publication"] = self.publication
        raw |= {name: number for name, number in numbers.items() if number}
        if self.parts and self.phase != "ready":
            raw["parts"] = dict(self.parts)
        if self.skips:
            raw["skips"] = [str(position) for position in self.skips]
        return raw if self.at is None else {**raw, "at": str(self.at)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> PostgresTableOffset:
        at = raw.get("at")
        return cls(
            raw["phase"],
            raw.get("x", 0),
            raw.get("next", 0),
            Position.parse(at) if at else None,
            raw.get("request", 0),
            tuple(map(Position.parse, raw.get("skips", ()))),
            raw.get("parts", {}),
            raw.get("member", 0),
            raw.get("publication", 0),
        )


@dataclass(frozen=True)
class Chunk:
    """A range of one heap's pages: chunk `ordinal` of `of` in heap `part`."""

    part: str
    ordinal: int
    of: int


def chunks(entry: PostgresTableOffset, wanted: range) -> Iterator[Chunk]:
    """The chunks with these numbers of a copying table."""
    every = (Chunk(part, ordinal, of) for part, of in entry.parts.items() for ordinal in range(of))
    return islice(every, wanted.start, wanted.stop)


@dataclass(frozen=True)
class PostgresOffset(offset.LogOffset[int, PostgresTableOffset, Position]):
    """The whole offset; `tables` is keyed by relation OID."""

    @classmethod
    def from_json(
        cls, raw: Mapping[str, Any], known: Mapping[int, PostgresTableOffset] | None = None
    ) -> PostgresOffset:
        """Read what `to_json` wrote. Entries that are equal to `known` ones become those, at a tenth of the cost."""
        tables: dict[int, PostgresTableOffset] = {}
        known = known or {}
        for name, entry in raw["tables"].items():
            oid = int(name)
            one = known.get(oid)
            tables[oid] = one if one is not None and one._raw == entry else PostgresTableOffset.from_json(entry)
        return cls(Position.parse(raw["log"]), tables)

    def to_json(self) -> dict[str, Any]:
        return {"log": str(self.log), "tables": {str(oid): self.tables[oid].to_json() for oid in sorted(self.tables)}}

    @property
    def high_water(self) -> Position:
        """No table has read further than this position."""
        return max((entry.position(self.log) for entry in self.tables.values()), default=self.log)
