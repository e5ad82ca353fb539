"""The tables of a cluster: from its API, from a file of CREATE TABLE statements, or from their first events.

The local SQLite parses the CREATE TABLE statements, so types, keys and rowids follow the same rules as in SQLite files.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from tailrace.capture.layout import list_tables
from tailrace.errors import PreflightError
from tailrace.model.change import Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.rqlite.api import Api, QueryRefusedError
from tailrace.source.sqlite import schema_diff
from tailrace.source.sqlite.catalog import ROWID, TableDefinition, rowid_column, stored_columns, try_describe

INFERRED = "inferred"
"""The upstream type of a column that is known only by its values."""
Kinds = Mapping[str, str]
"""Per column, the kinds of its values as letters: i integer, f float, s text, n null."""

_TABLES = (
    "SELECT s.name, s.sql FROM sqlite_schema s JOIN pragma_table_list l ON l.name = s.name "
    "WHERE s.type = 'table' AND l.schema = 'main' AND l.type = 'table' AND s.sql IS NOT NULL "
    "AND s.name NOT LIKE 'sqlite\\_%' ESCAPE '\\' AND s.name NOT LIKE '\\_rqlite\\_%' ESCAPE '\\' ORDER BY s.name"
)

Tables = Mapping[str, TableDefinition | None]
"""Tables by name; None for a table whose CREATE TABLE the local SQLite cannot parse."""


def ask_tables(api: Api) -> Tables:
    """The current tables of the cluster. Raises PreflightError when rqlite does not list them."""
    try:
        rows = api.query(_TABLES)
    except QueryRefusedError as error:
        raise PreflightError(
            f"rqlite at {api.url} does not list its tables: {error}", fix="use a release of rqlite with CDC, 9 or later"
        ) from None
    return {str(name): try_describe(str(sql)) for name, sql in rows}


def read_tables(file: Path) -> Tables:
    """The tables that a schema file declares. Raises PreflightError for a file that cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
        with closing(sqlite3.connect(":memory:")) as scratch:
            scratch.executescript(text)
            wanted = set(list_tables(scratch))
            rows = scratch.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'").fetchall()
    except (OSError, UnicodeDecodeError, sqlite3.Error) as error:
        raise PreflightError(
            f"the schema file {file} cannot be read: {error}", fix="it must hold CREATE TABLE statements of SQLite"
        ) from None
    return {name: try_describe(sql) for name, sql in rows if name in wanted}


def is_followable(table: TableDefinition | None) -> bool:
    """Whether its rows can be identified: by a declared key, or by a rowid that SQL can name."""
    return table is not None and (bool(table.key) or not table.lacks_rowid)


def is_always_copied(table: TableDefinition | None) -> bool:
    """Whether every change copies it again, because of its generated columns.

    With a VIRTUAL one rqlite sends no rows, which needs the rowid as the key; a STORED one is sent, but is no column.
    """
    return table is not None and (table.has_stored or (table.has_virtual and bool(table.key) and table.alias is None))


def upstream_id(service: str, table: str) -> str:
    """Its name in directives and versions. A part that holds a dot is quoted: any text may be a service or a table."""
    return str(TableName(service, table))


def begin(
    known: TableSchema | None, table: TableDefinition, service: str, at: Position, *, rowids: bool
) -> TableSchema:
    """The version a copy begins with."""
    return _placed(schema_diff.begin(known, table, at), service, rowids=rowids, lacks_rowid=table.lacks_rowid)


def derive(
    known: TableSchema, table: TableDefinition, service: str, at: Position, *, rowids: bool
) -> schema_diff.SqliteDerivedSchema:
    """`table` as the next version of `known`, from a position on."""
    derived = schema_diff.derive(known, table, at)
    schema = _placed(derived.schema, service, rowids=rowids, lacks_rowid=table.lacks_rowid)
    return replace(derived, schema=schema)


def _placed(schema: TableSchema, service: str, *, rowids: bool, lacks_rowid: bool) -> TableSchema:
    """The table in its cluster, with a rowid column if one is wanted and no column shows it already."""
    columns = schema.columns
    if rowids and not lacks_rowid and rowid_column(schema) is None:
        columns = (*columns, Column(free_name([c.name for c in columns]), pa.int64(), upstream_type=ROWID))
    name = schema.table.name
    return replace(schema, table=TableName(service, name), columns=columns, upstream_id=upstream_id(service, name))


def free_name(taken: list[str]) -> str:
    """`rowid`, with underscores before it where a column has that name."""
    name, lower = ROWID, {each.lower() for each in taken}
    while name in lower:
        name = f"_{name}"
    return name


def infer(known: TableSchema | None, service: str, table: str, kinds: Kinds, *, has_rowid: bool = True) -> TableSchema:
    """The table as its values show it: keyed by the rowid, columns in the order of their names, new ones at the end.

    A column that held other kinds of values before is widened to hold both; a column that is no longer sent is dropped.
    Without `has_rowid` nothing identifies its rows, and the table has no key.
    """
    old = {c.name: c for c in known.columns if c.upstream_type == INFERRED} if known is not None else {}
    numbers = max((c.number for c in known.columns), default=0) if known is not None else 0
    kept = [replace(c, type=_widened(c.type, kinds[name])) for name, c in old.items() if name in kinds]
    new = [
        Column(name, _widened(None, kinds[name]), upstream_type=INFERRED, number=number)
        for number, name in enumerate((name for name in sorted(kinds) if name not in old), numbers + 1)
    ]
    columns = (*kept, *new)
    key: tuple[str, ...] = ()
    if has_rowid:
        key = (free_name([c.name for c in columns]),)
        columns = (Column(key[0], pa.int64(), nullable=False, upstream_type=ROWID), *columns)
    return TableSchema(TableName(service, table), columns, key, upstream_id=upstream_id(service, table))


def _widened(known: pa.DataType | None, kinds: str) -> pa.DataType:
    """The narrowest type for values of these kinds and of those before. Only nulls give text: any value can follow."""
    held = {"int64": "i", "double": "f", "string": "s"}[str(known)] if known is not None else ""
    seen = {*held, *kinds} - {"n"}
    if not seen or "s" in seen:
        return pa.string()
    return pa.int64() if seen == {"i"} else pa.float64()


def stored_names(schema: TableSchema) -> list[str]:
    """The columns that events hold: all except a rowid column that tailrace added."""
    return [column.name for column in stored_columns(schema)]
