# ruff: noqa: S608 - every name in the SQL here is quoted
"""The table that a batch writes to, in a database that takes and gives rows as Arrow tables.

Rows go into the database as a whole, and SQL does the rest: rows with the keys of the batch are deleted, and the new
ones inserted. No row is looked at in Python.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.destination import Refetch, Written, chunking
from tailrace.destination.metadata import (
    COMMITTED_AT,
    DELETED_AT,
    OP,
    POSITION,
    metadata_fields,
    metadata_values,
    truncate_values,
)
from tailrace.destination.partial_row import Indexes, complete, left_out_columns
from tailrace.destination.replica.plan import ColumnRules, ReplicaPlan
from tailrace.destination.replica.sql_name import listed, quote
from tailrace.destination.replica.unheld_value import UnheldMask, note_unheld, unfit
from tailrace.model import key as keys
from tailrace.model.change import EXACT, Changes, Op
from tailrace.model.collapse import Collapsed, Marks, collapse, renamed_exact
from tailrace.model.schema import Column, TableName, TableSchema

OWN = {
    POSITION: pa.string(),
    OP: pa.string(),
    COMMITTED_AT: pa.timestamp("us", "UTC"),
    DELETED_AT: pa.timestamp("us", "UTC"),
    EXACT: pa.string(),
}
"""Tailrace's own columns, in the order in which a table has them."""


class ArrowDatabase(ABC):
    """The database inside the transaction of a batch."""

    rules: ColumnRules
    same: str
    """The SQL operator that finds a key: `=`, or one for which null equals null."""

    @abstractmethod
    def run(self, sql: str) -> None:
        """Run a statement."""

    @abstractmethod
    def ask(self, sql: str) -> pa.Table:
        """The rows of a query, in whatever Arrow types the database has for them."""

    @abstractmethod
    def incoming(self, rows: pa.Table) -> AbstractContextManager[str]:
        """Give rows to SQL for the length of the block, which gets what SQL calls them."""

    @abstractmethod
    def name(self, table: TableName, *, shadow: bool) -> TableName:
        """The schema and name there of a table or its shadow, which are in the same schema."""

    @abstractmethod
    def sql(self, name: TableName) -> str:
        """A table there, as SQL."""

    @abstractmethod
    def declared(self, column: Column) -> str:
        """The type that a kept column is declared with."""

    def given(self, column: Column, value: str) -> str:
        """The SQL for an incoming value of a kept column, as its declared type."""
        return value

    def taken(self, column: Column, value: str) -> str:
        """The SQL for a value of a kept column, as its kept type."""
        return value

    def upsert(
        self, name: TableName, key: Sequence[Column], incoming: str, values: Mapping[str, str], idle: Sequence[str]
    ) -> None:
        """Insert incoming rows `i` in place of those that have their keys; `values` has the SQL for each column.

        In rows that are changed, `idle` columns are null from then on.
        """
        self.run(f"DELETE FROM {self.sql(name)} AS t USING {incoming} AS i WHERE {self.matches(key)}")
        self.insert(name, incoming, values)

    def insert(self, name: TableName, incoming: str, values: Mapping[str, str]) -> None:
        columns, found = listed(values), ", ".join(values.values())
        self.run(f"INSERT INTO {self.sql(name)} ({columns}) SELECT {found} FROM {incoming} AS i")

    def matches(self, key: Sequence[Column]) -> str:
        """The condition under which a row `t` has the key of the incoming row `i`."""
        pairs = [(f"t.{quote(each.name)}", self.given(each, f"i.{quote(each.name)}")) for each in key]
        return " AND ".join(f"{here} {self.same} {incoming}" for here, incoming in pairs)

    def reshape(self, name: TableName, now: TableSchema, plan: ReplicaPlan) -> bool:
        """Give the columns that stay their new types, and drop those that others replace, with the key if it changes.

        False: the database cannot, and the table is built again.
        """
        return False

    def key_statements(self, name: TableName, now: TableSchema, plan: ReplicaPlan) -> list[str]:
        """What declares the key that the plan has, after `reshape`."""
        return []

    @abstractmethod
    def encode(self, values: Any, kind: pa.DataType, column: str, table: str) -> Any:
        """Values as the kept type `kind`. Raises UnfitError, without the value, for one that it cannot hold."""

    @abstractmethod
    def unheld(self, values: Any) -> UnheldMask | None:
        """Where kept values are that the database has no value for; None when nowhere."""

    def replace(self, name: TableName, heir: TableName, table: TableName) -> None:
        """Let `heir` take the place of the upstream's `table`, which is `name` here and may be missing."""
        self.run(f"DROP TABLE IF EXISTS {self.sql(name)}")
        self.run(f"ALTER TABLE {self.sql(heir)} RENAME TO {quote(name.name)}")

    def create(self, name: TableName, kept: TableSchema, own: Iterable[str]) -> None:
        columns = [*kept.columns, *(Column(each, OWN[each]) for each in own)]
        declared = [f"{quote(column.name)} {self.declared(column)}" for column in columns]
        self.run(f"CREATE TABLE {self.sql(name)} ({', '.join([*declared, *self.constraints(kept)])})")

    def constraints(self, kept: TableSchema) -> list[str]:
        """What a new table has besides its columns."""
        return []


@dataclass(frozen=True)
class ArrowLayout:
    """How one table is kept: the version it has after the batch, and the columns that are added for people."""

    table: TableSchema
    metadata: bool
    keeps_deleted: bool

    @property
    def own(self) -> list[str]:
        """Tailrace's columns that every row has. The one for unfit values comes with the first of them."""
        fields = metadata_fields(keyed=bool(self.table.key), wanted=self.metadata, keeps_deleted=self.keeps_deleted)
        return [field.name for field in fields]


@dataclass
class ArrowTable:
    """A table inside the transaction of its batch: the columns it has, and the layout of rows."""

    database: ArrowDatabase
    name: TableName
    kept: TableSchema
    layout: ArrowLayout
    own: list[str] = field(default_factory=list)

    @classmethod
    def created(cls, database: ArrowDatabase, layout: ArrowLayout, *, shadow: bool) -> ArrowTable:
        """A new table."""
        kept = database.rules.as_kept(layout.table)
        name = database.name(layout.table.table, shadow=shadow)
        database.create(name, kept, layout.own)
        return cls(database, name, kept, layout, layout.own)

    @classmethod
    def evolved(cls, database: ArrowDatabase, now: TableSchema, layout: ArrowLayout, *, shadow: bool) -> ArrowTable:
        """Evolve the existing table to the layout's columns. Raises SchemaChangedError where that is impossible."""
        table = cls(database, database.name(layout.table.table, shadow=shadow), now, layout)
        present = database.ask(f"SELECT * FROM {table.place} LIMIT 0").column_names
        table.own = [name for name in OWN if name in present]
        plan = database.rules.plan(now, layout.table)
        if plan.changes(now):
            table._carry_out(plan)
        for name in layout.own:
            table.require(name)
        return table

    @property
    def place(self) -> str:
        return self.database.sql(self.name)

    def require(self, column: str) -> None:
        """Add one of tailrace's own columns if it is missing."""
        if column not in self.own:
            self._add_column(Column(column, OWN[column]))
            self.own.append(column)

    def append(self, chunks: Iterable[Changes], now: pa.TimestampScalar) -> int:
        count, table = 0, self.layout.table
        for part in chunking.parts(chunks, table, chunking.PART_BYTES, row_bytes=lambda: chunking.ROW_BYTES):
            count += sum(map(len, part.chunks))
            if table.key:
                self.merge(collapse(part.chunks, table, keep_deleted=self.layout.keeps_deleted), now, None)
                continue
            for chunk in part.chunks:
                self._put(self._rows(chunk.row.flatten(), Marks.of(chunk), now))
        return count

    def merge(self, collapsed: Collapsed, now: pa.TimestampScalar, refetch: Refetch | None) -> Written:
        """Apply the last change of each key.

        Rows that lack values get those of the row they change, as it was before the batch; if there is none, those that
        the upstream has now.
        """
        # Old values first: two rows may take each other's key.
        old, at = self._old_values(collapsed)
        kept = self._kept_types(self.layout.table.arrow.names)
        columns, marks, _ = complete(collapsed, old, at, refetch, schema=kept, cast=self._cast)
        rows = self._rows(columns, marks, now)
        if collapsed.truncated:
            self._clear(truncate_values(collapsed.truncate_marks, now) if self.layout.keeps_deleted else None)
        self._delete(self._encoded(collapsed.deletes))
        self._put(rows)
        deleted = collapsed.deletes.num_rows
        if self.layout.keeps_deleted:
            deleted = int((marks.op == Op.DELETE).sum())
            return Written(collapsed.changes, rows.num_rows - deleted, deleted)
        return Written(collapsed.changes, rows.num_rows, deleted)

    def _carry_out(self, plan: ReplicaPlan) -> None:
        """Change the columns to those of a plan."""
        database = self.database
        first = pa.table({column: self._initial(plan, column) for column in plan.initial})
        if plan.rebuilt and not database.reshape(self.name, self.kept, plan):
            self._rebuild(plan, first)
        else:
            for old, new in plan.rename_steps():
                database.run(f"ALTER TABLE {self.place} RENAME COLUMN {quote(old)} TO {quote(new)}")
            for column in plan.added:
                self._add_column(column)
            if first.num_columns:
                with database.incoming(first) as values:
                    given = {each: database.given(plan.kept.column(each), f"i.{quote(each)}") for each in plan.initial}
                    setting = ", ".join(f"{quote(each)} = {value}" for each, value in given.items())
                    database.run(f"UPDATE {self.place} SET {setting} FROM {values} AS i")
            if plan.rebuilt:
                for statement in database.key_statements(self.name, self.kept, plan):
                    database.run(statement)
        self._rename_exact(plan)
        self.kept = plan.kept

    def _initial(self, plan: ReplicaPlan, column: str) -> Any:
        value = plan.initial[column]
        values = self._cast(pa.array([value], value.type), plan.kept.column(column).type, column)
        if self.database.unheld(values) is not None:
            raise unfit(column, plan.kept.table)
        return values

    def _rebuild(self, plan: ReplicaPlan, first: pa.Table) -> None:
        heir = TableName(self.name.schema, "_tailrace heir")
        self.database.create(heir, plan.kept, self.own)
        values = {name: source for name, (_, source) in plan.sources.items()} | {own: quote(own) for own in self.own}
        rows = self.place
        with ExitStack() as stack:
            if first.num_columns:
                given = stack.enter_context(self.database.incoming(first.rename_columns(_numbered(first))))
                values |= dict(zip(first.column_names, map(quote, _numbered(first)), strict=True))
                rows = f"{rows}, {given}"
            found = f"SELECT {', '.join(values.values())} FROM {rows}"
            self.database.run(f"INSERT INTO {self.database.sql(heir)} ({listed(values)}) {found}")
        self.database.replace(self.name, heir, plan.kept.table)

    def _rename_exact(self, plan: ReplicaPlan) -> None:
        """Rename the columns that texts of unfit values name, and drop those of columns that are gone."""
        if EXACT not in self.own or not (plan.rebuilt or plan.rename_steps()):
            return
        texts = self.database.ask(f"SELECT DISTINCT {EXACT} FROM {self.place} WHERE {EXACT} IS NOT NULL").column(0)
        before = texts.cast(pa.string()).combine_chunks()
        with self.database.incoming(pa.table({"old": before, "new": renamed_exact(before, plan.renamed)})) as names:
            self.database.run(f"UPDATE {self.place} SET {EXACT} = n.new FROM {names} AS n WHERE {EXACT} = n.old")

    def _add_column(self, column: Column) -> None:
        declared = f"{quote(column.name)} {self.database.declared(column)}"
        self.database.run(f"ALTER TABLE {self.place} ADD COLUMN {declared}")

    def _clear(self, marks: dict[str, pa.Scalar[Any]] | None) -> None:
        """Delete every row; with marks keep the rows and mark those as deleted that were not yet."""
        if marks is None:
            self.database.run(f"DELETE FROM {self.place}")
            return
        stamp = pa.table({name: pa.array([value], value.type) for name, value in marks.items() if name in self.own})
        setting = ", ".join(f"{name} = s.{name}" for name in stamp.column_names)
        with self.database.incoming(stamp) as values:
            self.database.run(f"UPDATE {self.place} AS t SET {setting} FROM {values} AS s WHERE t.{DELETED_AT} IS NULL")

    def _delete(self, wanted: pa.Table) -> None:
        if wanted.num_rows:
            with self.database.incoming(wanted) as given:
                condition = self.database.matches(self._key)
                self.database.run(f"DELETE FROM {self.place} AS t USING {given} AS i WHERE {condition}")

    def _put(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if EXACT in rows.column_names:
            self.require(EXACT)
        values = {name: self.database.given(self._column(name), f"i.{quote(name)}") for name in rows.column_names}
        idle = [name for name in (*self.kept.arrow.names, *self.own) if name not in values]
        with self.database.incoming(rows) as given:
            if self._key:
                self.database.upsert(self.name, self._key, given, values, idle)
            else:
                self.database.insert(self.name, given, values)

    def _old_values(self, collapsed: Collapsed) -> tuple[pa.Table, Indexes]:
        """The rows from before the batch with what changes left out; for each incomplete row its index there, or -1."""
        wanted = [*left_out_columns(collapsed), *([EXACT] if EXACT in self.own else [])]
        schema = self._kept_types(wanted)
        at = np.full(len(collapsed.incomplete), -1, np.int64)
        known = np.asarray(pc.is_valid(collapsed.lookup.column(0)).to_numpy(zero_copy_only=False), bool)
        if collapsed.truncated or not known.any():
            return schema.empty_table(), at
        sought = self._encoded(collapsed.lookup.filter(pa.array(known)))
        key = sought.column_names
        columns = self.selected("t", dict.fromkeys([*key, *wanted]))
        with self.database.incoming(sought) as given:
            is_sought = f"EXISTS (SELECT 1 FROM {given} AS i WHERE {self.database.matches(self._key)})"
            rows = self.database.ask(f"SELECT {columns} FROM {self.place} AS t WHERE {is_sought}")
        found = rows.select(key).cast(sought.schema)
        at[known] = keys.positions(keys.comparable(sought.columns), keys.comparable(found.columns))
        return rows.select(wanted).cast(schema), at

    def _rows(self, columns: Sequence[Any], marks: Marks, now: pa.TimestampScalar) -> pa.Table:
        """Rows ready for the table: the upstream's columns, tailrace's own and, where there are any, unfit values."""
        table, exact = self.layout.table, marks.exact
        arrays: dict[str, Any] = {}
        for column, values in zip(table.columns, columns, strict=True):
            encoded = self._cast(values, self.kept.column(column.name).type, column.name)
            if (mask := self.database.unheld(encoded)) is not None:
                encoded, exact = note_unheld(encoded, mask, exact, column.name, table)
            arrays[column.name] = encoded
        arrays |= dict(zip(self.layout.own, metadata_values(self.layout.own, marks, now), strict=True))
        if exact.null_count < len(exact) or EXACT in self.own:
            arrays[EXACT] = exact
        return pa.table(arrays)

    def _encoded(self, rows: pa.Table) -> pa.Table:
        """Some of the upstream's columns as the database keeps them."""
        types = self._kept_types(rows.column_names)
        return pa.table([self._cast(rows.column(f.name), f.type, f.name) for f in types], schema=types)

    def _kept_types(self, names: Iterable[str]) -> pa.Schema:
        return pa.schema([(name, OWN.get(name) or self.kept.column(name).type) for name in names])

    def _cast(self, values: Any, kind: pa.DataType, column: str) -> Any:
        return self.database.encode(values, kind, column, str(self.layout.table.table))

    def selected(self, rows: str, names: Iterable[str]) -> str:
        """The SQL that selects columns of the rows `rows` as their kept types."""
        taken = {name: self.database.taken(self._column(name), f"{rows}.{quote(name)}") for name in names}
        return ", ".join(f"{value} AS {quote(name)}" for name, value in taken.items())

    def _column(self, name: str) -> Column:
        return Column(name, OWN[name]) if name in OWN else self.kept.column(name)

    @property
    def _key(self) -> list[Column]:
        return [self.kept.column(name) for name in self.layout.table.key]


def _numbered(rows: pa.Table) -> list[str]:
    """Names for columns that no column of the rebuilt table has."""
    return [f"_tailrace {at}" for at in range(rows.num_columns)]
