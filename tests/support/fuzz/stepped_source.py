"""The Postgres source with its clock stopped: nothing happens between two calls, so a sequence repeats exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
import pyarrow as pa

from tailrace.source.follower import SchemaVersions
from tailrace.source.postgres.copy import PostgresSnapshot
from tailrace.source.postgres.follower import PostgresFollower
from tailrace.source.postgres.offset import before, format_lsn
from tailrace.source.postgres.receiver import PostgresReceiver
from tailrace.source.postgres.slot import server_position
from tailrace.source.postgres.source import PostgresSource
from tailrace.system.child_process import Child
from tailrace.testing.wait import PATIENCE_SECONDS


class NoChild(Child):
    """No process: the test receives by itself, when its script says so."""

    def __init__(self) -> None:
        """Starts nothing."""

    def require_alive(self) -> None:
        """It is as alive as it gets."""

    def stop(self) -> None:
        """There is nothing to stop."""


class SteppedFollower(PostgresFollower):
    """Waits for the snapshot of a copy instead of asking again later."""

    def _open_snapshot(self, patience_seconds: float = 0.05) -> PostgresSnapshot | None:
        return super()._open_snapshot(PATIENCE_SECONDS)


@dataclass(frozen=True)
class SteppedSource(PostgresSource):
    """Follows without a receiver process."""

    def receiver(self, *, patience_seconds: float = 0.0) -> Child:
        return NoChild()

    def follow(self, schemas: SchemaVersions, *, is_receiving: bool = False) -> PostgresFollower:
        return SteppedFollower(self, schemas, is_receiving=is_receiving)


class SteppedReceiver:
    """A receiver that reads what is committed by now, in this thread. Closed and made again, it is a restart."""

    def __init__(self, source: PostgresSource, session: psycopg.Connection[Any]) -> None:
        self._source = source
        self._session = session
        self._receiver = PostgresReceiver(source.receiver_options(), lambda: False)

    def receive(self, pieces: int, *, keeps: bool) -> None:
        """Read everything into the journal, `pieces` messages at a time (0: all). `keeps`: the slot stays where it is,
        as when the process dies before it acknowledges."""
        options, receiver = self._source.options, self._receiver
        upto = server_position(self._session)
        found = self._session.execute(
            f"SELECT data FROM pg_logical_slot_{'peek' if keeps else 'get'}_binary_changes(%s, %s, NULL,"
            " 'proto_version', '1', 'publication_names', %s, 'messages', 'true')",
            [options.slot, format_lsn(upto), f'"{options.publication}"'],
            binary=True,
        ).fetchall()
        step = pieces or max(len(found), 1)
        for start in range(0, len(found), step):
            receiver.receive(pa.array([data for (data,) in found[start : start + step]], pa.binary()))
        if upto > receiver.durable:
            receiver.writer.note(before(upto))
            receiver.durable = upto
        receiver.writer.retain()

    def close(self) -> None:
        self._receiver.writer.close()
        self._receiver._close_session()
