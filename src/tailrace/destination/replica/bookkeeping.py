"""What a replica records about its own tables, in three tables of its database.

table    each table: the upstream's name, and every column with type and number, dropped ones included
batch    the last batch of each pipeline in each table, and what identifies the offset at which it ends
copy     copies that wait for their end: the columns of what was copied so far
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.destination import Batch
from tailrace.errors import TableError
from tailrace.model.last_batch import LastBatch
from tailrace.model.schema import TableName, TableSchema

Execute = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
"""Runs a statement with a value for each `?` and returns its rows."""


@dataclass(frozen=True)
class CopyUnderway:
    """A copy into a table that holds rows. `kept` has the columns of its shadow."""

    pipeline: str
    kept: TableSchema


@dataclass(frozen=True)
class Bookkeeping:
    """The three tables, inside whatever transaction is open.

    run        runs SQL on the connection
    place      where one of the three is, as SQL
    key        a table's name in `batch` and `copy`
    unique     a table's name in `table`: the same for two that the database takes for one
    is_taken   whether something in the database has the name under which a table would be kept
    holder     what an error calls the database: `the file`
    """

    run: Execute
    place: Callable[[str], str]
    key: Callable[[TableName], str]
    unique: Callable[[TableName], str]
    is_taken: Callable[[TableName], bool]
    holder: str

    def create(self, name_type: str = "TEXT PRIMARY KEY") -> None:
        """Create the three tables. `name_type` may say how names are compared."""
        self.run(
            f"CREATE TABLE {self.place('table')} (name {name_type}, upstream TEXT NOT NULL, kept TEXT NOT NULL)", ()
        )
        self.run(
            f"CREATE TABLE {self.place('batch')} (pipeline TEXT, name TEXT, batch BIGINT NOT NULL, ending BIGINT,"
            " PRIMARY KEY (pipeline, name))",
            (),
        )
        self.run(
            f"CREATE TABLE {self.place('copy')} (name TEXT PRIMARY KEY, pipeline TEXT NOT NULL, kept TEXT NOT NULL)", ()
        )

    def last_batch(self, pipeline: str, table: TableName) -> LastBatch | None:
        """The pipeline's last batch that the table holds."""
        found = self._row("batch", "*", pipeline=pipeline, name=self.key(table))
        return LastBatch(*found[2:]) if found else None

    def put_batch(self, batch: Batch, table: TableName) -> None:
        self._put("batch", pipeline=batch.pipeline, name=self.key(table), batch=batch.id, ending=batch.end)

    def kept(self, table: TableName) -> TableSchema | None:
        """The columns that the table has in the database; None when it is not there.

        Raises TableError when its name is taken, by a table that tailrace did not make or one that differs in case.
        """
        found = self._row("table", "upstream, kept", name=self.unique(table))
        if found and found[0] == str(table):
            return TableSchema.from_json(found[1])
        if found or self.is_taken(table):
            owner = f"by the upstream's table {found[0]}" if found else "by something that tailrace did not make"
            raise TableError(
                f"the name {self.unique(table)} is taken in {self.holder} {owner}",
                table=str(table),
                fix=f"rename or drop that one, or keep this table in another {self.holder.removeprefix('the ')}",
            )
        return None

    def put_kept(self, columns: TableSchema) -> None:
        self._put("table", name=self.unique(columns.table), upstream=str(columns.table), kept=columns.to_json())

    def copy(self, table: TableName) -> CopyUnderway | None:
        found = self._row("copy", "pipeline, kept", name=self.key(table))
        return CopyUnderway(found[0], TableSchema.from_json(found[1])) if found else None

    def put_copy(self, pipeline: str, columns: TableSchema) -> None:
        self._put("copy", name=self.key(columns.table), pipeline=pipeline, kept=columns.to_json())

    def forget_copy(self, table: TableName) -> None:
        self.run(f"DELETE FROM {self.place('copy')} WHERE name = ?", (self.key(table),))  # noqa: S608

    def _row(self, book: str, columns: str, **where: str) -> tuple[Any, ...] | None:
        condition = " AND ".join(f"{name} = ?" for name in where)
        found = self.run(f"SELECT {columns} FROM {self.place(book)} WHERE {condition}", list(where.values()))  # noqa: S608
        return found[0] if found else None

    def _put(self, book: str, **values: Any) -> None:
        key = ("pipeline", "name") if book == "batch" else ("name",)
        setting = ", ".join(f"{name} = excluded.{name}" for name in values if name not in key)
        self.run(
            f"INSERT INTO {self.place(book)} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"  # noqa: S608
            f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {setting}",
            list(values.values()),
        )
