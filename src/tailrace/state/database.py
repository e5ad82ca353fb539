"""The seam between what the store says in SQL and the database that keeps it.

Statements are written once, in the dialect that SQLite and Postgres share, with `:name` for values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

Row = Mapping[str, Any]
Values = Mapping[str, object]


class Closable(Protocol):
    """What holds a connection, or is one."""

    def close(self) -> None: ...


@contextmanager
def closed_on_error(thing: Closable) -> Iterator[None]:
    """Whoever fails to open a store leaves no connection behind."""
    try:
        yield
    except BaseException:
        thing.close()
        raise


class StateCursor(Protocol):
    """Runs statements inside one transaction."""

    def run(self, statement: str, values: Values) -> list[Row]:
        """The rows a statement returns; none for one that returns nothing."""
        ...

    def run_many(self, statement: str, values: Sequence[Values]) -> None:
        """The same statement for each of the values."""
        ...


class StateDatabase(Protocol):
    """One connection to where the state is. Used by one thread at a time.

    Everything that fails raises UnavailableError, DamagedError, PreflightError or another TailraceError; no message
    holds a value or a secret.
    """

    place: str
    """Where the state is, for messages."""

    shared: bool
    """Whether several machines use it. Then the lease tells who runs the pipeline; else the folder's lock does."""

    locking: str
    """What a SELECT ends with to keep the row from others until the transaction ends; empty where all of it is kept."""

    clock: str
    """A SELECT of the database's own time, as `at`."""

    def read(self, statement: str, values: Values) -> list[Row]:
        """The rows of a SELECT, as they are committed now."""
        ...

    def transaction(self) -> AbstractContextManager[StateCursor]:
        """All or nothing: durable when the block ends, undone when it raises."""
        ...

    def close(self) -> None:
        """Let go of the connection. A repeat changes nothing."""
        ...
