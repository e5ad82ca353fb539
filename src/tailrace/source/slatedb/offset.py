"""Where a SlateDB stream stands: one WAL file, and for every table its copy, its place behind the log, its clock.

    {"wal": 812, "seq": 90321, "copies": 1,
     "tables": {"slatedb.db1": {"phase": "ready", "clock": 1794785532233, "copy": 1, "x": [800, 90000]}, …}}

A table waits for a checkpoint (`init`), then copies key ranges under checkpoints whose first holds everything up to
x = (WAL file, seq); its log changes stay in the WAL meanwhile. Then it catches up from x, and is ready once it meets
the common place. Its clock, in milliseconds, says which rows have expired for it. Pure values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tailrace.change import Position, end_of
from tailrace.source import Phase


class Mark(NamedTuple):
    """A place in the log: behind WAL file `wal`, and behind every row up to `seq`."""

    wal: int
    seq: int

    @property
    def position(self) -> Position:
        return end_of(self.seq)


NOWHERE = Mark(0, 0)
"""Before the first WAL file."""


@dataclass(frozen=True)
class Entry:
    """One table. `cuts` are the keys, in hex, at which the copy is cut into ranges; `next` is the next one to copy."""

    phase: Phase
    x: Mark = NOWHERE
    next: int = 0
    cuts: tuple[str, ...] = ()
    at: Mark | None = None
    clock: int = 0
    copy: int = 0
    request: int = 0
    skips: tuple[Position, ...] = ()

    @property
    def chunks(self) -> int:
        return len(self.cuts) + 1 if self.copy and self.phase != "init" else 0

    def mark(self, log: Mark) -> Mark:
        """Up to here the destination has this table's log changes, or will have them from a copy still to begin."""
        if self.at is not None:
            return self.at
        return self.x if self.phase == "copy" else log

    def stop(self, at: Mark | None) -> Entry:
        """Not read from now on. Behind `at` it can go on; None: only a new copy helps."""
        if at is None:
            return replace(self.restart(), phase="stopped")
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
        return replace(self, phase="ready", at=None)

    def restart(self) -> Entry:
        """Waiting for a new copy."""
        return Entry("init", copy=self.copy, request=self.request)

    def chunks_since(self, earlier: Entry | None) -> range:
        """The ranges to copy between an earlier state of the table and this one."""
        same = earlier is not None and earlier.copy == self.copy
        return range(earlier.next if earlier is not None and same else 0, self.next)

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {"phase": self.phase}
        raw |= {name: value for name in ("next", "clock", "copy", "request") if (value := getattr(self, name))}
        raw |= {name: list(value) for name in ("x", "cuts") if any(value := getattr(self, name))}
        if self.skips:
            raw["skips"] = [str(position) for position in self.skips]
        return raw if self.at is None else {**raw, "at": list(self.at)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Entry:
        return cls(
            raw["phase"],
            Mark(*raw.get("x", NOWHERE)),
            raw.get("next", 0),
            tuple(raw.get("cuts", ())),
            Mark(*raw["at"]) if "at" in raw else None,
            raw.get("clock", 0),
            raw.get("copy", 0),
            raw.get("request", 0),
            tuple(map(Position.parse, raw.get("skips", ()))),
        )


@dataclass(frozen=True)
class LogOffset:
    """The whole offset; `copies` counts the copies that were ever begun."""

    log: Mark = NOWHERE
    copies: int = 0
    tables: Mapping[str, Entry] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> LogOffset:
        tables = {name: Entry.from_json(entry) for name, entry in raw["tables"].items()}
        return cls(Mark(raw["wal"], raw["seq"]), raw["copies"], tables)

    def to_json(self) -> dict[str, Any]:
        tables = {name: self.tables[name].to_json() for name in sorted(self.tables)}
        return {"wal": self.log.wal, "seq": self.log.seq, "copies": self.copies, "tables": tables}

    @property
    def low_water(self) -> int:
        """WAL files up to this one are not needed again."""
        return min((entry.mark(self.log).wal for entry in self.tables.values()), default=self.log.wal)

    def within(self, *phases: Phase) -> dict[str, Entry]:
        return {name: entry for name, entry in self.tables.items() if entry.phase in phases}

    def with_tables(self, changed: Mapping[str, Entry]) -> LogOffset:
        return replace(self, tables={**self.tables, **changed})

    def without(self, gone: Collection[str]) -> LogOffset:
        return replace(self, tables={name: entry for name, entry in self.tables.items() if name not in gone})


@dataclass(frozen=True)
class Reading:
    """What a batch takes for one table: the log in (after, upto], and the expiries in (since, clock]."""

    after: Mark
    upto: Mark
    since: int
    clock: int


def readings(start: LogOffset, end: LogOffset) -> dict[str, Reading]:
    """Per table, what lies between two offsets. Pure: `plan` relies on it."""
    found = {}
    for name, then in end.tables.items():
        if then.phase not in ("ready", "catchup"):
            continue
        now = start.tables.get(name)
        if now is None or now.phase in ("init", "copy") or then.chunks_since(now):
            continue  # a copy ends the batch before the first log change is read
        if now.phase == "stopped" and now.resume().phase != "catchup":
            continue
        reading = Reading(now.mark(start.log), then.mark(end.log), now.clock, then.clock)
        if reading.upto > reading.after or reading.clock > reading.since:
            found[name] = reading
    return found
