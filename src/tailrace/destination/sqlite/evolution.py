"""Carries out the plan of a table's columns in the file: ALTER, or a table that is built again."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from tailrace.destination.replica.plan import ColumnRules, ReplicaPlan
from tailrace.destination.replica.sql_name import fold_ascii, listed, quote
from tailrace.destination.sqlite.column import create_sql
from tailrace.destination.sqlite.value import declared, encode, kept_type
from tailrace.model.change import EXACT

RULES = ColumnRules("the file", kept_type, lambda old, new: _conversion(old.type, new.type), fold_ascii)


def initial_values(plan: ReplicaPlan) -> dict[str, Any]:
    """What rows hold in added columns, where that is not null, as the file keeps it."""
    name = str(plan.kept.table)
    return {
        column: encode(pa.array([value], value.type), plan.kept.column(column).type, column, name)[0]
        for column, value in plan.initial.items()
    }


def carry_out(
    connection: sqlite3.Connection, name: str, own: list[str], plan: ReplicaPlan, initial: Mapping[str, Any]
) -> None:
    """Change the table `name`, which has the columns `own` besides the upstream's. Inside a transaction."""
    renamed = plan.renamed
    if EXACT in own and (plan.rebuilt or any(old != new for old, new in renamed.items())):
        connection.create_function("tailrace_renamed", 1, lambda text: _renamed(text, renamed), deterministic=True)
        connection.execute(
            f"UPDATE {quote(name)} SET {EXACT} = tailrace_renamed({EXACT}) WHERE {EXACT} IS NOT NULL"  # noqa: S608
        )
    if plan.rebuilt:
        _rebuild(connection, name, own, plan, initial)
        return
    for old, new in plan.rename_steps():
        connection.execute(f"ALTER TABLE {quote(name)} RENAME COLUMN {quote(old)} TO {quote(new)}")
    for column in plan.added:
        add_column(connection, name, column.name, declared(column.type))
        if (value := initial.get(column.name)) is not None:
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


def _rebuild(
    connection: sqlite3.Connection, name: str, own: list[str], plan: ReplicaPlan, initial: Mapping[str, Any]
) -> None:
    heir = f"_tailrace heir of {name}"
    connection.execute(create_sql(heir, plan.kept, own))
    names = [column.name for column in plan.kept.columns]
    values = [plan.sources[column][1] if column in plan.sources else "?" for column in names]
    connection.execute(
        f"INSERT INTO {quote(heir)} ({listed([*names, *own])}) "  # noqa: S608
        f"SELECT {', '.join([*values, *map(quote, own)])} FROM {quote(name)}",
        [initial.get(column) for column in names if column not in plan.sources],
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
