"""The driver half: how far the next batch goes, and how it is split. The file is open only during a read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tailrace.capture.exclusion import read_excluded
from tailrace.capture.tape import TapeMark
from tailrace.model.change import Position
from tailrace.model.schema import TableName, TableSchema
from tailrace.source.follower import Limit, Offset, SchemaVersions, TableDirectives
from tailrace.source.log_follower import LogFollower
from tailrace.source.offset import ChunkedTableOffset
from tailrace.source.split import Split
from tailrace.source.sqlite.catalog import SCHEMA, Listed, TableDefinition, list_tables
from tailrace.source.sqlite.copy import SqliteCopySplit, chunk_bounds
from tailrace.source.sqlite.cursor import Cursors
from tailrace.source.sqlite.log import Counted, TapeLog, TapeWindow, windows
from tailrace.source.sqlite.log_split import SqliteRange, log_splits
from tailrace.source.sqlite.offset import SqliteOffset, after_change
from tailrace.source.sqlite.schema_log import SqliteSchemaLog
from tailrace.source.table_range import TableRange

if TYPE_CHECKING:
    from tailrace.source.sqlite.source import SqliteSource

STEP_ASIDE_ROWS = 100_000
"""After this many changes of tables that are not followed, the offset advances, so that they may be purged."""
_KEPT_WINDOWS = 256


class SqliteFollower(LogFollower[SqliteOffset]):
    """Everything durable is in the file, the offsets and the versions."""

    offset_type = SqliteOffset

    def __init__(self, source: SqliteSource, versions: SchemaVersions) -> None:
        super().__init__(source, versions)
        self.source = source
        self._schemas = SqliteSchemaLog(versions)
        self._opened: TapeLog | None = None
        self._head: int | None = None
        self._listed: Mapping[str, Listed] = {}
        self._listed_at: int | None = None
        self._left_out: set[str] = set()
        self._followed: Mapping[str, TableDefinition] = {}
        self._compared: tuple[int | None, frozenset[str]] | None = None
        self._counted: dict[TapeWindow, dict[str, Counted]] = {}

    # -- the file -----------------------------------------------------------------------------------------

    @property
    def _log(self) -> TapeLog:
        assert self._opened is not None
        return self._opened

    @contextmanager
    def _snapshot(self, doing: str) -> Iterator[TapeLog]:
        """A snapshot of the tape for the duration of the context."""
        with self.source.engine.snapshot(doing) as connection:
            self._opened, self._head = TapeLog(connection, self.source.options.cdc_table), None
            try:
                yield self._opened
            finally:
                self._opened = None

    @contextmanager
    def opened(self, at: SqliteOffset) -> Iterator[None]:
        with self._snapshot("looking for changes") as log:
            log.require_sequence(TapeMark(at.log.commit, at.witness))
            yield

    def start(self) -> Offset:
        with self._snapshot("looking for the end of the tape") as log:
            head = log.head()
            Cursors(self.source.folder).begin(self.source.context.reader, head)
            return SqliteOffset(after_change(head), witness=log.mark(head).rows).to_json()

    def target(self) -> Offset:
        with self._snapshot("looking for the end of the tape"):
            return super().target()

    def is_idle_until(self, now: SqliteOffset, goal: Position) -> bool:
        with self._snapshot("looking for changes"):
            counted = self._count(now.log.commit, goal.commit)
        return not any(now.within("ready").keys() & counts.keys() for counts in counted.values())

    # -- which tables -------------------------------------------------------------------------------------

    def discover(self, *, at_once: bool = False) -> None:
        """Read the file's tables again when its schema has changed."""
        version = self._log.schema_version()
        left_out = {one.table for one in read_excluded(self._log.connection, self._log.table)}
        if version == self._listed_at and left_out == self._left_out:
            return
        self._left_out = left_out
        self._listed = list_tables(self._log.connection, self._log.table, by_triggers=self._log.by_triggers)
        self._listed_at = version
        found = {TableName(SCHEMA, name): one.described for name, one in self._listed.items()}
        self._followed = {
            table.name: described
            for table in self.source.context.tables.select(found)
            if (described := found[table]) is not None and not described.lacks_rowid and table.name not in left_out
        }

    def tables(self) -> Mapping[str, TableDefinition]:
        return self._followed

    def name_of(self, name: str) -> str:
        return str(TableName(SCHEMA, name))

    def scan_schemas(self, now: SqliteOffset, end: SqliteOffset) -> None:
        self._schemas.scan(self._log, now.low_water, end.log, now.tables, self._listed)

    def compare_schemas(self, now: SqliteOffset, end: SqliteOffset) -> SqliteOffset:
        """At the end of the tape, compare the file's schema with the versions: a rename leaves no row."""
        seen = (self._listed_at, frozenset(end.within("ready")))
        if self._log.by_triggers or end.log.commit != self.head().commit or seen == self._compared:
            return end
        self._compared = seen
        at = Position(end.log.commit, end.log.ordinal + 1)
        changed = [self._schemas.look(name, self._followed[name], at) for name in seen[1]]
        return replace(end, log=at) if any(changed) else end

    def recopies(self) -> Mapping[str, Position]:
        return self._schemas.recopies

    # -- the log ------------------------------------------------------------------------------------------

    def head(self) -> Position:
        if self._head is None:
            self._head = self._log.head()
        return after_change(self._head)

    def read_log(self, now: SqliteOffset, limit: Limit, directives: TableDirectives) -> SqliteOffset:
        for name, entry in now.tables.items():
            at = entry.position(now.log)
            if (
                entry.phase != "init"
                and at < now.log
                and directives.resync.get(name, 0) <= entry.request
                and not _waits_for_copy(entry)
            ):
                self._log.require_rows_after(at.commit, self.name_of(name))
        return super().read_log(now, limit, directives)

    def boundary(self, after: Position, upto: Position, tables: frozenset[str], limit: Limit) -> Position:
        reached = self._take(after.commit, upto.commit, tables, limit)
        return upto if reached >= upto.commit else after_change(reached)

    def _take(self, after: int, upto: int, tables: frozenset[str], limit: Limit) -> int:
        """The end of the first transaction in (after, upto] that reaches the limit, or `upto`."""
        if not tables or upto <= after:
            return max(after, upto)
        rows = size = 0
        for window in windows(after, upto):
            counts = self._count(*window)[window]
            here = [counts[name] for name in tables & counts.keys()]
            more, larger = sum(one.rows for one in here), sum(one.bytes for one in here)
            if rows + more > limit.rows or size + larger > limit.bytes:
                share = min((limit.rows - rows) / max(more, 1), (limit.bytes - size) / max(larger, 1))
                cut = window.after + max(1, int((window.upto - window.after) * share))
                return self._log.boundary(min(cut, window.upto), upto)
            rows, size = rows + more, size + larger
        return upto

    def _count(self, after: int, upto: int) -> dict[TapeWindow, dict[str, Counted]]:
        """The contents of (after, upto], window by window. A window before the end of the tape never changes."""
        found = {}
        for window in windows(after, upto):
            if window not in self._counted:
                while len(self._counted) >= _KEPT_WINDOWS:
                    del self._counted[next(iter(self._counted))]
                self._counted[window] = self._log.count(window)
            found[window] = self._counted[window]
        return found

    def is_worth_batch(self, given: SqliteOffset, now: SqliteOffset, end: SqliteOffset) -> bool:
        """Whether the step holds changes of a table we keep, or enough changes of other tables to be worth skipping."""
        head = self.head().commit
        if end.log <= now.log:
            return False
        if end.log.commit < head:
            return True  # a full batch
        ready = now.within("ready")
        if any(ready.keys() & counts.keys() for counts in self._count(now.log.commit, head).values()):
            return True
        if any(len(self._versions.schemas_between(name, now.log, end.log)) > 1 for name in ready):
            return True
        return end.log.commit - now.log.commit > STEP_ASIDE_ROWS

    def sealed(self, end: SqliteOffset) -> SqliteOffset:
        return replace(end, witness=self._log.mark(end.log.commit).rows)

    def plan_log(self, ranges: Mapping[str, TableRange]) -> list[Split]:
        wanted: dict[str, SqliteRange] = {}
        for name, one in ranges.items():
            newest = self._versions.schema_at(name)
            assert newest is not None
            wanted[name] = SqliteRange(**vars(one), newest=newest)
        after, upto = min(one.after.commit for one in wanted.values()), max(one.upto.commit for one in wanted.values())
        return log_splits(self._count(after, upto), wanted)

    # -- the copy -----------------------------------------------------------------------------------------

    def copy(self, now: SqliteOffset, end: SqliteOffset, limit: Limit, directives: TableDirectives) -> SqliteOffset:
        # A schema change found by comparison comes after the last change, and a copy that starts now has seen it.
        head = self.head()
        snapshot_position = end.log if end.log.commit == head.commit else head
        changed: dict[str, ChunkedTableOffset] = {}
        for name, entry in end.due(directives).items():
            bounds = chunk_bounds(self._log.connection, name, self.source.options.chunk_rows)
            self._schemas.begin(self._followed[name], snapshot_position)
            changed[name] = entry.begin(snapshot_position, bounds)
        return end.copy_on(changed, limit.copied_rows, self.source.options.chunk_rows)

    def split_copy(
        self,
        table: TableSchema,
        name: str,
        entry: ChunkedTableOffset,
        earlier: ChunkedTableOffset | None,
        chunks: range,
    ) -> list[Split]:
        return [
            SqliteCopySplit(
                copies=table,
                low=entry.bounds[chunk - 1] if chunk else None,
                high=entry.bounds[chunk],
                snapshot_position=entry.snapshot_position,
            )
            for chunk in chunks
        ]


def _waits_for_copy(entry: ChunkedTableOffset) -> bool:
    return entry.phase == "stopped" and entry.at is None
