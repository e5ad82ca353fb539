"""Where a stream of a log stands: one place in the log, and every table that is not level with it.

A table waits (`init`), copies in chunks while its changes stay in the log, then catches up from x, the place of the log
when its copy began, and is ready once it meets the common place. Each source adds what it keeps of its tables, and how
all of it is written as JSON. Pure values: no connection, no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar

from tailrace.model.change import Position
from tailrace.source.follower import Limit, Phase, TableDirectives, TableProgress

Id = TypeVar("Id", int, str)
LogPoint = TypeVar("LogPoint", bound=tuple[int, int])
Table = TypeVar("Table", bound="TableOffset[Any]")


@dataclass(frozen=True)
class TableOffset(ABC, Generic[LogPoint]):
    """One table. `copy` tells one copy of it from the next, whose first chunk not yet read is `next`.

    `at` is set while it stands apart from the log. `skips` are changes to be passed over.
    """

    phase: Phase
    copy: int = 0
    next: int = 0
    at: LogPoint | None = None
    request: int = 0
    skips: tuple[Position, ...] = ()

    @property
    @abstractmethod
    def snapshot_position(self) -> LogPoint:
        """The place behind which the log has what its copy may not."""

    @property
    @abstractmethod
    def chunks(self) -> int: ...

    @abstractmethod
    def position(self, log: LogPoint) -> Position:
        """The position of its place."""

    def place(self, log: LogPoint) -> LogPoint:
        """Up to here the destination has this table's log changes, or will have them from a copy still to begin."""
        if self.at is not None:
            return self.at
        return self.snapshot_position if self.phase == "copy" else log

    def stop(self, at: LogPoint | None) -> Self:
        """Not read from now on. Behind `at` it can go on; None: only a new copy helps, and nothing is kept for it."""
        return replace(self.recopy() if at is None else self, phase="stopped", at=at)

    @property
    def holds(self) -> bool:
        return self.at is not None

    def resume(self) -> Self:
        """Where a stopped table goes on."""
        if self.at is None:
            return replace(self, phase="init")
        if self.next < self.chunks:
            return replace(self, phase="copy", at=None)
        return replace(self, phase="catchup")

    def join(self) -> Self:
        """Level with the log."""
        return replace(self, phase="ready", at=None)

    def recopy(self) -> Self:
        """Waiting for a new copy."""
        return type(self)("init", copy=self.copy, request=self.request)

    def chunks_since(self, earlier: Self | None) -> range:
        """The chunks to copy between an earlier state of the table and this one."""
        return range(earlier.next if earlier is not None and earlier.copy == self.copy else 0, self.next)


@dataclass(frozen=True)
class LogOffset(ABC, Generic[Id, Table, LogPoint]):
    """The whole offset."""

    log: LogPoint
    tables: Mapping[Id, Table] = field(default_factory=dict)

    @classmethod
    @abstractmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """What `to_json` wrote."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """As Spark stores it: the format on disk."""

    @property
    def low_water(self) -> LogPoint:
        """Nothing at or before this place is needed again."""
        lowest: LogPoint = min((entry.place(self.log) for entry in self.tables.values()), default=self.log)
        return lowest

    def within(self, *phases: Phase) -> dict[Id, Table]:
        return {name: entry for name, entry in self.tables.items() if entry.phase in phases}

    def with_tables(self, changed: Mapping[Id, Table]) -> Self:
        return replace(self, tables={**self.tables, **changed})

    def only(self, names: Collection[Id]) -> Self:
        return replace(self, tables={name: entry for name, entry in self.tables.items() if name in names})

    def apply_directives(
        self,
        directives: TableDirectives,
        place_of: Callable[[str, LogPoint], LogPoint | None],
        id_of: Callable[[Id], str] = str,
    ) -> Self:
        """Tables in error or paused stay where they are, until they are told to go on or copied anew.

        `place_of` reads where an error left a table that had come to a place.
        """
        heeded: dict[Id, Table] = {}
        for name, entry in self.tables.items():
            position, told = entry.position(self.log), directives.skips.get(id_of(name), ())
            skips = tuple(sorted(at for at in map(Position.parse, told) if at > position))
            known = entry if skips == entry.skips else replace(entry, skips=skips)
            heeded[name] = apply_directives(
                known, id_of(name), directives, reached=entry.place(self.log), place_of=place_of
            )
        return self.with_tables(heeded)

    def due(self, directives: TableDirectives, id_of: Callable[[Id], str] = str) -> dict[Id, Table]:
        """The tables whose copy is to begin, or to begin again by a request, which is noted in them."""
        asked = {name: directives.resync.get(id_of(name), 0) for name in self.tables}
        return {
            name: replace(entry, request=max(entry.request, asked[name]))
            for name, entry in self.tables.items()
            if (entry.phase == "init" and id_of(name) not in directives.paused) or entry.request < asked[name]
        }

    def copy_on(self, begun: Mapping[Id, Table], budget: int, chunk: int) -> Self:
        """Tables that copy, those just begun included, move on by as many chunks of a size as a budget allows.

        The first is given a chunk whatever its size. One that is copied to its end catches up from there.
        """
        moved: dict[Id, Table] = {}
        for name, entry in sorted({**self.within("copy"), **begun}.items()):
            take = min(entry.chunks - entry.next, max(1, budget // chunk)) if budget > 0 else 0
            budget -= take * chunk
            entry = replace(entry, next=entry.next + take)
            moved[name] = (
                replace(entry, phase="catchup", at=entry.snapshot_position) if entry.next == entry.chunks else entry
            )
        return self.with_tables(moved)

    def read_on(
        self,
        head: LogPoint,
        goal: LogPoint | None,
        limit: Limit,
        take: Callable[[LogPoint, LogPoint, frozenset[Id], Limit], LogPoint],
    ) -> Self:
        """Ready tables move to the new common place; the tables behind it move towards it together.

        Together, because they read the same stretch of the log: it is paid for once, however many they are. `take` says
        how far a batch goes that reads the log between two places for some tables, within a limit.
        """
        ready, behind = frozenset(self.within("ready")), self.within("catchup")
        head = bounded(head, goal, (entry.place(self.log) for entry in self.within("copy", "catchup").values()))
        share = halved(limit) if behind else limit
        common = max(self.log, take(self.log, head, ready, share))
        # Those that were copied at a later place than the log has reached wait for it.
        late = {name: entry for name, entry in behind.items() if entry.at is not None and entry.at <= common}
        if not late:
            return replace(self, log=common)
        first = min(entry.place(common) for entry in late.values())
        reached = take(first, common, frozenset(late), share)
        changed = {
            name: entry.join() if reached >= common else replace(entry, at=reached)
            for name, entry in late.items()
            if entry.place(common) <= reached
        }
        return replace(self.with_tables(changed), log=common)

    def progress(self, id_of: Callable[[Id], str] = str) -> list[TableProgress]:
        """Where each table stands."""
        return [
            TableProgress(
                id_of(name),
                entry.phase,
                entry.position(self.log),
                entry.next,
                entry.chunks,
                entry.request,
                entry.copy,
                catching_up=entry.phase == "catchup" and entry.at != entry.snapshot_position,
            )
            for name, entry in self.tables.items()
        ]


def halved(limit: Limit) -> Limit:
    """Each one's share: a busy log must not keep the tables behind it from ever meeting it."""
    return Limit(max(limit.rows // 2, 1), max(limit.bytes // 2, 1))


@dataclass(frozen=True)
class LogRange(Generic[LogPoint]):
    """What a batch takes from the log for one table: the changes in (after, upto]."""

    after: LogPoint
    upto: LogPoint


def readers(
    start: LogOffset[Id, Table, LogPoint], end: LogOffset[Id, Table, LogPoint]
) -> Iterator[tuple[Id, Table, Table]]:
    """The tables that read the log between two offsets, as they are at each. Pure: `plan` relies on it."""
    for name, then in end.tables.items():
        now = start.tables.get(name)
        if now is None or now.phase in ("init", "copy") or then.phase not in ("ready", "catchup"):
            continue
        if then.chunks_since(now) or (now.phase == "stopped" and now.resume().phase != "catchup"):
            continue  # a copy ends the batch before the first log change is read
        yield name, now, then


def log_ranges(
    start: LogOffset[Id, Table, LogPoint], end: LogOffset[Id, Table, LogPoint]
) -> dict[Id, LogRange[LogPoint]]:
    """Per table, the log range that lies between two offsets. Pure: `plan` relies on it."""
    ranges = {name: LogRange(now.place(start.log), then.place(end.log)) for name, now, then in readers(start, end)}
    return {name: reading for name, reading in ranges.items() if reading.upto > reading.after}


# What orders make of one table's place in an offset, the same for every source.


class DirectedTable(Protocol):
    """Where one table stands, as its source writes it down."""

    @property
    def phase(self) -> Phase: ...

    @property
    def request(self) -> int: ...

    @property
    def holds(self) -> bool:
        """Whether a stopped table can go on where it is, for which the log behind that place is kept."""
        ...

    def stop(self, at: Any) -> Self:
        """Not read from now on. Behind `at` it can go on; None: only a new copy helps."""
        ...

    def resume(self) -> Self:
        """Where a stopped table goes on."""
        ...


Directed = TypeVar("Directed", bound=DirectedTable)
Reached = TypeVar("Reached")


def apply_directives(
    table: Directed,
    upstream_id: str,
    directives: TableDirectives,
    *,
    reached: Reached,
    place_of: Callable[[str, Reached], Reached | None],
) -> Directed:
    """The table stopped, resumed or as it was. `reached` is where it is, `place_of` reads where an error left it then.

    A table in error or paused stays where it is, also while it waits for a new copy to begin: what it would read until
    then would be behind the changes that failed.
    """
    if upstream_id in directives.stopped:
        resume = directives.stopped[upstream_id]
        if table.phase != "stopped" or (resume is None and table.holds):
            return table.stop(place_of(resume, reached) if resume else None)
    elif upstream_id in directives.paused:
        if table.phase != "stopped":
            return table.stop(reached if table.phase != "init" else None)
    elif table.phase == "stopped":
        return table.resume()
    return table


# Where a run with `--once` ends: what is written to all the time would keep it from ever ending.

Head = TypeVar("Head", bound=tuple[int, int] | int)


def bounded(head: Head, goal: Head | None, copied: Iterable[Head]) -> Head:
    """How far to read a log that ends at `head`: no further than the goal, or than what tables were `copied` at."""
    return head if goal is None else min(head, max([goal, *copied]))
