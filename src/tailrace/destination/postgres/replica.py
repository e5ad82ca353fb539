# ruff: noqa: S608 - every name in the SQL here is quoted
"""The database as a replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pyarrow as pa

from tailrace.destination.postgres import value
from tailrace.destination.postgres.name import place_of, shadow_of
from tailrace.destination.postgres.option import PostgresDestinationOptions
from tailrace.destination.postgres.session import Session, place_name
from tailrace.destination.replica.arrow_replica import ArrowReplica
from tailrace.destination.replica.arrow_table import ArrowDatabase
from tailrace.destination.replica.plan import ColumnRules, ReplicaPlan
from tailrace.destination.replica.sql_name import listed, quote
from tailrace.destination.replica.unheld_value import UnheldMask
from tailrace.errors import TableError
from tailrace.model.schema import Column, TableName, TableSchema


def rules(*, native: bool) -> ColumnRules:
    def conversion(old: Column, new: Column) -> str:
        before, after = (value.declared(each, native=native) for each in (old, new))
        if before == after:
            return "{}"
        return f"({value.printed(old, native=native)})::{after}"

    return ColumnRules("the database", value.kept_type, conversion, lambda name: name)


class PostgresDatabase(ArrowDatabase):
    same = "="

    def __init__(self, session: Session) -> None:
        self._session = session
        self._native = session.options.native_types
        self.rules = rules(native=self._native)

    def run(self, sql: str) -> None:
        self._session.run(sql)

    def ask(self, sql: str) -> pa.Table:
        return self._session.ask(sql)

    def incoming(self, rows: pa.Table) -> AbstractContextManager[str]:
        return self._session.incoming(rows)

    def name(self, table: TableName, *, shadow: bool) -> TableName:
        place = place_of(table, self._session.options.schema_name)
        return shadow_of(place) if shadow else place

    def sql(self, name: TableName) -> str:
        return f"{quote(name.schema)}.{quote(name.name)}"

    def create(self, name: TableName, kept: TableSchema, own: Iterable[str]) -> None:
        if problem := self._session.replica_problem(kept.table):
            raise TableError(problem.message, table=str(kept.table), fix=problem.fix)
        self._session.create_schema(name.schema)
        super().create(name, kept, own)

    def constraints(self, kept: TableSchema) -> list[str]:
        return [f"PRIMARY KEY ({listed(kept.key)})"] if kept.key else []

    def declared(self, column: Column) -> str:
        return value.declared(column, native=self._native)

    def given(self, column: Column, value_sql: str) -> str:
        return f"{value_sql}::{self.declared(column)}"

    def taken(self, column: Column, value_sql: str) -> str:
        return value.printed(column, native=self._native).format(value_sql)

    def encode(self, values: Any, kind: pa.DataType, column: str, table: str) -> Any:
        return value.encode(values, kind, column, table)

    def unheld(self, values: Any) -> UnheldMask | None:
        return value.unheld(values)

    def upsert(
        self, name: TableName, key: Sequence[Column], incoming: str, values: Mapping[str, str], idle: Sequence[str]
    ) -> None:
        """Rows are updated in place: no foreign key that people added sees one go, and indexes stay as they are."""
        keys = [column.name for column in key]
        setting = [f"{quote(each)} = excluded.{quote(each)}" for each in values if each not in keys]
        setting += [f"{quote(each)} = NULL" for each in idle]
        action = f"UPDATE SET {', '.join(setting)}" if setting else "NOTHING"
        self.run(
            f"INSERT INTO {self.sql(name)} ({listed(values)}) SELECT {', '.join(values.values())} FROM {incoming} AS i"
            f" ON CONFLICT ({listed(keys)}) DO {action}"
        )

    def reshape(self, name: TableName, now: TableSchema, plan: ReplicaPlan) -> bool:
        """In place, so that indexes, rights and triggers that people added stay."""
        if _changes_key(now, plan):
            constraint = self._session.run(
                "SELECT conname::text FROM pg_constraint WHERE contype = 'p' AND conrelid = ?::regclass",
                (self.sql(name),),
            )
            for (each,) in constraint:
                self.run(f"ALTER TABLE {self.sql(name)} DROP CONSTRAINT {quote(each)}")
        steps = [f"DROP COLUMN {quote(column.name)}" for column in now.columns if column.name not in plan.renamed]
        for new, (old, source) in plan.sources.items():
            if source != quote(old):
                declared = self.declared(plan.kept.column(new))
                steps.append(f"ALTER COLUMN {quote(old)} TYPE {declared} USING {source}")
        if steps:
            self.run(f"ALTER TABLE {self.sql(name)} {', '.join(steps)}")
        return True

    def key_statements(self, name: TableName, now: TableSchema, plan: ReplicaPlan) -> list[str]:
        if not (plan.kept.key and _changes_key(now, plan)):
            return []
        return [f"ALTER TABLE {self.sql(name)} ADD PRIMARY KEY ({listed(plan.kept.key)})"]

    def replace(self, name: TableName, heir: TableName, table: TableName) -> None:
        """A table with the same columns stays, with everything that people added to it, and takes the rows."""
        columns = [self._columns(each) for each in (name, heir)]
        if columns[0] == columns[1]:
            names = listed(column for column, _ in columns[0])
            self.run(f"TRUNCATE {self.sql(name)}")
            self.run(f"INSERT INTO {self.sql(name)} ({names}) SELECT {names} FROM {self.sql(heir)}")
            self.run(f"DROP TABLE {self.sql(heir)}")
        else:
            super().replace(name, heir, table)

    def _columns(self, name: TableName) -> list[tuple[Any, ...]]:
        """The columns of a table there, and the number of its key's columns."""
        return self._session.run(
            "SELECT attname::text, format_type(atttypid, atttypmod) || coalesce(("
            "   SELECT ' key ' || array_position(conkey, attnum) FROM pg_constraint"
            "   WHERE contype = 'p' AND conrelid = attrelid AND attnum = ANY (conkey)), '')"
            " FROM pg_attribute WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped ORDER BY attname",
            (self.sql(name),),
        )


def _changes_key(now: TableSchema, plan: ReplicaPlan) -> bool:
    return [plan.sources.get(name, ("",))[0] for name in plan.kept.key] != list(now.key)


class PostgresReplica(ArrowReplica):
    def __init__(self, session: Session, options: PostgresDestinationOptions, table: TableName, pipeline: str) -> None:
        super().__init__(
            PostgresDatabase(session),
            place_name(options),
            session.bookkeeping(),
            keeps_deleted=options.deletes == "soft",
            metadata=options.metadata,
        )
        self._session = session
        self._lock = f"writes {table} of {pipeline}"

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._session.transaction():
            self._session.lock(self._lock)
            yield
