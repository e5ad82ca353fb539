"""The driver half of the Postgres source: how far the next batch goes, and how it is split."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from tailrace.errors import LostError, UnavailableError
from tailrace.journal import Cursor, FrameRef, JournalReader
from tailrace.model.change import START, Position, just_before
from tailrace.model.schema import TableSchema
from tailrace.source.copy_share import CopyNeed, least_size, share_chunks
from tailrace.source.follower import Limit, Offset, SchemaVersions, TableDirectives
from tailrace.source.journal_log import RECEIVER_SECONDS, find_boundary, is_worth_passing
from tailrace.source.log_follower import LogFollower
from tailrace.source.postgres.catalog import Published
from tailrace.source.postgres.connection import session
from tailrace.source.postgres.copy import PostgresSnapshot, SnapshotOpening, copy_split, measure_heaps
from tailrace.source.postgres.discovery import CatalogLook, PostgresDiscovery
from tailrace.source.postgres.frame_builder import FrameMeta
from tailrace.source.postgres.log_split import PgRange, log_splits
from tailrace.source.postgres.offset import PostgresOffset, PostgresTableOffset, before, chunks
from tailrace.source.postgres.receiver import STATUS
from tailrace.source.postgres.schema_diff import compare, replaced, with_initial
from tailrace.source.postgres.schema_log import PostgresSchemaLog
from tailrace.source.postgres.slot import emit_heartbeat, read_slot, require, require_kept, server_position
from tailrace.source.source import RESYNC
from tailrace.source.split import Split
from tailrace.source.table_range import TableRange
from tailrace.system.child_process import read_status, write_status

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource

PAGE_BYTES = 8192
SMALL_SHARE = 8
"""A table of less than this fraction of a chunk is small."""
GATHER_SECONDS = 0.25
"""How long the first changes of a backlog wait for others: about as long as Spark takes to begin a batch."""
PASS_SECONDS = 0.1
FOLLOWER = "follower"


class PostgresFollower(LogFollower[PostgresOffset]):
    """Owns the receiver process and the copy's snapshot; everything durable is in journal, offsets and versions."""

    offset_type = PostgresOffset

    def __init__(self, source: PostgresSource, versions: SchemaVersions, *, is_receiving: bool) -> None:
        super().__init__(source, versions)
        self.source = source
        self._discovery = PostgresDiscovery(source)
        self._journal = JournalReader(source.journal)
        self._schemas = PostgresSchemaLog(
            source.dsn, source.options.publication, versions, self._published_now, source.with_decimals
        )
        patience = RECEIVER_SECONDS if is_receiving else 0.0
        self._receiver = source.receiver(patience_seconds=patience)
        self._snapshot: PostgresSnapshot | None = None
        self._opening: SnapshotOpening | None = None
        self._waits_for_snapshot = False
        self._small: dict[int, int] = {}
        """The bytes of each small table whose copy this process began: they share batches and tasks."""
        self._judged: CatalogLook | None = None
        self._compared: CatalogLook | None = None
        self._has_new_version = True  # the process before may have stored one
        self._gathers_since: float | None = None
        self._passed: tuple[Position, Position] | None = None
        self._passed_at = 0.0
        self._owes_pass = False
        self._entries: Mapping[int, PostgresTableOffset] = {}
        """Those of the last offset that was read. Few change from batch to batch."""

    def read_offset(self, raw: Offset) -> PostgresOffset:
        read = PostgresOffset.from_json(raw, self._entries)
        self._entries = read.tables
        return read

    def start(self) -> Offset:
        cursor = Cursor(self.source.journal, self.source.context.reader)
        if cursor.position == START:
            # From now on the journal keeps everything after the mark until this reader has read it.
            cursor.advance(self._journal.mark())
        # Spark calls this again when it repeats the very first batch, which must begin at the same offset.
        return self._at(cursor.position)

    def target(self) -> Offset:
        self._discovery.refresh(at_once=True)
        with session(self.source.dsn, "reading the server's position") as connection:
            if self.source.options.heartbeat is not None:
                # The flushed WAL may end within a record, whose end no reader reaches before the next commit.
                emit_heartbeat(connection)
            self.goal = before(server_position(connection))
        return self._at(self.goal)

    def is_settled(self, now: PostgresOffset) -> bool:
        look = self._discovery.look
        is_compared = look is self._judged or (self.goal is not None and look.ended > self.goal)
        return super().is_settled(now) and is_compared and not self._waits_for_snapshot

    def is_idle_until(self, now: PostgresOffset, goal: Position) -> bool:
        self._journal.refresh()
        return self._journal.mark() >= goal and not self._has_news(now, self._journal.frames(now.log, goal), goal)

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        self._receiver.require_alive()
        return super().latest(start, limit, directives)

    def idle_sign(self) -> object | None:
        self._journal.refresh()
        self._discovery.refresh()
        is_copying = self._snapshot is not None or self._opening is not None or self._waits_for_snapshot
        if is_copying or self._gathers_since is not None or self._owes_pass:
            return None
        return self._journal.head(), self._journal.mark(), self._discovery.look, self.goal

    @contextmanager
    def opened(self, at: PostgresOffset) -> Iterator[None]:
        self._journal.poll()
        is_first = self._discovery.followed is None
        self._discovery.followed = frozenset(at.tables)
        if is_first and self.source.extends_publication:
            self._discovery.refresh(at_once=True)  # until now, a table that is not published may have been removed
        yield

    def is_worth_batch(self, given: PostgresOffset, now: PostgresOffset, end: PostgresOffset) -> bool:
        if self._gathers(now, end):
            return False
        if not self._is_worth_batch(now, end):
            self._pass_over(given.high_water, end.log)
            return False
        return True

    def _pass_over(self, after: Position, upto: Position) -> None:
        """Report that nothing waits in (after, upto]: it gets no batch, and an idle table would seem to lag."""
        since = time.monotonic() - self._passed_at
        self._owes_pass = self.source.is_pipeline and (after, upto) != self._passed and since < PASS_SECONDS
        if not self.source.is_pipeline or (after, upto) == self._passed or self._owes_pass:
            return
        self._passed, self._passed_at = (after, upto), time.monotonic()
        write_status(self.source.folder, self.source.follower_status, {"passed": [str(after), str(upto)]})

    def _require_sent_again(self, applied: Position) -> None:
        """The journal ends before what was applied: a crash lost frames that were read there but not durable yet.

        Raises UnavailableError, as Postgres sends them again; LostError when the slot is confirmed past them, or the
        server itself ends before them.
        """
        with session(self.source.dsn, "reading the server's position") as connection:
            slot = require(read_slot(connection, self.source.options.slot), self.source.options.slot, RESYNC)
        if before(slot.server) < applied and not slot.is_standby:
            raise LostError("the server and the journal end before what was already applied", fix=RESYNC)
        require_kept(slot, self._journal.mark().commit + 1)
        raise UnavailableError(
            "the journal does not yet reach what was already applied", fix="none needed while the receiver runs"
        )

    # -- which tables -------------------------------------------------------------------------------------

    def discover(self, *, at_once: bool = False) -> None:
        self._discovery.refresh(at_once=at_once)

    def tables(self) -> Mapping[int, Published]:
        return self._discovery.tables

    def enrol(self, now: PostgresOffset) -> PostgresOffset:
        """Remove tables that left the publication. New ones wait for a copy, and so do those that left and came back,
        or whose publication may have held changes back in between."""
        tables = self._discovery.tables
        if now.tables.keys() != tables.keys():
            now = now.only(tables)
        entries = {
            oid: _enrolled(entry, one)
            for oid, one in tables.items()
            if (entry := now.tables.get(oid)) is None
            or (entry.member, entry.publication) != (one.membership, one.options)
        }
        return now.with_tables(entries) if entries else now

    def compare_schemas(self, now: PostgresOffset, end: PostgresOffset) -> PostgresOffset:
        """Compare the tables with the catalog, once the log was read up to where the catalog was read.

        A table whose rows changed, and neither the log nor the trigger showed it, is copied again. Other changes that
        no row followed become a version.
        """
        look = self._discovery.look
        if look is self._compared or end.log < look.ended:
            return end
        self._compared = self._judged = look
        upto = end.log if end.log > now.log else None
        due = [oid for oid in end.within("ready") if oid in look.tables and self._is_changed(oid, look, upto)]
        for oid in due:
            # A table whose policy is `stop` stops with the next changes that it reads.
            stops = self.policy_of(oid) == "stop"
            self._schemas.mark(oid, Position(end.log.commit, end.log.ordinal + 1) if stops else look.ended)
        return end.with_tables({oid: end.tables[oid].recopy() for oid in due if self.policy_of(oid) != "stop"})

    def _is_changed(self, oid: int, look: CatalogLook, upto: Position | None) -> bool:
        """Whether the catalog has the table in a way that none of its versions explains, and that needs a new copy.

        `upto` is the end of the batch; None when it reads no log, and so can bring no version.
        """
        published = look.tables[oid]
        history = self._versions.schemas_between(str(oid), look.began, upto or look.ended)
        if not history:
            return False
        # A transaction is in the log shortly before the catalog shows it.
        earlier = self._versions.schema_at(str(oid), just_before(history[0][0]))
        if any(_is_same(one, published.schema) for one in (earlier, *(schema for _, schema in history)) if one):
            return False
        last = history[-1][1]
        compared = compare(
            last,
            published.schema,
            unknown=published.unknown,
            may_be_unlogged=not look.has_trigger and not published.stays_logged,
            may_lack_key=not look.has_trigger,
        )
        # Without the trigger, values of the column that was added may have been read as those of the one dropped.
        if compared.recopy or (not look.has_trigger and replaced(last, published.schema)):
            return True
        if upto is None:
            self._compared = None
        elif not any(oid in FrameMeta.from_bytes(ref.meta).rows for ref in self._journal.frames(look.began, upto)):
            # No row there can have had other columns, and any later one that has comes with its own version.
            self._schemas.put(with_initial(last, published.schema), upto)
            self._has_new_version = True
        return False

    def recopies(self) -> Mapping[int, Position]:
        return self._schemas.recopies

    def scan_schemas(self, now: PostgresOffset, end: PostgresOffset) -> None:
        self._schemas.scan(self._journal, now.low_water, end.log)

    def recopy(self, now: PostgresOffset, end: PostgresOffset) -> PostgresOffset:
        """The same, without changes that a table has already read past."""
        due = {
            oid: entry.recopy()
            for oid, entry in end.tables.items()
            if oid in self._schemas.recopies
            and entry.phase not in ("init", "stopped")
            and max(entry.snapshot_position, now.tables[oid].position(now.log)) < self._schemas.recopies[oid]
            and self.policy_of(oid) != "stop"
        }
        return end.with_tables(due)

    def name_of(self, oid: int) -> str:
        schema = self._versions.schema_at(str(oid))
        return str(schema.table if schema is not None else self._discovery.tables[oid].schema.table)

    def _published_now(self, oid: int) -> Published | None:
        return self.source.discover().get(oid)

    # -- the log ------------------------------------------------------------------------------------------

    def head(self) -> Position:
        # Up to the mark the journal is known to be complete, with or without changes.
        return max(self._journal.head(), self._journal.mark())

    def read_log(self, now: PostgresOffset, limit: Limit, directives: TableDirectives) -> PostgresOffset:
        if now.log > self._journal.mark():
            self._require_sent_again(now.log)
        return super().read_log(now, limit, directives)

    def boundary(self, after: Position, upto: Position, tables: frozenset[int], limit: Limit) -> Position:
        if not tables or upto <= after:
            return max(after, upto)
        return find_boundary(self._journal, after, upto, limit)

    def _gathers(self, now: PostgresOffset, end: PostgresOffset) -> bool:
        """Whether to wait for more of a backlog. What comes while a batch is applied is the next one."""
        is_rest = end.log > now.log and end.log >= self._journal.head()
        if is_rest and read_status(self.source.folder, STATUS).get("gear") == "backlog":
            self._gathers_since = self._gathers_since or time.monotonic()
            if time.monotonic() - self._gathers_since < GATHER_SECONDS:
                return True
        self._gathers_since = None
        return False

    def _is_worth_batch(self, now: PostgresOffset, end: PostgresOffset) -> bool:
        """Whether the step holds changes of a followed table, or enough other log to be worth advancing past it."""
        if end.log <= now.log:
            return False
        if end.log < self._journal.head():
            return True  # a full batch
        frames = self._journal.frames(now.log, end.log)
        return self._has_news(now, frames, end.log) or is_worth_passing(frames, self.source.options.journal.max_bytes)

    def _has_news(self, now: PostgresOffset, frames: Sequence[FrameRef], upto: Position) -> bool:
        """Whether the frames up to a position hold rows, or a new version, of a ready table."""
        ready = now.within("ready")
        metas = [FrameMeta.from_bytes(ref.meta) for ref in frames]
        if any(oid in ready for meta in metas for oid in meta.rows):
            return True
        if not self._has_new_version and not any(meta.shapes for meta in metas):
            return False
        self._has_new_version = any(int(oid) in ready for oid in self._versions.new_versions(now.log, upto))
        return self._has_new_version

    def changed(self, after: Position, upto: Position) -> Collection[int]:
        if upto <= after:
            return ()
        frames = self._journal.frames(after, upto)
        rows = {oid for ref in frames for oid in FrameMeta.from_bytes(ref.meta).rows}
        return rows | {int(oid) for oid in self._versions.new_versions(after, upto)}

    # -- the copy -----------------------------------------------------------------------------------------

    def copy(
        self, now: PostgresOffset, end: PostgresOffset, limit: Limit, directives: TableDirectives
    ) -> PostgresOffset:
        new = end.due(directives)
        copying = {oid: entry for oid, entry in end.within("copy").items() if oid not in new}
        # A table that is copied again by request stays as it is until its copy can begin.
        self._waits_for_snapshot = bool(new)
        if not new and not copying:
            self._close_snapshot()
            return end
        snapshot = self._open_snapshot()
        if snapshot is None:
            return end
        begun = self._begin(new, snapshot, now)
        if begun is None:
            self._close_snapshot()
            return end
        self._waits_for_snapshot = False
        changed: dict[int, PostgresTableOffset] = {}
        taken = self._share(copying | begun, snapshot, limit)
        for oid, entry in sorted({**copying, **begun}.items()):
            keyed = bool(self._copied_schema(oid, entry).key)
            if not keyed and entry.copy != snapshot.x:
                # Without a key, a row of a newer snapshot cannot be matched with its own insert in the log.
                changed[oid] = entry.recopy()
                continue
            read = entry.next == entry.chunks
            entry = replace(entry, next=entry.next + taken[oid])
            # A table without key waits for the next batch, which shows that these chunks were read under this snapshot.
            if entry.next == entry.chunks and (keyed or read):
                entry = replace(entry, phase="catchup", at=entry.snapshot_position)
            changed[oid] = entry
        return end.with_tables(changed)

    def _share(
        self, copying: Mapping[int, PostgresTableOffset], snapshot: PostgresSnapshot, limit: Limit
    ) -> dict[int, int]:
        """How many chunks each of these tables copies in the next batch."""
        chunk = self.source.options.copying.chunk_bytes
        needs = {
            # A table without key that another snapshot began starts over, and copies nothing in this batch.
            oid: CopyNeed(entry.chunks - entry.next, least_size(self._small.get(oid, chunk), chunk))
            for oid, entry in copying.items()
            if entry.copy == snapshot.x or self._copied_schema(oid, entry).key
        }
        return share_chunks(needs, limit.copied_bytes)

    def _begin(
        self, new: Mapping[int, PostgresTableOffset], snapshot: PostgresSnapshot, now: PostgresOffset
    ) -> dict[int, PostgresTableOffset] | None:
        """The tables as they begin to copy under a snapshot; None when it is too old for one of them.

        It must include the table's entry in the publication, which sends only later commits, and the last change that
        the log does not show; and the journal must hold the log since the snapshot.
        """
        if not new:
            return {}
        shown = self.source.discover(snapshot.snapshot)
        low_water = now.low_water
        for oid, entry in new.items():
            one = shown.get(oid)
            if (
                one is None
                or (one.membership, one.options) != (entry.member, entry.publication)
                or self._schemas.recopies.get(oid, START) > before(snapshot.x)
                or before(snapshot.x) < low_water
            ):
                self._discovery.refresh(at_once=True)
                return None
        begun: dict[int, PostgresTableOffset] = {}
        pages = self.source.options.copying.chunk_bytes // PAGE_BYTES
        measured = measure_heaps(self.source.dsn, list(new), snapshot.snapshot)
        if measured is None:
            return None
        for oid, entry in new.items():
            heaps = measured[oid]
            self._small.pop(oid, None)
            if sum(heaps.values()) < pages // SMALL_SHARE and len(heaps) == 1:
                self._small[oid] = sum(heaps.values()) * PAGE_BYTES
            parts = {heap: max(1, math.ceil(size / pages)) for heap, size in heaps.items()}
            self._schemas.put(shown[oid].schema, before(snapshot.x))
            begun[oid] = PostgresTableOffset(
                "copy",
                copy=snapshot.x,
                parts=parts,
                request=entry.request,
                member=entry.member,
                publication=entry.publication,
            )
        return begun

    def _open_snapshot(self, patience_seconds: float = 0.05) -> PostgresSnapshot | None:
        if self._snapshot is None:
            self._opening = self._opening or SnapshotOpening(self.source.dsn)
            self._snapshot = self._opening.wait(patience_seconds)
            if self._snapshot is not None:
                self._opening = None
        return self._snapshot

    def _close_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None

    # -- splitting ----------------------------------------------------------------------------------------

    def split_copy(
        self,
        table: TableSchema,
        oid: int,
        entry: PostgresTableOffset,
        earlier: PostgresTableOffset | None,
        numbers: range,
    ) -> list[Split]:
        snapshot = self._wait_for_snapshot()
        if not table.key and entry.copy != snapshot.x:
            return []  # `latest` starts this table's copy over under the new snapshot
        pages = self.source.options.copying.chunk_bytes // PAGE_BYTES
        published = self._discovery.tables[oid]
        filtered_by = published.membership if published.row_filter else 0
        return [
            replace(copy_split(table, chunk, pages, snapshot, entry.copy, filtered_by), size=self._small.get(oid))
            for chunk in chunks(entry, numbers)
        ]

    def _wait_for_snapshot(self) -> PostgresSnapshot:
        while (snapshot := self._open_snapshot(1.0)) is None:
            self._receiver.require_alive()
        return snapshot

    def plan_log(self, ranges: Mapping[int, TableRange]) -> list[Split]:
        settings = self.source.context.tables.settings_of
        wanted = {
            oid: PgRange(**vars(one), truncates=settings(str(one.history[-1][1].table)).truncate == "apply")
            for oid, one in ranges.items()
        }
        after, upto = min(one.after for one in wanted.values()), max(one.upto for one in wanted.values())
        return log_splits(self._journal.frames(after, upto), wanted, self.source.parallel)

    def stop(self) -> None:
        self._close_snapshot()
        if self._opening is not None:
            self._opening.abandon()
        self._journal.close()
        self._receiver.stop()


def _enrolled(entry: PostgresTableOffset | None, one: Published) -> PostgresTableOffset:
    """A table's entry as the publication has it now."""
    if entry is None:
        return PostgresTableOffset("init", member=one.membership, publication=one.options)
    if entry.member != one.membership or entry.publication not in (0, one.options):
        entry = entry.recopy()
    return replace(entry, member=one.membership, publication=one.options)


def _is_same(one: TableSchema, other: TableSchema) -> bool:
    """Whether they show the table the same. A version of the log may have a fingerprint that was read after it."""
    names = [[(column.number, column.name) for column in each.columns] for each in (one, other)]
    return names[0] == names[1] and (one.table, one.key, one.fingerprint) == (
        other.table,
        other.key,
        other.fingerprint,
    )
