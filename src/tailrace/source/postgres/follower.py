"""The driver half of the Postgres source: how far the next batch goes, and how it is split."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import LostError, UnavailableError
from tailrace.journal import Cursor, FrameRef, JournalReader
from tailrace.model.change import START, Position
from tailrace.model.schema import TableSchema
from tailrace.source.follower import Limit, Offset, SchemaVersions, TableDirectives
from tailrace.source.offset import LogRange, log_ranges
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
from tailrace.source.table_range import first_change
from tailrace.system.child_process import read_status, write_status

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource

PAGE_BYTES = 8192
RECEIVER_SECONDS = 5.0
"""How long the receiver that the pipeline started may take to begin, before the follower starts one."""
GATHER_SECONDS = 5.0
"""How long the first changes of a backlog wait for a batch to fill up."""
STILL_SECONDS = 0.5
"""When no more of them have come for so long, the server decodes the next step, and they need not wait for that."""
PASS_SECONDS = 0.1
FOLLOWER = "follower"
STEP_ASIDE_BYTES = 64 * 1024 * 1024
"""After this much log that concerns no table, the offset moves on so that the journal may forget it."""


class PostgresFollower:
    """Owns the receiver process and the copy's snapshot; everything durable is in journal, offsets and versions."""

    def __init__(self, source: PostgresSource, versions: SchemaVersions, *, receives: bool) -> None:
        self.source = source
        self._versions = versions
        self._discovery = PostgresDiscovery(source)
        self._journal = JournalReader(Path(source.journal))
        self._schemas = PostgresSchemaLog(source.dsn, source.publication, versions, self._published_now)
        patience = 0.0 if receives else RECEIVER_SECONDS
        self._receiver = source.receiver(patience_seconds=patience)
        self._snapshot: PostgresSnapshot | None = None
        self._opening: SnapshotOpening | None = None
        self._waits_for_round = False
        self._gathers_since: float | None = None
        self._gathered: Position | None = None
        self._still_since = 0.0
        self._passed: tuple[Position, Position] | None = None
        self._passed_at = 0.0
        self._goal: Position | None = None

    def start(self) -> Offset:
        cursor = Cursor(self.source.journal, self.source.reader)
        if cursor.position == START:
            # From now on nothing behind the mark goes before this reader has passed it.
            cursor.advance(self._journal.mark())
        # Spark asks again when it repeats the very first batch, which must begin where it began.
        return PostgresOffset(cursor.position).to_json()

    def target(self) -> Offset:
        self._discovery.refresh(at_once=True)
        with session(self.source.dsn, "asking for the server's position") as connection:
            if self.source.heartbeat_seconds is not None:
                # What is flushed may end within a record, which no reader gets to the end of before the next commit.
                emit_heartbeat(connection)
            self._goal = before(server_position(connection))
        return PostgresOffset(self._goal).to_json()

    def done(self, start: Offset, target: Offset) -> bool:
        now = PostgresOffset.from_json(start)
        done = self._has_reached(now, PostgresOffset.from_json(target).log)
        if done:
            self._goal = None
        return done

    def _has_reached(self, now: PostgresOffset, goal: Position) -> bool:
        if (
            set(now.tables) != set(self._discovery.tables)
            or now.within("init", "copy", "catchup")
            or self._waits_for_round
        ):
            return False
        if now.log >= goal:
            return True
        self._journal.refresh()
        return self._journal.mark() >= goal and not self._has_news(now, self._journal.frames(now.log, goal), goal)

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        self._receiver.require_alive()
        self._journal.refresh()
        given = PostgresOffset.from_json(start)
        if given.log > self._journal.mark():
            self._require_sent_again(given.log)
        self._discovery.refresh()
        now = self._enrol(given.apply_directives(directives, lambda text, _: Position.parse(text)))
        end = self._read_log(now, limit)
        self._schemas.scan(self._journal, now.low_water, end.log)
        end = self._recopy(now, end)
        end = self._copy(now, end, limit, directives)
        if end.tables == given.tables:
            if self._gathers(end):
                return start
            if not self._is_worth_batch(now, end):
                self._pass_over(given.high_water, end.log)
                return start
        return end.to_json()

    def _pass_over(self, behind: Position, upto: Position) -> None:
        """Say that nothing waits up to here, which no batch will: without it an idle table would seem to lag."""
        since = time.monotonic() - self._passed_at
        if not self.source.is_pipeline or (behind, upto) == self._passed or since < PASS_SECONDS:
            return
        self._passed, self._passed_at = (behind, upto), time.monotonic()
        with suppress(OSError):  # only people look at it
            write_status(Path(self.source.journal), FOLLOWER, {"passed": [str(behind), str(upto)]})

    def _require_sent_again(self, applied: Position) -> None:
        """The journal ends before what was applied: a crash took what was seen there and not durable yet.

        Raises UnavailableError, as Postgres sends it again unless it was told to forget it, which the receiver knows;
        LostError when the server itself ends before it.
        """
        with session(self.source.dsn, "asking for the server's position") as connection:
            slot = require(read_slot(connection, self.source.slot), self.source.slot, RESYNC)
        if before(slot.server) < applied and not slot.is_standby:
            raise LostError("the server and the journal end before what was already applied", fix=RESYNC)
        raise UnavailableError(
            "the journal does not yet reach what was already applied", fix="none needed while the receiver runs"
        )

    # -- which tables -------------------------------------------------------------------------------------

    def _enrol(self, now: PostgresOffset) -> PostgresOffset:
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

    def _recopy(self, now: PostgresOffset, end: PostgresOffset) -> PostgresOffset:
        """Tables whose rows changed in a way that the log does not show are copied again, from behind that change."""
        due = {
            oid: entry.recopy()
            for oid, entry in end.tables.items()
            if oid in self._schemas.recopies
            and entry.phase not in ("init", "stopped")
            and max(entry.snapshot_position, now.tables[oid].position(now.log)) < self._schemas.recopies[oid]
            and self._policy(oid) != "stop"
        }
        return end.with_tables(due)

    def _policy(self, oid: int) -> str:
        return self.source.tables_wanted.settings_of(self._name_of(oid)).schema_changes

    def _name_of(self, oid: int) -> str:
        schema = self._versions.schema_at(str(oid))
        return str(schema.table if schema is not None else self._discovery.tables[oid].schema.table)

    def _published_now(self, oid: int) -> Published | None:
        return self.source.discover().get(oid)

    # -- the log ------------------------------------------------------------------------------------------

    def _read_log(self, now: PostgresOffset, limit: Limit) -> PostgresOffset:
        # Up to the mark the journal is known to be whole, changes or not.
        return now.read_on(max(self._journal.head(), self._journal.mark()), self._goal, limit, self._take)

    def _take(self, after: Position, upto: Position, wanted: frozenset[int], limit: Limit) -> Position:
        """The first commit boundary in (after, upto] at which the limit is reached; `upto` where it is not.

        The transaction that reaches it is taken whole, whatever its size: a batch must make progress.
        """
        if not wanted or upto <= after:
            return max(after, upto)
        refs = self._journal.frames(after, upto, rows=limit.rows, size=limit.bytes)
        full = sum(ref.count for ref in refs) >= limit.rows or sum(ref.length for ref in refs) >= limit.bytes
        return refs[-1].last if refs and full else upto

    def _gathers(self, end: PostgresOffset) -> bool:
        """Whether to wait for more of a backlog: one large batch costs less than a small one and the rest."""
        head, now = self._journal.head(), time.monotonic()
        if end.log < head or read_status(Path(self.source.journal), STATUS).get("gear") != "backlog":
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
        bound = min(STEP_ASIDE_BYTES, self.source.journal_max_bytes // 4)
        return self._has_news(now, frames, end.log) or sum(ref.length for ref in frames) > bound

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

    def _copy(
        self, now: PostgresOffset, end: PostgresOffset, limit: Limit, directives: TableDirectives
    ) -> PostgresOffset:
        new = end.due(directives)
        copying = {oid: entry for oid, entry in end.within("copy").items() if oid not in new}
        # One that is copied anew by request stays as it is until its copy can begin.
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
            take = min(entry.chunks - entry.next, max(1, budget // self.source.chunk_bytes)) if budget > 0 else 0
            budget -= take * self.source.chunk_bytes
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
        pages = self.source.chunk_bytes // PAGE_BYTES
        for oid, entry in new.items():
            heaps = measure_heaps(self.source.dsn, oid, round_.snapshot)
            if heaps is None:
                return None
            parts = {heap: max(1, math.ceil(size / pages)) for heap, size in heaps.items()}
            self._schemas.begin(shown[oid].schema, before(round_.x))
            begun[oid] = PostgresTableOffset(
                "copy", copy=round_.x, parts=parts, request=entry.request, member=entry.member
            )
        return begun

    def _copied_schema(self, oid: int, entry: PostgresTableOffset) -> TableSchema:
        """The columns a table's copy has: those of when it began."""
        schema = self._versions.schema_at(str(oid), entry.snapshot_position)
        if schema is None:
            raise LostError(f"the version of table {oid} that is being copied is not stored", fix=RESYNC)
        return schema

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

    def plan(self, start: Offset, end: Offset) -> list[Split]:
        now, then = PostgresOffset.from_json(start), PostgresOffset.from_json(end)
        self._journal.refresh()
        self._schemas.scan(self._journal, now.low_water, then.log)
        return [*self._plan_copy(now, then), *self._plan_log(now, then)]

    def _plan_copy(self, now: PostgresOffset, then: PostgresOffset) -> list[Split]:
        splits: list[Split] = []
        for oid, entry in then.tables.items():
            wanted = entry.chunks_since(now.tables.get(oid))
            if not wanted or oid not in self._discovery.tables:
                continue
            round_ = self._wait_for_snapshot()
            schema = self._copied_schema(oid, entry)
            if not schema.key and entry.copy != round_.x:
                continue  # `latest` starts this table's copy over under the new snapshot
            pages = self.source.chunk_bytes // PAGE_BYTES
            published = self._discovery.tables[oid]
            filtered_by = published.membership if published.row_filter else 0
            splits += [
                replace(
                    copy_split(schema, chunk, pages, round_, entry.copy, filtered_by),
                    starts=wanted.start == 0,
                    completes=entry.next == entry.chunks,
                )
                for chunk in chunks(entry, wanted)
            ]
        return splits

    def _wait_for_snapshot(self) -> PostgresSnapshot:
        while (round_ := self._open_snapshot(1.0)) is None:
            self._receiver.require_alive()
        return round_

    def _plan_log(self, now: PostgresOffset, then: PostgresOffset) -> list[Split]:
        wanted = {
            oid: self._table_range(oid, then.tables[oid], reading)
            for oid, reading in log_ranges(now, then).items()
            if oid in self._discovery.tables
        }
        if not wanted:
            return []
        after, upto = min(one.after for one in wanted.values()), max(one.upto for one in wanted.values())
        return log_splits(self._journal.frames(after, upto), wanted, self.source.parallel)

    def _table_range(self, oid: int, entry: PostgresTableOffset, reading: LogRange[Position]) -> PgRange:
        history = tuple(self._versions.schemas_between(str(oid), reading.after, reading.upto))
        settings = self.source.tables_wanted.settings_of(str(history[-1][1].table))
        policy = settings.schema_changes
        shown = self._versions.schema_at(str(oid), entry.snapshot_position) if policy == "ignore" else None
        return PgRange(
            reading.after,
            reading.upto,
            history,
            shown=shown,
            stops_at=first_change(reading, history, self._schemas.recopies.get(oid)) if policy == "stop" else None,
            skips=entry.skips,
            truncates=settings.truncate == "apply",
        )

    def stop(self) -> None:
        self._close_snapshot()
        if self._opening is not None:
            self._opening.abandon()
        self._journal.close()
        self._receiver.stop()
        self._journal.close()
