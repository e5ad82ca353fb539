# ruff: noqa: S608 - every name in the SQL here is quoted
"""The tables of a file and their columns, read from the text of their CREATE TABLE.

The file and the tape hold the same text, so current and earlier versions of a table are read in the same way.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from tailrace.capture import layout
from tailrace.capture.column_type import arrow_type, read_column
from tailrace.capture.layout import CaptureConnection, Field, quoted, side_tables
from tailrace.capture.record import Value
from tailrace.capture.schema_change import TRIGGER_PREFIX
from tailrace.errors import PreflightError
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.sqlite.value import cells_of

SCHEMA = "main"
ROWID = "rowid"
"""The upstream type of the column that shows the rowid of a table that does not declare it."""
ALIAS = "INTEGER PRIMARY KEY"


@dataclass(frozen=True)
class TableDefinition:
    """A table as its CREATE TABLE declares it: stored columns, NOT NULL columns, the key, and the rowid's alias.

    `has_virtual` and `has_stored` say whether it has generated columns of either kind; those are not among the fields.
    """

    name: str
    fields: tuple[Field, ...]
    required: frozenset[str]
    key: tuple[str, ...]
    alias: str | None
    lacks_rowid: bool
    has_virtual: bool = False
    has_stored: bool = False

    def declared(self, field: Field) -> str:
        """The type for people. The column that is the rowid is distinguished from other INTEGER columns."""
        return ALIAS if field.name == self.alias else field.declared

    @property
    def shown_rowid(self) -> str | None:
        """The name under which the rowid is shown as the key of a table that declares none."""
        if self.key:
            return None
        name, taken = "_rowid", {field.name.lower() for field in self.fields}
        while name in taken:
            name = f"_{name}"
        return name


@lru_cache(maxsize=4096)
def describe(sql: str) -> TableDefinition:
    """The table that a CREATE TABLE declares. Raises sqlite3.Error for text that this SQLite cannot parse."""
    with closing(sqlite3.connect(":memory:")) as scratch:
        scratch.execute(sql)
        (name,) = scratch.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        ).fetchone()
        shape = layout.read_table_shape(scratch, name)
        key = [field for field in sorted(shape.fields, key=lambda field: field.key) if field.key]
        rows = scratch.execute(f"PRAGMA table_info({quoted(name)})").fetchall()
        hidden = {row[6] for row in scratch.execute(f"PRAGMA table_xinfo({quoted(name)})")}
        generated = (layout.GENERATED_VIRTUAL in hidden, layout.GENERATED_STORED in hidden)
        required = frozenset(str(row[1]) for row in rows if row[3])
        # An index for the primary key shows that the column is not the rowid itself, as with DESC.
        indexed = any(row[3] == "pk" for row in scratch.execute(f"PRAGMA index_list({quoted(name)})").fetchall())
    alias = key[0].name if len(key) == 1 and key[0].declared.upper() == "INTEGER" and not indexed else None
    lacks_rowid = shape.without_rowid or not shape.rowid
    return TableDefinition(
        name, shape.fields, required, tuple(field.name for field in key), alias, lacks_rowid, *generated
    )


@dataclass(frozen=True)
class Listed:
    """One current table of the file. `entry` is its rowid in sqlite_schema; `described` is None if parsing failed."""

    name: str
    entry: int
    described: TableDefinition | None


def list_tables(connection: CaptureConnection, cdc_table: str, *, by_triggers: bool) -> dict[str, Listed]:
    """The tables whose changes can be on the tape, as the capture knows them.

    Triggers fit the schema they were created for; later DDL is not captured until they are created again. Raises
    PreflightError when they were removed: changes made since then are not on the tape.
    """
    if by_triggers:
        if layout.trigger_capture(connection) is None:
            raise PreflightError(
                "the capture by triggers was stopped, and changes made since are not on the tape",
                fix="tailrace sqlite disable FILE --drop && tailrace sqlite enable FILE;"
                " then tailrace reset and run the pipeline, which copies every table again",
            )
        source = quoted(side_tables(cdc_table)[2])
        prefix = f"{TRIGGER_PREFIX}insert:"
        triggers = connection.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall()
        names = {name.removeprefix(prefix) for (name,) in triggers if name.startswith(prefix)}
        # A renamed table counts as another table, and its triggers still write the old name.
        names &= set(layout.list_tables(connection))
        rows = connection.execute(f"SELECT id, name, sql FROM {source} WHERE type = 'table'").fetchall()
    else:
        names = set(layout.list_tables(connection)) - {cdc_table}
        rows = connection.execute("SELECT rowid, name, sql FROM sqlite_schema WHERE type = 'table'").fetchall()
    return {
        str(name): Listed(str(name), int(entry), try_describe(sql))
        for entry, name, sql in rows
        if name in names and sql is not None
    }


def try_describe(sql: str) -> TableDefinition | None:
    """As `describe`; None for text that this SQLite cannot parse."""
    try:
        return describe(sql)
    except sqlite3.Error:
        return None


def make_schema(
    table: TableDefinition, numbers: Mapping[str, int], initial: Mapping[str, pa.Scalar[object]] = {}
) -> TableSchema:
    """The table with these column numbers. Its key is the declared one, else the rowid."""
    columns = tuple(
        Column(
            field.name,
            arrow_type(field.declared),
            nullable=field.name not in table.required and field.name != table.alias,
            upstream_type=table.declared(field),
            number=numbers[field.name],
            initial=initial.get(field.name),
        )
        for field in table.fields
    )
    rowid = table.shown_rowid
    if rowid is not None:
        columns = (Column(rowid, pa.int64(), nullable=False, upstream_type=ROWID), *columns)
    key = table.key or (rowid or "",)
    return TableSchema(TableName(SCHEMA, table.name), columns, key, upstream_id=table.name)


def rowid_column(table: TableSchema) -> str | None:
    """The key column that is the rowid; None where the key is made of other columns."""
    if len(table.key) != 1:
        return None
    (name,) = table.key
    return name if table.column(name).upstream_type in (ROWID, ALIAS) else None


def stored_columns(table: TableSchema) -> list[Column]:
    """The columns that records and rows of the file hold, in order: all except a rowid column that tailrace added."""
    return [column for column in table.columns if column.upstream_type != ROWID]


def read_default(field: Field) -> tuple[Value, bool]:
    """What rows older than an added column hold in it, and whether that is known: only constant defaults are."""
    if field.default is None:
        return None, True
    try:
        with closing(sqlite3.connect(":memory:")) as scratch:
            scratch.execute(f"CREATE TABLE t (c {field.declared} DEFAULT {field.default}, d)")
            scratch.execute("INSERT INTO t (d) VALUES (1)")
            (value,) = scratch.execute("SELECT c FROM t").fetchone()
    except sqlite3.Error:
        return None, False
    return value, not field.default.upper().startswith("CURRENT_")


def initial_of(field: Field) -> tuple[pa.Scalar[object] | None, bool]:
    """The default of an added column as its Arrow type holds it, and whether that is what older rows hold."""
    value, known = read_default(field)
    if value is None or not known:
        return None, known
    column = read_column(cells_of([value]), arrow_type(field.declared))
    return (None, False) if column.unfit is not None else (column.array[0], True)
