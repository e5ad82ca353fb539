"""The seam between what the store says in SQL and the database that keeps it.

Statements are written once, in the SQL that SQLite and Postgres share, with `:name` for values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

from tailrace.errors import ConfigError
from tailrace.state.layout import FORMAT, ColumnTypes, statements

T = TypeVar("T")
Row = Mapping[str, Any]
Values = Mapping[str, object]
RunSql = Callable[[str, Values], list[Row]]
"""Runs a statement inside a transaction. Gives the rows it returns; none for a statement that returns nothing."""


class Closable(Protocol):
    """What holds a connection, or is one."""

    def close(self) -> None: ...


@contextmanager
def closed_on_error(thing: Closable) -> Iterator[None]:
    """A store that fails to open leaves no connection open."""
    try:
        yield
    except BaseException:
        thing.close()
        raise


class StateDatabase(ABC):
    """One connection to where the state is. Used by one thread at a time, not always by the thread that made it.

    A subclass writes `transaction` and `close`, and replaces what differs in its SQL. Everything that fails raises
    UnavailableError, DamagedError, PreflightError or another TailraceError; no message holds a value or a secret.
    """

    place: str
    """Where the state is, for messages."""

    shared: bool = True
    """Whether several machines use it. Then the lease says who runs the pipeline, otherwise the folder's lock does.

    A database that is not shared keeps one pipeline."""

    locking: str = ""
    """What a SELECT ends with to keep the row from others until the transaction ends; empty where all of it is kept."""

    clock: str = "SELECT CURRENT_TIMESTAMP AS at"
    """A SELECT of the database's own time, as `at`. A time without a zone is UTC."""

    catalog: str = "SELECT table_name AS name FROM information_schema.tables WHERE table_schema = current_schema()"
    """A SELECT of the tables that are there, by `name`."""

    types: ColumnTypes = ColumnTypes()
    """How the database calls the types of columns."""

    @abstractmethod
    def transaction(self, *, writes: bool = True) -> AbstractContextManager[RunSql]:
        """All or nothing: durable when the block ends, undone when it raises.

        Two transactions that write do not overlap, or the second one waits for the row that both update or select with
        `locking`. One that does not write sees what is committed now.
        """

    def write(self, change: Callable[[RunSql], T]) -> T:
        """Run `change` in a transaction. A database without locks runs it again when another process was faster."""
        with self.transaction() as run:
            return change(run)

    @abstractmethod
    def close(self) -> None:
        """Let go of the connection. A repeat changes nothing."""

    def read(self, statement: str, values: Values) -> list[Row]:
        """The rows of a SELECT, as they are committed now."""
        with self.transaction(writes=False) as run:
            return run(statement, values)

    def run_many(self, run: RunSql, statement: str, values: Sequence[Values]) -> None:
        """The same statement for each of the values, in the transaction that `run` belongs to."""
        for each in values:
            run(statement, each)

    def prepare(self) -> None:
        """Make the tables, or add what tables of an older format lack. A repeat changes nothing.

        Raises ConfigError for tables of a newer tailrace.
        """
        with self.transaction() as run:
            found = self._known_format(run)
            if found < FORMAT:
                self.upgrade(run, found)

    def is_prepared(self) -> bool:
        """Whether the tables are there. Raises ConfigError for tables of a newer tailrace.

        Tables of an older format can be read as they are: formats only added tables.
        """
        with self.transaction(writes=False) as run:
            return self._known_format(run) > 0

    def format(self, run: RunSql) -> int:
        """The format of the tables; 0 where there are none."""
        if "format" not in {row["name"] for row in run(self.catalog, {})}:
            return 0
        return int(run("SELECT version FROM format", {})[0]["version"])

    def upgrade(self, run: RunSql, found: int) -> None:
        """Bring the tables from format `found` (0: there are none) to the newest, inside the caller's transaction."""
        if found == 0:
            run("CREATE TABLE format AS SELECT 0 AS version", {})
        for statement in statements(self.types, found):
            run(statement, {})
        run(f"UPDATE format SET version = {FORMAT}", {})  # noqa: S608 - a number of ours

    def _known_format(self, run: RunSql) -> int:
        found = self.format(run)
        if found > FORMAT:
            raise ConfigError(
                f"{self.place} has format {found}, this tailrace reads up to {FORMAT}: a newer tailrace wrote it",
                fix="upgrade with `pip install -U tailrace`, or keep the state of this pipeline elsewhere",
            )
        return found
