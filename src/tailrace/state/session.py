"""One process's use of a pipeline's state: transactions, the fence around them, and what may be remembered.

Each write takes the pipeline's row first, so writes of all processes come one after the other, and none can slip in
behind a later run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

from tailrace.errors import ConfigError, OwnedError, TailraceError
from tailrace.state.engine import Row, StateCursor, StateDatabase, Values
from tailrace.state.machine import TableState
from tailrace.state.memory import StateCache
from tailrace.state.row import time_of

_SELECT_RUN = "SELECT run, changed FROM pipeline WHERE name = :pipeline"


class StateTransaction:
    """What a write may use. `then` is for memory: it happens once the transaction is durable."""

    def __init__(self, cursor: StateCursor, pipeline: str) -> None:
        self._cursor = cursor
        self._pipeline = pipeline
        self._staged: list[Callable[[], None]] = []
        self.memory = StateCache()

    def run(self, statement: str, **values: object) -> list[Row]:
        return self._cursor.run(statement, {"pipeline": self._pipeline, **values})

    def run_many(self, statement: str, values: Sequence[Values]) -> None:
        if values:
            self._cursor.run_many(statement, [{"pipeline": self._pipeline, **each} for each in values])

    def next_id(self) -> int:
        """A number that nothing of this pipeline has had before."""
        rows = self.run("UPDATE pipeline SET serial = serial + 1 WHERE name = :pipeline RETURNING serial")
        return int(rows[0]["serial"])

    def then(self, happen: Callable[[], None]) -> None:
        self._staged.append(happen)

    def finish(self) -> None:
        for happen in self._staged:
            happen()


class StateSession:
    """Shared by the parts of a store. Can be used from several threads."""

    def __init__(self, engine: StateDatabase, pipeline: str, *, writes: bool) -> None:
        self.engine = engine
        self.pipeline = pipeline
        self.run: int | None = None
        self.overlay: dict[str, tuple[TableState, datetime]] = {}
        self.lock = threading.RLock()
        self._open = True
        self._writes = writes
        self._kept: StateCache | None = None
        self._changed = 0

    @property
    def cache(self) -> StateCache:
        """What is remembered: the runner's own, or nothing yet."""
        return StateCache() if self._kept is None else self._kept

    def read(self, statement: str, **values: object) -> list[Row]:
        with self.lock:
            self._require_open()
            return self.engine.read(statement, {"pipeline": self.pipeline, **values})

    def clock(self) -> datetime:
        """The time by the store's own clock."""
        return time_of(self.read(self.engine.clock)[0]["at"])

    def close(self) -> None:
        """For good; a repeat changes nothing."""
        with self.lock:
            self._open = False
            self.engine.close()

    def _require_open(self) -> None:
        if not self._open:
            raise TailraceError(f"the store in {self.engine.place} was closed", fix="open it again")

    @contextmanager
    def write(self, *, fenced: bool = True) -> Iterator[StateTransaction]:
        """One transaction. Raises OwnedError when it is fenced and a later run has begun."""
        if not self._writes:
            raise TailraceError(f"the state in {self.engine.place} was opened read-only", fix="open it for writing")
        with self.lock:
            self._require_open()
            try:
                with self.engine.transaction() as cursor:
                    transaction = StateTransaction(cursor, self.pipeline)
                    self._enter(transaction, fenced)
                    yield transaction
            except BaseException:
                # Whether a commit that failed took place is not known; the next question goes to the database.
                self._kept = None if self._kept is None else StateCache()
                raise
            transaction.finish()

    def _enter(self, transaction: StateTransaction, fenced: bool) -> None:
        if self._kept is None:
            # Tells the runner, who reads this with each of its own writes, that its memory is no longer the truth.
            statement = "UPDATE pipeline SET changed = changed + 1 WHERE name = :pipeline RETURNING run, changed"
        else:
            statement = _SELECT_RUN + self.engine.locking
        self._check(transaction.run(statement), fenced)
        transaction.memory = self.cache

    def require_run(self) -> None:
        """Raises OwnedError when a later run has begun; forgets what other processes have changed since."""
        with self.lock:
            self._check(self.read(_SELECT_RUN), True)

    def become(self, run: int, changed: int) -> None:
        """This is the runner now: it may remember."""
        self.run, self._changed, self._kept = run, changed, StateCache()

    def _check(self, rows: list[Row], fenced: bool) -> None:
        if not rows:
            raise ConfigError(
                f"{self.engine.place} holds no state of pipeline {self.pipeline}",
                fix="start it with `tailrace run FILE`",
            )
        run, changed = rows[0]["run"], rows[0]["changed"]
        if fenced and self.run is not None and run != self.run:
            raise OwnedError(
                f"run {run} of the pipeline has begun; this is run {self.run} and may not write any more",
                fix="stop this process; `tailrace status FILE` names the one that runs",
            )
        if self._kept is not None and changed != self._changed:
            self._changed, self._kept = changed, StateCache()
