"""Where a pipeline's state is kept."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tailrace.errors import ConfigError
from tailrace.state.engine import closed_on_error
from tailrace.state.store import StateStore

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
