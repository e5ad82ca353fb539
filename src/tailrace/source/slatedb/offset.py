"""How far a SlateDB stream is: one WAL file, and for every table its copy, its own position in the log, its clock.

    {"wal": 812, "seq": 90321, "copies": 1, "witness": [812, 1432778632],
     "tables": {"slatedb.db1": {"phase": "ready", "clock": 1794785532233, "copy": 1, "x": [800, 90000]}, …}}

A table waits for a checkpoint (`init`), then copies key ranges under checkpoints whose first holds everything up to
x = (WAL file, seq); its log changes stay in the WAL meanwhile. Then it catches up from x, and is ready once it reaches
the common position. Its clock, in milliseconds, decides which of its rows have expired. Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tailrace.model.change import Position, end_of
from tailrace.source import offset


class WalPoint(NamedTuple):
    """A position in the log: after WAL file `wal`, and after every row up to `seq`."""

    wal: int
    seq: int

    @property
    def position(self) -> Position:
        return end_of(self.seq)


NOWHERE = WalPoint(0, 0)
"""Before the first WAL file."""


@dataclass(frozen=True)
class SlateDbTableOffset(offset.TableOffset[WalPoint]):
    """One table. `cuts` are the keys, in hex, at which the copy is split into ranges."""

    snapshot_position: WalPoint = NOWHERE
    cuts: tuple[str, ...] = ()
    clock: int = 0

    @property
    def chunks(self) -> int:
        return len(self.cuts) + 1 if self.copy and self.phase != "init" else 0

    def position(self, log: WalPoint) -> Position:
        return self.place(log).position

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {"phase": self.phase}
        numbers = {"next": self.next, "clock": self.clock, "copy": self.copy, "request": self.request}
        raw |= {name: number for name, number in numbers.items() if number}
        raw |= {
            name: list(values)
            for name, values in {"x": self.snapshot_position, "cuts": self.cuts}.items()
            if any(values)
        }
        if self.skips:
            raw["skips"] = [str(position) for position in self.skips]
        return raw if self.at is None else {**raw, "at": list(self.at)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SlateDbTableOffset:
        return cls(
            raw["phase"],
            raw.get("copy", 0),
            raw.get("next", 0),
            WalPoint(*raw["at"]) if "at" in raw else None,
            raw.get("request", 0),
            tuple(map(Position.parse, raw.get("skips", ()))),
            WalPoint(*raw.get("x", NOWHERE)),
            tuple(raw.get("cuts", ())),
            raw.get("clock", 0),
        )


@dataclass(frozen=True)
class SlateDbOffset(offset.LogOffset[str, SlateDbTableOffset, WalPoint]):
    """The whole offset; `copies` counts all copies begun so far, `witness` is a file at its end and its checksum."""

    copies: int = 0
    witness: tuple[int, int] | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SlateDbOffset:
        tables = {name: SlateDbTableOffset.from_json(entry) for name, entry in raw["tables"].items()}
        witness = raw.get("witness")
        return cls(WalPoint(raw["wal"], raw["seq"]), tables, raw["copies"], tuple(witness) if witness else None)

    def to_json(self) -> dict[str, Any]:
        tables = {name: self.tables[name].to_json() for name in sorted(self.tables)}
        raw = {"wal": self.log.wal, "seq": self.log.seq, "copies": self.copies, "tables": tables}
        return raw if self.witness is None else {**raw, "witness": list(self.witness)}


@dataclass(frozen=True)
class ExpiringRange(offset.LogRange[WalPoint]):
    """What a batch takes for one table: the log in (after, upto], and the expiries in (since, clock]."""

    since: int
    clock: int


def wal_ranges(start: SlateDbOffset, end: SlateDbOffset) -> dict[str, ExpiringRange]:
    """Per table, the range between two offsets. Pure: `plan` relies on it."""
    found = {
        name: ExpiringRange(now.place(start.log), then.place(end.log), now.clock, then.clock)
        for name, now, then in offset.readers(start, end)
    }
    return {name: one for name, one in found.items() if one.upto > one.after or one.clock > one.since}
