"""The one table of the file that a batch writes to, and the statements that do it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import isnan
from typing import Any

import pyarrow as pa

from tailrace.destination.metadata import DELETED_AT
from tailrace.destination.replica.sql_name import listed, quote
from tailrace.destination.sqlite.column import OWN, ColumnValues, SqliteLayout, create_sql, noted
from tailrace.destination.sqlite.evolution import RULES, add_column, carry_out, initial_values
from tailrace.destination.sqlite.value import declared, encode
from tailrace.model.change import EXACT
from tailrace.model.schema import TableSchema


@dataclass
class SqliteTarget:
    """A table inside the transaction of its batch: its name in the file, the columns kept there, the layout of rows."""

    connection: sqlite3.Connection
    name: str
    kept: TableSchema
    layout: SqliteLayout
    own: list[str] = field(default_factory=list)

    @classmethod
    def created(cls, connection: sqlite3.Connection, name: str, layout: SqliteLayout) -> SqliteTarget:
        """A new table."""
        kept = RULES.as_kept(layout.table)
        connection.execute(create_sql(name, kept, layout.own))
        return cls(connection, name, kept, layout, list(layout.own))

    @classmethod
    def evolved(cls, connection: sqlite3.Connection, name: str, now: TableSchema, layout: SqliteLayout) -> SqliteTarget:
        """Evolve the existing table to the layout's columns. Raises SchemaChangedError where that is impossible."""
        present = {row[1] for row in connection.execute(f"PRAGMA table_info({quote(name)})")}
        own = [column for column in OWN if column in present]
        way = RULES.plan(now, layout.table)
        initial = initial_values(way)
        if way.changes(now):
            carry_out(connection, name, own, way, initial)
        target = cls(connection, name, way.kept, layout, own)
        target.note({column: "NaN" for column, value in initial.items() if isinstance(value, float) and isnan(value)})
        for column in layout.own:
            target.require(column)
        return target

    def require(self, column: str) -> None:
        """Add one of tailrace's own columns if it is missing."""
        if column not in self.own:
            add_column(self.connection, self.name, column, "TEXT")
            self.own.append(column)

    def note(self, unfit: Mapping[str, str]) -> None:
        """Keep texts with every row, for columns that held a value SQLite cannot represent."""
        if unfit:
            self.require(EXACT)
            self.connection.create_function("tailrace_noted", 1, lambda text: noted(text, unfit), deterministic=True)
            self.connection.execute(f"UPDATE {quote(self.name)} SET {EXACT} = tailrace_noted({EXACT})")  # noqa: S608

    def put(self, columns: ColumnValues, wanted: Sequence[bool] | None = None) -> int:
        """Write the wanted rows, as `Layout.rows` gives them, over those with their keys. Returns how many."""
        *values, exact = columns
        if any(exact):
            self.require(EXACT)
        if EXACT in self.own:
            values.append(exact)
        rows = zip(*values, strict=True)
        cursor = self.connection.executemany(self._put_sql(), rows if wanted is None else compress(rows, wanted))
        return cursor.rowcount

    def delete(self, keys: pa.Table) -> int:
        """Delete the rows with these keys. Returns how many there were."""
        where = " AND ".join(f"{quote(name)} = ?" for name in self.layout.table.key)
        cursor = self.connection.executemany(
            f"DELETE FROM {quote(self.name)} WHERE {where}",  # noqa: S608
            zip(*self.encoded(keys), strict=True),
        )
        return max(cursor.rowcount, 0)

    def clear(self, marks: dict[str, Any] | None) -> None:
        """Delete every row; with marks keep the rows and mark those as deleted that were not yet."""
        if marks is None:
            self.connection.execute(f"DELETE FROM {quote(self.name)}")  # noqa: S608
            return
        stamped = {name: value for name, value in marks.items() if name in self.own}
        setting = ", ".join(f"{quote(name)} = ?" for name in stamped)
        self.connection.execute(
            f"UPDATE {quote(self.name)} SET {setting} WHERE {DELETED_AT} IS NULL",  # noqa: S608
            list(stamped.values()),
        )

    def find(self, numbers: Sequence[int], keys: pa.Table, columns: Sequence[str]) -> dict[int, tuple[Any, ...]]:
        """The values of some columns in the rows with these keys, by the keys' numbers; missing keys are left out."""
        key = self.layout.table.key
        kinds = [f"{quote(name)} {declared(self.kept.column(name).type)}" for name in key]
        self.connection.execute("DROP TABLE IF EXISTS temp.sought")
        # It has the same key as the table, so rows are looked up in the order they are stored in.
        self.connection.execute(
            f"CREATE TEMP TABLE sought (_tailrace_number INTEGER, {', '.join(kinds)}, "
            f"PRIMARY KEY ({listed(key)}, _tailrace_number)) WITHOUT ROWID"
        )
        self.connection.executemany(
            f"INSERT INTO temp.sought VALUES (?{', ?' * len(key)})",  # noqa: S608
            zip(numbers, *self.encoded(keys), strict=True),
        )
        same = " AND ".join(f"t.{quote(name)} = s.{quote(name)}" for name in key)
        # CROSS JOIN fixes the join order: each key looks up its row, and the table is not scanned.
        found = self.connection.execute(
            f"SELECT s._tailrace_number{''.join(f', t.{quote(column)}' for column in columns)} "  # noqa: S608
            f"FROM temp.sought AS s CROSS JOIN {quote(self.name)} AS t ON {same}"
        )
        return {number: tuple(values) for number, *values in found}

    def encoded(self, rows: pa.Table) -> ColumnValues:
        """Some of the upstream's columns as the file keeps them."""
        name = str(self.layout.table.table)
        return [encode(rows.column(c), self.kept.column(c).type, c, name) for c in rows.column_names]

    def _put_sql(self) -> str:
        table = self.layout.table
        exact = [EXACT] if EXACT in self.own else []
        names = [*table.arrow.names, *self.layout.own, *exact]
        marks = ", ".join("?" * len(names))
        insert = f"INSERT INTO {quote(self.name)} ({listed(names)}) VALUES ({marks})"  # noqa: S608
        if not table.key:
            return insert
        # Columns that the upstream dropped, and those of options that were switched off, are null in rows from now on.
        idle = [name for name in (*self.kept.arrow.names, *self.own) if name not in names]
        setting = [f"{quote(name)} = excluded.{quote(name)}" for name in names if name not in table.key]
        setting += [f"{quote(name)} = NULL" for name in idle]
        action = f"UPDATE SET {', '.join(setting)}" if setting else "NOTHING"
        return f"{insert} ON CONFLICT ({listed(table.key)}) DO {action}"


def has_rows(connection: sqlite3.Connection, name: str) -> bool:
    return bool(connection.execute(f"SELECT EXISTS (SELECT 1 FROM {quote(name)})").fetchone()[0])  # noqa: S608
