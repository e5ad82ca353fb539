"""Bounded waits for a Postgres server.

A network may be silent without being closed, and something in between may keep answering keepalives. So a request that
stays unanswered is looked up through a second session: a server that still works on it is waited for, and any other
connection counts as broken.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import psycopg
from psycopg import pq, waiting

SILENCE_SECONDS = float(os.environ.get("TAILRACE_SILENCE_SECONDS", "30"))
"""How long a server may leave a request unanswered before it is looked up."""
STEP_SECONDS = 0.1
CONNECT_TIMEOUT_SECONDS = 10

KEEPALIVES = {
    "connect_timeout": str(CONNECT_TIMEOUT_SECONDS),
    # A connection whose other side has gone is noticed within about half a minute.
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}

Result = TypeVar("Result")
Row = TypeVar("Row")

# A session that is blocked on sending has an answer that does not arrive.
_ACTIVITY = """
SELECT state = 'active' AND wait_event IS DISTINCT FROM 'ClientWrite' FROM pg_catalog.pg_stat_activity WHERE pid = %s
"""


class SilentError(psycopg.OperationalError):
    """The connection counts as broken: no answer came, and the server does not work on one."""

    def __init__(self) -> None:
        super().__init__(f"no answer for {SILENCE_SECONDS:g} s, the connection counts as broken")


def is_working(conninfo: str, pid: int) -> bool:
    """Whether the server still works on a request of the session with this process id, which has the same role."""
    with suppress(psycopg.Error), _ProbeConnection.connect(conninfo, autocommit=True) as probe:
        found = probe.execute(_ACTIVITY, [pid]).fetchone()
        return found is not None and bool(found[0])
    return False


def bounded(steps: Generator[Any, Any, Result], is_working: Callable[[], bool]) -> Generator[Any, Any, Result]:
    """A generator of psycopg that raises SilentError when its socket was silent for too long."""
    ready = None
    deadline = time.monotonic() + SILENCE_SECONDS
    while True:
        try:
            wanted = steps.send(ready)
        except StopIteration as done:
            result: Result = done.value
            return result
        ready = yield wanted
        if ready:
            deadline = time.monotonic() + SILENCE_SECONDS
        elif time.monotonic() > deadline:
            if not is_working():
                raise SilentError
            deadline = time.monotonic() + SILENCE_SECONDS


def wait_bounded(steps: Generator[Any, Any, Result], connection: pq.abc.PGconn, conninfo: str) -> Result:
    """Run a generator of `psycopg.generators` on a connection of the `pq` layer."""
    working = bounded(steps, lambda: is_working(conninfo, connection.backend_pid))
    return waiting.wait(working, connection.socket, interval=STEP_SECONDS)


class _ProbeConnection(psycopg.Connection[tuple[Any, ...]]):
    def wait(self, gen: Generator[Any, Any, Result], *arguments: Any, **options: Any) -> Result:
        return super().wait(bounded(gen, lambda: False), *arguments, **options)


class BoundedConnection(psycopg.Connection[Row]):
    """A session in which every wait is bounded: it raises SilentError, an OperationalError."""

    _conninfo = ""

    @classmethod
    def connect(cls, conninfo: str = "", **options: Any) -> Self:
        made = super().connect(conninfo, **options)
        # What psycopg remembers of it is without the password.
        made._conninfo = conninfo
        return made

    def wait(self, gen: Generator[Any, Any, Result], *arguments: Any, **options: Any) -> Result:
        return super().wait(bounded(gen, self._is_working), *arguments, **options)

    def _is_working(self) -> bool:
        return bool(self._conninfo) and is_working(self._conninfo, self.info.backend_pid)


class SocketWatch:
    """Ends calls into a driver that neither returns nor lets its socket be seen, as ADBC.

    Sockets that this process opens to one of `ports` within `opening` are taken for the driver's. If a call within
    `watching` is unanswered for too long, they are shut down, and the call fails.
    """

    def __init__(self, ports: Sequence[int], is_working: Callable[[], bool]) -> None:
        self._ports = ports
        self._is_working = is_working
        self._sockets: list[socket.socket] = []

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around the call that connects: also bounded."""
        before = _socket_inodes()

        def find() -> None:
            self.close()
            self._sockets = list(_new_sockets(before, self._ports))

        try:
            with self._ended_if_silent(find, lambda: False):
                yield
            find()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a call. Raises SilentError instead of the driver's error if the watch ended it."""
        with self._ended_if_silent(lambda: None, self._is_working):
            yield

    def close(self) -> None:
        for one in self._sockets:
            one.close()
        self._sockets = []

    @contextmanager
    def _ended_if_silent(self, find: Callable[[], None], is_working: Callable[[], bool]) -> Iterator[None]:
        done, silent = threading.Event(), threading.Event()

        def watch() -> None:
            received = _received(self._sockets)
            while not done.wait(SILENCE_SECONDS):
                find()
                before, received = received, _received(self._sockets)
                if received == before and not is_working() and not done.is_set():
                    silent.set()
                    for one in self._sockets:
                        with suppress(OSError):
                            one.shutdown(socket.SHUT_RDWR)
                    return

        thread = threading.Thread(target=watch, name="silence", daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            if silent.is_set():
                raise SilentError from error
            raise
        finally:
            done.set()
            if silent.is_set():
                thread.join()  # it uses the sockets


# linux/tcp.h: `tcpi_bytes_received` of struct tcp_info.
_RECEIVED_AT = 128


def _received(sockets: Sequence[socket.socket]) -> list[int]:
    """How many bytes have arrived at each of the sockets; 0 where the system does not tell."""
    found = []
    for one in sockets:
        state = b""
        with suppress(OSError, AttributeError):
            state = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
        found.append(struct.unpack_from("Q", state, _RECEIVED_AT)[0] if len(state) == _RECEIVED_AT + 8 else 0)
    return found


def _socket_inodes() -> dict[str, str]:
    """The sockets of this process: their inodes, by descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        with suppress(OSError):
            target = str(entry.readlink())
            if target.startswith("socket:"):
                found[entry.name] = target
    return found


def _new_sockets(before: dict[str, str], ports: Sequence[int]) -> Iterator[socket.socket]:
    known = set(before.values())
    for descriptor, inode in _socket_inodes().items():
        if inode in known:
            continue
        with suppress(OSError):
            # A duplicate stays valid when the driver closes its own.
            one = socket.socket(fileno=os.dup(int(descriptor)))
            peer = one.getpeername()
            if (one.family == socket.AF_UNIX and "PGSQL" in str(peer)) or (len(peer) > 1 and peer[1] in ports):
                yield one
            else:
                one.close()
