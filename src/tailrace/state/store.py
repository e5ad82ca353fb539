"""The state of one pipeline, wherever it is kept.

Every write is one transaction that is durable when the method returns, so a killed process leaves the state before
or after it, nothing between. A store can be used from several threads.
"""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tailrace.errors import ConfigError
from tailrace.state import layout
from tailrace.state.applied import AppliedStore
from tailrace.state.database import StateDatabase, closed_on_error
from tailrace.state.planned import PlannedStore
from tailrace.state.progress import DeadLetterStore, ProgressStore, RequestStore
from tailrace.state.record import Owner, now, text_of
from tailrace.state.report import ReportStore
from tailrace.state.runner import LeaseStore, find_owner
from tailrace.state.schema_version import VersionStore
from tailrace.state.transaction import StateSession


class StateStore(
    LeaseStore,
    ProgressStore,
    PlannedStore,
    AppliedStore,
    VersionStore,
    RequestStore,
    DeadLetterStore,
    ReportStore,
):
    """Everything a pipeline remembers; opened by a `StoreAddress`.

    The runner writes, fenced: once a later run has begun, each of its writes raises OwnedError. Other processes read at
    the same time and leave requests. In the runner's own store (after `claim_run`) table states and schema versions
    come from memory; what a joined process wrote is seen from the next write or `require_owner` on. Every other store
    asks the database each time.

    `state_dir` is the pipeline's folder on this machine, whether or not the state is in it.
    """

    def __init__(self, database: StateDatabase, name: str, state_dir: Path, *, writes: bool) -> None:
        self._session = StateSession(database, name, writes=writes)
        self.state_dir = state_dir

    @classmethod
    def begin(cls, database: StateDatabase, name: str, state_dir: Path) -> StateStore:
        """A store that writes, for a pipeline that becomes known by it. A repeat changes nothing."""
        with closed_on_error(database), database.transaction() as run:
            others = [row["name"] for row in run("SELECT name FROM pipeline", {}) if row["name"] != name]
            if others and not database.shared:
                raise ConfigError(
                    f"the state in {state_dir} belongs to pipeline {others[0]}, not {name}",
                    fix="give each pipeline its own `state`",
                )
            run(
                # `fingerprint` is of no use any more, and still a column that must have a value.
                "INSERT INTO pipeline (name, created_at, epoch, fingerprint) VALUES (:name, :at, :epoch, '')"
                " ON CONFLICT (name) DO NOTHING",
                {"name": name, "at": text_of(now()), "epoch": str(uuid.uuid4())},
            )
        return cls(database, name, state_dir, writes=True)

    def join(self, run: int) -> Self:
        """Write as part of a run that another process of it claimed. Raises OwnedError when a later one has begun."""
        self._session.run = run
        self.require_owner()
        return self

    def forget_pipeline(self) -> None:
        """Drop all there is of the pipeline and begin a new life of it, in a new epoch. No one may run it any more."""
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
        if not self.shared:
            from tailrace.state.versioned_file import forget_senders

            forget_senders(self.state_dir, self._session.pipeline)

    @property
    def shared(self) -> bool:
        """Whether several machines use the state. Then the lease keeps a second runner out, else the folder's lock."""
        return self._session.database.shared

    def runner(self) -> Owner | None:
        """The runner now: the holder of the lease or, where one machine has the state, of the folder's lock."""
        return self.lease_holder() if self.shared else find_owner(self.state_dir)

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
class StoreAddress(ABC):
    """A value that any process of the pipeline can be given; it opens nothing by itself and can be pickled.

    A subclass repeats the decorator, adds what it needs to find its database, and writes `connect`. `name` is the
    pipeline's and `state_dir` its folder on this machine, whether or not the state is in it; a `Pipeline` fills in
    both. Other packages register theirs in the entry point group `tailrace.stores`; then the class has an attribute
    `Options` as well: a subclass of `tailrace.config.pipeline.StateStoreOptions` with the keys of the section `store`.
    """

    name: str = ""
    state_dir: Path = Path()

    @classmethod
    def from_options(cls, options: Any, *, name: str, state_dir: Path) -> Self:
        """The address that a section `store` describes. By default each further field is the option of its name."""
        further = [each.name for each in fields(cls) if each.name not in ("name", "state_dir")]
        return cls(name=name, state_dir=state_dir, **{field: getattr(options, field) for field in further})

    def bind(self, name: str, state_dir: Path) -> Self:
        """The same place for a pipeline of this name and folder."""
        return replace(self, name=name, state_dir=state_dir)

    @abstractmethod
    def connect(self, *, writes: bool) -> StateDatabase:
        """A new connection, closed by the caller. Where nothing is made yet, one that `writes` makes what it needs for
        tables to be made in.

        Raises UnavailableError when the place is out of reach. Without `writes` it changes nothing, and raises
        ConfigError when it can tell that nothing is there yet.
        """

    def open(self) -> StateStore:
        """A store that writes, unfenced until it claims a run. Made where it is missing.

        Raises ConfigError for the state of another pipeline or a newer tailrace, UnavailableError when it is out of
        reach.
        """
        return StateStore.begin(self.open_database(), self.name, self.state_dir)

    def open_database(self) -> StateDatabase:
        """A connection that writes, to tables of the newest format."""
        database = self.connect(writes=True)
        with closed_on_error(database):
            database.prepare()
        return database

    def open_reading(self) -> StateStore:
        """A store that only reads, next to any number of others. Raises ConfigError before the pipeline's first run."""
        database = self.connect(writes=False)
        with closed_on_error(database):
            rows = database.read("SELECT name FROM pipeline", {}) if database.is_prepared() else []
            names = [row["name"] for row in rows]
            # A database of one pipeline says which one: people may have given it another name since.
            name = names[0] if names and not database.shared else self.name
            if name not in names:
                raise ConfigError(
                    f"{database.place} holds no pipeline {name}: it has not run yet",
                    fix="start it with `tailrace run FILE`",
                )
        return StateStore(database, name, self.state_dir, writes=False)

    def join(self, run: int) -> StateStore:
        """A store for a second process of run `run`: it may write until a later run begins, and remembers nothing.

        Raises OwnedError when a later run has begun already.
        """
        store = self.open()
        with closed_on_error(store):
            return store.join(run)
