"""The driver half of the SlateDB source: how far the next batch goes, and how it is split."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tailrace.errors import RESYNC, LostError
from tailrace.model.change import Position
from tailrace.model.schema import TableSchema
from tailrace.source.follower import Follower, Limit, Offset, SchemaVersions, TableDirectives
from tailrace.source.offset import bounded, halved
from tailrace.source.slatedb.copy import SlateDbCopySplit, SlateDbSnapshot, delete_leftovers, range_of
from tailrace.source.slatedb.expiry_index import ExpiryIndex
from tailrace.source.slatedb.log_split import ExpirySplit, WalRange, WalSplit
from tailrace.source.slatedb.object_store import CollectedError
from tailrace.source.slatedb.offset import (
    NOWHERE,
    ExpiringRange,
    SlateDbOffset,
    SlateDbTableOffset,
    WalPoint,
    wal_ranges,
)
from tailrace.source.slatedb.preflight import Watch
from tailrace.source.slatedb.wal import (
    Measure,
    WalLog,
    WalWitness,
    find_tail,
    find_witness,
    oldest_at,
    read_head,
    require_witness,
    wal_point_at,
    wal_point_before,
)
from tailrace.source.slatedb.wal_archive import WalArchive, archived_bytes
from tailrace.source.slatedb.wal_buffer import BufferedLog
from tailrace.source.split import Split
from tailrace.system.backoff import Backoff

if TYPE_CHECKING:
    from tailrace.source.slatedb.source import SlateDbSource

log = logging.getLogger(__name__)

COPY_RETRIES = Backoff((10.0,), longest_seconds=1800.0, factor=3.0)
EXPIRY_SECONDS = 1.0
"""How often a batch may consist only of rows that expire."""
BYPASS_SECONDS = 10.0
SPLIT_BYTES = 8 << 20
"""The size of one split, which is read in one go."""
_RANGE_BYTES = 64 << 20
_RANGES_PER_BATCH = 2 * (os.cpu_count() or 1)


def read_clock() -> int:
    """Now, in milliseconds."""
    return int(time.time() * 1000)


class CopyAttempt:
    """How often the copy of a table failed because its log was deleted meanwhile, and when it may begin again."""

    def __init__(self) -> None:
        self.failures = 0
        self.is_running = False
        self._due = -math.inf

    def fail(self) -> None:
        self.failures += 1
        self.is_running = False
        self._due = time.monotonic() + COPY_RETRIES.delay(self.failures)

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._due - time.monotonic())


class SlateDbFollower(Follower):
    """Owns the copy's checkpoint and, with `keep_wal`, the thread that copies WAL files."""

    def __init__(self, source: SlateDbSource, versions: SchemaVersions) -> None:
        self.source = source
        self._versions = versions
        self._rules = {rule.name: rule for rule in source.followed}
        self._indexes = {name: ExpiryIndex(source.expiry_folder, name) for name in self._rules}
        self._measure = Measure()
        self._watch = Watch(source.status_file, None if source.keep_wal else source.options.min_age)
        self._snapshot: SlateDbSnapshot | None = None
        self._log: WalLog | None = None
        self._more = self._is_same = self._is_past_gap = False
        self._attempts: dict[str, CopyAttempt] = {}
        self._tail = 0
        self._goal: int | None = None
        self._looked = self._expired = self._bypass = -math.inf
        delete_leftovers(source.database, source.checkpoint_name)

    def start(self) -> Offset:
        return SlateDbOffset(NOWHERE).to_json()

    def target(self) -> Offset:
        head = read_head(self.source.database)
        self._goal = find_tail(self.source.database, head.flushed)
        return SlateDbOffset(WalPoint(self._goal, head.seq)).to_json()

    def done(self, start: Offset, target: Offset) -> bool:
        now, goal = SlateDbOffset.from_json(start), SlateDbOffset.from_json(target)
        if set(now.tables) != set(self._rules) or now.within("init", "copy", "catchup"):
            return False
        done = now.log.wal >= goal.log.wal or not now.within("ready")
        if done:
            self._goal = None
        return done

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        before = SlateDbOffset.from_json(start)
        now = self._enrol(before.apply_directives(directives, self._place))
        # A table that is new here may have been stopped before its first batch.
        now = now.apply_directives(directives, self._place)
        waiting = any(self._attempts[name].seconds_left > 0 for name in now.within("init") if name in self._attempts)
        copying = now.within("init", "copy", "catchup") and not waiting
        busy = self._more or now != before or copying or directives.resync
        if not busy and time.monotonic() - self._looked < self.source.options.poll:
            return start
        self._looked = time.monotonic()
        self._require_same(before)
        self._buffer(now)
        end = self._read_log(now, limit, directives)
        end = self._copy(end, directives)
        end = self._expire(now, end)
        if end.log != before.log:
            end = replace(end, witness=find_witness(self._open_log(), end.log.wal))
        self._show(before)
        idle = end.tables == before.tables and (end.log == before.log or not now.within("ready"))
        return start if idle else end.to_json()

    def _require_same(self, now: SlateDbOffset) -> None:
        """Once: raise LostError when the database is not the one that was read, or an earlier copy of it."""
        if not self._is_same and now.witness is not None:
            require_witness(self.source.database, WalWitness(*now.witness))
        self._is_same = True

    # -- which tables -------------------------------------------------------------------------------------

    def _place(self, resume: str, reached: WalPoint) -> WalPoint | None:
        """Where a table that failed continues: after the position it had before; None when that is lost."""
        seq = Position.parse(resume).commit
        if seq >= reached.seq:
            return reached
        try:
            return wal_point_before(self._open_log(), seq, reached.wal)
        except CollectedError:
            return None

    def _enrol(self, now: SlateDbOffset) -> SlateDbOffset:
        now = now.only(self._rules)
        for name in now.tables:
            known = self._versions.schema_at(name)
            if known is not None and known.columns != self._rules[name].schema.columns:
                self._versions.put_schema(self._rules[name].schema, now.log.position)
        return now.with_tables({name: SlateDbTableOffset("init") for name in self._rules if name not in now.tables})

    def _name_of(self, name: str) -> str:
        return str(self._schema(name).table)

    def _schema(self, name: str) -> TableSchema:
        schema = self._versions.schema_at(name)
        return schema if schema is not None else self._rules[name].schema

    # -- the log ------------------------------------------------------------------------------------------

    def _open_log(self) -> WalLog:
        if self._log is None:
            database, folder = self.source.database, self.source.keep_wal
            poll = self.source.options.poll
            if folder is None:
                self._log = BufferedLog(database, self.source.wal_buffer, self.source.options.copy_buffer, poll)
            else:
                flushed, past = read_head(database).flushed, self._is_past_gap
                self._log = WalArchive(database, folder, flushed, poll, is_past_gap=past)
        return self._log

    def _read_log(self, now: SlateDbOffset, limit: Limit, directives: TableDirectives) -> SlateDbOffset:
        """Move ready tables to the new common position, and tables that lag together towards it."""
        lagging = now.within("catchup")
        share = halved(limit) if lagging else limit
        try:
            log = self._advance(now, share)
        except CollectedError as error:
            now = self._give_up(now, now.within("ready", "catchup", "copy"), directives, error)
            return replace(now, log=self._jump(now.log))
        late = {name: entry.at for name, entry in lagging.items() if entry.at is not None and entry.at.wal <= log.wal}
        if not late:
            return replace(now, log=log)
        try:
            # `tail` raises if the next file is gone. With `keep_wal` it ends at the last file copied so far.
            there = self._open_log().tail(min(late.values()).wal)
            reached = self._take(min(late.values()), min(log.wal, there), share)
        except CollectedError as error:
            return replace(self._give_up(now, lagging, directives, error), log=log)
        changed = {
            name: lagging[name].join()
            if reached.wal >= log.wal
            else replace(lagging[name], at=WalPoint(reached.wal, max(reached.seq, at.seq)))
            for name, at in late.items()
            if at.wal <= reached.wal
        }
        return replace(now.with_tables(changed), log=log)

    def _advance(self, now: SlateDbOffset, limit: Limit) -> WalPoint:
        if now.log == NOWHERE:
            return self._jump(now.log)
        read = bool(now.within("ready"))
        try:
            self._tail = max(now.log.wal, self._open_log().tail(now.log.wal))
        except CollectedError:
            if read:
                raise
            return self._jump(now.log)
        self._require_log(now)
        copied = (entry.place(now.log).wal for entry in now.within("copy", "catchup").values())
        end = max(now.log.wal, bounded(self._tail, self._goal, copied))
        if not read:
            return wal_point_at(self._open_log(), self._measure, now.log, end)
        log = self._take(now.log, end, limit)
        self._more = log.wal < end
        return log

    def _jump(self, log: WalPoint) -> WalPoint:
        """The end of the log, when no table needs what is before it."""
        self._open_log()
        head = read_head(self.source.database)
        if log.wal > find_tail(self.source.database, head.flushed):
            raise LostError(
                f"the WAL ends before file {log.wal}, which was already read: this is another database",
                fix="tailrace reset FILE; the next run copies every table again",
            )
        after = max(log, WalPoint(head.flushed, head.seq))
        self._tail = max(after.wal, self._open_log().tail(after.wal))
        self._more = False
        return wal_point_at(self._open_log(), self._measure, after, self._tail)

    def _take(self, after: WalPoint, upto: int, limit: Limit) -> WalPoint:
        """The furthest file in (after, upto] within the limit, estimated from the sizes seen so far."""
        if upto <= after.wal:
            return after
        if self._measure.is_unknown:
            self._measure.add(self._open_log().summary(after.wal + 1))
        last = min(upto, after.wal + self._measure.files_within(limit))
        return wal_point_at(self._open_log(), self._measure, after, last)

    def _require_log(self, now: SlateDbOffset) -> None:
        """Raise LostError when rows were written without the WAL, or the WAL is that of another database."""
        if self._tail > now.log.wal or time.monotonic() - self._bypass < BYPASS_SECONDS:
            return
        self._bypass = time.monotonic()
        head = read_head(self.source.database)
        if find_tail(self.source.database, head.flushed) < now.log.wal:
            self._jump(now.log)
        if head.seq > now.log.seq and head.flushed <= now.log.wal:
            raise LostError(
                "SlateDB holds newer rows than its WAL: it was opened with wal_enabled=false",
                fix=f"open the database with wal_enabled=true, then {RESYNC}",
            )

    def _give_up(
        self,
        now: SlateDbOffset,
        needy: Mapping[str, SlateDbTableOffset],
        directives: TableDirectives,
        error: CollectedError,
    ) -> SlateDbOffset:
        """Make tables that need a lost file wait for a new copy, if allowed. Raises LostError otherwise."""
        stuck = [name for name in needy if name not in directives.resync]
        if stuck and self.source.options.on_collected == "stop":
            raise LostError(
                f"{error.message}: changes of {', '.join(stuck)} are lost, and only a new snapshot helps",
                fix="re-snapshot: "
                + " && ".join(f"tailrace resync FILE {name}" for name in map(self._name_of, stuck))
                + ", or set on_collected: resnapshot; a larger min_age of the writer's garbage collector, or keep_wal,"
                " prevents it",
            ) from error
        if self.source.keep_wal is not None and self._log is not None:
            # The kept files end before the gap; the next ones are copied from where the new snapshot will be.
            self._log.stop()
            self._log = None
            self._is_past_gap = True
        return now.with_tables({name: entry.recopy() for name, entry in needy.items()})

    # -- the copy -----------------------------------------------------------------------------------------

    def _copy(self, end: SlateDbOffset, directives: TableDirectives) -> SlateDbOffset:
        new = self._begin_due(end, end.due(directives), directives)
        if not new and not end.within("copy"):
            self._close_snapshot()
            if not end.within("catchup"):
                self._open_log().release()
            return end
        snapshot = self._open_snapshot()
        if new:
            self._open_log().hold(snapshot.snapshot_position.wal)
        begun: dict[str, SlateDbTableOffset] = {}
        for name, entry in new.items():
            rule = self._rules[name]
            self._versions.put_schema(rule.schema, snapshot.snapshot_position.position)
            begun[name] = SlateDbTableOffset(
                "copy",
                snapshot_position=snapshot.snapshot_position,
                cuts=() if rule.changelog else snapshot.cuts(rule, _RANGE_BYTES),
                clock=read_clock(),
                copy=end.copies + len(begun) + 1,
                request=entry.request,
            )
        return replace(end.copy_on(begun, _RANGES_PER_BATCH, 1), copies=end.copies + len(begun))

    def _buffer(self, now: SlateDbOffset) -> None:
        """Go on keeping the log of tables that an earlier process was copying."""
        behind = [entry.place(now.log).wal for entry in now.within("copy", "catchup").values()]
        if behind and self.source.keep_wal is None:
            self._open_log().hold(min(behind))

    def _begin_due(
        self, end: SlateDbOffset, new: Mapping[str, SlateDbTableOffset], directives: TableDirectives
    ) -> dict[str, SlateDbTableOffset]:
        """Those of the tables whose copy may begin now: one that lost its log waits before it tries again."""
        for name, entry in end.tables.items():
            attempt = self._attempts.setdefault(name, CopyAttempt())
            requested = entry.request < directives.resync.get(name, 0)
            if entry.phase == "ready" or requested:
                self._attempts[name] = CopyAttempt()
            elif entry.phase == "init" and attempt.is_running:
                attempt.fail()
                log.warning(
                    "the copy of %s took longer than SlateDB keeps WAL files and starts again in %.0f s (attempt %d);"
                    " raise min_age of the writer's WAL garbage collection, copy_buffer, or set keep_wal",
                    self._name_of(name),
                    attempt.seconds_left,
                    attempt.failures + 1,
                )
        begun = {name: entry for name, entry in new.items() if self._attempts[name].seconds_left <= 0}
        for name in begun:
            self._attempts[name].is_running = True
        return begun

    def _open_snapshot(self) -> SlateDbSnapshot:
        if self._snapshot is None:
            self._snapshot = SlateDbSnapshot(self.source.database, self.source.checkpoint_name)
        self._snapshot.keep_alive()
        return self._snapshot

    def _close_snapshot(self) -> None:
        if self._snapshot is not None:
            snapshot, self._snapshot = self._snapshot, None
            snapshot.close()

    # -- time ---------------------------------------------------------------------------------------------

    def _expire(self, now: SlateDbOffset, end: SlateDbOffset) -> SlateDbOffset:
        """Move the clock of tables that read the log, and of those with rows that are due."""
        clock = read_clock()
        patient = time.monotonic() - self._expired < EXPIRY_SECONDS
        changed: dict[str, SlateDbTableOffset] = {}
        for name, entry in end.within("ready", "catchup").items():
            was = now.tables.get(name)
            if was is None or was.copy != entry.copy or was.phase not in ("ready", "catchup"):
                continue
            moved = entry.place(end.log) != was.place(now.log)
            if not self._rules[name].expires or clock <= entry.clock:
                continue
            if moved or (not patient and self._indexes[name].is_due(entry.clock, clock)):
                changed[name] = replace(entry, clock=clock)
        if changed:
            self._expired = time.monotonic()
        return end.with_tables(changed)

    def _show(self, now: SlateDbOffset) -> None:
        if not self._watch.is_due:
            return
        folder = self.source.keep_wal
        kept = self._open_log().kept(now.low_water.wal)
        oldest = oldest_at(self._open_log(), kept, self._tail) if now.tables and not folder else None
        retries = {self._name_of(name): one for name, one in self._attempts.items() if one.failures}
        self._watch.write(now, self._tail, oldest, archived_bytes(folder or self.source.wal_buffer) or None, retries)

    # -- splitting ----------------------------------------------------------------------------------------

    def plan(self, start: Offset, end: Offset) -> list[Split]:
        now, then = SlateDbOffset.from_json(start), SlateDbOffset.from_json(end)
        wanted = {name: one for name, one in wal_ranges(now, then).items() if name in self._rules}
        return [*self._plan_copy(now, then), *self._plan_expiry(wanted), *self._plan_log(wanted, then)]

    def _plan_copy(self, now: SlateDbOffset, then: SlateDbOffset) -> list[Split]:
        splits: list[Split] = []
        for name, entry in then.tables.items():
            wanted = entry.chunks_since(now.tables.get(name))
            if not wanted or name not in self._rules:
                continue
            # After a restart the rest is copied from another checkpoint; the log from x on makes both consistent.
            snapshot = self._open_snapshot()
            for index in wanted:
                low, high = range_of(self._rules[name], entry.cuts, index)
                splits.append(
                    SlateDbCopySplit(
                        copies=self._schema(name),
                        starts=wanted.start == 0,
                        completes=entry.next == entry.chunks,
                        checkpoint=snapshot.checkpoint,
                        snapshot_position=entry.snapshot_position,
                        copy=entry.copy,
                        index=index,
                        low=low,
                        high=high,
                        clock=entry.clock,
                    )
                )
        return splits

    def _plan_expiry(self, wanted: Mapping[str, ExpiringRange]) -> list[Split]:
        return [
            ExpirySplit(
                weights={name: 1},
                schemas={name: self._schema(name)},
                table=self._schema(name),
                since=one.since,
                clock=one.clock,
            )
            for name, one in wanted.items()
            if self._indexes[name].is_due(one.since, one.clock)
        ]

    def _plan_log(self, wanted: Mapping[str, ExpiringRange], then: SlateDbOffset) -> list[Split]:
        log = {
            name: WalRange(self._schema(name), one.after, one.upto, one.clock, then.tables[name].skips)
            for name, one in wanted.items()
            if one.upto.wal > one.after.wal
        }
        if not log:
            return []
        first = min(one.after.wal for one in log.values()) + 1
        last = max(one.upto.wal for one in log.values())
        size = self._measure.file_bytes
        files = max(1, min(SPLIT_BYTES // size, math.ceil((last - first + 1) / _RANGES_PER_BATCH)))
        splits: list[Split] = []
        for begin in range(first, last + 1, files):
            end = min(last, begin + files - 1)
            own = {name: one for name, one in log.items() if one.after.wal < end and one.upto.wal >= begin}
            if not own:
                continue
            # No table needs the files between one that lags and the others, and they may be gone.
            begin = max(begin, min(one.after.wal for one in own.values()) + 1)
            end = min(end, max(one.upto.wal for one in own.values()))
            whole = size * (end - begin + 1)
            splits.append(
                WalSplit(
                    weights={name: max(1, whole // len(own)) for name in own},
                    schemas={name: one.schema for name, one in own.items()},
                    first=begin,
                    last=end,
                    ranges=own,
                    bytes=whole,
                    readers=len(own),
                )
            )
        return splits

    def stop(self) -> None:
        self._close_snapshot()
        if self._log is not None:
            self._log.stop()
            self._log = None
