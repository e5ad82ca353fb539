"""How a table's columns in the file follow those of its upstream.

Added columns are added and renamed ones renamed in place; dropped ones stay, null in rows written from then on, until
another column takes their name. The table is rebuilt, in the transaction of the batch that brings the change, for a
column whose values are kept in another form from now on, for one that takes a dropped column's name, and for another
key. A change of a type that could lose a value stops the table.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tailrace.destination.evolution import column_keys, match_columns, require_same_kind
from tailrace.destination.sqlite.column import as_kept, create_sql
from tailrace.destination.sqlite.name import fold, listed, quote
from tailrace.destination.sqlite.value import declared, encode
from tailrace.model.change import EXACT
from tailrace.model.schema import Column, TableSchema


@dataclass(frozen=True)
class Plan:
    """The way from some columns to others.

    kept       the upstream's columns afterwards, dropped ones included
    sources    for each of them that was there before, its name before and the SQL for its values
    initial    what rows hold in the others, where that is not null
    rebuilt    whether renaming and adding columns is not enough
    """

    kept: TableSchema
    sources: Mapping[str, tuple[str, str]]
    initial: Mapping[str, Any]
    rebuilt: bool

    @property
    def renamed(self) -> dict[str, str]:
        """For columns that still exist, the old name to the new one."""
        return {old: new for new, (old, _) in self.sources.items()}

    def changes(self, now: TableSchema) -> bool:
        return self.rebuilt or column_keys(self.kept) != column_keys(now)


def plan(now: TableSchema, table: TableSchema) -> Plan:
    """From the columns a table has in the file to those of a version; SchemaChangedError where that is impossible."""
    wanted = as_kept(table)
    name = str(table.table)
    require_same_kind(now, wanted)
    places: dict[int, Column] = {}
    sources: dict[str, tuple[str, str]] = {}
    added: list[Column] = []
    rebuilt = False
    matches = match_columns(column_keys(now), column_keys(wanted), table=name, place="the file")
    for column, match in zip(wanted.columns, matches, strict=True):
        if match.at is None:
            added.append(column)
            continue
        old = now.columns[match.at]
        conversion = _conversion(old.type, match.type)
        rebuilt = rebuilt or conversion != "{}"
        places[match.at] = replace(column, type=match.type)
        sources[column.name] = (old.name, conversion.format(quote(old.name)))
    taken = {fold(column.name) for column in wanted.columns}
    kept: list[Column] = []
    for at, old in enumerate(now.columns):
        if at in places:
            kept.append(places[at])
        elif fold(old.name) in taken:
            rebuilt = True
        else:
            kept.append(old)
            sources[old.name] = (old.name, quote(old.name))
    key = {sources[column][0] for column in wanted.key if column in sources}
    rebuilt = rebuilt or key != set(now.key) or len(key) != len(wanted.key)
    initial = {
        column.name: encode(pa.array([column.initial], column.initial.type), as_type.type, column.name, name)[0]
        for column, as_type in zip(table.columns, wanted.columns, strict=True)
        if column.name not in sources and column.initial is not None
    }
    return Plan(replace(wanted, columns=(*kept, *added)), sources, initial, rebuilt)


def carry_out(connection: sqlite3.Connection, name: str, own: list[str], plan: Plan) -> None:
    """Change the table `name`, which has the columns `own` besides the upstream's. Inside a transaction."""
    renamed = plan.renamed
    if EXACT in own and (plan.rebuilt or any(old != new for old, new in renamed.items())):
        connection.create_function("tailrace_renamed", 1, lambda text: _renamed(text, renamed), deterministic=True)
        connection.execute(
            f"UPDATE {quote(name)} SET {EXACT} = tailrace_renamed({EXACT}) WHERE {EXACT} IS NOT NULL"  # noqa: S608
        )
    if plan.rebuilt:
        _rebuild(connection, name, own, plan)
        return
    # Via temporary names that no column has: two columns may have swapped names.
    moves = [(old, f"_tailrace {at}", new) for at, (old, new) in enumerate(renamed.items()) if old != new]
    for step in ([(old, between) for old, between, _ in moves], [(between, new) for _, between, new in moves]):
        for old, new in step:
            connection.execute(f"ALTER TABLE {quote(name)} RENAME COLUMN {quote(old)} TO {quote(new)}")
    for column in plan.kept.columns:
        if column.name not in plan.sources:
            add_column(connection, name, column.name, declared(column.type))
            if (value := plan.initial.get(column.name)) is not None:
                connection.execute(f"UPDATE {quote(name)} SET {quote(column.name)} = ?", (value,))  # noqa: S608


def add_column(connection: sqlite3.Connection, name: str, column: str, kind: str) -> None:
    connection.execute(f"ALTER TABLE {quote(name)} ADD COLUMN {quote(column)} {kind}")


def succeed(connection: sqlite3.Connection, heir: str, name: str) -> None:
    """Replace the table `name` with `heir`, keeping the indexes and triggers that people added to it.

    Those on a dropped column are dropped with it.
    """
    extras = connection.execute(
        "SELECT sql FROM sqlite_schema WHERE tbl_name = ? COLLATE NOCASE AND type <> 'table' AND sql IS NOT NULL",
        (name,),
    ).fetchall()
    connection.execute(f"DROP TABLE IF EXISTS {quote(name)}")
    connection.execute(f"ALTER TABLE {quote(heir)} RENAME TO {quote(name)}")
    for (statement,) in extras:
        try:
            connection.execute(statement)
        except sqlite3.OperationalError as error:
            if not _lacks_column(error):
                raise


def _lacks_column(error: sqlite3.OperationalError) -> bool:
    # SQLite has no code of its own for it. Names come after these words only.
    return error.sqlite_errorcode == sqlite3.SQLITE_ERROR and str(error).startswith("no such column: ")


def _rebuild(connection: sqlite3.Connection, name: str, own: list[str], plan: Plan) -> None:
    heir = f"_tailrace heir of {name}"
    connection.execute(create_sql(heir, plan.kept, own))
    names = [column.name for column in plan.kept.columns]
    values = [plan.sources[column][1] if column in plan.sources else "?" for column in names]
    connection.execute(
        f"INSERT INTO {quote(heir)} ({listed([*names, *own])}) "  # noqa: S608
        f"SELECT {', '.join([*values, *map(quote, own)])} FROM {quote(name)}",
        [plan.initial.get(column) for column in names if column not in plan.sources],
    )
    succeed(connection, heir, name)


def _renamed(text: str, names: Mapping[str, str]) -> str | None:
    kept = {names[name]: value for name, value in json.loads(text).items() if name in names}
    return json.dumps(kept, ensure_ascii=False) if kept else None


def _conversion(narrow: pa.DataType, wide: pa.DataType) -> str:
    """The SQL that makes kept values of one type those of a wider one, `{}` being the column."""
    if pa.types.is_decimal(wide) and narrow != wide:
        text = "{}" if pa.types.is_decimal(narrow) else "CAST({} AS TEXT)"
        return text + _zeros(narrow.scale if pa.types.is_decimal(narrow) else 0, wide.scale)
    if pa.types.is_integer(narrow) and pa.types.is_floating(wide):
        return "CAST({} AS REAL)"
    return "{}"


def _zeros(before: int, after: int) -> str:
    """What is appended to the text of a decimal, so that it has more digits after its point."""
    if before == after:
        return ""
    return f" || '{'' if before else '.'}{'0' * (after - before)}'"
