"""The leader, the one of several nodes that may send, and the progress of each table, in a store all nodes can read.

The lease has an epoch that grows with each change of leader, and only the holder of the newest epoch can write: a
former leader that was paused and wakes up changes nothing. The database's clock decides how long a lease lasts; its
holder counts the same seconds from before its request, so it never believes to hold the lease for longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tailrace.errors import OwnedError
from tailrace.model.change import START, Position
from tailrace.state.database import Row, RunSql, StateDatabase
from tailrace.state.record import Owner, text_of, time_of
from tailrace.state.store import is_folder
from tailrace.state.versioned_file import open_leader_database
from tailrace.system.failpoint import reach

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # also counts while the machine sleeps


def elapsed() -> float:
    """Seconds since some moment, by a clock that cannot be set."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True)
class LeaderState:
    """What a new leader has to know.

    `place` is up to where its own queue is delivered. `watermarks` are what other nodes delivered since, by table;
    there are none when the last events were sent from this queue, because then `place` is enough.
    """

    epoch: int
    place: Position
    watermarks: Mapping[str, Position]


class Leadership:
    """One node's part in the lease of a pipeline. Can be used from several threads.

    Every method raises UnavailableError when the store is out of reach.
    """

    def __init__(
        self, engine: StateDatabase, pipeline: str, *, node: str, queue: str, seconds: float, owner: Owner | None = None
    ) -> None:
        self._engine = engine
        self._pipeline = pipeline
        self._node = node
        self._queue = queue
        self._seconds = seconds
        self._owner = owner or Owner.here()
        self._lock = threading.RLock()
        self._epoch: int | None = None
        self._until = 0.0

    @property
    def epoch(self) -> int | None:
        """The epoch this node leads in, as far as it knows; None when it does not."""
        return self._epoch

    def holds(self) -> bool:
        """Whether the lease certainly still lasts. Asks no store: meant to be called right before each request."""
        return self._epoch is not None and elapsed() < self._until

    def claim(self) -> LeaderState | None:
        """Take the lease; None while another node has it. A dead process of this machine is not waited for."""
        with self._lock:
            asked = elapsed()
            standing = self._engine.write(self._claim)
            if standing is not None:
                self._epoch, self._until = standing.epoch, asked + self._seconds
            return standing

    def _claim(self, run: RunSql) -> LeaderState | None:
        self._run(run, "INSERT INTO sender_lease (pipeline) VALUES (:pipeline) ON CONFLICT (pipeline) DO NOTHING")
        lease = self._lease(run)
        at = time_of(self._run(run, self._engine.clock)[0]["at"])
        holder = _holder(lease)
        lasts = lease["lease_until"] is not None and time_of(lease["lease_until"]) > at
        if holder and lasts and not (holder == self._owner or holder.gone):
            return None
        epoch = int(lease["epoch"]) + 1
        self._run(
            run,
            "UPDATE sender_lease SET epoch = :epoch, node = :node, owner_pid = :pid, owner_host = :host,"
            " owner_started = :started, owner_machine = :machine, lease_until = :until"
            " WHERE pipeline = :pipeline",
            epoch=epoch,
            node=self._node,
            pid=self._owner.pid,
            host=self._owner.host,
            started=text_of(self._owner.started),
            machine=self._owner.machine,
            until=text_of(at + timedelta(seconds=self._seconds)),
        )
        reach("leader.changing")
        places = self._run(
            run,
            "SELECT place FROM sender_queue WHERE pipeline = :pipeline AND queue = :queue",
            queue=self._queue,
        )
        marks = {} if lease["writer"] == self._queue else _marks(self._run(run, _WATERMARKS))
        return LeaderState(epoch, Position.parse(places[0]["place"]) if places else START, marks)

    def renew(self) -> bool:
        """Extend the lease, counted from now. False when another node leads: this one does not lead any more."""
        with self._lock:
            if self._epoch is None:
                return False
            asked = elapsed()
            is_ours = self._engine.write(self._renew)
            if is_ours:
                self._until = asked + self._seconds
            else:
                self._epoch = None
            return is_ours

    def _renew(self, run: RunSql) -> bool:
        if not self._is_ours(run):
            return False
        at = time_of(self._run(run, self._engine.clock)[0]["at"])
        self._run(
            run,
            "UPDATE sender_lease SET lease_until = :until WHERE pipeline = :pipeline",
            until=text_of(at + timedelta(seconds=self._seconds)),
        )
        reach("leader.changing")
        return True

    def release(self) -> None:
        """Give up the lease, so that the next leader need not wait. Does nothing when this node does not lead."""
        with self._lock:
            if self._epoch is None:
                return
            self._engine.write(self._release)
            self._epoch = None

    def _release(self, run: RunSql) -> None:
        if self._is_ours(run):
            self._run(
                run,
                "UPDATE sender_lease SET owner_pid = NULL, owner_host = NULL, owner_started = NULL,"
                " owner_machine = NULL, lease_until = NULL WHERE pipeline = :pipeline",
            )

    def resign(self) -> None:
        """Stop relying on the lease, without asking the store: it may be unreachable."""
        self._epoch = None

    def persist(self, watermarks: Mapping[str, Position], place: Position) -> None:
        """Store how far tables and this node's queue are delivered, in one transaction; no table goes back.

        Raises OwnedError, and nothing is stored, when another node has led since.
        """
        with self._lock:
            if not self._engine.write(lambda run: self._persist(run, watermarks, place)):
                self._epoch = None
                raise OwnedError(
                    f"another node sends the events of {self._pipeline} now; it repeats what this node delivered last",
                    fix="none needed: this node follows from now on",
                )

    def _persist(self, run: RunSql, watermarks: Mapping[str, Position], place: Position) -> bool:
        if not self._is_ours(run):
            return False
        at = text_of(time_of(self._run(run, self._engine.clock)[0]["at"]))
        self._run(run, "UPDATE sender_lease SET writer = :queue WHERE pipeline = :pipeline", queue=self._queue)
        self._put_place(run, place, at)
        if watermarks:
            self._engine.run_many(
                run,
                'INSERT INTO sender_watermark (pipeline, "table", position) VALUES (:pipeline, :table, :position)'
                ' ON CONFLICT (pipeline, "table") DO UPDATE SET position = excluded.position'
                " WHERE sender_watermark.position < excluded.position",
                [
                    {"pipeline": self._pipeline, "table": table, "position": str(position)}
                    for table, position in sorted(watermarks.items())
                ],
            )
        reach("leader.changing")
        return True

    def watermarks(self) -> dict[str, Position]:
        """How far each table is delivered, by all nodes together."""
        return _marks(self._read(_WATERMARKS))

    def places(self) -> dict[str, Position]:
        """How far the queue of each node that ever led is delivered, by the node's name."""
        rows = self._read("SELECT node, place FROM sender_queue WHERE pipeline = :pipeline ORDER BY at")
        return {row["node"]: Position.parse(row["place"]) for row in rows}

    def leader(self) -> str | None:
        """The name of the node whose lease lasts now, by the database's clock."""
        rows = self._read(_LEASE)
        if not rows or rows[0]["lease_until"] is None:
            return None
        at = time_of(self._read(self._engine.clock)[0]["at"])
        return str(rows[0]["node"]) if time_of(rows[0]["lease_until"]) > at else None

    def pass_over(self, place: Position) -> None:
        """Make the sender of this queue begin after `place`: an operator gave up the events before it."""
        with self._lock:
            self._engine.write(lambda run: self._pass_over(run, place))

    def _pass_over(self, run: RunSql, place: Position) -> None:
        at = text_of(time_of(self._run(run, self._engine.clock)[0]["at"]))
        self._put_place(run, place, at)

    def close(self) -> None:
        """Close the connection, but keep the lease."""
        with self._lock:
            self._engine.close()

    def _put_place(self, run: RunSql, place: Position, at: str) -> None:
        self._run(
            run,
            "INSERT INTO sender_queue (pipeline, queue, node, place, at)"
            " VALUES (:pipeline, :queue, :node, :place, :at)"
            " ON CONFLICT (pipeline, queue) DO UPDATE SET node = excluded.node, place = excluded.place,"
            " at = excluded.at",
            queue=self._queue,
            node=self._node,
            place=str(place),
            at=at,
        )

    def _is_ours(self, run: RunSql) -> bool:
        return self._epoch is not None and int(self._lease(run)["epoch"]) == self._epoch

    def _lease(self, run: RunSql) -> Row:
        rows = self._run(run, _LEASE + self._engine.locking)
        return rows[0] if rows else {"epoch": -1}

    def _run(self, run: RunSql, statement: str, **values: object) -> list[Row]:
        return run(statement, {"pipeline": self._pipeline, **values})

    def _read(self, statement: str) -> list[Row]:
        with self._lock:
            return self._engine.read(statement, {"pipeline": self._pipeline})


_LEASE = "SELECT * FROM sender_lease WHERE pipeline = :pipeline"
_WATERMARKS = 'SELECT "table", position FROM sender_watermark WHERE pipeline = :pipeline'


def _marks(rows: list[Row]) -> dict[str, Position]:
    return {row["table"]: Position.parse(row["position"]) for row in rows}


def _holder(lease: Row) -> Owner | None:
    if lease["owner_pid"] is None:
        return None
    return Owner(lease["owner_pid"], lease["owner_host"], time_of(lease["owner_started"]), lease["owner_machine"] or "")


def open_engine(lease: str) -> StateDatabase:
    """The shared store: a folder on one machine, a Postgres DSN across machines."""
    if is_folder(lease):
        return open_leader_database(Path(lease))
    from tailrace.state.postgres import PostgresStore

    return PostgresStore(dsn=lease).open_database()
