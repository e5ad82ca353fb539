"""One cluster's events on their way into its journal: what is new is appended, durably, and nothing twice.

JOURNAL/SERVICE/        the journal (segments, cursors, lock), and next to them
  window                the latest events, to recognise repeats (see `deduplication`)
  told                  the position up to which rqlite got 200; the journal must not end before it
  stopped               the error that stopped the cluster for good; a reset removes it with the folder
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tailrace.errors import DamagedError, LostError, TailraceError, UnavailableError, revive
from tailrace.journal import Frame, Journal, JournalReader, JournalWriter, cursors
from tailrace.journal.segment import list_segments
from tailrace.model.change import START, Position
from tailrace.source.rqlite.deduplication import DeduplicationWindow, Placed
from tailrace.source.rqlite.frame_builder import LastEntry, build, remember
from tailrace.source.rqlite.journal_entry import JournalEntries
from tailrace.source.rqlite.request import PostedRequest, folder_of
from tailrace.source.source import RESYNC
from tailrace.system.atomic_file import replace_durably
from tailrace.system.failpoint import reach

_log = logging.getLogger(__name__)

_READ_EVENTS = 100_000
_SAVED_EVENTS = 65_536
"""After how many new events the window is saved: a restart reads those since then from the journal."""
_WARNING_LEVEL = 0.8
_ANSWERED_REQUESTS = 16


@dataclass
class ClusterCounts:
    """What came since the process started, in events but for `requests`."""

    requests: int = 0
    received: int = 0
    duplicates: int = 0
    zero_index: int = 0
    late: int = 0
    missing: int = 0

    def to_json(self) -> dict[str, int]:
        """The counts, by their names in the status file and the metrics."""
        return {
            "requests": self.requests,
            "received": self.received,
            "duplicates": self.duplicates,
            "zero_index": self.zero_index,
            "late": self.late,
            "missing": self.missing,
        }


class Level(NamedTuple):
    """The journal's mark, its size, and the size as a fraction of `max_bytes`."""

    mark: Position
    bytes: int
    usage: float


class Cluster:
    """The journal of one service. Its methods take turns: any thread may call them.

    `error` is set once it has stopped: nothing is stored any more, so that rqlite keeps everything.
    """

    def __init__(self, service: str, folder: Path, *, segment_bytes: int, max_bytes: int) -> None:
        self.service = service
        self.error: TailraceError | None = None
        self.counts = ClusterCounts()
        self._folder = folder / folder_of(service)
        # Only finished segments are removed, so a journal at its limit must have finished some.
        self._segment_bytes = segment_bytes
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._writer: JournalWriter | None = None
        self._window: DeduplicationWindow | None = None
        self._answered: tuple[str, ...] = ()
        self._level = Level(START, 0, 0.0)
        self._acknowledged = START
        self._slowest = START
        self._unsaved = 0
        self._is_stop_kept = False

    def open(self) -> None:
        """Open the journal and read what it holds. An error that stops the cluster is then in `error`.

        Raises UnavailableError when the disk does not answer; `commit` tries again.
        """
        with self._lock:
            self._open()

    def commit(self, requests: Sequence[PostedRequest]) -> list[TailraceError | None]:
        """Store the new events of these requests, in order, with one sync. None: rqlite may drop the request.

        Otherwise the error that kept a request from being stored: UnavailableError while the disk fails or the journal
        is full, any other error once the cluster has stopped.
        """
        with self._lock:
            try:
                self._open()
                if self.error is None:
                    self._require_room()
                    return self._store(requests)
            except UnavailableError as error:
                return [error] * len(requests)
            return [self.error] * len(requests)

    def maintain(self) -> None:
        """Remove what every reader has passed, and save the state for the next start. Called about once a second.

        Raises UnavailableError when the disk fails, DamagedError when a cursor cannot be read.
        """
        with self._lock, self._disk("used"):
            writer, window = self._writer, self._window
            if writer is None or (window is None and self.error is None):
                return
            self._retain(writer)  # first: it frees the space that saving may need
            self._measure(writer)
            if self.error is not None and not self._is_stop_kept:
                self._write_stop(self.error)
            if window is not None and window.mark > self._acknowledged:
                self._acknowledge(window.mark)
            if self._unsaved >= _SAVED_EVENTS:
                self._save()

    def close(self) -> None:
        """Close the journal. A second call does nothing."""
        with self._lock:
            if self._writer is not None:
                if self._unsaved:
                    self._save()
                self._writer.close()
            self._writer = self._window = None

    def holds(self, digest: str) -> bool:
        """Whether the body with this digest is one of the last whose events are durable, so that rqlite may drop it.
        Does not block: a request that is being stored does not count yet."""
        window = self._window
        is_stored = digest in self._answered or (window is not None and window.request == digest)
        return is_stored and self.error is None

    def level(self) -> Level:
        """How far the journal goes and how full it is, as of the last change or `tend`. Does not block on either."""
        return self._level

    def describe(self) -> dict[str, Any]:
        """The cluster's part of the status file."""
        level = self.level()
        return {
            "mark": str(level.mark),
            **self.counts.to_json(),
            "journal_bytes": level.bytes,
            "usage": round(level.usage, 3),
            "warnings": self.warnings(),
            "error": self.error.describe() if self.error else None,
        }

    def warnings(self) -> list[str]:
        """Conditions that a person should know about, although nothing has stopped."""
        found = []
        if self._level.usage >= _WARNING_LEVEL:
            found.append(f"the journal is {self._level.usage:.0%} full; at 100% rqlite has to keep further changes")
        if self.counts.zero_index:
            found.append(
                f"{self.counts.zero_index} changes came with index 0; rqlite drops batches that hold nothing else:"
                " use ?transaction for requests of several statements"
            )
        if self.counts.late:
            found.append(
                f"{self.counts.late} changes came after newer ones and count as changes without a row:"
                " they had index 0, or the leader before had dropped them"
            )
        return found

    def _open(self) -> None:
        try:
            if self._writer is None:
                self._writer = Journal.open_writer(
                    self._folder, segment_bytes=self._segment_bytes, max_bytes=self._max_bytes
                )
                self._measure(self._writer)
                self.error = None
            if self._window is None and self.error is None:
                with self._disk("read"):
                    self.error = self._read_stop()
                    self._window = self._restore(self._writer) if self.error is None else None
        except UnavailableError:
            raise
        except TailraceError as error:
            self._stop(error)

    def _read_stop(self) -> TailraceError | None:
        try:
            error = revive(json.loads((self._folder / "stopped").read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            error = DamagedError(
                f"cluster {self.service!r} was stopped, and the file with the reason is damaged", fix=RESYNC
            )
        self._is_stop_kept = True
        return error

    def _restore(self, writer: JournalWriter) -> DeduplicationWindow:
        if writer.damage:
            hole = writer.damage[0]
            raise DamagedError(
                f"journal segment {hole.segment} of cluster {self.service!r} is damaged at byte {hole.offset},"
                " and those events were already acknowledged to rqlite",
                position=str(hole.after),
                fix=RESYNC,
            )
        window = DeduplicationWindow.load(self._folder / "window") or DeduplicationWindow()
        self._acknowledged = max(self._read_acknowledged(), window.mark)
        if self._acknowledged > writer.mark:
            raise DamagedError(
                f"the journal of cluster {self.service!r} ends at {writer.mark}, but events up to"
                f" {self._acknowledged} were already acknowledged to rqlite",
                position=str(writer.mark),
                fix=RESYNC,
            )
        after = max(window.mark, self._beginning())
        reader = Journal.open_reader(self._folder)
        try:
            while after < writer.mark:
                after = self._read_back(reader, after, writer.mark, window)
        finally:
            reader.close()
        if window.mark < writer.mark:
            window.resume(writer.mark)
        self._unsaved = _SAVED_EVENTS
        return window

    @staticmethod
    def _read_back(reader: JournalReader, after: Position, upto: Position, window: DeduplicationWindow) -> Position:
        for ref in reader.frames(after, upto, rows=_READ_EVENTS):
            remember(reader.read(ref), window)
            after = ref.last
        return after

    def _beginning(self) -> Position:
        with closing(Journal.open_reader(self._folder)) as reader:
            return reader.origin()

    def _read_acknowledged(self) -> Position:
        try:
            return Position.parse((self._folder / "told").read_text())
        except (FileNotFoundError, ValueError):
            return START

    def _store(self, requests: Sequence[PostedRequest]) -> list[TailraceError | None]:
        assert self._writer is not None
        window, self._window = self._window, None  # not valid until the journal has confirmed it
        assert window is not None
        outcomes: list[TailraceError | None] = []
        frames: list[Frame] = []
        fresh: list[Placed] = []
        lost: LostError | None = None
        with JournalEntries(self._folder) as earlier:
            for request in requests:
                before = LastEntry(window.next.commit, window.node, window.at)
                try:
                    placed = window.admit(request, earlier.find) if lost is None else []
                except LostError as error:
                    lost, placed = error, []
                outcomes.append(lost)
                if placed:
                    frames.append(build(placed, request, before))
                    fresh += placed
        reach("rqlite.before_append")
        self._writer.append(frames)
        reach("rqlite.appended")
        self._measure(self._writer)
        self._count(requests, outcomes, fresh)
        # Also those that held nothing new: a new leader's repeat of a large transaction is as slow to parse.
        stored = (request.digest for request, error in zip(requests, outcomes, strict=True) if error is None)
        self._answered = (*self._answered, *stored)[-_ANSWERED_REQUESTS:]
        if lost is None:
            self._window = window
        else:
            self._stop(lost)
        return outcomes

    def _count(
        self, requests: Sequence[PostedRequest], outcomes: Sequence[TailraceError | None], fresh: Sequence[Placed]
    ) -> None:
        stored = [request for request, error in zip(requests, outcomes, strict=True) if error is None]
        counts, zeros, late = self.counts, self.counts.zero_index, self.counts.late
        counts.requests += len(stored)
        counts.received += len(fresh)
        counts.duplicates += sum(len(entry.events) for one in stored for entry in one.entries) - len(fresh)
        counts.zero_index += sum(placed.zero is not None for placed in fresh)
        counts.late += sum(placed.late for placed in fresh)
        counts.missing += sum(not placed.event.image for placed in fresh)
        self._unsaved += len(fresh)
        if counts.zero_index > zeros == 0 or counts.late > late == 0:
            _log.warning("cluster %r: %s", self.service, "; ".join(self.warnings()))

    def _measure(self, writer: JournalWriter) -> None:
        self._level = Level(writer.mark, writer.size(), writer.usage())

    def _require_room(self) -> None:
        assert self._writer is not None
        if not self._writer.room():
            self._retain(self._writer)
            if not self._writer.room():
                raise UnavailableError(
                    f"the journal of cluster {self.service!r} is full; rqlite keeps further changes meanwhile",
                    fix="check that the pipeline runs and keeps up, or raise journal.max_bytes",
                )

    def _retain(self, writer: JournalWriter) -> None:
        slowest = min(cursors(self._folder).values(), default=START)
        if slowest <= self._slowest:
            return
        removable = writer.size() >= writer.segment_bytes or len(list(list_segments(self._folder))) > 1
        if removable and self._unsaved and self._window is not None:
            self._save()
        writer.retain()
        self._slowest = slowest

    def _save(self) -> None:
        if self._window is not None:
            with self._disk("written"):
                self._window.save(self._folder / "window")
            self._unsaved = 0

    def _acknowledge(self, mark: Position) -> None:
        # Not synced: it only detects a journal that went back, and may itself be slightly out of date.
        with self._disk("written"):
            (self._folder / "told").write_text(str(mark))
        self._acknowledged = mark

    def _stop(self, error: TailraceError) -> None:
        self.error = error
        self._is_stop_kept = False
        _log.error("cluster %r stopped: %s", self.service, error)
        self._write_stop(error)

    def _write_stop(self, error: TailraceError) -> None:
        """Keep the error for the next start. By then its cause may no longer show: events of a rebuilt cluster may pass
        for new ones, or a damaged file may have been moved away."""
        if isinstance(error, LostError | DamagedError):
            with self._disk("written"):
                replace_durably(self._folder / "stopped", json.dumps(error.describe()).encode())
        self._is_stop_kept = True

    @contextmanager
    def _disk(self, used: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError(
                f"{self._folder} cannot be {used}: {error.strerror}",
                fix="check that its disk is mounted and not full, and that it belongs to this user",
            ) from error
