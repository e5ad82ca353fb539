# ruff: noqa: S608 - every name and value in the SQL here is quoted
"""A session with a database that speaks SQL: pages, chunks, rows by key and counts, written once.

A subclass lists the tables and runs SQL, and overrides what its database writes differently.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tailrace.model.digest import row_digests
from tailrace.model.exact import combine
from tailrace.model.schema import Column
from tailrace.source.poll.connector import ConnectorSession, Page, Polled, Query
from tailrace.source.poll.keyset import Keyset, KeyValue, Stretch


class SqlSession(ConnectorSession):
    """Everything a session needs except `tables` and `ask`. Methods that a subclass can override build the SQL."""

    key_list: str = ""
    """The text before the rows of `(a, b) IN (…)`; SQLite wants `VALUES` there."""

    @abstractmethod
    def ask(self, sql: str, table: Polled | None = None) -> Sequence[tuple[Any, ...]]:
        """The rows of a SELECT. `table` is the table it reads, if it reads one.

        Raises SchemaChangedError when the table or one of its columns is gone, UnavailableError for all else.
        """

    # -- how names and values are written -----------------------------------------------------------------

    def quote(self, name: str) -> str:
        return '"' + name.replace('"', '""') + '"'

    def source(self, table: Polled) -> str:
        """The table, as written in FROM."""
        return f"{self.quote(table.schema.table.schema)}.{self.quote(table.schema.table.name)}"

    def column(self, table: Polled, name: str) -> str:
        """A column of the table, as written anywhere in the query."""
        return self.quote(name)

    def mark_value(self, table: Polled, name: str) -> str:
        """A column of the order, in the form its values have in a mark."""
        return self.column(table, name)

    def literal(self, table: Polled, name: str, value: KeyValue) -> str:
        """A value of this column, from a mark or from a typed key column."""
        if isinstance(value, str):
            return "'" + value.replace("'", "''") + "'"
        return f"X'{value.hex()}'" if isinstance(value, bytes) else repr(value)

    def order_by(self, table: Polled, names: Sequence[str]) -> str:
        return f"ORDER BY {self.columns(table, names)}"

    def columns(self, table: Polled, names: Sequence[str]) -> str:
        return ", ".join(self.column(table, name) for name in names)

    # -- which rows ---------------------------------------------------------------------------------------

    def within(self, table: Polled, by: str | None, stretch: Stretch) -> list[str]:
        """The conditions of a stretch. Compares row values, for which an index on these columns can be used."""
        order, found = table.order(by), []
        if stretch.after:
            sign = ">" if len(stretch.after) == len(order) else ">="
            found.append(self._compared(table, order, stretch.after, sign))
        if stretch.upto is not None:
            sign = "<=" if len(stretch.upto) == len(order) else "<"
            found.append(self._compared(table, order, stretch.upto, sign) if stretch.upto else "1 = 0")
        return found

    def _compared(self, table: Polled, order: Sequence[str], mark: Keyset, sign: str) -> str:
        left = self.columns(table, order[: len(mark)])
        right = ", ".join(self.literal(table, name, value) for name, value in zip(order, mark, strict=False))
        return f"{left} {sign} {right}" if len(mark) == 1 else f"({left}) {sign} ({right})"

    def alive(self, table: Polled, deleted: bool | None) -> list[str]:
        """The condition on the soft delete column, if there is one: see `Query.deleted`."""
        if table.soft is None or deleted is None:
            return []
        return [f"{self.column(table, table.soft)} IS {'NOT ' if deleted else ''}NULL"]

    def keyed(self, table: Polled, keys: pa.Table) -> str:
        """The condition that a row has one of these keys."""
        names = table.schema.key
        values = zip(*(keys.column(name).to_pylist() for name in names), strict=True)
        rows = ", ".join(
            f"({', '.join(self.literal(table, name, value) for name, value in zip(names, row, strict=True))})"
            for row in values
        )
        listed = self.columns(table, names)
        return f"({listed}) IN ({self.key_list}{rows})" if len(names) > 1 else f"{listed} IN ({rows})"

    # -- what is asked ------------------------------------------------------------------------------------

    def select(self, query: Query) -> Page:
        table = query.table
        where = [*self.within(table, query.by, query.stretch), *self.alive(table, query.deleted)]
        if query.by is not None:
            where.append(f"{self.column(table, query.by)} IS NOT NULL")
        if query.keys is not None:
            return self.read(query, where_clause([self.keyed(table, query.keys), *where]))
        return self.read(query, f"{where_clause(where)} {self.order_by(table, query.order)} LIMIT {query.rows}")

    def read(self, query: Query, rest: str) -> Page:
        """The rows of `SELECT … FROM …` and the `rest`; from `ask` by default, in bulk where the driver can do that."""
        table = query.table
        wanted = (table.schema if query.hashed else query.columns).columns
        listed = [self.column(table, column.name) for column in wanted]
        listed += [self.mark_value(table, name) for name in query.order]
        rows = self.ask(f"SELECT {', '.join(listed)} FROM {self.source(table)} {rest}", table)
        values = list(zip(*rows, strict=True)) or [()] * len(listed)
        parsed = {column.name: self.parse(values[at], column) for at, column in enumerate(wanted)}
        hashes = None
        if query.hashed:
            # Values that the column's type cannot hold still belong to the row.
            hashes = row_digests([each for array, unfit in parsed.values() for each in (array, _or_nulls(unfit, rows))])
        shown = [column.name for column in query.columns.columns]
        row = pa.StructArray.from_arrays([parsed[name][0] for name in shown], fields=list(query.columns.row_type))
        exact = combine({name: unfit for name in shown if (unfit := parsed[name][1]) is not None})
        last = tuple(each[-1] for each in values[len(wanted) :]) if rows else None
        return Page(row, exact, hashes, last)

    def parse(self, values: Sequence[Any], column: Column) -> tuple[pa.Array[Any], pa.Array[Any] | None]:
        """The values of a column as Arrow, and those that its type cannot hold as text (None: there are none)."""
        return pa.array(values, column.type), None

    def highest(self, table: Polled, column: str) -> KeyValue | None:
        query = f"SELECT max({self.column(table, column)}) FROM {self.source(table)}"
        found: KeyValue | None = self.ask(query, table)[0][0]
        return found

    def chunk_bound(self, table: Polled, after: Keyset, rows: int) -> Keyset | None:
        order = table.order(None)
        marks = ", ".join(self.mark_value(table, name) for name in order)
        where = where_clause(self.within(table, None, Stretch(after)))
        found = self.ask(
            f"SELECT {marks} FROM {self.source(table)} {where} {self.order_by(table, order)} LIMIT 1 OFFSET {rows - 1}",
            table,
        )
        return tuple(found[0]) if found else None

    def count_unversioned(self, table: Polled) -> int:
        if table.version is None:
            return 0
        where = where_clause([f"{self.column(table, table.version)} IS NULL", *self.alive(table, False)])
        return int(self.ask(f"SELECT count(*) FROM {self.source(table)} {where}", table)[0][0])


def where_clause(conditions: Sequence[str]) -> str:
    return f"WHERE {' AND '.join(conditions)}" if conditions else ""


def _or_nulls(texts: pa.Array[Any] | None, rows: Sequence[Any]) -> pa.Array[Any]:
    return pa.nulls(len(rows)) if texts is None else texts
