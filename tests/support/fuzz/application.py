"""The fuzzer's statements against a pipeline that runs as in production: a thread that changes tables and rows."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from typing import Any, Self

import psycopg

from tests.support.fuzz.generator import TABLES, Generator
from tests.support.fuzz.schema_statement import ALL_ACTIONS
from tests.support.fuzz.sequence import PARTITIONS, PREPARATION, SCHEMA, execute

REFUSED = re.compile(r"REPLICA IDENTITY NOTHING", re.I)
"""A pipeline does not start while a table has this: Postgres refuses the application's own updates."""


class Application:
    """Changes the tables of the schema `app` until the end of the `with` block.

    Without `has_trigger`, it leaves out what a pipeline without the event trigger does not see.
    """

    def __init__(
        self, session: psycopg.Connection[Any], seed: int, publication: str, *, pause_seconds: float, has_trigger: bool
    ) -> None:
        self._session = session
        self._generator = Generator(seed, publication=publication)
        self._publication = publication
        self._pause_seconds = pause_seconds
        self._left_out = [REFUSED, *([] if has_trigger else [PARTITIONS])]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._change)
        self._error: Exception | None = None
        session.execute(PREPARATION.encode())
        session.execute(f"SET search_path = {SCHEMA}")
        for statements in TABLES.values():
            for statement in statements:
                session.execute(statement.encode())

    def _change(self) -> None:
        try:
            while not self._stopping.wait(self._pause_seconds):
                step = self._generator.transaction(self._session)
                if step is None or any(one.search(text) for one in self._left_out for text in step.statements):
                    continue
                with suppress(psycopg.Error), self._session.transaction():
                    execute(self._session, step)
        except Exception as error:  # noqa: BLE001 - raised again at the end of the block
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Publish every kind of change: what is not published at the end cannot arrive."""
        self._session.execute(f"ALTER PUBLICATION {self._publication} SET (publish = '{ALL_ACTIONS}')")
