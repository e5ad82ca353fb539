"""The state of one pipeline, wherever it is kept.

Every write is one transaction that is durable when the method returns, so a killed process leaves the state before
or after it, nothing between. A store can be used from several threads.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from tailrace.errors import ConfigError
from tailrace.state import layout
from tailrace.state.engine import StateDatabase, closed_on_error
from tailrace.state.lease import LeaseStore
from tailrace.state.letter import DeadLetterStore
from tailrace.state.lock import Owner, find_owner
from tailrace.state.progress import ProgressStore
from tailrace.state.request import RequestStore
from tailrace.state.row import now, text_of
from tailrace.state.session import StateSession
from tailrace.state.sqlite import SqliteStateDatabase
from tailrace.state.version import VersionStore


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
