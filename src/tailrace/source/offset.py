"""How far a stream has read a log: one common position, and the state of every table that is not at it.

A table waits (`init`), copies in chunks while its changes stay in the log, then catches up from x, the log position at
which its copy began, and is ready once it reaches the common position. Each source adds its own fields for a table and
the JSON format. Pure values: no connection, no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, Self, TypeVar

from tailrace.model.change import START, Position
from tailrace.source.copy_share import CopyNeed, share_chunks
from tailrace.source.follower import Limit, Phase, TableDirectives, TableProgress

Id = TypeVar("Id", int, str)
LogPoint = TypeVar("LogPoint", bound=tuple[int, int])
Table = TypeVar("Table", bound="TableOffset[Any]")


@dataclass(frozen=True)
class TableOffset(ABC, Generic[LogPoint]):
    """One table. `copy` identifies its current copy, and `next` is the first chunk of it that is not read yet.

    `at` is its own log position, set while that is not the common one. `skips` are changes to skip.
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
        """The log position of the copy: changes after it may be missing from the copy, and are in the log."""

    @property
    @abstractmethod
    def chunks(self) -> int: ...

    @abstractmethod
    def position(self, log: LogPoint) -> Position:
        """Its place in the log as a position."""

    def place(self, log: LogPoint) -> LogPoint:
        """The destination has this table's log changes up to here, or gets them from a copy that has not begun yet."""
        if self.at is not None:
            return self.at
        return self.snapshot_position if self.phase == "copy" else log

    def stop(self, at: LogPoint | None) -> Self:
        """Stop reading it. It can resume after `at`. None: it needs a new copy, and no log is kept for it."""
        return replace(self.recopy() if at is None else self, phase="stopped", at=at)

    @property
    def holds(self) -> bool:
        return self.at is not None

    def resume(self) -> Self:
        """The entry with which a stopped table continues."""
        if self.at is None:
            return replace(self, phase="init")
        if self.next < self.chunks:
            return replace(self, phase="copy", at=None)
        return replace(self, phase="catchup")

    def join(self) -> Self:
        """The entry once it has reached the common position."""
        return replace(self, phase="ready", at=None)

    def recopy(self) -> Self:
        """The entry that waits for a new copy."""
        return type(self)("init", copy=self.copy, request=self.request)

    def chunks_since(self, earlier: Self | None) -> range:
        """The chunks to copy between an earlier state of the table and this one."""
        return range(earlier.next if earlier is not None and earlier.copy == self.copy else 0, self.next)


@dataclass(frozen=True)
class ChunkedTableOffset(TableOffset[Position]):
    """A table of a log whose places are positions. `bounds` say where its chunks end, in the words of its source."""

    snapshot_position: Position = START
    bounds: tuple[Any, ...] = ()

    @property
    def chunks(self) -> int:
        return len(self.bounds)

    def position(self, log: Position) -> Position:
        return self.place(log)

    def begin(self, snapshot_position: Position, bounds: tuple[Any, ...]) -> ChunkedTableOffset:
        """A new copy, with no chunk read yet."""
        return ChunkedTableOffset(
            "copy", snapshot_position=snapshot_position, bounds=bounds, request=self.request, copy=self.copy + 1
        )

    def join(self) -> ChunkedTableOffset:
        return replace(super().join(), bounds=(), next=0)

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {"phase": self.phase}
        numbers = {"next": self.next, "request": self.request, "copy": self.copy}
        raw |= {name: number for name, number in numbers.items() if number}
        if self.snapshot_position != START:
            raw["x"] = str(self.snapshot_position)
        if self.bounds:
            raw["bounds"] = list(self.bounds)
        if self.skips:
            raw["skips"] = [str(position) for position in self.skips]
        return raw if self.at is None else {**raw, "at": str(self.at)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ChunkedTableOffset:
        at, x = raw.get("at"), raw.get("x")
        return cls(
            raw["phase"],
            raw.get("copy", 0),
            raw.get("next", 0),
            Position.parse(at) if at else None,
            raw.get("request", 0),
            tuple(map(Position.parse, raw.get("skips", ()))),
            Position.parse(x) if x else START,
            tuple(raw.get("bounds", ())),
        )


@dataclass(frozen=True)
class LogOffset(ABC, Generic[Id, Table, LogPoint]):
    """The whole offset."""

    log: LogPoint
    tables: Mapping[Id, Table] = field(default_factory=dict)

    @classmethod
    @abstractmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The offset as Spark stores it: the format on disk."""

    @property
    def low_water(self) -> LogPoint:
        """Nothing at or before this place is needed again. Not past the log, where the next batch begins to read."""
        # A ready table is at the log. Of ten thousand tables most are.
        behind = (entry for entry in self.tables.values() if entry.phase != "ready" or entry.at is not None)
        lowest: LogPoint = min((entry.place(self.log) for entry in behind), default=self.log)
        return min(lowest, self.log)

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
        """Tables in error or paused stay where they are until they are resumed or copied again.

        `place_of` returns the place where a table that had reached a place resumes after an error.
        """
        named = {*directives.stopped, *directives.paused, *directives.skips}
        directed: dict[Id, Table] = {}
        for name, entry in self.tables.items():
            if entry.phase != "stopped" and not entry.skips and (not named or id_of(name) not in named):
                continue
            position, requested = entry.position(self.log), directives.skips.get(id_of(name), ())
            skips = tuple(sorted(at for at in map(Position.parse, requested) if at > position))
            known = entry if skips == entry.skips else replace(entry, skips=skips)
            directed[name] = apply_directives(
                known, id_of(name), directives, reached=entry.place(self.log), place_of=place_of
            )
        return self.with_tables(directed) if directed else self

    def due(self, directives: TableDirectives, id_of: Callable[[Id], str] = str) -> dict[Id, Table]:
        """The tables whose copy is to begin, or to begin again because of a request, with the request's id."""
        due: dict[Id, Table] = {}
        for name, entry in self.tables.items():
            if entry.phase != "init" and not directives.resync:
                continue
            request = directives.resync.get(id_of(name), 0)
            if (entry.phase == "init" and id_of(name) not in directives.paused) or entry.request < request:
                due[name] = replace(entry, request=max(entry.request, request))
        return due

    def copy_on(self, begun: Mapping[Id, Table], budget: int, chunk: int) -> Self:
        """Advance the copying tables, those just begun included, by as many chunks as the budget allows.

        They share it (see `share_chunks`). A table whose copy is complete then catches up.
        """
        moved: dict[Id, Table] = {}
        copying = {**self.within("copy"), **begun}
        taken = share_chunks({name: CopyNeed(one.chunks - one.next, chunk) for name, one in copying.items()}, budget)
        for name, entry in sorted(copying.items()):
            entry = replace(entry, next=entry.next + taken[name])
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
        """Advance ready tables to the new common place, and the tables that catch up towards it, together.

        Together, because they read the same range of the log: it is read once, however many they are. `take` returns
        how far a batch goes that reads the log between two places for some tables, within a limit.
        """
        ready, catching_up = frozenset(self.within("ready")), self.within("catchup")
        head = bounded(head, goal, (entry.place(self.log) for entry in self.within("copy", "catchup").values()))
        share = halved(limit) if catching_up else limit
        common = max(self.log, take(self.log, head, ready, share))
        # Tables that were copied at a later place than the log has reached wait for it.
        late = {name: entry for name, entry in catching_up.items() if entry.at is not None and entry.at <= common}
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
        """The state of each table."""
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
    """The share of ready tables and of those catching up: a busy log must not keep the latter from ever reaching it."""
    return Limit(max(limit.rows // 2, 1), max(limit.bytes // 2, 1))


@dataclass(frozen=True)
class LogRange(Generic[LogPoint]):
    """What a batch takes from the log for one table: the changes in (after, upto]."""

    after: LogPoint
    upto: LogPoint


def readers(
    start: LogOffset[Id, Table, LogPoint],
    end: LogOffset[Id, Table, LogPoint],
    changed: Collection[Id] | None = None,
) -> Iterator[tuple[Id, Table, Table]]:
    """The tables that read the log between two offsets, with their entry at each. Pure: `plan` relies on it.

    With `changed`, without the ready tables that are not among them: of ten thousand tables few change in a batch.
    """
    for name, then in end.tables.items():
        now = start.tables.get(name)
        if changed is not None and now is not None and now.phase == then.phase == "ready" and name not in changed:
            continue
        if now is None or now.phase in ("init", "copy") or then.phase not in ("ready", "catchup"):
            continue
        if then.chunks_since(now) or (now.phase == "stopped" and now.resume().phase != "catchup"):
            continue  # a table that copies in this batch does not read the log yet
        yield name, now, then


def log_ranges(
    start: LogOffset[Id, Table, LogPoint],
    end: LogOffset[Id, Table, LogPoint],
    changed: Collection[Id] | None = None,
) -> dict[Id, LogRange[LogPoint]]:
    """Per table, the log range that lies between two offsets. Pure: `plan` relies on it.

    With `changed`, without the ready tables that are not among them.
    """
    ranges: dict[Id, LogRange[LogPoint]] = {}
    for name, now, then in readers(start, end, changed):
        after, upto = now.place(start.log), then.place(end.log)
        if upto > after:
            ranges[name] = LogRange(after, upto)
    return ranges


# How directives change one table's entry in an offset, the same for every source.


class DirectedTable(Protocol):
    """The entry of one table in its source's offset."""

    @property
    def phase(self) -> Phase: ...

    @property
    def request(self) -> int: ...

    @property
    def holds(self) -> bool:
        """Whether a stopped table can resume where it is, so that the log after that place is kept."""
        ...

    def stop(self, at: Any) -> Self:
        """Stop reading it. It can resume after `at`. None: it needs a new copy."""
        ...

    def resume(self) -> Self:
        """The entry with which a stopped table continues."""
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
    """The table stopped, resumed or unchanged. `reached` is its place, `place_of` where it resumes after an error.

    A table in error or paused stays where it is, also while it waits for a new copy to begin: anything it read until
    then would come after the changes that failed.
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


# Where a run with `--once` ends: without a goal, an upstream with constant writes would keep it from ever ending.

Head = TypeVar("Head", bound=tuple[int, int] | int)


def bounded(head: Head, goal: Head | None, copied: Iterable[Head]) -> Head:
    """How far to read a log that ends at `head`: not past the goal, or past the places that tables were `copied` at."""
    return head if goal is None else min(head, max([goal, *copied]))
