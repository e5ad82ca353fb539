"""One cluster on the driver: how far its tables go in the next batch, and how that is split."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tailrace.errors import LostError, TableError, TailraceError, revive
from tailrace.journal import Cursor, FrameRef, JournalReader, cursors
from tailrace.model.change import START, Position
from tailrace.model.schema import TableName, TableSchema
from tailrace.source.follower import Limit, Offset, SchemaVersions, TableDirectives
from tailrace.source.journal_log import find_boundary, is_worth_passing, split_frames, without_frames
from tailrace.source.log_follower import LogFollower
from tailrace.source.offset import ChunkedTableOffset
from tailrace.source.rqlite.catalog import upstream_id
from tailrace.source.rqlite.copy import WHOLE, RqliteCopySplit, chunk_bounds
from tailrace.source.rqlite.discovery import RqliteDiscovery
from tailrace.source.rqlite.log_split import RqliteLogSplit, RqliteRange, summaries
from tailrace.source.rqlite.missed_change import MissedChanges
from tailrace.source.rqlite.receiver import STATUS
from tailrace.source.rqlite.schema_log import Arrival, RqliteSchemaLog, arrivals
from tailrace.source.source import RESYNC
from tailrace.source.split import Split
from tailrace.source.sqlite import schema_diff
from tailrace.source.sqlite.catalog import TableDefinition, stored_columns
from tailrace.source.sqlite.offset import SqliteOffset
from tailrace.source.table_range import TableRange
from tailrace.system.child_process import read_status

if TYPE_CHECKING:
    from tailrace.source.rqlite.source import RqliteSource

SPLIT_BYTES = 8 * 1024 * 1024
"""The least amount of log that is worth a task of its own."""
SETTLE_SECONDS = 10.0
QUIET_SECONDS = 0.5
"""How long a node must have nothing left to send before everything counts as sent: it may still be filling a batch."""


class ClusterFollower(LogFollower[SqliteOffset]):
    """Everything durable is in the journal, the offsets and the versions. Tables are keyed by their plain names."""

    offset_type = SqliteOffset

    def __init__(self, source: RqliteSource, service: str, versions: SchemaVersions) -> None:
        super().__init__(source, versions)
        self.source = source
        self.service = service
        self._folder = source.folder_of(service)
        self._api = source.api_of(service)
        file = source.options.schema_file if self._api is None else None
        self._discovery = RqliteDiscovery(service, source.context.tables, self._api, file)
        self._missed = MissedChanges(service, self._api, self._folder / "nodes")
        self._schemas = RqliteSchemaLog(service, versions, self._discovery, self._missed, rowids=source.options.rowids)
        self._journal = JournalReader(self._folder)
        self._compared: tuple[int, frozenset[str]] | None = None

    def start(self) -> Offset:
        cursor = Cursor(self._folder, self.source.context.reader)
        if self.source.context.reader not in cursors(self._folder):
            # With an API, tables are copied at the end of the journal. Without one, the journal is the only data: begin
            # at its start.
            self._journal.refresh()
            cursor.advance(self._journal.mark() if self._api is not None else self._journal.origin())
            self._missed.begin()
        # Spark asks again when it repeats the very first batch, which must have the same start.
        return self._at(cursor.position)

    def target(self) -> Offset:
        """The end of the journal, once the node has nothing left to send; at once if the node does not report that."""
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
        return super().target()

    def is_settled(self, now: SqliteOffset) -> bool:
        if now.within("init", "copy", "catchup"):
            return False
        return self._api is None or now.tables.keys() == self.tables().keys()

    def is_idle_until(self, now: SqliteOffset, goal: Position) -> bool:
        self._journal.refresh()
        return self._journal.mark() >= goal and not self._has_news(now, self._journal.frames(now.log, goal))

    @contextmanager
    def opened(self, at: SqliteOffset) -> Iterator[None]:
        self._journal.refresh()
        yield

    def _require_received(self) -> None:
        """Raise the error that stopped the cluster at the receiver, once everything that was stored is read."""
        services = read_status(self.source.journal, STATUS).get("services") or {}
        error = (services.get(self.service) or {}).get("error")
        if error:
            raise revive(error)

    # -- which tables -------------------------------------------------------------------------------------

    def discover(self, *, at_once: bool = False) -> None:
        self._discovery.refresh(at_once=at_once)

    def tables(self) -> Mapping[str, TableDefinition]:
        return self._discovery.tables

    def id_of(self, name: str) -> str:
        return upstream_id(self.service, name)

    def name_of(self, name: str) -> str:
        return str(TableName(self.service, name))

    def is_followed(self, name: str) -> bool:
        return self._api is None or name in self.tables()

    def enrol(self, now: SqliteOffset) -> SqliteOffset:
        """Remove tables that were dropped or are no longer selected. With an API, new tables wait for their copy."""
        if self._api is None:
            return now.only([name for name in now.tables if self._discovery.wants(name)])
        return super().enrol(now)

    def _arrived(self, now: SqliteOffset, end: SqliteOffset) -> dict[str, Arrival]:
        """Without an API, the tables whose first events are in this range of the log."""
        if self._api is not None or end.log <= now.log:
            return {}
        refs = self._journal.frames(now.log, end.log)
        names = {name for ref in refs for name in summaries(ref.meta)} - now.tables.keys()
        wanted = {name for name in names if self._discovery.wants(name)}
        return arrivals(self._journal, refs, wanted, now.log) if wanted else {}

    def scan_schemas(self, now: SqliteOffset, end: SqliteOffset) -> None:
        self._schemas.scan(self._journal, now.low_water, end.log, end.tables)

    def recopies(self) -> Mapping[str, Position]:
        return self._schemas.recopies

    def recopy(self, now: SqliteOffset, end: SqliteOffset) -> SqliteOffset:
        return end if self._api is None else super().recopy(now, end)

    def compare_schemas(self, now: SqliteOffset, end: SqliteOffset) -> SqliteOffset:
        """At the end of the log, find tables that were recreated with the same columns: no event shows that."""
        if self._api is None or end.log < self._journal.mark():
            return end
        seen = (self._discovery.edition, frozenset(end.within("ready")))
        if seen == self._compared:
            return end
        self._compared = seen
        tables = self.tables()
        due: dict[str, ChunkedTableOffset] = {}
        for name, entry in end.within("ready").items():
            known, found = self._versions.schema_at(self.id_of(name)), tables.get(name)
            if known is None or found is None or self.policy_of(name) != "evolve":
                continue
            same_names = {c.name for c in known.columns} >= {field.name for field in found.fields}
            if same_names and len(found.fields) == len(stored_columns(known)) and not schema_diff.same(known, found):
                due[name] = entry.recopy()
        return end.with_tables(due)

    # -- the log ------------------------------------------------------------------------------------------

    def head(self) -> Position:
        return self._journal.mark()

    def read_log(self, now: SqliteOffset, limit: Limit, directives: TableDirectives) -> SqliteOffset:
        if now.log > self._journal.mark():
            raise LostError(
                f"the journal of cluster {self.service!r} ends before the position that was already applied",
                position=str(now.log),
                fix=RESYNC,
            )
        return super().read_log(now, limit, directives)

    def boundary(self, after: Position, upto: Position, tables: frozenset[str], limit: Limit) -> Position:
        if upto <= after or (not tables and self._api is not None):
            return max(after, upto)
        return find_boundary(self._journal, after, upto, limit)

    def is_worth_batch(self, given: SqliteOffset, now: SqliteOffset, end: SqliteOffset) -> bool:
        """Whether the step holds changes of a table we keep, or enough log of other tables to be worth skipping."""
        if end.log > now.log:
            if end.log < self._journal.head():
                return True  # a full batch
            frames = self._journal.frames(now.log, end.log)
            if self._has_news(now, frames) or is_worth_passing(frames, self.source.options.journal.max_bytes):
                return True
        self._require_received()
        return False

    def _has_news(self, now: SqliteOffset, frames: Sequence[FrameRef]) -> bool:
        """Whether the frames hold rows of a table that is level with the log, or of one that joins with them."""
        ready = now.within("ready")
        names = {name for ref in frames for name in summaries(ref.meta)}
        if self._api is None and any(self._discovery.wants(name) for name in names - now.tables.keys()):
            return True
        return not ready.keys().isdisjoint(names)

    # -- the copy -----------------------------------------------------------------------------------------

    def copy(self, now: SqliteOffset, end: SqliteOffset, limit: Limit, directives: TableDirectives) -> SqliteOffset:
        due = end.due(directives, self.id_of)
        changed = self._join(self._arrived(now, end)) if self._api is None else {}
        if due and self._api is not None:
            # The end of the journal was read first, so the catalog and the tables queried now include everything in it.
            snapshot_position = self._journal.mark()
            self._discovery.refresh(at_once=True)
            tables = self.tables()
            for name, entry in due.items():
                if name in tables:
                    self._schemas.begin(tables[name], snapshot_position)
                    bounds = chunk_bounds(self._api, tables[name], self.source.options.copying.chunk_rows)
                    changed[name] = entry.begin(snapshot_position, bounds)
        elif due:
            changed |= {name: entry.begin(end.log, WHOLE) for name, entry in due.items()}
        return end.copy_on(changed, limit.copied_rows, self.source.options.copying.chunk_rows)

    def _join(self, arrived: Mapping[str, Arrival]) -> dict[str, ChunkedTableOffset]:
        """Start tables at their first events: an empty copy before those, then the log."""
        tables = self.tables()
        joined: dict[str, ChunkedTableOffset] = {}
        for name, arrival in arrived.items():
            if name in tables:
                self._schemas.begin(tables[name], arrival.snapshot_position)
            elif self._discovery.is_listed or arrival.kinds is None:
                # Not in the schema file, or only rowids were sent: there is nothing to store yet.
                self._schemas.put(arrival.infer(self.service, {}), arrival.snapshot_position)
            else:
                self._schemas.put(arrival.infer(self.service, arrival.kinds), arrival.snapshot_position)
            joined[name] = ChunkedTableOffset("init").begin(arrival.snapshot_position, WHOLE)
        return joined

    # -- splitting ----------------------------------------------------------------------------------------

    def fail(self, now: SqliteOffset, error: TailraceError) -> list[Split]:
        """Splits that stop every table that is not stopped yet, with this error."""
        wanted: dict[str, RqliteRange] = {}
        for name, entry in now.tables.items():
            schema = self._versions.schema_at(self.id_of(name))
            if entry.phase == "stopped" or schema is None:
                continue
            failure = TableError(error.message, fix=error.fix, table=str(schema.table), position=error.position)
            at = entry.position(now.log)
            wanted[name] = RqliteRange(at, at, ((at, schema),), failure=failure.describe())
        return [without_frames(RqliteLogSplit, wanted, service=self.service)] if wanted else []

    def split_copy(
        self,
        table: TableSchema,
        name: str,
        entry: ChunkedTableOffset,
        earlier: ChunkedTableOffset | None,
        chunks: range,
    ) -> list[Split]:
        failure = self._copy_failure(table, entry, earlier) if self._api is None else None
        return [
            RqliteCopySplit(
                copies=table,
                low=entry.bounds[chunk - 1] if chunk else None,
                high=entry.bounds[chunk],
                snapshot_position=entry.snapshot_position,
                rows=self.source.options.copying.chunk_rows,
                by_key=self._api is not None and self.tables()[name].lacks_rowid,
                empty=self._api is None,
                failure=failure.describe() if failure is not None else None,
            )
            for chunk in chunks
        ]

    def _copy_failure(
        self, schema: TableSchema, entry: ChunkedTableOffset, earlier: ChunkedTableOffset | None
    ) -> TableError | None:
        """Without an API: why the table cannot begin, or begin again."""
        name, give = str(schema.table), f"give source.api for {self.service}"
        again = f"then tailrace resync FILE {schema.table}"
        if self._discovery.is_listed and schema.table.name not in self.tables():
            why, fix = "it is not in the schema file", f"add its CREATE TABLE to the schema file, or {give}; {again}"
        elif not schema.key:
            why = "its events hold no rowid (WITHOUT ROWID), so nothing identifies its rows"
            fix = f"{give}, or a schema file with its CREATE TABLE; {again}"
        elif len(schema.columns) == 1 and not self._discovery.is_listed:
            why = "its events hold no rows, only their ids"
            fix = f"{give}, or set row_ids_only to false in rqlite; {again}"
        elif entry.copy > 1 and earlier is not None and entry.request == earlier.request:
            why = "it needs a new copy, and there is no API to read its rows from"
            fix = f"{give}; {again}. Without an API the table starts empty and receives only the changes from then on"
        else:
            return None
        return TableError(why, fix=fix, table=name, position=str(entry.snapshot_position))

    def plan_log(self, ranges: Mapping[str, TableRange]) -> list[Split]:
        wanted = {name: RqliteRange(**vars(one), failure=self._failure(name, one)) for name, one in ranges.items()}
        after, upto = min(one.after for one in wanted.values()), max(one.upto for one in wanted.values())
        frames, asks = self._journal.frames(after, upto), self._api is not None
        return split_frames(RqliteLogSplit, frames, wanted, lambda _: SPLIT_BYTES, service=self.service, asks=asks)

    def _failure(self, name: str, one: TableRange) -> Mapping[str, str | None] | None:
        at, failure = self._schemas.failures.get(name, (START, None))
        return failure if one.after < at <= one.upto else None

    def stop(self) -> None:
        self._journal.close()
