"""The receiver: a separate process that writes Postgres's change stream to the journal, undecoded.

Two gears. *Streaming* reads one replication connection message by message, and runs while the pipeline is near the
head of the log. *Backlog* reads the same messages in bulk from an SQL function, several times faster than any
walsender, and runs while the pipeline lags far. Both write to the same journal, and Postgres may discard a change only
once it is durable there (or, with `acknowledge: applied`, at the destination).

The follower starts it with its options as JSON on standard input and stops it by closing that pipe, so it never
outlives its owner and no secret appears in a process list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from tailrace.errors import DamagedError, LostError, OwnedError, TailraceError, UnavailableError
from tailrace.journal import Frame, Journal, JournalPlace, ObjectPlace, cursors
from tailrace.model.change import LAST_ORDINAL, START
from tailrace.source.postgres.bulk import bulk
from tailrace.source.postgres.connection import (
    Replication,
    connect,
    connection_string,
    lacks,
    session,
    translate,
    translated,
)
from tailrace.source.postgres.frame_builder import FrameBuilder
from tailrace.source.postgres.offset import before, format_lsn
from tailrace.source.postgres.replication_stream import ReplicationStream
from tailrace.source.postgres.server_identity import require_same_history, require_sent
from tailrace.source.postgres.slot import (
    SlotStatus,
    emit_heartbeat,
    publication_exists,
    read_slot,
    require,
    require_kept,
)
from tailrace.source.source import RESYNC
from tailrace.system.backoff import Backoff, wait
from tailrace.system.child_process import BUSY, serve, write_status
from tailrace.system.failpoint import reach

BACKLOG_BYTES = 32 * 1024 * 1024
"""From this lag on, the backlog gear is worth its start-up."""
STEP_BYTES = 512 * 1024 * 1024
"""How much WAL one backlog step decodes; the server keeps a step's messages on disk until they are sent."""
READ_BYTES = 4 * 1024 * 1024
SLOT_SECONDS = 1.0
WAIT_SECONDS = 0.05
"""How often an idle stream checks whether to stop; stopping it may take that long."""
PATIENCE_SECONDS = 75.0
"""How long a slot may be in use before its reader counts as alive. If a machine lost power, the server still lists it
as the slot's reader for a minute (`wal_sender_timeout`)."""
BACKOFF = Backoff((0.1, 0.2, 0.5, 1.0, 2.0, 5.0))

STATUS = "receiver"


@dataclass(frozen=True)
class PostgresReceiverOptions:
    """The options that the receiver reads from standard input."""

    dsn: str
    slot: str
    publication: str
    journal: str
    segment_bytes: int
    max_bytes: int
    acknowledge: str
    heartbeat_seconds: float | None
    messages: bool = False
    folder: str = ""
    """Where status and log are; the journal's own folder, if it has one."""
    storage_options: dict[str, str] | None = field(default=None, repr=False)
    """The options of the object store that the journal is in; None if it is in a folder."""

    @property
    def place(self) -> JournalPlace:
        return Path(self.journal) if self.storage_options is None else ObjectPlace(self.journal, self.storage_options)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class PostgresReceiver:
    """Reads the slot into the journal until its owner goes away."""

    def __init__(self, options: PostgresReceiverOptions, stopping: Callable[[], bool]) -> None:
        self.options = options
        self.stopping = stopping
        self.writer = Journal.open_writer(
            options.place, segment_bytes=options.segment_bytes, max_bytes=options.max_bytes
        )
        self._pace = self.writer.pace
        # The log before this LSN is durable in the journal.
        self.durable = self.writer.mark.commit + 1
        self.framer = self._build_frames()
        self.mode = "starting"
        self._session: psycopg.Connection[tuple[Any, ...]] | None = None
        self._slot: SlotStatus | None = None
        self._slot_read_at = 0.0
        self._beat = time.monotonic()
        self._failures = 0
        self._is_checked = False
        self._walsender: int | None = None
        self._gathered: list[Frame] = []
        self._gathered_bytes = 0
        self._stored_at = self._noted_at = self._kept_at = self._slowest_read_at = 0.0
        self._slowest = START

    def _build_frames(self) -> FrameBuilder:
        return FrameBuilder(self.durable, takes_messages=self.options.messages)

    def run(self) -> None:
        """Run until stopped. UnavailableError is retried, every other error is raised."""
        taken_since: float | None = None
        while not self.stopping():
            try:
                self.writer.drop_unfinished()
                status = self._read_slot(fresh=True)
                if status.active_pid is not None and status.active_pid == self._walsender:
                    # The server drops it after wal_sender_timeout, by default one minute.
                    raise UnavailableError("the server still shows a broken connection of tailrace as active")
                if status.active_pid is not None:
                    raise OwnedError(
                        f"the slot {self.options.slot!r} is read by process {status.active_pid}",
                        fix="stop the other reader, or give this pipeline a slot of its own with source.slot",
                    )
                self._check_journal(status)
                self._check_server(status)
                taken_since = None
                if self._worth_backlog(status):
                    self._drain(status)
                else:
                    self._stream()
                self._failures = 0
            except OwnedError as error:
                if self.writer.is_fenced:
                    raise
                taken_since = taken_since or time.monotonic()
                if time.monotonic() - taken_since > PATIENCE_SECONDS:
                    raise
                self._wait(error)
            except UnavailableError as error:
                self._require_published(error)
                self._wait(error)

    def _require_published(self, error: UnavailableError) -> None:
        """Raise LostError when the log was written while there was no publication, and there is one now.

        The server does not decode such a log; from version 18 on it leaves the changes out instead. While there is no
        publication, the follower reports that.
        """
        if not lacks("publication", error.message):
            return
        with suppress(UnavailableError), session(self.options.dsn, "checking the publication") as connection:
            if publication_exists(connection, self.options.publication):
                raise LostError(
                    f"the publication {self.options.publication!r} was dropped and created again;"
                    " changes made in between are not sent by the server",
                    fix=RESYNC,
                )

    def _wait(self, error: TailraceError) -> None:
        self._close_session()
        self._is_checked = False
        # The server sends what the journal did not store again, with its relations.
        self.framer = self._build_frames()
        self._gathered, self._gathered_bytes = [], 0
        self.mode = "waiting"
        self.publish(error)
        self._failures += 1
        wait(BACKOFF.delay(self._failures), self.stopping)

    def _check_journal(self, status: SlotStatus) -> None:
        require_sent(status, self.durable)
        if self.writer.damage:
            self._repair_slot(status)
        require_kept(status, self.durable)

    def _check_server(self, status: SlotStatus) -> None:
        """After each loss of the connection: it may be another server that answers now."""
        if not self._is_checked:
            options = self.options
            require_same_history(options.dsn, options.slot, options.publication, options.place, status)
            self._is_checked = True

    def _repair_slot(self, status: SlotStatus) -> None:
        """Receive damaged frames again if Postgres still has them."""
        slowest = min(cursors(self.options.place).values(), default=START)
        holes = [hole for hole in self.writer.damage if hole.last > slowest or hole.last == hole.after]
        if not holes:
            return  # every reader has read past it
        hole = min(holes, key=lambda one: one.after)
        if hole.after.commit + 1 < status.confirmed:
            raise DamagedError(
                f"journal segment {hole.segment} is damaged at byte {hole.offset},"
                " and the slot is already confirmed past it",
                position=str(hole.after),
                fix=RESYNC,
            )
        # A hole within a transaction: the whole transaction is sent again.
        whole = hole.after.ordinal == LAST_ORDINAL or hole.after == START
        self.writer.cut_back(hole.after if whole else before(hole.after.commit))
        self.durable = self.writer.mark.commit + 1
        self.framer = self._build_frames()

    def _worth_backlog(self, status: SlotStatus) -> bool:
        ahead = max(status.confirmed, self.durable)
        # Every step decodes again from restart_lsn, which a long transaction holds back: the rest must be worth that.
        worth = max(BACKLOG_BYTES, (ahead - status.restart) // 2)
        return self.options.acknowledge == "journal" and status.server - ahead > worth

    def _drain(self, status: SlotStatus) -> None:
        """One backlog step: read a bounded part of the WAL in bulk, then advance the slot."""
        self.mode = "backlog"
        self.publish(None)
        ahead = max(status.confirmed, self.durable)
        # A step grows with what it decodes again, and includes a small rest instead of leaving it to another step.
        step = max(STEP_BYTES, 2 * (ahead - status.restart))
        upto = status.server if status.server - ahead < step * 3 // 2 else ahead + step
        head = self.writer.head
        query = sql.SQL(
            "SELECT data FROM pg_logical_slot_peek_binary_changes({}, {}, NULL,"
            " 'proto_version', '1', 'publication_names', {}, 'messages', 'true')"
        ).format(self.options.slot, format_lsn(upto), sql.Identifier(self.options.publication).as_string())
        with bulk(self.options.dsn, "reading the slot in bulk") as connection, connection.cursor() as cursor:
            cursor.set_batch_bytes(READ_BYTES)
            cursor.execute(query.as_string())
            if not self._receive_all(cursor.fetch_batches()):
                return
        if upto > self.durable:
            self.writer.note(before(upto))
            self.durable = upto
        reach("receiver.before_advance")
        if status.server - upto > BACKLOG_BYTES and self.writer.head > head:
            # A separate session, because this may take long without anything being wrong.
            with session(self.options.dsn, "advancing the slot") as advancing:
                advancing.execute(
                    "SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", [self.options.slot, format_lsn(self.durable)]
                )

    def _receive_all(self, reader: Iterator[pa.RecordBatch]) -> bool:
        """Receive the result of a step: one piece arrives while the one before it is cut into frames and stored.

        False when stopped meanwhile.
        """
        with ThreadPoolExecutor(2) as pool:
            coming: Future[pa.RecordBatch | None] = pool.submit(next, reader, None)
            storing: Future[None] | None = None
            while (batch := coming.result()) is not None:
                coming = pool.submit(next, reader, None)
                frames = self.framer.feed(batch.column(0))
                end = self.framer.durable_end
                if storing is not None:
                    storing.result()
                # From here on no other thread uses the journal.
                if self.stopping() or not self._make_room():
                    return False
                self._read_slot()
                storing = pool.submit(self._store, frames, end)
            if storing is not None:
                storing.result()
        return True

    def _stream(self) -> None:
        """Read the replication protocol until stopped, or until the lag is large enough for the other gear."""
        self.mode = "streaming"
        self.publish(None)
        with Replication(self.options.dsn) as replication:
            self._walsender = replication.pgconn.backend_pid
            stream = ReplicationStream(replication, self.options.slot, self.options.publication, self.durable)
            while not self.stopping():
                arrived = stream.receive(self._wait_seconds())
                if arrived is not None:
                    self.receive(arrived)
                elif stream.position > self.durable and self.framer.idle and not self._gathered and self._may_note():
                    # No change of a published table up to here: the slot may still advance.
                    self.writer.note(before(stream.position))
                    self.durable = stream.position
                self._store_gathered()
                stream.acknowledge(self._acknowledged())
                status = self._read_slot()
                self._heartbeat()
                waited = self._make_room(lambda: stream.acknowledge(self._acknowledged(), force=True))
                if not waited or (self.framer.idle and self._lags(status)):
                    break
            self._store_gathered(at_once=True)

    def _lags(self, status: SlotStatus) -> bool:
        # Twice the bound, so that the gears do not alternate.
        return self.options.acknowledge == "journal" and status.server - self.durable > max(
            2 * BACKLOG_BYTES, self.durable - status.restart
        )

    def receive(self, messages: pa.Array[Any]) -> None:
        """Write messages to the journal: whole transactions if they fit, very large ones in pieces."""
        frames = self.framer.feed(messages)
        if not self._pace.append_seconds:
            self._store(frames, self.framer.durable_end)
            return
        # An object store takes few large objects rather than many small ones; nothing is acknowledged until then.
        self._gathered += frames
        self._gathered_bytes += sum(memoryview(frame.payload).nbytes for frame in frames)
        self._store_gathered()

    def _store_gathered(self, *, at_once: bool = False) -> None:
        """Store what was gathered once it is large, or once the last append is long enough ago."""
        is_due = at_once or time.monotonic() - self._stored_at >= self._pace.append_seconds
        is_large = self._gathered_bytes >= self._pace.append_bytes
        if self._pace.append_seconds and (is_large or (is_due and self._has_unstored())):
            frames, self._gathered, self._gathered_bytes = self._gathered, [], 0
            self._stored_at = time.monotonic()
            self._store(frames, self.framer.durable_end)

    def _has_unstored(self) -> bool:
        return bool(self._gathered) or (self.framer.durable_end > self.durable and self._may_note())

    def _wait_seconds(self) -> float:
        """How long to wait for messages: no longer than what was gathered may wait."""
        if not self._gathered:
            return WAIT_SECONDS
        return min(max(self._stored_at + self._pace.append_seconds - time.monotonic(), 0.001), WAIT_SECONDS)

    def _may_note(self) -> bool:
        """Whether the last note is long enough ago. From now on it is not."""
        now = time.monotonic()
        if now - self._noted_at < self._pace.note_seconds:
            return False
        self._noted_at = now
        return True

    def _store(self, frames: Sequence[Frame], end: int) -> None:
        """Make frames durable; `end` is the LSN up to which they are complete."""
        if end > self.durable and not any(frame.complete for frame in frames):
            self.writer.note(before(end))
        if frames:
            frames = _reaching(frames, end)
            reach("receiver.before_append")
            self.writer.append(frames)
            reach("receiver.appended")
            self._failures = 0
        self.durable = max(self.durable, end)

    def _acknowledged(self) -> int:
        if self.options.acknowledge == "journal":
            return self.durable
        now = time.monotonic()
        if now - self._slowest_read_at >= self._pace.upkeep_seconds:
            self._slowest = min(cursors(self.options.place).values(), default=START)
            self._slowest_read_at = now
        slowest = self._slowest
        # When every reader has reached the journal's head, the log after it holds no change of a published table.
        return self.durable if slowest >= self.writer.head else slowest.commit + 1

    def _make_room(self, while_waiting: Callable[[], None] = lambda: None) -> bool:
        """Wait while the journal is full, so that Postgres keeps the rest. False when stopped meanwhile.

        Not within a transaction that is larger than a frame: no reader can read it, and so make room, before its end.
        """
        gear = self.mode
        while not self.writer.within_transaction and not self.writer.room():
            if self.stopping():
                return False
            self.mode = "full"
            self._retain()
            self._read_slot()
            while_waiting()
            time.sleep(0.1)
        self.mode = gear
        return True

    def session(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._session is None or self._session.closed:
            with translated("connecting"):
                self._session = connect(connection_string(self.options.dsn))
        return self._session

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _read_slot(self, *, fresh: bool = False) -> SlotStatus:
        """The slot's status, at most a second old, or just read if `fresh`. Reading it also runs the housekeeping."""
        now = time.monotonic()
        if self._slot is None or fresh or now - self._slot_read_at > SLOT_SECONDS:
            try:
                self._slot = require(read_slot(self.session(), self.options.slot), self.options.slot, RESYNC)
            except psycopg.Error as error:
                self._close_session()
                raise translate(error, "reading the slot") from error
            self._slot_read_at = now
            self._retain()
            self.publish(None)
        return self._slot

    def _retain(self) -> None:
        now = time.monotonic()
        if now - self._kept_at >= self._pace.upkeep_seconds:
            self._kept_at = now
            self.writer.retain()

    def _heartbeat(self) -> None:
        pause = self.options.heartbeat_seconds
        if pause is None or time.monotonic() - self._beat < pause:
            return
        self._beat = time.monotonic()
        try:
            emit_heartbeat(self.session())
        except psycopg.Error as error:
            raise translate(error, "sending a heartbeat") from error

    def publish(self, error: TailraceError | None) -> None:
        """Leave a status file for the follower and `tailrace status`."""
        slot = self._slot
        write_status(
            Path(self.options.folder or self.options.journal),
            STATUS,
            {
                "at": time.time(),
                "gear": self.mode,
                "durable": self.durable,
                "server": slot.server if slot else None,
                "confirmed": slot.confirmed if slot else None,
                "restart": slot.restart if slot else None,
                "wal_status": slot.wal_status if slot else None,
                "safe_wal_bytes": slot.safe_wal_bytes if slot else None,
                "journal_bytes": self.writer.size(),
                "error": error.describe() if error else None,
            },
        )


def _reaching(frames: Sequence[Frame], end: int) -> list[Frame]:
    """The same frames, the last complete one up to `end`: transactions without a change may have come after it, and
    what is acknowledged must be in the journal."""
    last = max((at for at, frame in enumerate(frames) if frame.complete), default=None)
    return [replace(frame, last=before(end)) if at == last else frame for at, frame in enumerate(frames)]


def main() -> int:
    """Run the receiver process and return its exit code."""
    return serve(_run)


def _run(options: str, stopping: Callable[[], bool]) -> int:
    parsed = PostgresReceiverOptions(**json.loads(options))
    try:
        receiver = PostgresReceiver(parsed, stopping)
    except OwnedError:
        return BUSY
    except TailraceError as error:
        write_status(Path(parsed.folder or parsed.journal), STATUS, {"at": time.time(), "error": error.describe()})
        return error.exit_code
    try:
        receiver.run()
    except TailraceError as error:
        receiver.mode = "stopped"
        receiver.publish(error)
        return error.exit_code
    return 0
