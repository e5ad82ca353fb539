"""Sessions that are used again: the source opens one for each question, and opening it takes longer than asking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.pq import TransactionStatus

from tailrace.source.postgres import connection
from tailrace.source.postgres.connection import PgConnection

_open = connection.connect


class SessionPool:
    """`connect` stands for that of the source where it makes short sessions. `close` ends those that are left."""

    def __init__(self) -> None:
        self._idle: dict[str, list[PgConnection]] = {}

    @contextmanager
    def connect(self, address: str) -> Iterator[PgConnection]:
        idle = self._idle.setdefault(address, [])
        session = idle.pop() if idle else _open(address)
        try:
            yield session
        finally:
            if session.closed or session.info.transaction_status is not TransactionStatus.IDLE:
                session.close()
            else:
                idle.append(session)

    def close(self) -> None:
        for sessions in self._idle.values():
            for session in sessions:
                session.close()
        self._idle.clear()
