"""The driver half of the Postgres source: how far the next batch goes, and how it is split."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.change import START, Position
from tailrace.errors import LostError, UnavailableError, revive
from tailrace.journal import Cursor, FrameRef, JournalReader
from tailrace.schema import TableSchema
from tailrace.source import Limit, Offset, Orders, Split
from tailrace.source.postgres.catalog import Published
from tailrace.source.postgres.connection import session
from tailrace.source.postgres.copy import Opening, Round, copy_split, measure_heaps
from tailrace.source.postgres.framing import FrameMeta
from tailrace.source.postgres.lsn import before
from tailrace.source.postgres.offset import Entry, LogOffset, Reading, chunks, readings
from tailrace.source.postgres.receiver import JOURNAL_BUSY, RESYNC, read_status
from tailrace.source.postgres.slot import beat, server_position

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource

PAGE_BYTES = 8192
SPLIT_BYTES = 4 * 1024 * 1024
"""A task is worth its start from about this much of the log on."""
MOST_SPLIT_BYTES = 12 * 1024 * 1024
"""What one split holds is decoded at once, so a huge transaction is many of them."""
TAKE_OVER_SECONDS = 1.0
GATHER_SECONDS = 5.0
"""How long the first changes of a backlog wait for a batch to fill up."""
STEP_ASIDE_BYTES = 64 * 1024 * 1024
"""After this much log that concerns no table, the offset moves on so that the journal may forget it."""


@dataclass(frozen=True)
class LogSplit(Split):
    """Some journal frames and the tables wanted of them. `after` limits tables that start inside a frame."""

    frames: tuple[FrameRef, ...] = ()
    tables: Mapping[int, TableSchema] = field(default_factory=dict)
    after: Mapping[int, Position] = field(default_factory=dict)
    upto: Mapping[int, Position] = field(default_factory=dict)

    def only(self, tables: Collection[str]) -> LogSplit:
        kept = {oid: schema for oid, schema in self.tables.items() if str(schema.table) in tables}
        frames = tuple(ref for ref in self.frames if not kept.keys().isdisjoint(FrameMeta.from_bytes(ref.meta).rows))
        return replace(super().only(tables), tables=kept, frames=frames)


class PostgresFollower:
    """Owns the receiver process and the copy's snapshot; everything durable is in the journal and the offsets."""

    def __init__(self, source: PostgresSource, published: Mapping[int, Published]) -> None:
        self.source = source
        self.published = published
        self._journal = JournalReader(Path(source.journal))
        self._receiver = ReceiverProcess(source)
        self._round: Round | None = None
        self._opening: Opening | None = None
        self._gathers_since: float | None = None

    def start(self) -> Offset:
        cursor = Cursor(self.source.journal, self.source.reader)
        if cursor.position == START:
            # From now on nothing behind the mark goes before this reader has passed it.
            cursor.advance(self._journal.mark())
        # Spark asks again when it repeats the very first batch, which must begin where it began.
        return LogOffset(cursor.position).to_json()

    def target(self) -> Offset:
        with session(self.source.dsn, "asking for the server's position") as connection:
            if self.source.heartbeat_seconds is not None:
                # What is flushed may end within a record, which no reader gets to the end of before the next commit.
                beat(connection)
            return LogOffset(before(server_position(connection))).to_json()

    def done(self, start: Offset, target: Offset) -> bool:
        now = LogOffset.from_json(start)
        goal = LogOffset.from_json(target).log
        if set(now.tables) != set(self.published) or now.within("copy", "catchup"):
            return False
        if now.log >= goal:
            return True
        self._journal.refresh()
        return self._journal.mark() >= goal and not self._journal.frames(now.log, goal)

    def latest(self, start: Offset, limit: Limit, orders: Orders) -> Offset:
        self._receiver.require_alive()
        self._journal.refresh()
        now = LogOffset.from_json(start)
        if now.log > self._journal.mark():
            raise LostError("the journal ends before the position that was already applied: it was lost", fix=RESYNC)
        now = _stop(now, orders)
        end = self._read_log(now, limit)
        end = self._copy(now, end, limit, orders)
        if end.tables == LogOffset.from_json(start).tables and (self._gathers(end) or not self._concerns(now, end)):
            return start
        return end.to_json()

    # -- the log ------------------------------------------------------------------------------------------

    def _read_log(self, now: LogOffset, limit: Limit) -> LogOffset:
        """Ready tables move to the new common position; the tables behind it move towards it together.

        Together, because they read the same stretch of the log: it is paid for once, however many they are.
        """
        ready, behind = frozenset(now.within("ready")), now.within("catchup")
        # Up to the mark the journal is known to be whole, changes or not.
        head = max(self._journal.head(), self._journal.mark())
        # A busy log must not keep those behind it from ever meeting it.
        share = Limit(max(limit.rows // 2, 1), max(limit.bytes // 2, 1)) if behind else limit
        log = self._take(now.log, head, ready, share)
        # Those that were copied at a later position than the log has reached wait for it.
        late = {oid: entry.at for oid, entry in behind.items() if entry.at is not None and entry.at <= log}
        if not late:
            return replace(now, log=log)
        reached = self._take(min(late.values()), log, frozenset(late), share)
        changed = {
            oid: Entry("ready", request=behind[oid].request) if reached >= log else replace(behind[oid], at=reached)
            for oid, at in late.items()
            if at <= reached
        }
        return replace(now.with_tables(changed), log=log)

    def _take(self, after: Position, upto: Position, wanted: frozenset[int], limit: Limit) -> Position:
        """The furthest commit boundary in (after, upto] within the limit.

        The first transaction is taken whatever its size: a batch must make progress.
        """
        if not wanted or upto <= after:
            return max(after, upto)
        refs = self._journal.frames(after, upto, rows=limit.rows, size=limit.bytes)
        full = sum(ref.count for ref in refs) >= limit.rows or sum(ref.length for ref in refs) >= limit.bytes
        return refs[-1].last if refs and full else upto

    def _gathers(self, end: LogOffset) -> bool:
        """Whether to wait for more of a backlog: one large batch costs less than a small one and the rest."""
        full = end.log < self._journal.head()
        if full or read_status(Path(self.source.journal)).get("gear") != "backlog":
            self._gathers_since = None
            return False
        self._gathers_since = self._gathers_since or time.monotonic()
        return time.monotonic() - self._gathers_since < GATHER_SECONDS

    def _concerns(self, now: LogOffset, end: LogOffset) -> bool:
        """Whether the step holds changes of a table we keep, or enough foreign log to be worth passing over."""
        if end.log <= now.log:
            return False
        if end.log < self._journal.head():
            return True  # a full batch
        frames = self._journal.frames(now.log, end.log)
        ready = now.within("ready")
        if any(oid in ready for ref in frames for oid in FrameMeta.from_bytes(ref.meta).rows):
            return True
        return sum(ref.length for ref in frames) > STEP_ASIDE_BYTES

    # -- the copy -----------------------------------------------------------------------------------------

    def _copy(self, now: LogOffset, end: LogOffset, limit: Limit, orders: Orders) -> LogOffset:
        resync = {int(oid): request for oid, request in orders.resync.items()}
        new = {
            oid: resync.get(oid, 0)
            for oid in self.published
            if oid not in now.tables or now.tables[oid].request < resync.get(oid, 0)
        }
        copying = {oid: entry for oid, entry in now.within("copy").items() if oid not in new}
        if not new and not copying:
            self._close_round()
            return end
        round_ = self._open_round()
        if round_ is None:
            return end
        if new:
            # A copy begins with the table as it is now, not as it was when this process started.
            self.published = self.source.discover()
        changed: dict[int, Entry] = {oid: self._begin(oid, round_, request) for oid, request in new.items()}
        budget = limit.bytes
        for oid, entry in sorted({**copying, **changed}.items()):
            keyed = bool(self.published[oid].schema.key)
            if not keyed and entry.x != round_.x:
                # Without a key a row of a newer snapshot cannot be told from its own insert in the log.
                entry = self._begin(oid, round_, entry.request)
            read = entry.next == entry.chunks
            take = min(entry.chunks - entry.next, max(1, budget // self.source.chunk_bytes)) if budget > 0 else 0
            budget -= take * self.source.chunk_bytes
            entry = replace(entry, next=entry.next + take)
            # A keyless table waits for the next batch, which shows that these chunks were read under this round.
            if entry.next == entry.chunks and (keyed or read):
                entry = replace(entry, phase="catchup", at=before(entry.x))
            changed[oid] = entry
        return end.with_tables(changed)

    def _begin(self, oid: int, round_: Round, request: int) -> Entry:
        pages = self.source.chunk_bytes // PAGE_BYTES
        parts = {heap: max(1, math.ceil(size / pages)) for heap, size in measure_heaps(self.source.dsn, oid).items()}
        return Entry("copy", x=round_.x, parts=parts, request=request)

    def _open_round(self, patience_seconds: float = 0.05) -> Round | None:
        if self._round is None:
            self._opening = self._opening or Opening(self.source.dsn)
            self._round = self._opening.wait(patience_seconds)
            if self._round is not None:
                self._opening = None
        return self._round

    def _close_round(self) -> None:
        if self._round is not None:
            self._round.close()
            self._round = None

    # -- splitting ----------------------------------------------------------------------------------------

    def plan(self, start: Offset, end: Offset) -> list[Split]:
        now, then = LogOffset.from_json(start), LogOffset.from_json(end)
        return [*self._plan_copy(now, then), *self._plan_log(readings(now, then))]

    def _plan_copy(self, now: LogOffset, then: LogOffset) -> list[Split]:
        splits: list[Split] = []
        for oid, entry in then.tables.items():
            wanted = entry.chunks_since(now.tables.get(oid))
            if not wanted or oid not in self.published:
                continue
            round_ = self._wait_for_round()
            published = self.published[oid]
            if not published.schema.key and entry.x != round_.x:
                continue  # `latest` starts this table's copy over under the new snapshot
            pages = self.source.chunk_bytes // PAGE_BYTES
            splits += [
                copy_split(published.schema, chunk, pages, round_, entry.x, published.row_filter)
                for chunk in chunks(entry, wanted)
            ]
        return splits

    def _wait_for_round(self) -> Round:
        while (round_ := self._open_round(1.0)) is None:
            self._receiver.require_alive()
        return round_

    def _plan_log(self, ranges: Mapping[int, Reading]) -> list[Split]:
        if not ranges:
            return []
        self._journal.refresh()
        wanted = {oid: reading for oid, reading in ranges.items() if oid in self.published}
        if not wanted:
            return []
        refs = self._journal.frames(
            min(reading.after for reading in wanted.values()), max(reading.upto for reading in wanted.values())
        )
        concerned = [ref for ref in refs if self._wanted_of(ref, wanted)]
        size = sum(ref.length for ref in concerned)
        share = min(max(SPLIT_BYTES, math.ceil(size / (2 * self.source.parallel))), MOST_SPLIT_BYTES)
        splits: list[Split] = []
        group: list[FrameRef] = []
        for ref in concerned:
            group.append(ref)
            if sum(each.length for each in group) >= share:
                splits.append(self._log_split(group, wanted))
                group = []
        if group:
            splits.append(self._log_split(group, wanted))
        return splits

    @staticmethod
    def _wanted_of(ref: FrameRef, wanted: Mapping[int, Reading]) -> set[int]:
        return {
            oid
            for oid in FrameMeta.from_bytes(ref.meta).rows
            if oid in wanted and ref.last > wanted[oid].after and ref.first <= wanted[oid].upto
        }

    def _log_split(self, group: list[FrameRef], wanted: Mapping[int, Reading]) -> LogSplit:
        oids = sorted(set().union(*(self._wanted_of(ref, wanted) for ref in group)))
        weights: dict[str, int] = {}
        for ref in group:
            rows = FrameMeta.from_bytes(ref.meta).rows
            for oid in self._wanted_of(ref, wanted):
                name = str(self.published[oid].schema.table)
                weights[name] = weights.get(name, 0) + ref.length * rows[oid] // max(ref.count, 1)
        return LogSplit(
            weights=weights,
            frames=tuple(group),
            tables={oid: self.published[oid].schema for oid in oids},
            after={oid: wanted[oid].after for oid in oids},
            upto={oid: wanted[oid].upto for oid in oids},
        )

    def stop(self) -> None:
        self._close_round()
        if self._opening is not None:
            self._opening.abandon()
        self._receiver.stop()


def _stop(now: LogOffset, orders: Orders) -> LogOffset:
    """Tables in error stay where they failed, until they are copied anew or told to go on."""
    stopped = {}
    for upstream_id, resume in orders.stopped.items():
        entry = now.tables.get(int(upstream_id))
        if entry is not None and entry.phase != "stopped" and upstream_id not in orders.resync:
            at = Position.parse(resume) if resume else entry.position(now.log)
            stopped[int(upstream_id)] = replace(entry, phase="stopped", at=at)
    return now.with_tables(stopped)


class ReceiverProcess:
    """The receiver as a child. It ends with its owner: its standard input is a pipe that only the owner holds."""

    def __init__(self, source: PostgresSource) -> None:
        self._journal = Path(source.journal)
        self._source = source
        self._started = time.time()
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[str]:
        with (self._journal / "receiver.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.source.postgres"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
            )
        assert process.stdin is not None
        process.stdin.write(self._source.receiver_options().to_json() + "\n")
        process.stdin.flush()
        return process

    def require_alive(self) -> None:
        """Raises the error that ended the receiver, if it has ended."""
        code = self._process.poll()
        if code is None:
            return
        if code == JOURNAL_BUSY:
            # Whoever receives into this journal serves us too; should it end, the next attempt takes over.
            if time.time() - self._started > TAKE_OVER_SECONDS:
                self._started = time.time()
                self._process = self._spawn()
            return
        status = read_status(self._journal)
        error = status.get("error") if status.get("at", 0) >= self._started else None
        if error:
            raise revive(error)
        raise UnavailableError(f"the receiver ended with code {code}; its log is {self._journal / 'receiver.log'}")

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
