"""What the catalog says of the tables: columns, keys, replica identity, and what the publication shows of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg

from tailrace.schema import Column, TableName, TableSchema
from tailrace.source.postgres.catalog_type import read_types

Session = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True)
class Published:
    """A table as it is, or would be, published. `identity` is Postgres's letter: default, index, full or nothing."""

    schema: TableSchema
    identity: str = "d"
    row_filter: str | None = None
    has_primary_key: bool = True
    can_select: bool = True

    @property
    def oid(self) -> int:
        return int(self.schema.upstream_id)


_TABLES = """
SELECT c.oid::int8, n.nspname::text, c.relname::text, c.relreplident::text,
       has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'),
       c.relkind = 'p', c.relispartition
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_%%'
ORDER BY 2, 3
"""

_COLUMNS = """
SELECT a.attrelid::int8, a.attname::text, a.attnum::int4, a.atttypid::int8, a.atttypmod, a.attnotnull,
       pg_catalog.format_type(a.atttypid, a.atttypmod), a.attgenerated <> ''
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = ANY(%s) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY 1, 3
"""

_KEYS = """
SELECT i.indrelid::int8, i.indisprimary, i.indisreplident,
       ARRAY(SELECT k.attnum::int4 FROM unnest(i.indkey[0:i.indnkeyatts - 1]) WITH ORDINALITY AS k(attnum, at)
             ORDER BY k.at)
FROM pg_catalog.pg_index i
WHERE i.indrelid = ANY(%s) AND (i.indisprimary OR i.indisreplident) AND i.indisvalid
"""


@dataclass(frozen=True)
class Relation:
    """A table of the database, whether published or not."""

    oid: int
    table: TableName
    identity: str
    can_select: bool
    partitioned: bool
    is_partition: bool


def list_tables(session: Session) -> list[Relation]:
    """Every permanent table of the database that is not the system's."""
    return [
        Relation(oid, TableName(schema, name), identity, can_select, partitioned, is_partition)
        for oid, schema, name, identity, can_select, partitioned, is_partition in session.execute(_TABLES).fetchall()
    ]


@dataclass(frozen=True)
class Shown:
    """What a publication shows of a table: its columns (None: all that are not generated) and a row filter."""

    columns: frozenset[str] | None
    row_filter: str | None


def list_published(session: Session, publication: str) -> dict[TableName, Shown]:
    """The tables in a publication, partitions under the name they are published by."""
    shown = "attnames::text[], rowfilter" if session.info.server_version >= 150000 else "NULL::text[], NULL::text"
    query = f"SELECT schemaname::text, tablename::text, {shown} FROM pg_publication_tables WHERE pubname = %s"  # noqa: S608
    return {
        TableName(schema, name): Shown(frozenset(columns) if columns is not None else None, row_filter)
        for schema, name, columns, row_filter in session.execute(query, [publication]).fetchall()
    }


def describe(session: Session, relations: Iterable[Relation], shown: dict[TableName, Shown]) -> list[Published]:
    """The tables with their columns as the stream will carry them."""
    wanted = {relation.oid: relation for relation in relations}
    oids = list(wanted)
    columns: dict[int, list[tuple[Any, ...]]] = {oid: [] for oid in oids}
    for row in session.execute(_COLUMNS, [oids]).fetchall():
        columns[row[0]].append(row)
    keys: dict[int, dict[str, list[int]]] = {oid: {} for oid in oids}
    for oid, primary, identity, numbers in session.execute(_KEYS, [oids]).fetchall():
        if primary:
            keys[oid]["primary"] = numbers
        if identity:
            keys[oid]["identity"] = numbers
    types = read_types(session, (row[3] for rows in columns.values() for row in rows))
    found = []
    for oid, relation in wanted.items():
        view = shown.get(relation.table, Shown(None, None))
        kept = [row for row in columns[oid] if (not row[7] if view.columns is None else row[1] in view.columns)]
        numbers = keys[oid].get("identity" if relation.identity == "i" else "primary", [])
        names = {row[2]: row[1] for row in kept}
        # A key that is not published in full identifies nothing.
        key = tuple(names[number] for number in numbers) if all(number in names for number in numbers) else ()
        schema = TableSchema(
            relation.table,
            tuple(
                Column(name, types[type_oid].arrow(typmod), not required, declared, number)
                for _, name, number, type_oid, typmod, required, declared, _ in kept
            ),
            key,
            upstream_id=str(oid),
        )
        found.append(Published(schema, relation.identity, view.row_filter, "primary" in keys[oid], relation.can_select))
    return found
