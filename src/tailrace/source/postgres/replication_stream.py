"""One START_REPLICATION connection: messages in, acknowledgements out. Independent of journals and tables."""

from __future__ import annotations

import select
import struct
import time
from typing import Any

import psycopg
import pyarrow as pa

from tailrace.errors import UnavailableError
from tailrace.source.postgres.connection import Replication, translate
from tailrace.source.postgres.offset import format_lsn
from tailrace.source.postgres.pgoutput.message import EPOCH_US
from tailrace.system import silence

GROUP_BYTES = 4 * 1024 * 1024
LINGER_SECONDS = 0.005
"""How long a first message waits for more: one fsync then serves them all."""
STATUS_SECONDS = 1.0

_DATA, _KEEPALIVE = ord("w"), ord("k")
_HEADER_BYTES = 25


class ReplicationStream:
    """Reads one slot. `position` is how far the server has read its WAL for this slot; `receive` returns groups."""

    def __init__(self, replication: Replication, slot: str, publication: str, start: int) -> None:
        self._conn = replication.pgconn
        quoted = publication.replace('"', '""').replace("'", "''")
        replication.execute(
            f'START_REPLICATION SLOT "{slot}" LOGICAL {format_lsn(start)}'
            f" (proto_version '1', publication_names '\"{quoted}\"', messages 'true')",
            copies=True,
        )
        self.position = start
        self._acknowledged = 0
        self._sent_at = 0.0
        self._received_at = time.monotonic()

    def receive(self, wait_seconds: float) -> pa.Array[Any] | None:
        """The messages that arrive within a few milliseconds of the first, at most a few MB; None if none arrived."""
        messages: list[bytes] = []
        size = 0
        deadline = time.monotonic() + wait_seconds
        while size < GROUP_BYTES:
            length, data = self._next()
            if length > 0:
                self._received_at = time.monotonic()
                kind = data[0]
                if kind == _DATA:
                    if not messages:
                        deadline = min(deadline, time.monotonic() + LINGER_SECONDS)
                    messages.append(bytes(data[_HEADER_BYTES:]))
                    size += length
                elif kind == _KEEPALIVE:
                    position, _, reply = struct.unpack("!QQB", data[1:18])
                    if not messages:
                        self.position = position
                    if reply:
                        self.acknowledge(self._acknowledged, force=True)
                    if not messages:
                        break
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            self._wait(remaining)
            # Every acknowledgement requests a reply, so a live server is never silent for long.
            if time.monotonic() - self._received_at > silence.SILENCE_SECONDS:
                raise UnavailableError(f"the replication connection was silent for {silence.SILENCE_SECONDS:g} s")
        return pa.array(messages, pa.binary()) if messages else None

    def _next(self) -> tuple[int, Any]:
        try:
            length, data = self._conn.get_copy_data(1)
        except psycopg.OperationalError as error:
            raise translate(error, "streaming") from error
        if length == -1:
            result = self._conn.get_result()
            message = result.get_error_message() if result is not None else "the server ended the stream"
            raise translate(psycopg.OperationalError(message), "streaming")
        return length, data

    def _wait(self, seconds: float) -> None:
        if select.select([self._conn.socket], [], [], seconds)[0]:
            try:
                self._conn.consume_input()
            except psycopg.OperationalError as error:
                raise translate(error, "streaming") from error

    def acknowledge(self, lsn: int, *, force: bool = False) -> None:
        """Report what is durable to the server: at once when it advanced, else every second, which requests a reply."""
        now = time.monotonic()
        if lsn <= self._acknowledged and not force and now - self._sent_at < STATUS_SECONDS:
            return
        if lsn > self._acknowledged and not force and now - self._sent_at < STATUS_SECONDS / 10:
            return
        self._acknowledged = max(lsn, self._acknowledged)
        micros = time.time_ns() // 1000 - EPOCH_US
        ping = 0 if force else 1
        message = struct.pack("!cQQQQB", b"r", self._acknowledged, self._acknowledged, self._acknowledged, micros, ping)
        try:
            self._conn.put_copy_data(message)
            while self._conn.flush():
                select.select([], [self._conn.socket], [], 1.0)
        except psycopg.OperationalError as error:
            raise translate(error, "acknowledging") from error
        self._sent_at = now
