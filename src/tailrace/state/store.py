"""The state of one pipeline, wherever it is kept.

Every write is one transaction that is durable when the method returns, so a killed process leaves the state before
or after it, nothing between. A store can be used from several threads.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tailrace.errors import ConfigError
from tailrace.state import layout
from tailrace.state.database import StateDatabase, closed_on_error
from tailrace.state.progress import DeadLetterStore, ProgressStore, RequestStore
from tailrace.state.record import Owner, now, text_of
from tailrace.state.runner import LeaseStore, find_owner
from tailrace.state.schema_version import VersionStore
from tailrace.state.sqlite import SqliteStateDatabase
from tailrace.state.transaction import StateSession


class StateStore(LeaseStore, ProgressStore, VersionStore, RequestStore, DeadLetterStore):
    """Everything a pipeline remembers. See the protocols in `tailrace.state.protocol`; made by a `StoreAddress`.

    `state_dir` is the pipeline's folder on this machine, whether or not the state is in it.
    """

    def __init__(self, engine: StateDatabase, name: str, state_dir: Path, *, writes: bool) -> None:
        self._session = StateSession(engine, name, writes=writes)
        self.state_dir = state_dir

    @classmethod
    def open(cls, state_dir: str | Path, *, name: str, fingerprint: str = "") -> StateStore:
        """The state in a folder, made for pipeline `name` if there is none. Raises ConfigError if it is another's."""
        engine = SqliteStateDatabase.open_writing(Path(state_dir))
        return cls.begin(engine, name, Path(state_dir), fingerprint)

    @classmethod
    def open_reading(cls, state_dir: str | Path) -> StateStore:
        """The same without the right to write, also while a runner writes. Raises ConfigError if there is no state."""
        engine = SqliteStateDatabase.open_reading(Path(state_dir))
        with closed_on_error(engine):
            rows = engine.read("SELECT name FROM pipeline", {})
            if not rows:  # a reader may come between the making of the file and its first row
                raise ConfigError(f"the state in {state_dir} is only being made", fix="try again in a moment")
        return cls(engine, rows[0]["name"], Path(state_dir), writes=False)

    @classmethod
    def begin(cls, engine: StateDatabase, name: str, state_dir: Path, fingerprint: str) -> StateStore:
        """A store that writes, for a pipeline that becomes known by it. A repeat changes only the fingerprint."""
        values = {"name": name, "at": text_of(now()), "epoch": str(uuid.uuid4()), "fingerprint": fingerprint}
        with closed_on_error(engine), engine.transaction() as cursor:
            others = [row["name"] for row in cursor.run("SELECT name FROM pipeline", {}) if row["name"] != name]
            if others and not engine.shared:
                raise ConfigError(
                    f"the state in {state_dir} belongs to pipeline {others[0]}, not {name}",
                    fix="give each pipeline its own `state`",
                )
            cursor.run(
                "INSERT INTO pipeline (name, created_at, epoch, fingerprint) VALUES (:name, :at, :epoch, :fingerprint)"
                " ON CONFLICT (name) DO NOTHING",
                values,
            )
            if fingerprint:
                cursor.run("UPDATE pipeline SET fingerprint = :fingerprint WHERE name = :name", values)
        return cls(engine, name, state_dir, writes=True)

    def join(self, run: int) -> Self:
        """Write as part of a run that another process of it claimed. Raises OwnedError when a later one has begun."""
        self._session.run = run
        self.require_owner()
        return self

    def forget_pipeline(self) -> None:
        """Drop all there is of the pipeline and begin a new life of it, in a new epoch. Nobody may run it any more."""
        with self._session.write(fenced=False) as tx:
            for table in layout.OF_PIPELINE:
                tx.run(f"DELETE FROM {table} WHERE pipeline = :pipeline")  # noqa: S608 - names of ours
            # Runs are counted on: a runner of the old life that wakes up must not be taken for one of the new.
            tx.run(
                "UPDATE pipeline SET run = run + 1, changed = changed + 1, epoch = :epoch, created_at = :at,"
                " owner_pid = NULL, owner_host = NULL, owner_started = NULL, owner_machine = NULL, lease_until = NULL"
                " WHERE name = :pipeline",
                epoch=str(uuid.uuid4()),
                at=text_of(now()),
            )

    def runner(self) -> Owner | None:
        """Who runs the pipeline now: who holds the lease or, where one machine has the state, the folder's lock."""
        return self.lease_holder() if self._session.engine.shared else find_owner(self.state_dir)

    def close(self) -> None:
        """Nothing can be asked of it any more. A repeat changes nothing."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Where a pipeline's state is kept.

SCHEMA = "tailrace"
_DSN = re.compile(r"postgres(ql)?://|\s*\w+\s*=")


def is_folder(place: str) -> bool:
    """Whether a text names a folder, for a SQLite file, and not a Postgres database."""
    return _DSN.match(place) is None


@dataclass(frozen=True)
class StoreAddress:
    """A value that any process of the pipeline can be given; it opens nothing by itself.

    With `kind` sqlite the state is a file in `state_dir`, with postgres it is in a schema of the database at `dsn`.
    """

    name: str
    state_dir: Path
    kind: Literal["sqlite", "postgres"] = "sqlite"
    dsn: str | None = field(default=None, repr=False)
    schema: str = SCHEMA

    def open(self, fingerprint: str = "") -> StateStore:
        """A store that writes, unfenced until it claims a run. Made where it is missing.

        Raises ConfigError for the state of another pipeline or a newer tailrace, UnavailableError when it is out of
        reach.
        """
        if self.kind == "sqlite":
            return StateStore.open(self.state_dir, name=self.name, fingerprint=fingerprint)
        from tailrace.state.postgres import PostgresStateDatabase  # the driver: only who uses this store pays for it

        engine = PostgresStateDatabase.open_writing(self._dsn(), self.schema)
        return StateStore.begin(engine, self.name, self.state_dir, fingerprint)

    def open_reading(self) -> StateStore:
        """A store that only reads, beside any number of others. Raises ConfigError before the pipeline's first run."""
        if self.kind == "sqlite":
            return StateStore.open_reading(self.state_dir)
        from tailrace.state.postgres import PostgresStateDatabase

        engine = PostgresStateDatabase.open_reading(self._dsn(), self.schema)
        with closed_on_error(engine):
            if not engine.read("SELECT 1 FROM pipeline WHERE name = :name", {"name": self.name}):
                raise ConfigError(
                    f"{engine.place} holds no pipeline {self.name}: it has not run yet",
                    fix="start it with `tailrace run FILE`",
                )
        return StateStore(engine, self.name, self.state_dir, writes=False)

    def join(self, run: int) -> StateStore:
        """A store for a second process of run `run`: it may write until a later run begins, and remembers nothing.

        Raises OwnedError when a later run has begun already.
        """
        store = self.open()
        with closed_on_error(store):
            return store.join(run)

    def _dsn(self) -> str:
        if self.dsn is None:
            raise ConfigError("a Postgres store needs a dsn", fix="add `dsn: ${STATE_DSN}` to `store`")
        return self.dsn
