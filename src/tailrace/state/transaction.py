"""One process's use of a pipeline's state: transactions, the fence around them, and what may be cached.

Each write takes the pipeline's row first, so writes of all processes come one after the other, and none can come
after a later run has begun.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from tailrace.errors import ConfigError, OwnedError, TailraceError
from tailrace.state.database import Row, RunSql, StateDatabase, Values
from tailrace.state.record import TableRecord, read_table, time_of
from tailrace.state.state_machine import TableState

if TYPE_CHECKING:
    from tailrace.model.schema import TableSchema


# What was read from the store and is still true.
#
# The runner's session keeps one for as long as no one else writes; every other session begins an empty one with each
# question, and so always asks the database.

Version = tuple[str, int]
"""A position's text and the number of the version that begins there."""

_SELECT_TABLES = (
    "SELECT t.*, (SELECT v.version FROM schema_version AS v WHERE v.pipeline = t.pipeline"
    " AND v.upstream_id = t.upstream_id ORDER BY v.position DESC LIMIT 1) AS version"
    " FROM table_state AS t WHERE t.pipeline = :pipeline"
)


class RunStatement(Protocol):
    """Runs a statement for the pipeline, inside a transaction or outside of any."""

    def __call__(self, statement: str, **values: object) -> list[Row]: ...


class StateCache:
    """Table records, which versions each table has, and the versions themselves; each loaded when first needed."""

    def __init__(self) -> None:
        self._tables: dict[str, TableRecord] | None = None
        self._versions: dict[str, list[Version]] = {}
        self._schemas: dict[tuple[str, int], TableSchema] = {}

    def tables(self, run: RunStatement) -> dict[str, TableRecord]:
        """All tables by their upstream's id. Not to be changed by the caller."""
        if self._tables is None:
            self._tables = {row["upstream_id"]: read_table(row) for row in run(_SELECT_TABLES)}
        return self._tables

    def table(self, run: RunStatement, upstream_id: str) -> TableRecord | None:
        if self._tables is not None:
            return self._tables.get(upstream_id)
        rows = run(_SELECT_TABLES + " AND t.upstream_id = :upstream_id", upstream_id=upstream_id)
        return read_table(rows[0]) if rows else None

    def halted_tables(self, run: RunStatement) -> list[TableRecord]:
        if (known := self._tables) is not None:
            return [one for one in known.values() if one.state is TableState.ERRORED or one.paused_at is not None]
        condition = " AND (t.state = :errored OR t.paused_at IS NOT NULL)"
        return [read_table(row) for row in run(_SELECT_TABLES + condition, errored=TableState.ERRORED.value)]

    def tables_named(self, run: RunStatement, name: str) -> list[TableRecord]:
        if self._tables is not None:
            return [one for one in self._tables.values() if one.name == name]
        return [read_table(row) for row in run(_SELECT_TABLES + " AND t.name = :name", name=name)]

    def versions(self, run: RunStatement, upstream_id: str) -> list[Version]:
        """The versions of a table by position. Not to be changed by the caller."""
        if upstream_id not in self._versions:
            rows = run(
                "SELECT position, version FROM schema_version WHERE pipeline = :pipeline"
                " AND upstream_id = :upstream_id ORDER BY position",
                upstream_id=upstream_id,
            )
            self._versions[upstream_id] = [(row["position"], row["version"]) for row in rows]
        return self._versions[upstream_id]

    def schema(self, run: RunStatement, upstream_id: str, version: int) -> TableSchema | None:
        """One version; asked of the store when it is not remembered, as another process may have added it."""
        from tailrace.model.schema import TableSchema  # pyarrow: loaded only where a schema is asked for

        found = self._schemas.get((upstream_id, version))
        if found is None:
            rows = run(
                "SELECT schema FROM schema_version WHERE pipeline = :pipeline AND upstream_id = :upstream_id"
                " AND version = :version",
                upstream_id=upstream_id,
                version=version,
            )
            if rows:
                found = self._schemas[upstream_id, version] = TableSchema.from_json(rows[0]["schema"])
        return found

    def put_table(self, table: TableRecord) -> None:
        if self._tables is not None:
            self._tables[table.upstream_id] = table

    def put_schema(self, schema: TableSchema, versions: list[Version]) -> None:
        """A version was added; `versions` are all the table has now."""
        self._schemas[schema.upstream_id, schema.version] = schema
        self.put_versions(schema.upstream_id, versions)

    def put_versions(self, upstream_id: str, versions: list[Version]) -> None:
        self._versions[upstream_id] = versions
        numbers = {number for _, number in versions}
        self._schemas = {key: s for key, s in self._schemas.items() if key[0] != upstream_id or key[1] in numbers}
        if self._tables is not None and (table := self._tables.get(upstream_id)):
            self._tables[upstream_id] = replace(table, version=versions[-1][1] if versions else None)

    def drop_table(self, upstream_id: str) -> None:
        if self._tables is not None:
            self._tables.pop(upstream_id, None)
        self.put_versions(upstream_id, [])


def holding(versions: list[Version], position: str) -> int:
    """The index of the version that holds at a position; -1 when the first one begins later."""
    return bisect_right(versions, position, key=lambda version: version[0]) - 1


_SELECT_RUN = "SELECT run, changed FROM pipeline WHERE name = :pipeline"


class StateTransaction:
    """What a write may use. `then` is for memory: it happens once the transaction is durable."""

    def __init__(self, database: StateDatabase, run: RunSql, pipeline: str) -> None:
        self._database = database
        self._run = run
        self._pipeline = pipeline
        self._staged: list[Callable[[], None]] = []
        self.memory = StateCache()

    def run(self, statement: str, **values: object) -> list[Row]:
        return self._run(statement, {"pipeline": self._pipeline, **values})

    def run_many(self, statement: str, values: Sequence[Values]) -> None:
        if values:
            named = [{"pipeline": self._pipeline, **each} for each in values]
            self._database.run_many(self._run, statement, named)

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

    def __init__(self, database: StateDatabase, pipeline: str, *, writes: bool) -> None:
        self.database = database
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
            return self.database.read(statement, {"pipeline": self.pipeline, **values})

    def clock(self) -> datetime:
        """The time by the store's own clock."""
        return time_of(self.read(self.database.clock)[0]["at"])

    def close(self) -> None:
        """For good; a repeat changes nothing."""
        with self.lock:
            self._open = False
            self.database.close()

    def _require_open(self) -> None:
        if not self._open:
            raise TailraceError(f"the store in {self.database.place} was closed", fix="open it again")

    @contextmanager
    def write(self, *, fenced: bool = True) -> Iterator[StateTransaction]:
        """One transaction. Raises OwnedError when it is fenced and a later run has begun."""
        if not self._writes:
            raise TailraceError(f"the state in {self.database.place} was opened read-only", fix="open it for writing")
        with self.lock:
            self._require_open()
            try:
                with self.database.transaction() as run:
                    transaction = StateTransaction(self.database, run, self.pipeline)
                    self._enter(transaction, fenced)
                    yield transaction
            except BaseException:
                # Whether a commit that failed took place is not known; the next question goes to the database.
                self._kept = None if self._kept is None else StateCache()
                raise
            transaction.finish()

    def _enter(self, transaction: StateTransaction, fenced: bool) -> None:
        if self._kept is None:
            # Tells the runner, which reads this with each of its own writes, that its memory is no longer the truth.
            statement = "UPDATE pipeline SET changed = changed + 1 WHERE name = :pipeline RETURNING run, changed"
        else:
            statement = _SELECT_RUN + self.database.locking
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
                f"{self.database.place} holds no state of pipeline {self.pipeline}",
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
