"""One follower for all sources that read a log, and `LogSource`: what a source with a log implements to use it.

Tables that have caught up read the log together; new ones are copied first and then catch up (see
`tailrace.source.offset`). Everything durable is in the offsets and the versions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Generic, TypeVar

import pyarrow as pa

from tailrace.errors import LostError
from tailrace.model.change import START, Changes, Op, Position, end_of, just_before
from tailrace.model.collapse import fit
from tailrace.model.schema import TableSchema
from tailrace.source import offset as log_offset
from tailrace.source.discovery import Discovery
from tailrace.source.follower import Follower, Limit, Offset, SchemaVersions, TableDirectives, TableProgress
from tailrace.source.offset import ChunkedTableOffset, LogRange, log_ranges
from tailrace.source.source import RESYNC, Source
from tailrace.source.split import Split
from tailrace.source.table_range import TableRange, distinct, first_change

At = TypeVar("At", bound=log_offset.LogOffset[Any, Any, Any])


class LogFollower(Follower, Generic[At]):
    """The driver half of a source with a log. Subclasses define where its log ends, how it is split, how a copy begins.

    `At` is the source's offset, whose tables are keyed by what identifies them in the log.
    """

    offset_type: type[At]

    def __init__(self, source: Source, versions: SchemaVersions) -> None:
        self._context = source.context
        self._versions = versions
        self.goal: Any = None
        """A run with `--once` reads no further than this, or than the position at which a table was copied."""
        self._idle: tuple[Offset, TableDirectives, object] | None = None
        self._read: deque[tuple[Offset, At]] = deque(maxlen=2)
        """The last offsets, as Spark gives them and as they were read."""

    # -- every source implements these --------------------------------------------------------------------

    @abstractmethod
    def discover(self, *, at_once: bool = False) -> None:
        """Refresh the tables to follow: `at_once`, or when the last result is too old."""

    @abstractmethod
    def tables(self) -> Mapping[Any, Any]:
        """The tables to follow, of those that `discover` found."""

    @abstractmethod
    def head(self) -> Any:
        """Where the log ends now."""

    @abstractmethod
    def boundary(self, after: Any, upto: Any, tables: frozenset[Any], limit: Limit) -> Any:
        """The first commit boundary in (after, upto] past the limit, or `upto`, for a batch that reads these tables.

        It includes at least one transaction, whatever its size: a batch must make progress.
        """

    @abstractmethod
    def copy(self, now: At, end: At, limit: Limit, directives: TableDirectives) -> At:
        """Begin the copy of tables that wait for one, and advance the copying tables by some chunks."""

    @abstractmethod
    def split_copy(self, table: TableSchema, name: Any, entry: Any, earlier: Any, chunks: range) -> Sequence[Split]:
        """The chunks of a copy with these numbers. `earlier` is the table's entry at the start of the batch, if any."""

    @abstractmethod
    def plan_log(self, ranges: Mapping[Any, TableRange]) -> Sequence[Split]:
        """The splits that read these ranges of the log."""

    # -- some sources override these ----------------------------------------------------------------------

    def opened(self, at: At) -> AbstractContextManager[object]:
        """Runs around each read of the log. Raises LostError when the log no longer holds what was read up to `at`."""
        return nullcontext()

    def id_of(self, name: Any) -> str:
        """The upstream id of a table in the offset."""
        return str(name)

    def name_of(self, name: Any) -> str:
        """The name of a table as it is used in `tables.settings`."""
        schema = self._versions.schema_at(self.id_of(name))
        return str(schema.table) if schema is not None else self.id_of(name)

    def policy_of(self, name: Any) -> str:
        return self._context.policy_of(self.name_of(name))

    def place_of(self, resume: str, reached: Any) -> Any:
        """The log position where a table that had reached `reached` resumes after an error; None when that is lost."""
        return Position.parse(resume)

    def is_followed(self, name: Any) -> bool:
        return name in self.tables()

    def enrol(self, now: At) -> At:
        """Remove tables that are gone, and add new ones, which wait for their copy."""
        tables = self.tables()
        return now.only(tables).with_tables({name: self.new_entry() for name in tables if name not in now.tables})

    def new_entry(self) -> Any:
        return ChunkedTableOffset("init")

    def read_log(self, now: At, limit: Limit, directives: TableDirectives) -> At:
        """Advance the tables along the log."""
        return now.read_on(self.head(), self.goal, limit, self.boundary)

    def scan_schemas(self, now: At, end: At) -> None:
        """Store the versions that the log holds between two offsets."""

    def compare_schemas(self, now: At, end: At) -> At:
        """At the end of the log, find schema changes that the log does not show."""
        return end

    def recopies(self) -> Mapping[Any, Position]:
        """By table, the position of the last change that the log alone cannot reproduce."""
        return {}

    def recopy(self, now: At, end: At) -> At:
        """Copy a table again when its rows changed in a way that the log does not show; the copy begins after that."""
        due = {
            name: entry.recopy()
            for name, at in self.recopies().items()
            if (entry := end.tables.get(name)) is not None
            and entry.phase not in ("init", "stopped")
            and entry.snapshot_position < at
            and self.policy_of(name) != "stop"
        }
        return end.with_tables(due) if due else end

    def is_worth_batch(self, given: At, now: At, end: At) -> bool:
        """Whether a step that changed no table's phase is worth a batch."""
        return bool(end.log > now.log)

    def is_settled(self, now: At) -> bool:
        """Whether every table is known and has been copied."""
        return now.tables.keys() == self.tables().keys() and not now.within("init", "copy", "catchup")

    def is_idle_until(self, now: At, goal: Any) -> bool:
        """Whether the log up to the goal holds no change of a table, although it was not read that far."""
        return False

    def changed(self, after: Any, upto: Any) -> Collection[Any] | None:
        """The ready tables of which the log in (after, upto] holds rows or a new version; None: any of them.

        A plan is then made for these alone.
        """
        return None

    def idle_sign(self) -> object | None:
        """Changes with everything that the next offset depends on, except the last one and the directives.

        While it stays the same, an idle poll costs no work per table. None: that cannot be said now.
        """
        return None

    def sealed(self, end: At) -> At:
        """The offset as it is handed to Spark."""
        return end

    # -- the follower -------------------------------------------------------------------------------------

    def _offset(self, raw: Offset) -> At:
        # Spark names the same offset several times in a batch, and with thousands of tables reading it takes long.
        for known, read in self._read:
            if known == raw:
                return read
        read = self.read_offset(raw)
        self._read.append((raw, read))
        return read

    def read_offset(self, raw: Offset) -> At:
        """Read an offset from Spark."""
        return self.offset_type.from_json(raw)

    def _at(self, place: Any) -> Offset:
        return self.offset_type(place).to_json()

    def apply_directives(self, now: At, directives: TableDirectives) -> At:
        return now.apply_directives(directives, self.place_of, self.id_of)

    def target(self) -> Offset:
        self.discover(at_once=True)
        self.goal = self.head()
        return self._at(self.goal)

    def done(self, start: Offset, target: Offset) -> bool:
        done = self.has_reached(self._offset(start), self._offset(target).log)
        if done:
            self.goal = None
        return done

    def has_reached(self, now: At, goal: Any) -> bool:
        """Whether everything up to the goal was read."""
        return self.is_settled(now) and bool(now.log >= goal or self.is_idle_until(now, goal))

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        sign = self.idle_sign()
        if sign is not None and self._idle is not None and self._idle == (start, directives, sign):
            # While Spark waits for this answer it is the same object, which is equal at a glance.
            self._idle = (start, directives, sign)
            return start
        end = self._latest(start, limit, directives)
        self._idle = (start, directives, sign) if end is start and sign is not None else None
        return end

    def _latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        given = self._offset(start)
        with self.opened(given):
            self.discover()
            now = self.enrol(self.apply_directives(given, directives))
            # A table that is new here may have been stopped before its first batch.
            now = self.apply_directives(now, directives)
            end = self.read_log(now, limit, directives)
            self.scan_schemas(now, end)
            end = self.recopy(now, self.compare_schemas(now, end))
            end = self.copy(now, end, limit, directives)
            if end.tables == given.tables and not self.is_worth_batch(given, now, end):
                return start
            return self.sealed(end).to_json()

    def plan(self, start: Offset, end: Offset) -> list[Split]:
        now, then = self._offset(start), self._offset(end)
        with self.opened(then):
            self.discover()  # a new process may repeat the batch of one that crashed
            self.scan_schemas(now, then)
            return [*self._plan_copy(now, then), *self._plan_ranges(now, then)]

    def _plan_copy(self, now: At, then: At) -> Iterator[Split]:
        for name, entry in then.tables.items():
            earlier = now.tables.get(name)
            if entry is earlier:
                continue
            chunks = entry.chunks_since(earlier)
            if chunks and self.is_followed(name):
                for split in self.split_copy(self._copied_schema(name, entry), name, entry, earlier, chunks):
                    yield replace(split, starts=chunks.start == 0, completes=entry.next == entry.chunks)

    def _plan_ranges(self, now: At, then: At) -> Sequence[Split]:
        ranges = {
            name: self._range_of(name, then.tables[name], reading)
            for name, reading in log_ranges(now, then, self.changed(now.log, then.log)).items()
            if self.is_followed(name)
        }
        return self.plan_log(ranges) if ranges else []

    def _range_of(self, name: Any, entry: Any, reading: LogRange[Position]) -> TableRange:
        table = self.id_of(name)
        history = distinct(self._versions.schemas_between(table, reading.after, reading.upto))
        if not history:
            raise LostError(f"the version of {table} at {reading.after} is not stored", fix=RESYNC)
        policy = self._context.policy_of(history[-1][1].table)
        stops = first_change(reading, history, self.recopies().get(name)) if policy == "stop" else None
        shown = self._versions.schema_at(table, entry.snapshot_position) if policy == "ignore" else None
        shown = shown and shown.without_fingerprint()
        return TableRange(reading.after, reading.upto, history, shown, stops, entry.skips)

    def _copied_schema(self, name: Any, entry: Any) -> TableSchema:
        """The columns of a table's copy: those the table had when the copy began."""
        schema = self._versions.schema_at(self.id_of(name), entry.snapshot_position)
        if schema is None:
            raise LostError(f"the version of {self.id_of(name)} that is being copied is not stored", fix=RESYNC)
        return schema.without_fingerprint()


# -- LogSource: a source for any upstream with a log ------------------------------------------------------


@dataclass(frozen=True)
class SourceOffset(log_offset.LogOffset[str, ChunkedTableOffset, Position]):
    """How far the stream of a `LogSource` has read; `tables` is keyed by upstream id.

    {"log": "<position>", "tables": {"notes": {"phase": "copy", "next": 1, "bounds": [<chunk>, …], …}, …}}
    """

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> SourceOffset:
        tables = {name: ChunkedTableOffset.from_json(entry) for name, entry in raw["tables"].items()}
        return cls(Position.parse(raw["log"]), tables)

    def to_json(self) -> dict[str, Any]:
        return {"log": str(self.log), "tables": {name: self.tables[name].to_json() for name in sorted(self.tables)}}


@dataclass(frozen=True)
class CopySplit(Split):
    """A chunk of a table's copy. `position` is the log position at which the copy began."""

    chunk: Any = None
    position: Position = START


@dataclass(frozen=True)
class LogSplit(Split):
    """The ranges of the log to read, by table name."""

    ranges: Mapping[str, TableRange] = field(default_factory=dict)

    def only(self, tables: Collection[str]) -> LogSplit:
        ranges = {name: one for name, one in self.ranges.items() if name in tables}
        return replace(super().only(tables), ranges=ranges)


@dataclass(frozen=True)
class LogSource(Source):
    """An upstream that keeps its changes in order. Implement three methods; the follower comes with it.

    A change is identified by its position: its commit, and its number within that. Commits grow, and never change.
    """

    @abstractmethod
    def tables(self) -> list[TableSchema]:
        """The tables to follow now, with their keys: `self.wanted(...)` of the tables that exist."""

    @abstractmethod
    def head(self) -> Position:
        """`end_of(commit)` of the last commit so far; START before the first. Called many times a second."""

    @abstractmethod
    def read_log(self, table: TableSchema, after: Position, upto: Position) -> Iterator[Changes]:
        """The changes of one table in (after, upto], in order, a few MB at a time. A repeat gives the same.

        Rows have the columns of `table`. If the changes of one commit come in several pieces, `ordinal` continues from
        one piece to the next. Called on executors.
        """

    def boundary(self, after: Position, upto: Position, limit: Limit) -> Position:
        """How far one batch reads, from `after` to at most `upto`: the end of a commit, about `limit` away.

        By default `limit.rows` commits.
        """
        return min(upto, end_of(after.commit + limit.rows))

    def chunks(self, table: TableSchema) -> Sequence[Any]:
        """The chunks in which a table's current rows are copied, as JSON values that `read_rows` understands.

        Empty, the default: the log holds every row from its beginning, and is read from there.
        """
        return ()

    def read_rows(self, table: TableSchema, chunk: Any) -> Iterator[pa.StructArray]:
        """The current rows of a chunk, some at a time. Called on executors.

        They may or may not include changes committed since the copy began: those are read from the log as well.
        """
        return iter(())

    # -- implemented with these ---------------------------------------------------------------------------

    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> Follower:
        return SourceLogFollower(self, schemas)

    def progress(self, offset: Offset) -> list[TableProgress]:
        return SourceOffset.from_json(offset).progress()

    def read(self, split: Split) -> Iterator[Changes]:
        if isinstance(split, CopySplit):
            assert split.copies is not None
            yield from self._read_chunk(split.copies, split)
        elif isinstance(split, LogSplit):
            for one in split.ranges.values():
                one.require_allowed()
                yield from self._read_range(one)
        else:
            raise TypeError(f"not a split of this source: {type(split).__name__}")

    def _read_chunk(self, table: TableSchema, split: CopySplit) -> Iterator[Changes]:
        if split.chunk is not None:
            for rows in self.read_rows(table, split.chunk):
                yield Changes.build(table, rows, op=Op.READ, commit=split.position.commit)

    def _read_range(self, one: TableRange) -> Iterator[Changes]:
        """The changes without those to skip, each read with its own version and fitted to the destination's columns."""
        cuts = [one.after, *(max(one.after, just_before(at)) for at, _ in one.history[1:]), one.upto]
        for (_, table), (after, upto) in zip(one.history, pairwise(cuts), strict=True):
            for changes in self.read_log(table, after, upto) if upto > after else ():
                kept = _without(changes, one.skips)
                if len(kept):
                    yield kept if one.shown is None else fit(kept, one.shown)


def _without(changes: Changes, skips: Collection[Position]) -> Changes:
    """The changes without those that an operator chose to skip."""
    if not skips:
        return changes
    places = zip(changes.numpy("commit").tolist(), changes.numpy("ordinal").tolist(), strict=True)
    return Changes(changes.table, changes.batch.filter(pa.array([place not in skips for place in places], pa.bool_())))


class _Found(Discovery):
    """The tables of a source by upstream id. `edition` grows each time they change."""

    def __init__(self, source: LogSource) -> None:
        super().__init__()
        self._source = source
        self.tables: Mapping[str, TableSchema] = {}
        self.edition = 0

    def _look(self, *, at_once: bool) -> None:
        found = {table.upstream_id: table for table in self._source.tables()}
        if found != self.tables:
            self.tables, self.edition = found, self.edition + 1


class SourceLogFollower(LogFollower[SourceOffset]):
    """Follows a `LogSource`."""

    offset_type = SourceOffset

    def __init__(self, source: LogSource, versions: SchemaVersions) -> None:
        super().__init__(source, versions)
        self.source = source
        self._found = _Found(source)
        self._compared: tuple[int, frozenset[str]] | None = None

    def start(self) -> Offset:
        return self._at(START)

    def discover(self, *, at_once: bool = False) -> None:
        self._found.refresh(at_once=at_once)

    def tables(self) -> Mapping[str, TableSchema]:
        return self._found.tables

    def head(self) -> Position:
        return self.source.head()

    def boundary(self, after: Position, upto: Position, tables: frozenset[str], limit: Limit) -> Position:
        return self.source.boundary(after, upto, limit) if tables and upto > after else max(after, upto)

    def compare_schemas(self, now: SourceOffset, end: SourceOffset) -> SourceOffset:
        """When the description of a table changed, store it as a new version from the next commit on."""
        known = end.within("copy", "catchup", "ready")
        seen = (self._found.edition, frozenset(known))
        if seen != self._compared:
            self._compared = seen
            for name in known:
                self._versions.put_schema(self._found.tables[name], Position(self.head().commit + 1, 0))
        return end

    def copy(self, now: SourceOffset, end: SourceOffset, limit: Limit, directives: TableDirectives) -> SourceOffset:
        begun = {name: self._begin(self._found.tables[name], entry) for name, entry in end.due(directives).items()}
        return end.copy_on(begun, limit.copied_rows, max(1, limit.rows))

    def _begin(self, table: TableSchema, entry: ChunkedTableOffset) -> ChunkedTableOffset:
        at = self.head()  # first: what is committed later may be in the chunks, and is in the log
        chunks = tuple(self.source.chunks(table))
        if not chunks:
            at, chunks = START, (None,)
        self._versions.put_schema(table, at)
        return entry.begin(at, chunks)

    def split_copy(
        self,
        table: TableSchema,
        name: str,
        entry: ChunkedTableOffset,
        earlier: ChunkedTableOffset | None,
        chunks: range,
    ) -> list[Split]:
        return [
            CopySplit(copies=table, chunk=entry.bounds[number], position=entry.snapshot_position) for number in chunks
        ]

    def plan_log(self, ranges: Mapping[str, TableRange]) -> list[Split]:
        names = {str(one.schema.table): one for one in ranges.values()}
        return [
            LogSplit(weights={name: 1}, schemas={name: one.schema}, ranges={name: one}) for name, one in names.items()
        ]
