"""The driver half of the Postgres source: how far the next batch goes, and how it is split."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from tailrace.errors import LostError, UnavailableError
from tailrace.journal import Cursor, FrameRef, JournalReader
from tailrace.model.change import START, Position
from tailrace.model.schema import TableSchema
from tailrace.source.follower import Limit, Offset, SchemaVersions, TableDirectives
from tailrace.source.journal_log import RECEIVER_SECONDS, find_boundary, is_worth_passing
from tailrace.source.log_follower import LogFollower
from tailrace.source.postgres.catalog import Published
from tailrace.source.postgres.connection import session
from tailrace.source.postgres.copy import PostgresSnapshot, SnapshotOpening, copy_split, measure_heaps
from tailrace.source.postgres.discovery import PostgresDiscovery
from tailrace.source.postgres.frame_builder import FrameMeta
from tailrace.source.postgres.log_split import PgRange, log_splits
from tailrace.source.postgres.offset import PostgresOffset, PostgresTableOffset, before, chunks
from tailrace.source.postgres.receiver import STATUS
from tailrace.source.postgres.schema_log import PostgresSchemaLog
from tailrace.source.postgres.slot import emit_heartbeat, read_slot, require, server_position
from tailrace.source.source import RESYNC
from tailrace.source.split import Split
from tailrace.source.table_range import TableRange
from tailrace.system.child_process import read_status, write_status

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource

PAGE_BYTES = 8192
GATHER_SECONDS = 5.0
"""How long the first changes of a backlog wait for a batch to fill up."""
STILL_SECONDS = 0.5
"""When no more of them have come for so long, the server decodes the next step, and they need not wait for that."""
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
        self._schemas = PostgresSchemaLog(source.dsn, source.options.publication, versions, self._published_now)
        patience = RECEIVER_SECONDS if is_receiving else 0.0
        self._receiver = source.receiver(patience_seconds=patience)
        self._snapshot: PostgresSnapshot | None = None
        self._opening: SnapshotOpening | None = None
        self._waits_for_round = False
        self._gathers_since: float | None = None
        self._gathered: Position | None = None
        self._still_since = 0.0
        self._passed: tuple[Position, Position] | None = None
        self._passed_at = 0.0

    def start(self) -> Offset:
        cursor = Cursor(self.source.journal, self.source.context.reader)
        if cursor.position == START:
            # From now on nothing after the mark goes before this reader has passed it.
            cursor.advance(self._journal.mark())
        # Spark asks again when it repeats the very first batch, which must begin where it began.
        return self._at(cursor.position)

    def target(self) -> Offset:
        self._discovery.refresh(at_once=True)
        with session(self.source.dsn, "asking for the server's position") as connection:
            if self.source.options.heartbeat is not None:
                # What is flushed may end within a record, which no reader gets to the end of before the next commit.
                emit_heartbeat(connection)
            self.goal = before(server_position(connection))
        return self._at(self.goal)

    def is_settled(self, now: PostgresOffset) -> bool:
        return super().is_settled(now) and not self._waits_for_round

    def is_idle_until(self, now: PostgresOffset, goal: Position) -> bool:
        self._journal.refresh()
        return self._journal.mark() >= goal and not self._has_news(now, self._journal.frames(now.log, goal), goal)

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        self._receiver.require_alive()
        return super().latest(start, limit, directives)

    @contextmanager
    def opened(self, at: PostgresOffset) -> Iterator[None]:
        self._journal.refresh()
        yield

    def is_worth_batch(self, given: PostgresOffset, now: PostgresOffset, end: PostgresOffset) -> bool:
        if self._gathers(end):
            return False
        if not self._is_worth_batch(now, end):
            self._pass_over(given.high_water, end.log)
            return False
        return True

    def _pass_over(self, behind: Position, upto: Position) -> None:
        """Say that nothing waits up to here, which no batch will: without it an idle table would seem to lag."""
        since = time.monotonic() - self._passed_at
        if not self.source.is_pipeline or (behind, upto) == self._passed or since < PASS_SECONDS:
            return
        self._passed, self._passed_at = (behind, upto), time.monotonic()
        with suppress(OSError):  # only people look at it
            write_status(self.source.journal, FOLLOWER, {"passed": [str(behind), str(upto)]})

    def _require_sent_again(self, applied: Position) -> None:
        """The journal ends before what was applied: a crash took what was seen there and not durable yet.

        Raises UnavailableError, as Postgres sends it again unless it was told to forget it, which the receiver knows;
        LostError when the server itself ends before it.
        """
        with session(self.source.dsn, "asking for the server's position") as connection:
            slot = require(read_slot(connection, self.source.options.slot), self.source.options.slot, RESYNC)
        if before(slot.server) < applied and not slot.is_standby:
            raise LostError("the server and the journal end before what was already applied", fix=RESYNC)
        raise UnavailableError(
            "the journal does not yet reach what was already applied", fix="none needed while the receiver runs"
        )

    # -- which tables -------------------------------------------------------------------------------------

    def discover(self, *, at_once: bool = False) -> None:
        self._discovery.refresh(at_once=at_once)

    def tables(self) -> Mapping[int, Published]:
        return self._discovery.tables

    def enrol(self, now: PostgresOffset) -> PostgresOffset:
        """Tables that left the publication go. Those that came, or came back after changes that were not sent, wait."""
        tables = self._discovery.tables
        now = now.only(tables)
        changed = {
            oid: replace(
                now.tables[oid].recopy() if oid in now.tables else PostgresTableOffset("init"), member=one.membership
            )
            for oid, one in tables.items()
            if oid not in now.tables or now.tables[oid].member != one.membership
        }
        return now.with_tables(changed)

    def recopies(self) -> Mapping[int, Position]:
        return self._schemas.recopies

    def scan_schemas(self, now: PostgresOffset, end: PostgresOffset) -> None:
        self._schemas.scan(self._journal, now.low_water, end.log)

    def recopy(self, now: PostgresOffset, end: PostgresOffset) -> PostgresOffset:
        """Likewise, but for changes that a table has already passed."""
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
        # Up to the mark the journal is known to be whole, changes or not.
        return max(self._journal.head(), self._journal.mark())

    def read_log(self, now: PostgresOffset, limit: Limit, directives: TableDirectives) -> PostgresOffset:
        if now.log > self._journal.mark():
            self._require_sent_again(now.log)
        return super().read_log(now, limit, directives)

    def boundary(self, after: Position, upto: Position, tables: frozenset[int], limit: Limit) -> Position:
        if not tables or upto <= after:
            return max(after, upto)
        return find_boundary(self._journal, after, upto, limit)

    def _gathers(self, end: PostgresOffset) -> bool:
        """Whether to wait for more of a backlog: one large batch costs less than a small one and the rest."""
        head, now = self._journal.head(), time.monotonic()
        if end.log < head or read_status(self.source.journal, STATUS).get("gear") != "backlog":
            self._gathers_since = None
            return False
        self._gathers_since = self._gathers_since or now
        if head != self._gathered:
            self._gathered, self._still_since = head, now
        return now - self._still_since < STILL_SECONDS and now - self._gathers_since < GATHER_SECONDS

    def _is_worth_batch(self, now: PostgresOffset, end: PostgresOffset) -> bool:
        """Whether the step holds changes of a table we keep, or enough foreign log to be worth passing over."""
        if end.log <= now.log:
            return False
        if end.log < self._journal.head():
            return True  # a full batch
        frames = self._journal.frames(now.log, end.log)
        return self._has_news(now, frames, end.log) or is_worth_passing(frames, self.source.options.journal.max_bytes)

    def _has_news(self, now: PostgresOffset, frames: Sequence[FrameRef], upto: Position) -> bool:
        """Whether the frames up to a position hold rows, or a new version, of a table that is level with the log."""
        ready = now.within("ready")
        metas = [FrameMeta.from_bytes(ref.meta) for ref in frames]
        if any(oid in ready for meta in metas for oid in meta.rows):
            return True
        return any(meta.shapes for meta in metas) and any(
            len(self._versions.schemas_between(str(oid), now.log, upto)) > 1 for oid in ready
        )

    # -- the copy -----------------------------------------------------------------------------------------

    def copy(
        self, now: PostgresOffset, end: PostgresOffset, limit: Limit, directives: TableDirectives
    ) -> PostgresOffset:
        new = end.due(directives)
        copying = {oid: entry for oid, entry in end.within("copy").items() if oid not in new}
        # One that is copied again by request stays as it is until its copy can begin.
        self._waits_for_round = bool(new)
        if not new and not copying:
            self._close_snapshot()
            return end
        round_ = self._open_snapshot()
        if round_ is None:
            return end
        begun = self._begin(new, round_, now)
        if begun is None:
            self._close_snapshot()
            return end
        self._waits_for_round = False
        changed: dict[int, PostgresTableOffset] = {}
        budget = limit.bytes
        for oid, entry in sorted({**copying, **begun}.items()):
            keyed = bool(self._copied_schema(oid, entry).key)
            if not keyed and entry.copy != round_.x:
                # Without a key a row of a newer snapshot cannot be told from its own insert in the log.
                changed[oid] = entry.recopy()
                continue
            read = entry.next == entry.chunks
            take = (
                min(entry.chunks - entry.next, max(1, budget // self.source.options.copying.chunk_bytes))
                if budget > 0
                else 0
            )
            budget -= take * self.source.options.copying.chunk_bytes
            entry = replace(entry, next=entry.next + take)
            # A keyless table waits for the next batch, which shows that these chunks were read under this round.
            if entry.next == entry.chunks and (keyed or read):
                entry = replace(entry, phase="catchup", at=entry.snapshot_position)
            changed[oid] = entry
        return end.with_tables(changed)

    def _begin(
        self, new: Mapping[int, PostgresTableOffset], round_: PostgresSnapshot, now: PostgresOffset
    ) -> dict[int, PostgresTableOffset] | None:
        """The tables as they begin to copy under a round; None when it is too old for one of them.

        It must have seen the table in the publication, which sends only what is committed after, and the last change
        that the log does not show; and the journal must hold the log since.
        """
        if not new:
            return {}
        shown = self.source.discover(round_.snapshot)
        for oid, entry in new.items():
            seen = oid in shown and shown[oid].membership == entry.member
            if (
                not seen
                or self._schemas.recopies.get(oid, START) > before(round_.x)
                or before(round_.x) < now.low_water
            ):
                self._discovery.refresh(at_once=True)
                return None
        begun: dict[int, PostgresTableOffset] = {}
        pages = self.source.options.copying.chunk_bytes // PAGE_BYTES
        for oid, entry in new.items():
            heaps = measure_heaps(self.source.dsn, oid, round_.snapshot)
            if heaps is None:
                return None
            parts = {heap: max(1, math.ceil(size / pages)) for heap, size in heaps.items()}
            self._schemas.put(shown[oid].schema, before(round_.x))
            begun[oid] = PostgresTableOffset(
                "copy", copy=round_.x, parts=parts, request=entry.request, member=entry.member
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
        round_ = self._wait_for_snapshot()
        if not table.key and entry.copy != round_.x:
            return []  # `latest` starts this table's copy over under the new snapshot
        pages = self.source.options.copying.chunk_bytes // PAGE_BYTES
        published = self._discovery.tables[oid]
        filtered_by = published.membership if published.row_filter else 0
        return [copy_split(table, chunk, pages, round_, entry.copy, filtered_by) for chunk in chunks(entry, numbers)]

    def _wait_for_snapshot(self) -> PostgresSnapshot:
        while (round_ := self._open_snapshot(1.0)) is None:
            self._receiver.require_alive()
        return round_

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
        self._journal.close()
