"""The driver half: how far the next batch goes, and how it is split. It opens the file for each look at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tailrace.capture.tape import TapeMark
from tailrace.errors import LostError
from tailrace.model.change import Position
from tailrace.model.schema import TableName
from tailrace.source.follower import Limit, Offset, SchemaVersions, TableDirectives
from tailrace.source.offset import LogRange, log_ranges
from tailrace.source.source import RESYNC
from tailrace.source.split import Split
from tailrace.source.sqlite.catalog import SCHEMA, Listed, TableDefinition, list_tables
from tailrace.source.sqlite.copy import SqliteCopySplit, chunk_bounds
from tailrace.source.sqlite.cursor import Cursors
from tailrace.source.sqlite.log import Counted, TapeLog, TapeWindow, windows
from tailrace.source.sqlite.log_split import SqliteRange, log_splits
from tailrace.source.sqlite.offset import SqliteOffset, SqliteTableOffset, after_change
from tailrace.source.sqlite.schema_log import SqliteSchemaLog
from tailrace.source.table_range import first_change

if TYPE_CHECKING:
    from tailrace.source.sqlite.source import SqliteSource

STEP_ASIDE_ROWS = 100_000
"""After this many changes that concern no table, the offset moves on so that they may be purged."""
_KEPT_WINDOWS = 256


class SqliteFollower:
    """Everything durable is in the file, the offsets and the versions."""

    def __init__(self, source: SqliteSource, versions: SchemaVersions) -> None:
        self.source = source
        self._versions = versions
        self._schemas = SqliteSchemaLog(versions)
        self._listed: Mapping[str, Listed] = {}
        self._listed_at: int | None = None
        self._looked: tuple[int | None, frozenset[str]] | None = None
        self._counted: dict[TapeWindow, dict[str, Counted]] = {}
        self._goal: Position | None = None

    def start(self) -> Offset:
        with self.source.engine.snapshot("looking for the end of the tape") as connection:
            log = TapeLog(connection, self.source.cdc_table)
            head = log.head()
            Cursors(self.source.folder).begin(self.source.reader, head)
            return SqliteOffset(after_change(head), witness=log.mark(head).rows).to_json()

    def target(self) -> Offset:
        with self.source.engine.snapshot("looking for the end of the tape") as connection:
            log = TapeLog(connection, self.source.cdc_table)
            self._refresh(log)
            self._goal = after_change(log.head())
        return SqliteOffset(self._goal).to_json()

    def done(self, start: Offset, target: Offset) -> bool:
        done = self._has_reached(SqliteOffset.from_json(start), SqliteOffset.from_json(target).log)
        if done:
            self._goal = None
        return done

    def _has_reached(self, now: SqliteOffset, goal: Position) -> bool:
        if set(now.tables) != set(self._tables()) or now.within("init", "copy", "catchup"):
            return False
        if now.log >= goal:
            return True
        with self.source.engine.snapshot("looking for changes") as connection:
            counted = self._count(TapeLog(connection, self.source.cdc_table), now.log.commit, goal.commit)
        return not any(now.within("ready").keys() & counts.keys() for counts in counted.values())

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        given = SqliteOffset.from_json(start)
        with self.source.engine.snapshot("looking for changes") as connection:
            log = TapeLog(connection, self.source.cdc_table)
            log.require_sequence(TapeMark(given.log.commit, given.witness))
            self._refresh(log)
            now = self._enrol(given.apply_directives(directives, lambda text, _: Position.parse(text)))
            self._require_rows(log, now, directives)
            head = log.head()
            end = self._read_log(log, now, head, limit)
            self._schemas.scan(log, now.low_water.commit, end.log.commit, now.tables, self._listed)
            end = self._compare_schemas(log, end, head)
            end = end.recopy(self._schemas.recopies, self._policy)
            end = self._copy(log, end, head, limit, directives)
            if end.tables == given.tables and not self._is_worth_batch(log, now, end, head):
                return start
            return replace(end, witness=log.mark(end.log.commit).rows).to_json()

    # -- which tables -------------------------------------------------------------------------------------

    def _refresh(self, log: TapeLog) -> None:
        """Look at the file's tables when its schema is another than before."""
        version = log.schema_version()
        if version != self._listed_at:
            self._listed = list_tables(log.connection, log.table, by_triggers=log.by_triggers)
            self._listed_at = version

    def _tables(self) -> dict[str, TableDefinition]:
        """The tables to follow, of those that were listed."""
        found = {TableName(SCHEMA, name): one.described for name, one in self._listed.items()}
        return {
            table.name: described
            for table in self.source.tables_wanted.select(found)
            if (described := found[table]) is not None and not described.lacks_rowid
        }

    def _enrol(self, now: SqliteOffset) -> SqliteOffset:
        """Tables that are gone go, those that came wait for their copy."""
        tables = self._tables()
        new = {name: SqliteTableOffset("init") for name in tables if name not in now.tables}
        return now.only(tables).with_tables(new)

    @staticmethod
    def _require_rows(log: TapeLog, now: SqliteOffset, directives: TableDirectives) -> None:
        for name, entry in now.tables.items():
            at = entry.position(now.log)
            if (
                entry.phase != "init"
                and at < now.log
                and directives.resync.get(name, 0) <= entry.request
                and not _waits_for_copy(entry)
            ):
                log.require_rows_after(at.commit, str(TableName(SCHEMA, name)))

    def _policy(self, name: str) -> str:
        return self.source.tables_wanted.settings_of(str(TableName(SCHEMA, name))).schema_changes

    def _compare_schemas(self, log: TapeLog, end: SqliteOffset, head: int) -> SqliteOffset:
        """At the end of the tape, compare the file's schema with the versions: a rename leaves no row."""
        seen = (self._listed_at, frozenset(end.within("ready")))
        if log.by_triggers or end.log.commit != head or seen == self._looked:
            return end
        self._looked = seen
        tables = self._tables()
        at = Position(end.log.commit, end.log.ordinal + 1)
        changed = [self._schemas.compare(name, tables[name], at) for name in seen[1]]
        return replace(end, log=at) if any(changed) else end

    # -- the log ------------------------------------------------------------------------------------------

    def _read_log(self, log: TapeLog, now: SqliteOffset, head: int, limit: Limit) -> SqliteOffset:
        def take(after: Position, upto: Position, tables: frozenset[str], share: Limit) -> Position:
            reached = self._take(log, after.commit, upto.commit, tables, share)
            return upto if reached >= upto.commit else after_change(reached)

        return now.read_on(after_change(head), self._goal, limit, take)

    def _take(self, log: TapeLog, after: int, upto: int, tables: frozenset[str], limit: Limit) -> int:
        """The furthest transaction's end in (after, upto] within the limit.

        The first transaction is taken whatever its size: a batch must make progress.
        """
        if not tables or upto <= after:
            return max(after, upto)
        rows = size = 0
        for window in windows(after, upto):
            counts = self._count(log, *window)[window]
            here = [counts[name] for name in tables & counts.keys()]
            more, larger = sum(one.rows for one in here), sum(one.bytes for one in here)
            if rows + more > limit.rows or size + larger > limit.bytes:
                share = min((limit.rows - rows) / max(more, 1), (limit.bytes - size) / max(larger, 1))
                cut = window.after + max(1, int((window.upto - window.after) * share))
                return log.boundary(min(cut, window.upto), upto)
            rows, size = rows + more, size + larger
        return upto

    def _count(self, log: TapeLog, after: int, upto: int) -> dict[TapeWindow, dict[str, Counted]]:
        """What lies in (after, upto], window by window. A window below the end of the tape never changes."""
        found = {}
        for window in windows(after, upto):
            if window not in self._counted:
                while len(self._counted) >= _KEPT_WINDOWS:
                    del self._counted[next(iter(self._counted))]
                self._counted[window] = log.count(window)
            found[window] = self._counted[window]
        return found

    def _is_worth_batch(self, log: TapeLog, now: SqliteOffset, end: SqliteOffset, head: int) -> bool:
        """Whether the step holds changes of a table we keep, or enough foreign ones to be worth passing over."""
        if end.log <= now.log:
            return False
        if end.log.commit < head:
            return True  # a full batch
        ready = now.within("ready")
        if any(ready.keys() & counts.keys() for counts in self._count(log, now.log.commit, head).values()):
            return True
        if any(len(self._versions.schemas_between(name, now.log, end.log)) > 1 for name in ready):
            return True
        return end.log.commit - now.log.commit > STEP_ASIDE_ROWS

    # -- the copy -----------------------------------------------------------------------------------------

    def _copy(
        self, log: TapeLog, end: SqliteOffset, head: int, limit: Limit, directives: TableDirectives
    ) -> SqliteOffset:
        # What was found by looking lies behind the last change, and a copy of now has seen it.
        snapshot_position = end.log if end.log.commit == head else after_change(head)
        tables = self._tables()
        changed: dict[str, SqliteTableOffset] = {}
        for name, entry in end.due(directives).items():
            bounds = chunk_bounds(log.connection, name, self.source.chunk_rows)
            self._schemas.begin(tables[name], snapshot_position)
            changed[name] = entry.begin(snapshot_position, bounds)
        return end.copy_on(changed, limit.rows, self.source.chunk_rows)

    # -- splitting ----------------------------------------------------------------------------------------

    def plan(self, start: Offset, end: Offset) -> list[Split]:
        now, then = SqliteOffset.from_json(start), SqliteOffset.from_json(end)
        with self.source.engine.snapshot("planning a batch") as connection:
            log = TapeLog(connection, self.source.cdc_table)
            log.require_sequence(TapeMark(then.log.commit, then.witness))
            self._refresh(log)
            self._schemas.scan(log, now.low_water.commit, then.log.commit, now.tables, self._listed)
            return [*self._plan_copy(now, then), *self._plan_log(log, now, then)]

    def _plan_copy(self, now: SqliteOffset, then: SqliteOffset) -> list[Split]:
        splits: list[Split] = []
        for name, entry in then.tables.items():
            wanted = entry.chunks_since(now.tables.get(name))
            if not wanted or name not in self._tables():
                continue
            schema = self._versions.schema_at(name, entry.snapshot_position)
            if schema is None:
                raise LostError(f"the version of {name} that is being copied is not stored", fix=RESYNC)
            splits += [
                SqliteCopySplit(
                    copies=schema,
                    starts=wanted.start == 0,
                    completes=entry.next == entry.chunks,
                    low=entry.bounds[chunk - 1] if chunk else None,
                    high=entry.bounds[chunk],
                    snapshot_position=entry.snapshot_position,
                )
                for chunk in wanted
            ]
        return splits

    def _plan_log(self, log: TapeLog, now: SqliteOffset, then: SqliteOffset) -> list[Split]:
        tables = self._tables()
        wanted = {
            name: self._table_range(name, then.tables[name], reading)
            for name, reading in log_ranges(now, then).items()
            if name in tables
        }
        if not wanted:
            return []
        after, upto = min(one.after.commit for one in wanted.values()), max(one.upto.commit for one in wanted.values())
        return log_splits(self._count(log, after, upto), wanted)

    def _table_range(self, name: str, entry: SqliteTableOffset, reading: LogRange[Position]) -> SqliteRange:
        history = tuple(self._versions.schemas_between(name, reading.after, reading.upto))
        newest = self._versions.schema_at(name)
        if not history or newest is None:
            raise LostError(f"the version of {name} at {reading.after} is not stored", fix=RESYNC)
        policy = self._policy(name)
        stops = first_change(reading, history, self._schemas.recopies.get(name)) if policy == "stop" else None
        shown = self._versions.schema_at(name, entry.snapshot_position) if policy == "ignore" else None
        return SqliteRange(reading.after, reading.upto, history, shown, stops, entry.skips, newest=newest)

    def stop(self) -> None:
        """Nothing is kept open."""


def _waits_for_copy(entry: SqliteTableOffset) -> bool:
    return entry.phase == "stopped" and entry.at is None
