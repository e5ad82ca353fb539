"""The interface to a database that can only be queried.

A connector is made for the scheme of the source's `dsn`. Postgres, SQLite and DuckDB are built in; others are added by
an entry point that names a subclass of `Connector`, which writes `open`; its session writes `tables` and `select`, or
`tables` and `ask` where the database speaks SQL (see `sql_session`):

    [project.entry-points."tailrace.connectors"]
    mysql = "my_package:MySqlConnector"
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import ConfigError, Finding, TailraceError
from tailrace.model.schema import TableName, TableSchema
from tailrace.source.poll.keyset import START, Keyset, KeyValue, Stretch
from tailrace.source.poll.version_column import Scale, VersionKind, kind_of, tick_of


@dataclass(frozen=True)
class ConnectorOptions:
    """Limits the load on the database, for one session. `zone` is for times without a zone, if configured."""

    statement_seconds: float = 60.0
    queries_per_second: float | None = None
    zone: str | None = None


@dataclass(frozen=True)
class Polled:
    """A table and the columns it is polled by. `soft` is not null in rows that count as deleted.

    `scope` is the part of the configuration that selects columns and rows. A copy made with another scope is of no use.
    """

    schema: TableSchema
    version: str | None
    created: str | None = None
    soft: str | None = None
    scope: str = ""

    @property
    def name(self) -> str:
        return str(self.schema.table)

    @cached_property
    def basis(self) -> str:
        """What marks refer to: a mark of another column, kind of time or key is meaningless here."""
        kind = kind_of(self.schema.column(self.version)) if self.version is not None else None
        return json.dumps([self.version, kind.name if kind is not None else None, *self.schema.key])

    @cached_property
    def tells_inserts(self) -> bool:
        """Whether a row shows that it was never updated: both of its times are there, of types that can be compared."""
        if self.created is None or self.version is None:
            return False
        types = [self.schema.column(name).type for name in (self.created, self.version)]
        try:
            pc.equal(*(pa.array([], each) for each in types))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return False
        return True

    def order(self, column: str | None) -> tuple[str, ...]:
        """The columns that order the rows: those of the key, after `column` where it is given."""
        return self.schema.key if column is None else (column, *self.schema.key)

    def only(self, names: Sequence[str]) -> TableSchema:
        """The table with only these columns, each once."""
        kept = tuple(column for column in self.schema.columns if column.name in names)
        return replace(self.schema, columns=kept, key=tuple(name for name in self.schema.key if name in names))


_NAMED: Final = 1 << 60


def number_by_name(name: str) -> int:
    """The number of a column in a database without column numbers: another name means another column."""
    return _NAMED + int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6], "big")


def has_unknown_past(known: TableSchema, now: TableSchema) -> bool:
    """Whether a column was added whose value in older rows is unknown: it may be a renamed one."""
    numbers = {column.number for column in known.columns}
    return any(column.number >= _NAMED and column.number not in numbers for column in now.columns)


@dataclass(frozen=True)
class Query:
    """A query for some rows of a table, in order: the rows of a stretch, with these `columns`, at most `rows`.

    by         the column that orders them before the key does; None: only the key. Rows with a null in it are left out
    deleted    rows whose soft delete column is set: only them (True), none of them (False), or both (None)
    hashed     whether the hash of each whole row is wanted
    keys       only the rows of these keys (typed key columns); then there are no more than that, in any order
    """

    table: Polled
    by: str | None
    stretch: Stretch
    columns: TableSchema
    rows: int
    deleted: bool | None = False
    hashed: bool = False
    keys: pa.Table | None = None

    @property
    def order(self) -> tuple[str, ...]:
        return self.table.order(self.by)


@dataclass(frozen=True)
class Page:
    """The result of a query: the requested columns, `exact` and hashes if requested, and the mark of the last row.

    A hash covers all columns of the table, whichever were requested. Rows with equal hashes are equal.
    """

    rows: pa.StructArray
    exact: pa.Array[Any] | None
    hashes: npt.NDArray[np.int64] | None
    last: Keyset | None

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Clock:
    """The database's time in microseconds, and the start of its oldest open transaction (`now` without one).

    `known` is False where transactions of others cannot be seen: their rows may still appear with any older time.
    `prepared` names prepared transactions that are not yet committed; their start is no longer known.
    """

    now: int
    oldest: int
    known: bool
    prepared: frozenset[str] = frozenset()


class ConnectorSession(ABC):
    """An open connection, for one thread. Every method may raise UnavailableError; the session cannot be used after
    that.

    A connector for SQL derives from `tailrace.source.poll.sql_session.SqlSession`, which implements more than these
    defaults.
    """

    fetch_keys: int = 1000
    """How many keys one query of `fetch` requests."""

    @abstractmethod
    def tables(self) -> list[TableSchema]:
        """Every table that can be read, all columns, with its primary key. `upstream_id` changes if it is recreated."""

    @abstractmethod
    def select(self, query: Query) -> Page:
        """The rows of a query. Raises SchemaChangedError when the table or one of its columns is gone."""

    def clock(self) -> Clock:
        """The database's time. The default is this machine's clock, without seeing transactions of others."""
        now = time.time_ns() // 1000
        return Clock(now, now, known=False)

    def zone(self) -> str:
        """The time zone of times stored without one."""
        return "UTC"

    def scale(self, table: Polled, column: str) -> Scale | None:
        """How times are written in a column; None for a type whose values have no usable order.

        Called before each poll: the highest value of a number column is its clock. Raises UnfitError for values whose
        order is not known.
        """
        found = table.schema.column(column)
        kind = kind_of(found)
        if kind is None:
            return None
        zone = self.zone() if kind in (VersionKind.LOCAL, VersionKind.DAY) else "UTC"
        return Scale(kind, tick_of(found), zone, self.highest(table, column) if kind is VersionKind.NUMBER else None)

    def highest(self, table: Polled, column: str) -> KeyValue | None:
        """The highest value of a column of numbers; None without any. By default every row is read to find it."""
        query = Query(table, column, Stretch(), table.only(table.order(column)), self.fetch_keys, deleted=None)
        last = START
        while (found := self.select(query).last) is not None:
            last, query = found, replace(query, stretch=Stretch(found))
        return last[0] if last else None

    def chunk_bound(self, table: Polled, after: Keyset, rows: int) -> Keyset | None:
        """The mark of the key that is `rows` rows after `after` in the order of keys; None past the end."""
        query = Query(table, None, Stretch(after), table.only(table.order(None)), rows, deleted=None)
        page = self.select(query)
        return page.last if len(page) == rows else None

    def fetch(self, table: Polled, keys: pa.Table, columns: TableSchema) -> Iterator[Page]:
        """`columns` of the current rows of these keys (typed key columns); soft deleted rows are left out."""
        for start in range(0, keys.num_rows, self.fetch_keys):
            some = keys.slice(start, self.fetch_keys)
            yield self.select(Query(table, None, Stretch(), columns, self.fetch_keys, keys=some))

    def count_unversioned(self, table: Polled) -> int:
        """How many rows have a null version. By default this is unknown, and 0."""
        return 0

    def count_keyless(self, table: Polled) -> int:
        """How many rows have a null in their key. By default 0: few databases allow it in a primary key."""
        return 0

    def lacks_index(self, table: Polled, column: str) -> bool:
        """Whether a poll by this column would read the whole table, according to the database's query plan."""
        return False

    def estimate(self, table: Polled) -> int:
        """About how many rows there are, from statistics; 0 if unknown."""
        return 0


@dataclass(frozen=True)
class Connector(ABC):
    """A database, as configuration: frozen and picklable, and its dsn never shows in its repr. It only ever reads."""

    dsn: str = field(repr=False)
    options: ConnectorOptions = field(default_factory=ConnectorOptions)

    @abstractmethod
    def open(self) -> AbstractContextManager[ConnectorSession]:
        """A session, closed by the caller. Raises PreflightError for an address that a retry cannot fix."""

    def check(self) -> list[Finding]:
        """Check whether the database can be polled, apart from its tables. A refused login is a finding."""
        try:
            with self.open() as session:
                session.tables()
        except TailraceError as error:
            return [Finding("error", "connection", error.message, error.fix)]
        return [Finding("ok", "connection", "its tables can be listed")]

    def unreadable(self) -> list[TableName]:
        """Tables that exist and that this user may not read, where the database can tell. Asked every few seconds."""
        return []


BUILT_IN: Final = {
    "duckdb": "tailrace.source.poll.duckdb:DuckDbConnector",
    "postgresql": "tailrace.source.poll.postgres:PostgresConnector",
    "postgres": "tailrace.source.poll.postgres:PostgresConnector",
    "sqlite": "tailrace.source.poll.sqlite:SqliteConnector",
}
GROUP: Final = "tailrace.connectors"


def connect(dsn: str, options: ConnectorOptions) -> Connector:
    """The connector for a dsn's scheme; `host=… dbname=…` is Postgres. Raises ConfigError where none is installed."""
    # Show it only if it has the form of a scheme: the text before `://` may be part of a password.
    found = re.match(r"[A-Za-z][A-Za-z0-9+.-]*(?=://)", dsn)
    scheme = found[0].lower() if found else "postgresql"
    others = {point.name: point for point in entry_points(group=GROUP)}
    point = EntryPoint(scheme, BUILT_IN[scheme], GROUP) if scheme in BUILT_IN else others.get(scheme)
    if point is None:
        raise ConfigError(
            f"no connector for {scheme}:// is installed; there are {', '.join(sorted({*BUILT_IN, *others}))}",
            fix=f"install a package with an entry point in {GROUP}, or use another dsn",
        )
    try:
        made = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the connector for {scheme}:// cannot be loaded: {error}",
            fix=f"pip install 'tailrace[{scheme}]'" if scheme in BUILT_IN else f"install what {point.value} needs",
        ) from error
    return cast(Connector, made(dsn, options))
