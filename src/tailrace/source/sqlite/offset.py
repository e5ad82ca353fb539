"""Where a stream of a SQLite file stands: one position on the tape, and every table that is not level with it.

    {"log": "<position>", "witness": {…}, "tables": {"orders": {"phase": "copy", "x": "<position>", …}, …}}

A position is (change_id, ordinal). Ordinals 0 and 1 are a change and, where its key was changed, the second half of it;
higher ones stand for changes of the schema that were found by looking, behind that change. By `witness` the rows up to
`log` are known again. A table waits (`init`), copies in chunks of rowids while its changes stay on the tape, then
catches up from x, the end of the tape when its copy began, and is ready once it meets the common position. Pure values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tailrace.change import START, Position
from tailrace.source import Limit, Orders, Phase
from tailrace.source.goal import bounded
from tailrace.source.heed import heed, skips_behind

Take = Callable[[Position, Position, frozenset[str], Limit], Position]
FIRST_HALF, SECOND_HALF = 0, 1


def behind(change_id: int) -> Position:
    """The position behind a change, before any schema change that nobody wrote down."""
    return Position(change_id, SECOND_HALF)


@dataclass(frozen=True)
class Entry:
    """One table. `bounds` are the last rowids of its chunks, `copy` counts its copies, `skips` are passed over."""

    phase: Phase
    x: Position = START
    next: int = 0
    bounds: tuple[int, ...] = ()
    at: Position | None = None
    request: int = 0
    copy: int = 0
    skips: tuple[Position, ...] = ()

    @property
    def chunks(self) -> int:
        return len(self.bounds)

    def position(self, log: Position) -> Position:
        """Up to here the destination has this table's log changes, or will have them from a copy still to begin."""
        if self.at is not None:
            return self.at
        return self.x if self.phase == "copy" else log

    def stop(self, at: Position | None) -> Entry:
        """Not read from now on. Behind `at` it can go on; None: only a new copy helps, and nothing is kept for it."""
        if at is None:
            return Entry("stopped", request=self.request, copy=self.copy)
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

    def begin(self, x: Position, bounds: tuple[int, ...], request: int) -> Entry:
        """A new copy, of which no chunk was read yet."""
        return Entry("copy", x=x, bounds=bounds, request=request, copy=self.copy + 1)

    def join(self) -> Entry:
        """Level with the log."""
        return replace(self, phase="ready", bounds=(), next=0, at=None)

    def restart(self) -> Entry:
        """Waiting for a new copy."""
        return Entry("init", request=self.request, copy=self.copy)

    def chunks_since(self, earlier: Entry | None) -> range:
        """The chunks to copy between an earlier state of the table and this one."""
        same_copy = earlier is not None and earlier.copy == self.copy
        return range(earlier.next if earlier is not None and same_copy else 0, self.next)

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {"phase": self.phase}
        raw |= {name: getattr(self, name) for name in ("next", "request", "copy") if getattr(self, name)}
        if self.x != START:
            raw["x"] = str(self.x)
        if self.bounds:
            raw["bounds"] = list(self.bounds)
        if self.skips:
            raw["skips"] = [str(position) for position in self.skips]
        return raw if self.at is None else {**raw, "at": str(self.at)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Entry:
        at, x = raw.get("at"), raw.get("x")
        return cls(
            raw["phase"],
            Position.parse(x) if x else START,
            raw.get("next", 0),
            tuple(raw.get("bounds", ())),
            Position.parse(at) if at else None,
            raw.get("request", 0),
            raw.get("copy", 0),
            tuple(map(Position.parse, raw.get("skips", ()))),
        )


@dataclass(frozen=True)
class LogOffset:
    """The whole offset; `tables` is keyed by name, which is all that tells one table of a file from another."""

    log: Position
    witness: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, Entry] = field(default_factory=dict)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> LogOffset:
        tables = {name: Entry.from_json(entry) for name, entry in raw["tables"].items()}
        return cls(Position.parse(raw["log"]), raw["witness"], tables)

    def to_json(self) -> dict[str, Any]:
        tables = {name: self.tables[name].to_json() for name in sorted(self.tables)}
        return {"log": str(self.log), "witness": dict(self.witness), "tables": tables}

    @property
    def low_water(self) -> Position:
        """Nothing at or before this position is needed again."""
        return min((entry.position(self.log) for entry in self.tables.values()), default=self.log)

    def within(self, *phases: Phase) -> dict[str, Entry]:
        return {name: entry for name, entry in self.tables.items() if entry.phase in phases}

    def with_tables(self, changed: Mapping[str, Entry]) -> LogOffset:
        return replace(self, tables={**self.tables, **changed})

    def only(self, names: Collection[str]) -> LogOffset:
        return replace(self, tables={name: entry for name, entry in self.tables.items() if name in names})

    def heed(self, orders: Orders, id_of: Callable[[str], str] = str) -> LogOffset:
        """Tables in error or paused stay where they are, until they are told to go on or copied anew."""
        heeded: dict[str, Entry] = {}
        for name, entry in self.tables.items():
            reached = entry.position(self.log)
            skips = skips_behind(reached, id_of(name), orders)
            known = entry if skips == entry.skips else replace(entry, skips=skips)
            heeded[name] = heed(known, id_of(name), orders, reached=reached, place_of=Position.parse)
        return self.with_tables(heeded)

    def begin_anew(self, recopies: Mapping[str, Position], policy: Callable[[str], str]) -> LogOffset:
        """Tables whose rows changed in a way that the log does not show are copied again, from behind that change."""
        due = {
            name: entry.restart()
            for name, entry in self.tables.items()
            if entry.phase not in ("init", "stopped") and entry.x < recopies.get(name, START) and policy(name) != "stop"
        }
        return self.with_tables(due)

    def copy_on(self, begun: Mapping[str, Entry], rows: int, chunk_rows: int) -> LogOffset:
        """Tables that copy, those just begun included, move on by as many chunks as so many rows allow.

        The first is given a chunk whatever its size. One that is copied to its end catches up from there.
        """
        moved: dict[str, Entry] = {}
        for name, entry in sorted({**self.within("copy"), **begun}.items()):
            take = min(entry.chunks - entry.next, max(1, rows // chunk_rows)) if rows > 0 else 0
            rows -= take * chunk_rows
            entry = replace(entry, next=entry.next + take)
            if entry.next == entry.chunks:
                entry = replace(entry, phase="catchup", at=entry.x)
            moved[name] = entry
        return self.with_tables(moved)

    def read_on(self, head: Position, goal: Position | None, limit: Limit, take: Take) -> LogOffset:
        """Ready tables move to the new common position; the tables behind it move towards it together.

        `take` says how far a batch goes that reads the log between two positions for some tables, within a limit.
        """
        ready, late = frozenset(self.within("ready")), self.within("catchup")
        head = bounded(head, goal, (entry.at for entry in late.values()))
        # A busy log must not keep those behind it from ever meeting it.
        share = Limit(max(limit.rows // 2, 1), max(limit.bytes // 2, 1)) if late else limit
        common = max(self.log, take(self.log, head, ready, share))
        # Those that were copied at a later position than the log has reached wait for it.
        late = {name: entry for name, entry in late.items() if entry.at is not None and entry.at <= common}
        if not late:
            return replace(self, log=common)
        first = min(entry.position(common) for entry in late.values())
        reached = take(first, common, frozenset(late), share)
        changed = {
            name: entry.join() if reached >= common else replace(entry, at=reached)
            for name, entry in late.items()
            if entry.position(common) <= reached
        }
        return replace(self.with_tables(changed), log=common)


@dataclass(frozen=True)
class Reading:
    """What a batch takes from the log for one table: the changes in (after, upto]."""

    after: Position
    upto: Position


def readings(start: LogOffset, end: LogOffset) -> dict[str, Reading]:
    """Per table, the log range that lies between two offsets. Pure: `plan` relies on it."""
    ranges = {}
    for name, then in end.tables.items():
        if then.phase not in ("ready", "catchup"):
            continue
        now = start.tables.get(name)
        if now is None or now.phase in ("init", "copy") or now.copy != then.copy:
            continue  # a copy ends the batch before the first log change is read
        if now.phase == "stopped" and now.resume().phase != "catchup":
            continue
        reading = Reading(now.position(start.log), then.position(end.log))
        if reading.upto > reading.after:
            ranges[name] = reading
    return ranges
