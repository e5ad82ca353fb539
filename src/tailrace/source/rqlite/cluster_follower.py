"""One cluster on the driver: how far its tables go in the next batch, and how that is split."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import LostError, TableError, TailraceError, revive
from tailrace.journal import Cursor, FrameRef, JournalReader, cursors
from tailrace.model.change import START, Position
from tailrace.model.schema import TableSchema
from tailrace.source.follower import Limit, SchemaVersions, TableDirectives
from tailrace.source.offset import LogRange, log_ranges
from tailrace.source.rqlite.catalog import upstream_id
from tailrace.source.rqlite.copy import WHOLE, RqliteCopySplit, chunk_bounds
from tailrace.source.rqlite.discovery import RqliteDiscovery
from tailrace.source.rqlite.log_split import RqliteRange, failing_split, log_splits, summaries
from tailrace.source.rqlite.receiver import STATUS
from tailrace.source.rqlite.schema_log import Arrival, RqliteSchemaLog, arrivals
from tailrace.source.source import RESYNC
from tailrace.source.split import Split
from tailrace.source.sqlite import schema_diff
from tailrace.source.sqlite.catalog import TableDefinition, stored_columns
from tailrace.source.sqlite.offset import SqliteOffset, SqliteTableOffset
from tailrace.source.table_range import first_change
from tailrace.system.child_process import read_status

if TYPE_CHECKING:
    from tailrace.source.rqlite.source import RqliteSource

STEP_ASIDE_BYTES = 64 * 1024 * 1024
"""After this much log that concerns no table, or a part of the journal's bound, the offset moves on so that the journal
may forget it."""
SETTLE_SECONDS = 10.0
QUIET_SECONDS = 0.5
"""For so long a node must have nothing left to send before all of it counts as sent: it gathers batches meanwhile."""


class ClusterFollower:
    """Everything durable is in the journal, the offsets and the versions. Tables are keyed by their plain names."""

    def __init__(self, source: RqliteSource, service: str, versions: SchemaVersions) -> None:
        self.source = source
        self.service = service
        self._versions = versions
        self._folder = source.folder_of(service)
        self._api = source.api_of(service)
        file = Path(source.schema_file) if source.schema_file is not None and self._api is None else None
        self._discovery = RqliteDiscovery(service, source.tables_wanted, self._api, file)
        self._schemas = RqliteSchemaLog(service, versions, self._discovery, rowids=source.rowids)
        self._journal = JournalReader(self._folder)
        self._looked: tuple[int, frozenset[str]] | None = None
        self.goal: Position | None = None
        """The journal is read no further than that, or than what a table was copied at."""

    def start(self) -> SqliteOffset:
        cursor = Cursor(self._folder, self.source.reader)
        if self.source.reader not in cursors(self._folder):
            # With an API everything is copied at the end of the journal; without, its beginning is all there is.
            self._journal.refresh()
            cursor.advance(self._journal.mark() if self._api is not None else self._journal.origin())
        # Spark asks again when it repeats the very first batch, which must begin where it began.
        return SqliteOffset(cursor.position)

    def target(self) -> SqliteOffset:
        """The end of the journal, once the node has nothing left to send; where it does not tell, as it is."""
        self._discovery.refresh(at_once=True)
        deadline = time.monotonic() + SETTLE_SECONDS
        quiet_since: float | None = None
        while self._api is not None and time.monotonic() < deadline:
            pending = self._api.pending()
            if pending is None:
                break
            quiet_since = None if pending.batches else quiet_since or time.monotonic()
            if quiet_since is not None and time.monotonic() - quiet_since >= QUIET_SECONDS:
                break
            time.sleep(QUIET_SECONDS / 5)
        self._journal.refresh()
        self.goal = self._journal.mark()
        return SqliteOffset(self.goal)

    def done(self, now: SqliteOffset, goal: Position) -> bool:
        if now.within("init", "copy", "catchup") or (
            self._api is not None and now.tables.keys() != self._tables().keys()
        ):
            return False
        if now.log >= goal:
            return True
        self._journal.refresh()
        return self._journal.mark() >= goal and not self._has_news(now, self._journal.frames(now.log, goal))

    def latest(self, given: SqliteOffset, limit: Limit, directives: TableDirectives) -> SqliteOffset:
        """The next offset, or the given one when there is nothing to do."""
        self._journal.refresh()
        if given.log > self._journal.mark():
            raise LostError(
                f"the journal of cluster {self.service!r} ends before the position that was already applied",
                position=str(given.log),
                fix=RESYNC,
            )
        self._discovery.refresh()
        now = self._enrol(self.apply_directives(given, directives))
        end = now.read_on(self._journal.mark(), self.goal, limit, self._take)
        arrived = self._arrived(now, end)
        self._schemas.scan(self._journal, now.low_water, end.log, end.tables)
        end = self._compare_schemas(self._recopy(end))
        end = self._copy(end, limit, directives, arrived)
        if end.tables == given.tables and not self._is_worth_batch(now, end):
            self._require_received()
            return given
        return end

    def _require_received(self) -> None:
        """Raises what stopped the cluster at the receiver, once everything that it had stored is read."""
        services = read_status(Path(self.source.journal), STATUS).get("services") or {}
        error = (services.get(self.service) or {}).get("error")
        if error:
            raise revive(error)

    # -- which tables -------------------------------------------------------------------------------------

    def _id(self, name: str) -> str:
        return upstream_id(self.service, name)

    def _tables(self) -> dict[str, TableDefinition]:
        return dict(self._discovery.tables)

    def apply_directives(self, now: SqliteOffset, directives: TableDirectives) -> SqliteOffset:
        return now.apply_directives(directives, lambda text, _: Position.parse(text), self._id)

    def _enrol(self, now: SqliteOffset) -> SqliteOffset:
        """Tables that are gone, or not selected any more, go. With an API, those that came wait for their copy."""
        if self._api is None:
            return now.only([name for name in now.tables if self._discovery.wants(name)])
        tables = self._tables()
        return now.only(tables).with_tables(
            {name: SqliteTableOffset("init") for name in tables if name not in now.tables}
        )

    def _arrived(self, now: SqliteOffset, end: SqliteOffset) -> dict[str, Arrival]:
        """Without an API, the tables that have their first events in this stretch of the log."""
        if self._api is not None or end.log <= now.log:
            return {}
        refs = self._journal.frames(now.log, end.log)
        names = {name for ref in refs for name in summaries(ref.meta)} - now.tables.keys()
        wanted = {name for name in names if self._discovery.wants(name)}
        return arrivals(self._journal, refs, wanted, now.log) if wanted else {}

    def _recopy(self, end: SqliteOffset) -> SqliteOffset:
        return end if self._api is None else end.recopy(self._schemas.recopies, self._policy)

    def _compare_schemas(self, end: SqliteOffset) -> SqliteOffset:
        """At the end of the log, find tables that were made anew with the same columns: no event shows it."""
        if self._api is None or end.log < self._journal.mark():
            return end
        seen = (self._discovery.edition, frozenset(end.within("ready")))
        if seen == self._looked:
            return end
        self._looked = seen
        tables = self._tables()
        due: dict[str, SqliteTableOffset] = {}
        for name, entry in end.within("ready").items():
            known, now = self._versions.schema_at(self._id(name)), tables.get(name)
            if known is None or now is None or self._policy(name) != "evolve":
                continue
            same_names = {c.name for c in known.columns} >= {field.name for field in now.fields}
            if same_names and len(now.fields) == len(stored_columns(known)) and not schema_diff.same(known, now):
                due[name] = entry.recopy()
        return end.with_tables(due)

    def _policy(self, name: str) -> str:
        return self.source.settings_of(self.service, name).schema_changes

    # -- the log ------------------------------------------------------------------------------------------

    def _take(self, after: Position, upto: Position, tables: frozenset[str], limit: Limit) -> Position:
        """The furthest frame's end in (after, upto] within the limit. The first one is taken whatever its size."""
        if upto <= after or (not tables and self._api is not None):
            return max(after, upto)
        refs = self._journal.frames(after, upto, rows=limit.rows, size=limit.bytes)
        full = sum(ref.count for ref in refs) >= limit.rows or sum(ref.length for ref in refs) >= limit.bytes
        return refs[-1].last if refs and full else upto

    def _is_worth_batch(self, now: SqliteOffset, end: SqliteOffset) -> bool:
        """Whether the step holds changes of a table we keep, or enough foreign log to be worth passing over."""
        if end.log <= now.log:
            return False
        if end.log < self._journal.head():
            return True  # a full batch
        frames = self._journal.frames(now.log, end.log)
        bound = min(STEP_ASIDE_BYTES, self.source.receiver.max_bytes // 4)
        return self._has_news(now, frames) or sum(ref.length for ref in frames) > bound

    def _has_news(self, now: SqliteOffset, frames: Sequence[FrameRef]) -> bool:
        """Whether the frames hold rows of a table that is level with the log, or of one that joins with them."""
        ready = now.within("ready")
        names = {name for ref in frames for name in summaries(ref.meta)}
        if self._api is None and any(self._discovery.wants(name) for name in names - now.tables.keys()):
            return True
        return not ready.keys().isdisjoint(names)

    # -- the copy -----------------------------------------------------------------------------------------

    def _copy(
        self, end: SqliteOffset, limit: Limit, directives: TableDirectives, arrived: dict[str, Arrival]
    ) -> SqliteOffset:
        due = end.due(directives, self._id)
        changed = self._join(end, arrived) if self._api is None else {}
        if due and self._api is not None:
            # The journal was looked at before: what it holds is in the catalog and the tables that are asked for now.
            snapshot_position = self._journal.mark()
            self._discovery.refresh(at_once=True)
            tables = self._tables()
            for name, entry in due.items():
                if name in tables:
                    self._schemas.begin(tables[name], snapshot_position)
                    bounds = chunk_bounds(self._api, tables[name], self.source.chunk_rows)
                    changed[name] = entry.begin(snapshot_position, bounds)
        elif due:
            changed |= {name: entry.begin(end.log, WHOLE) for name, entry in due.items()}
        return end.copy_on(changed, limit.rows, self.source.chunk_rows)

    def _join(self, end: SqliteOffset, arrived: dict[str, Arrival]) -> dict[str, SqliteTableOffset]:
        """Tables with their first events: an empty copy before those, and then the log."""
        tables = self._tables()
        joined: dict[str, SqliteTableOffset] = {}
        for name, arrival in arrived.items():
            if name in tables:
                self._schemas.begin(tables[name], arrival.snapshot_position)
            elif self._discovery.is_listed or arrival.kinds is None:
                # Not in the schema file, or nothing but rowids was sent: there is nothing to keep yet.
                self._schemas.put(arrival.infer(self.service, {}), arrival.snapshot_position)
            else:
                self._schemas.put(arrival.infer(self.service, arrival.kinds), arrival.snapshot_position)
            joined[name] = SqliteTableOffset("init").begin(arrival.snapshot_position, WHOLE)
        return joined

    # -- splitting ----------------------------------------------------------------------------------------

    def plan(self, now: SqliteOffset, then: SqliteOffset) -> list[Split]:
        self._journal.refresh()
        self._schemas.scan(self._journal, now.low_water, then.log, then.tables)
        return [*self._plan_copy(now, then), *self._plan_log(now, then)]

    def fail(self, now: SqliteOffset, error: TailraceError) -> list[Split]:
        """Splits that stop every table that is not stopped yet, with this error."""
        wanted: dict[str, RqliteRange] = {}
        for name, entry in now.tables.items():
            schema = self._versions.schema_at(self._id(name))
            if entry.phase == "stopped" or schema is None:
                continue
            failure = TableError(error.message, fix=error.fix, table=str(schema.table), position=error.position)
            at = entry.position(now.log)
            wanted[name] = RqliteRange(at, at, ((at, schema),), failure=failure.describe())
        return [failing_split(self.service, wanted)] if wanted else []

    def _plan_copy(self, now: SqliteOffset, then: SqliteOffset) -> list[Split]:
        splits: list[Split] = []
        tables = self._tables() if self._api is not None else {}
        for name, entry in then.tables.items():
            earlier = now.tables.get(name)
            chunks = entry.chunks_since(earlier)
            if not chunks or (self._api is not None and name not in tables):
                continue
            schema = self._schema_at(name, entry.snapshot_position)
            failure = self._copy_failure(schema, entry, earlier) if self._api is None else None
            splits += [
                RqliteCopySplit(
                    copies=schema,
                    starts=chunks.start == 0,
                    completes=entry.next == entry.chunks,
                    low=entry.bounds[chunk - 1] if chunk else None,
                    high=entry.bounds[chunk],
                    snapshot_position=entry.snapshot_position,
                    rows=self.source.chunk_rows,
                    by_key=self._api is not None and tables[name].lacks_rowid,
                    empty=self._api is None,
                    failure=failure.describe() if failure is not None else None,
                )
                for chunk in chunks
            ]
        return splits

    def _copy_failure(
        self, schema: TableSchema, entry: SqliteTableOffset, earlier: SqliteTableOffset | None
    ) -> TableError | None:
        """Without an API: why the table cannot begin, or begin again."""
        name, give = str(schema.table), f"give source.api for {self.service}"
        again = f"then tailrace resync FILE {schema.table}"
        if self._discovery.is_listed and schema.table.name not in self._tables():
            why, fix = "it is not in the schema file", f"add its CREATE TABLE to the schema file, or {give}; {again}"
        elif not schema.key:
            why = "its events hold no rowid (WITHOUT ROWID), so nothing tells its rows apart"
            fix = f"{give}, or a schema file with its CREATE TABLE; {again}"
        elif len(schema.columns) == 1 and not self._discovery.is_listed:
            why = "its events hold no rows, only their ids"
            fix = f"{give}, or set row_ids_only to false in rqlite; {again}"
        elif entry.copy > 1 and earlier is not None and entry.request == earlier.request:
            why = "it needs a new copy, and its rows cannot be asked for"
            fix = f"{give}; {again}. Without an API that begins with an empty table and what comes from then on"
        else:
            return None
        return TableError(why, fix=fix, table=name, position=str(entry.snapshot_position))

    def _schema_at(self, name: str, snapshot_position: Position) -> TableSchema:
        schema = self._versions.schema_at(self._id(name), snapshot_position)
        if schema is None:
            raise LostError(f"the version of {self._id(name)} that is being copied is not stored", fix=RESYNC)
        return schema

    def _plan_log(self, now: SqliteOffset, then: SqliteOffset) -> list[Split]:
        wanted = {
            name: self._table_range(name, then.tables[name], reading)
            for name, reading in log_ranges(now, then).items()
            if self._api is None or name in self._tables()
        }
        if not wanted:
            return []
        after, upto = min(one.after for one in wanted.values()), max(one.upto for one in wanted.values())
        return log_splits(self.service, self._journal.frames(after, upto), wanted, asks=self._api is not None)

    def _table_range(self, name: str, entry: SqliteTableOffset, reading: LogRange[Position]) -> RqliteRange:
        history = tuple(self._versions.schemas_between(self._id(name), reading.after, reading.upto))
        if not history:
            raise LostError(f"the version of {self._id(name)} at {reading.after} is not stored", fix=RESYNC)
        policy = self._policy(name)
        shown = self._schema_at(name, entry.snapshot_position) if policy == "ignore" else None
        at, failure = self._schemas.failures.get(name, (START, None))
        return RqliteRange(
            reading.after,
            reading.upto,
            history,
            shown=shown,
            stops_at=first_change(reading, history, self._schemas.recopies.get(name)) if policy == "stop" else None,
            skips=entry.skips,
            failure=failure if reading.after < at <= reading.upto else None,
        )

    def stop(self) -> None:
        self._journal.close()
