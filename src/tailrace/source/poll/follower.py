"""The driver half of a polled source: what the next step reads of each table."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tailrace.errors import TableError, UnavailableError
from tailrace.model.change import Position, end_of
from tailrace.source.copy_share import CopyNeed, least_size, share_chunks
from tailrace.source.follower import Follower, Limit, Offset, SchemaVersions, TableDirectives
from tailrace.source.offset import apply_directives
from tailrace.source.poll.connector import ConnectorSession, Polled, has_unknown_past
from tailrace.source.poll.discovery import PollDiscovery, select_tables
from tailrace.source.poll.key_snapshot import Hashes, KeySnapshot, last_step
from tailrace.source.poll.keyset import START, Keyset
from tailrace.source.poll.offset import PollOffset, PollTableOffset, StepRead
from tailrace.source.poll.plan import Planner
from tailrace.source.poll.probe import ForeignMarkError, Height, Probe, ProbeResult, SettledClock, SettledTime
from tailrace.source.poll.schedule import PollSchedule
from tailrace.source.split import Split

if TYPE_CHECKING:
    from tailrace.source.poll.source import PollSource

DISCOVERY_SECONDS = 5.0

log = logging.getLogger(__name__)


@dataclass
class PollCache:
    """What earlier polls of a table found, at one step. If it is lost, the table is polled again.

    `floors`: everything up to here was emitted; may be further than the offset's marks. `seen` are the rows of the last
    window.
    """

    step: int
    floors: dict[str, Keyset]
    seen: Hashes
    heights: dict[str, tuple[Height, ...]] = field(default_factory=dict)


class PollFollower(Follower):
    """Queries the database and decides; everything durable is in the offsets, the versions and the state folder."""

    def __init__(self, source: PollSource, versions: SchemaVersions) -> None:
        self.source = source
        self._versions = versions
        self._opened = ExitStack()
        self._session: ConnectorSession | None = None
        self._discovery = PollDiscovery({}, {}, [])
        self._called: float | None = None
        self._recorded: int | None = None
        self._settled_clock: SettledClock | None = None
        self._target: float | None = None
        self._cache: dict[str, PollCache] = {}
        self._sizes: dict[str, int] = {}
        self._schedule = PollSchedule(
            source.folder / "schedule.json", source.options.interval, source.options.idle_interval
        )

    def start(self) -> Offset:
        return PollOffset().to_json()

    def target(self) -> Offset:
        self._discover(at_once=True)
        self._target = time.monotonic()
        return PollOffset(clock=(round(self._target * 1e6), 0)).to_json()

    def done(self, start: Offset, target: Offset) -> bool:
        now, since = PollOffset.from_json(start), PollOffset.from_json(target).clock[0] / 1e6
        if now.damaged or now.tables.keys() - self._discovery.unfit.keys() != self._discovery.tables.keys():
            return False
        done = all(
            entry.phase == "stopped"
            or (entry.phase == "ready" and self._schedule.is_idle(each, since) and not self._is_diff_due(each))
            for each, entry in now.tables.items()
        )
        if done:
            self._target = None
            self._schedule.save()
        return done

    def latest(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        try:
            self._discover()
            return self._advance(start, limit, directives)
        except UnavailableError:
            self._disconnect()
            raise

    def _advance(self, start: Offset, limit: Limit, directives: TableDirectives) -> Offset:
        given = PollOffset.from_json(start)
        if self._recorded is None:
            self._recorded = last_step(self.source.folder)
        # Without its offset, or with an older one, a step must not be taken for one that left files under its number.
        now = replace(given, step=max(given.step, self._recorded))
        now = self._enrol(self._apply_directives(now, directives), directives.paused)
        # A table that is new here may have been stopped before its first batch.
        now = self._apply_directives(now, directives)
        due = self._select(now, directives)
        view = self._read_clock(now) if due else None
        changed = self._read(due, view, now.step + 1, limit) if view is not None else {}
        tables = {**now.tables, **changed}
        if tables == given.tables and not given.damaged:
            return start
        clock = (view.now, time.time_ns() // 1000) if view is not None else now.clock
        return PollOffset(now.step + 1, clock, tables).to_json()

    def plan(self, start: Offset, end: Offset) -> list[Split]:
        self._discover()
        unfit = {each: table for each, (table, _) in self._discovery.unfit.items()}
        return Planner(self.source, {**unfit, **self._discovery.tables}, self._versions).plan(PollOffset.from_json(end))

    def idle_seconds(self, without: Collection[str] = ()) -> float:
        """How long no table, `without` some, is due. Never longer than a few seconds: new tables are looked for."""
        tables = [each for each in self._discovery.tables if each not in without]
        return min(DISCOVERY_SECONDS, self._schedule.seconds_until_due(tables))

    def stop(self) -> None:
        self._schedule.save()
        self._disconnect()

    # -- the database -------------------------------------------------------------------------------------

    def _connect(self) -> ConnectorSession:
        if self._session is None:
            self._session = self._opened.enter_context(self.source.connector().open())
        return self._session

    def _disconnect(self) -> None:
        self._session = None
        self._opened.close()

    def _discover(self, *, at_once: bool = False) -> None:
        """List the tables now and then. Those that cannot be followed are logged once, and left out."""
        if not at_once and self._called is not None and time.monotonic() - self._called < DISCOVERY_SECONDS:
            return
        discovery = select_tables(self._connect().tables(), self.source.context.tables)
        self._called = time.monotonic()
        for finding in discovery.findings:
            if finding not in self._discovery.findings:
                log.warning("%s is not followed: %s", finding.subject, finding.message)
        self._discovery = discovery

    def _read_clock(self, now: PollOffset) -> SettledTime:
        self._settled_clock = self._settled_clock or SettledClock(self.source.look_back_us, now.clock)
        view = self._settled_clock.read(self._connect().clock())
        if view.rewound is not None:
            log.warning("the database's clock was set back: rows written since then are read again")
        return view

    # -- which tables -------------------------------------------------------------------------------------

    def _apply_directives(self, now: PollOffset, directives: TableDirectives) -> PollOffset:
        """Tables in error or paused keep their position until a directive resumes them or copies them again."""
        tables = {
            each: apply_directives(
                entry, each, directives, reached=entry.step, place_of=lambda text, _: Position.parse(text).commit
            )
            for each, entry in now.tables.items()
        }
        for each, entry in tables.items():
            if entry.phase == "stopped" and entry.step < now.tables[each].step:
                KeySnapshot.of(str(self.source.folder), each).forget(entry.step)
        return now.with_tables(tables)

    def _enrol(self, now: PollOffset, paused: Collection[str]) -> PollOffset:
        """Remove tables that are gone, add new ones that wait for their copy, and handle unusable watermarks."""
        tables: dict[str, PollTableOffset] = {}
        for each, table in self._discovery.tables.items():
            entry = now.tables.get(each)
            if entry is None and each in now.damaged:
                # This entry refers to no column, so it is refused as well once the table is no longer paused.
                unusable = PollTableOffset("ready")
                entry = PollTableOffset("init") if self._rewinds else unusable
                if entry is unusable and each not in paused:
                    entry = self._refuse(table, unusable, now.step + 1)
            elif entry is None:
                entry = PollTableOffset("init")
            elif entry.phase in ("ready", "copy") and entry.by != table.basis:
                entry = entry.recopy() if self._rewinds else self._refuse(table, entry, now.step + 1)
            tables[each] = entry
        for each, (_, finding) in self._discovery.unfit.items():
            if (known := now.tables.get(each)) is not None:
                reading = StepRead("refuse", reason=finding.message, fix=finding.fix or "")
                tables[each] = known if known.phase == "stopped" else known.read(now.step + 1, reading)
        for each in now.tables.keys() - tables.keys():
            KeySnapshot.of(str(self.source.folder), each).leave()
        return replace(now, tables=tables, damaged=())

    @property
    def _rewinds(self) -> bool:
        """Whether to copy a table again if its watermark is damaged or no longer fits the order of the table."""
        return self.source.options.on_bad_watermark == "permissive"

    @staticmethod
    def _refuse(table: Polled, entry: PollTableOffset, step: int) -> PollTableOffset:
        """Stop a table with an unusable watermark until someone decides."""
        reason = "its stored watermark is damaged, or of another column, type or key than the table has now"
        fix = f"tailrace resync FILE {table.name}, or set source.options.on_bad_watermark to permissive and retry it"
        return entry.read(step, StepRead("refuse", reason=reason, fix=fix))

    def _outgrown(self, each: str, entry: PollTableOffset) -> str | None:
        """Why polls cannot continue from what was copied; None when they can."""
        table = self._discovery.tables[each]
        if entry.scope != table.scope:
            return "other columns or soft deletes are configured"
        if entry.phase == "ready" and self.source.keeps_keys(table) and not entry.base:
            return "its keys were not recorded, and full diffs need them"
        known = self._versions.schema_at(each, end_of(entry.step))
        evolves = self.source.context.tables.settings_of(table.name).schema_changes == "evolve"
        if evolves and known is not None and has_unknown_past(known, table.schema):
            return "it has a new column whose value in older rows is unknown"
        return None

    def _note_schema(self, each: str, step: int) -> None:
        """Store the columns that a step reads as a version, before the step's offset is returned."""
        table = self._discovery.tables[each]
        policy = self.source.context.tables.settings_of(table.name).schema_changes
        if policy == "evolve" or self._versions.schema_at(each) is None:
            self._versions.put_schema(table.schema, Position(step, 0))

    # -- what a step reads --------------------------------------------------------------------------------

    def _select(self, now: PollOffset, directives: TableDirectives) -> dict[str, PollTableOffset]:
        """The tables whose turn it is. Those that wait for a copy are in the phase `init`."""
        due: dict[str, PollTableOffset] = {}
        for each, entry in now.tables.items():
            request = directives.resync.get(each, 0)
            recopies = entry.phase == "init" or request > entry.request
            if (
                entry.step > now.step  # refused just now
                or each not in self._discovery.tables
                or (each in directives.paused and request <= entry.request)
                or (entry.phase == "stopped" and not recopies)
                or (entry.phase == "ready" and not recopies and not self._is_due(each))
            ):
                continue
            if not recopies and (reason := self._outgrown(each, entry)):
                log.warning("%s is copied again: %s", self._discovery.tables[each].name, reason)
                recopies = True
            due[each] = replace(entry.recopy() if recopies else entry, request=max(entry.request, request))
        return due

    def _read(
        self, due: Mapping[str, PollTableOffset], view: SettledTime, step: int, limit: Limit
    ) -> dict[str, PollTableOffset]:
        """What the step reads of these tables. Tables that are polled share `limit.rows`, and tables that copy share
        `limit.copied_rows`, so that neither wait for the others."""
        changed: dict[str, PollTableOffset] = {}
        budget = limit.rows
        # The table that was read longest ago comes first, so that no table is left out again and again.
        for each, entry in sorted(due.items(), key=lambda item: (item[1].step, item[0])):
            if entry.phase in ("init", "copy") or budget <= 0:
                continue
            read = self._attempt(entry, step, lambda: self._poll(each, entry, view, step, budget))  # noqa: B023
            if read is not None:
                assert read.reading is not None
                changed[each] = read
                budget -= max(read.reading.rows, 1)
        changed |= self._copy_some(due, view, step, limit.copied_rows)
        for each, read in changed.items():
            if read.reading is not None and read.reading.kind != "refuse":
                self._note_schema(each, step)
        return changed

    def _copy_some(
        self, due: Mapping[str, PollTableOffset], view: SettledTime, step: int, budget: int
    ) -> dict[str, PollTableOffset]:
        """Advance the tables that copy, and begin with the smallest of those that wait for it.

        A huge one, whose chunks take long to find, does not begin in a step in which smaller ones do.
        """
        changed: dict[str, PollTableOffset] = {}
        copying = {each: entry for each, entry in due.items() if entry.phase == "copy"}
        waiting = {each: self._size(each) for each, entry in due.items() if entry.phase == "init"}
        room = budget
        for each, size in sorted(waiting.items(), key=lambda item: (item[1], item[0])):
            if room < budget and size > room:
                break
            room -= size
            begun = self._attempt(due[each], step, lambda: self._begin(each, due[each], step, view))  # noqa: B023
            assert begun is not None
            (copying if begun.phase == "copy" else changed)[each] = begun
        chunk = self.source.options.chunk_rows
        sizes = {each: chunk if one.chunks > 1 else min(self._size(each), chunk) for each, one in copying.items()}
        needs = {each: CopyNeed(one.chunks - one.next, sizes[each]) for each, one in copying.items()}
        taken = share_chunks(needs, budget)
        for each, entry in copying.items():
            # What begins reads something in the same step: the step is where its copy is recorded.
            if take := max(taken[each], int(entry.copy == step)):
                changed[each] = self._copy(entry, step, take, sizes[each])
        return changed

    def _size(self, each: str) -> int:
        """About how many rows a table has, as they count in a step; a chunk where that is unknown."""
        if each not in self._sizes:
            chunk = self.source.options.chunk_rows
            with suppress(TableError):
                rows = self._connect().estimate(self._discovery.tables[each])
                self._sizes[each] = max(rows, least_size(0, chunk)) if rows else chunk
        return self._sizes.get(each, self.source.options.chunk_rows)

    @staticmethod
    def _attempt(
        entry: PollTableOffset, step: int, read: Callable[[], PollTableOffset | None]
    ) -> PollTableOffset | None:
        """What a read finds to do. A table that cannot be read is refused, and stays as it is."""
        try:
            return read()
        except TableError as error:
            return entry.read(step, StepRead("refuse", reason=error.message, fix=error.fix or ""))

    def _begin(self, each: str, entry: PollTableOffset, step: int, view: SettledTime) -> PollTableOffset:
        """Begin a copy: its chunks, and the marks from which polls continue when it is done."""
        table, session = self._discovery.tables[each], self._connect()
        bounds: list[Keyset] = []
        rows = self.source.options.chunk_rows
        while (bound := session.chunk_bound(table, bounds[-1] if bounds else START, rows)) is not None:
            bounds.append(bound)
        self._versions.put_schema(table.schema, Position(step, 0))
        return PollTableOffset(
            "copy",
            by=table.basis,
            scope=table.scope,
            mark=self._first_mark(table, table.version, view),
            soft=self._first_mark(table, table.soft, view),
            base=step if self.source.keeps_keys(table) else 0,
            copy=step,
            bounds=tuple(bounds),
            request=entry.request,
        )

    def _first_mark(self, table: Polled, column: str | None, view: SettledTime) -> Keyset:
        """Rows before this mark are final, and so in a copy that begins now. A number has no such mark: all is read."""
        scale = self._connect().scale(table, column) if column is not None else None
        if scale is None or not scale.timed or scale.is_empty:
            return START
        return view.settled_mark(scale, ())

    @staticmethod
    def _copy(entry: PollTableOffset, step: int, take: int, size: int) -> PollTableOffset:
        """The table after a step that copies so many chunks of about `size` rows."""
        reading = StepRead("copy", entry.next, entry.next + take, rows=take * size)
        done = entry.next + take == entry.chunks
        return entry.read(step, reading, next=entry.next + take, phase="ready" if done else "copy")

    def _copy_again(self, each: str, entry: PollTableOffset, view: SettledTime, step: int) -> PollTableOffset:
        """Begin a new copy in place of a poll, with its first chunk."""
        return self._copy(self._begin(each, entry, step, view), step, 1, self.source.options.chunk_rows)

    def _is_due(self, each: str) -> bool:
        return self._schedule.is_due(each, self._target) or self._is_diff_due(each)

    def _is_diff_due(self, each: str) -> bool:
        deletes = self.source.context.tables.settings_of(self._discovery.tables[each].name).deletes
        return self._schedule.is_diff_due(each, deletes.full_diff if deletes is not None else None)

    def _poll(
        self, each: str, entry: PollTableOffset, view: SettledTime, step: int, budget: int
    ) -> PollTableOffset | None:
        """What to read of the table now; None when nothing is new."""
        if self._is_diff_due(each):
            return self._diff(each, entry, step)
        began, table = time.monotonic(), self._discovery.tables[each]
        memory = self._recall(each, entry)
        found: dict[str, ProbeResult] = {}
        # A task holds all rows of a poll in memory; the rest follows in the next step.
        limit = min(budget, self.source.options.chunk_rows)
        for column, deleted in ((table.version, False), (table.soft, True)):
            if column is None:
                continue
            probe = Probe(
                self._connect(), table, column, deleted, view, memory.seen, self.source.options.page_rows, limit
            )
            try:
                one = probe.run(memory.floors[column], memory.heights.get(column, ()))
            except ForeignMarkError:
                if self._rewinds:
                    return self._copy_again(each, entry, view, step)
                return self._refuse(table, entry, step)
            if one is not None:
                found[column] = one
                memory.heights[column] = one.heights
        fresh = sum(one.fresh for one in found.values())
        more = any(one.more for one in found.values())
        self._schedule.polled(each, began=began, fresh=fresh > 0, whole=not more)
        if not fresh:
            memory.floors |= {column: one.sweep.settled for column, one in found.items()}
            return None
        sweeps = {column: one.sweep for column, one in found.items()}
        sweep, soft = sweeps.get(table.version or ""), sweeps.get(table.soft or "")
        return entry.read(
            step,
            StepRead("poll", sweep=sweep, soft=soft, window=entry.window, rows=fresh),
            mark=sweep.settled if sweep else entry.mark,
            soft=soft.settled if soft else entry.soft,
            window=step,
            # Later diffs do not know rows that were emitted without being recorded.
            base=entry.base if self.source.keeps_keys(table) else 0,
            bounds=(),
        )

    def _recall(self, each: str, entry: PollTableOffset) -> PollCache:
        memory = self._cache.get(each)
        table = self._discovery.tables[each]
        marks = {table.version or "": entry.mark, table.soft or "": entry.soft}
        if memory is None or memory.step != entry.step or memory.floors.keys() != marks.keys():
            heights = memory.heights if memory is not None else {}
            seen = KeySnapshot.of(str(self.source.folder), each).window(entry.window)
            memory = self._cache[each] = PollCache(entry.step, marks, seen, heights)
        return memory

    def _diff(self, each: str, entry: PollTableOffset, step: int) -> PollTableOffset:
        self._schedule.diffed(each)
        if KeySnapshot.of(str(self.source.folder), each).bases(entry.base) is None:
            log.warning("the key snapshot of %s is incomplete: copying it again", self._discovery.tables[each].name)
            return self._copy_again(each, entry, self._read_clock(PollOffset()), step)
        rows = self._connect().estimate(self._discovery.tables[each])
        reading = StepRead("diff", since=entry.base, window=entry.window, rows=rows)
        return entry.read(step, reading, base=step, window=step, bounds=())
