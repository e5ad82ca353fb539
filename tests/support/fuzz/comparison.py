"""What the destination should hold, asked of Postgres itself, and how it differs from what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from deltalake import DeltaTable
from psycopg import sql

from tailrace.destination.metadata import OP, POSITION
from tests.support.fuzz.memory_destination import KEPT

Session = psycopg.Connection[Any]
Bag = Counter[tuple[Any, ...]]


@dataclass(frozen=True)
class Held:
    """A table at the destination: the type of each column, and its rows."""

    types: Mapping[str, pa.DataType]
    rows: list[dict[str, Any]]


def held_in_memory(place: str) -> dict[str, Held]:
    return {
        name: Held({one.name: one.type for one in table.columns}, _folded(table.rows, bool(table.schema.key)))
        for name, table in KEPT[place].items()
    }


def held_in_lake(lake: Path) -> dict[str, Held]:
    found: dict[str, Held] = {}
    for folder in lake.glob("*/*/_delta_log"):
        place = folder.parent
        table = DeltaTable(str(place)).to_pyarrow_table()
        types = {one.name: one.type for one in table.schema}
        # Its rows are changes if they say which one.
        found[f"{place.parent.name}.{place.name}"] = Held(types, _folded(table.to_pylist(), OP not in types))
    return found


def _folded(rows: list[dict[str, Any]], keyed: bool) -> list[dict[str, Any]]:
    """The rows that a log of changes leaves: a delete takes away one row that is equal to it."""
    if keyed:
        return rows
    bag: Counter[tuple[tuple[str, Any], ...]] = Counter()
    for row in sorted(rows, key=lambda one: str(one[POSITION])):
        content = tuple((name, value) for name, value in row.items() if not name.startswith("_tailrace_"))
        if row[OP] == "truncate":
            bag.clear()
        else:
            bag[content] += -1 if row[OP] == "delete" else 1
    missing = [dict(content) | {"a row was deleted that is not there": True} for content, n in bag.items() if n < 0]
    return [dict(content) for content in bag.elements()] + missing


_TABLES = """
SELECT to_regclass(format('%%I.%%I', p.schemaname, p.tablename))::oid::int8, p.schemaname::text, p.tablename::text,
       p.attnames::text[]
FROM pg_publication_tables p WHERE p.pubname = %s AND p.schemaname = %s ORDER BY 3
"""
_UNPUBLISHED = """
SELECT c.oid::int8, n.nspname || '.' || c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence = 'p'
  AND NOT EXISTS (SELECT FROM pg_publication_tables p
    WHERE p.pubname = %(publication)s AND p.schemaname = n.nspname AND p.tablename = c.relname)
ORDER BY 2
"""


def unpublished(session: Session, publication: str, schema: str) -> dict[int, str]:
    """The tables of the schema that are not in the publication."""
    return dict(session.execute(_UNPUBLISHED, {"schema": schema, "publication": publication}).fetchall())


def differences(
    session: Session, publication: str, schema: str, held: Mapping[str, Held], *, lenient: bool
) -> dict[int, str]:
    """By OID, how a published table differs from what the destination holds of it.

    `lenient`: a column that holds nothing but nulls may be missing there.
    """
    found: dict[int, str] = {}
    for oid, _, name, columns in session.execute(_TABLES, [publication, schema]).fetchall():
        at = held.get(f"{schema}.{name}")
        if at is None:
            found[oid] = f"{schema}.{name} is missing"
            continue
        rows = _rows(session, schema, name, columns)
        missing = [
            column
            for index, column in enumerate(columns)
            if column not in at.types and not (lenient and all(row[index][0] is None for row in rows))
        ]
        if missing:
            found[oid] = f"{schema}.{name} lacks the columns {', '.join(missing)}"
            continue
        wanted = Counter(
            tuple(_value(cell, at.types.get(c)) for cell, c in zip(row, columns, strict=True)) for row in rows
        )
        got = Counter(tuple(_plain(row.get(column)) for column in columns) for row in at.rows)
        extra = [row for row in at.rows if "a row was deleted that is not there" in row]
        if wanted != got or extra:
            found[oid] = (
                f"{schema}.{name} ({', '.join(columns)}): only upstream {_some(wanted - got)};"
                f" only at the destination {_some(got - wanted)}"
            )
    return found


def _rows(session: Session, schema: str, name: str, columns: Iterable[str]) -> list[list[tuple[Any, str | None]]]:
    """Each value as the driver reads it, and as the server prints it."""
    fields = sql.SQL(", ").join(
        sql.SQL("{0}, CASE WHEN {0} IS NOT NULL THEN format('%%s', {0}) END").format(sql.Identifier(column))
        for column in columns
    )
    query = sql.SQL("SELECT {} FROM {}").format(fields, sql.Identifier(schema, name))
    cursor = session.execute(query, [])
    kinds = [column.type_code for column in (cursor.description or ())[::2]]
    return [
        [
            (_single(value) if kind == REAL else value, text)
            for kind, value, text in zip(kinds, row[::2], row[1::2], strict=True)
        ]
        for row in cursor.fetchall()
    ]


REAL = 700


def _single(value: float | None) -> float | None:
    """The driver reads the text of a number of 32 bits as one of 64."""
    return None if value is None else float(np.float32(value))


def _value(cell: tuple[Any, str | None], kind: pa.DataType | None) -> Any:
    """A value upstream as it is kept in this type: what has no type of its own there is kept as its text."""
    value, text = cell
    is_text = kind is not None and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
    return text if is_text and not isinstance(value, str) else _plain(value)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _some(bag: Bag) -> list[tuple[Any, ...]]:
    shown = [tuple(f"{v[:20]}…" if isinstance(v, str) and len(v) > 20 else v for v in row) for row in bag.elements()]
    return shown[:4]
