"""What can be found out about single tables: rights, row security, replica identity, columns that are not sent.

Postgres looks at the leaves of a partitioned table: rows are copied from them, and UPDATE and DELETE need their replica
identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from psycopg import sql

from tailrace.errors import Finding
from tailrace.model.schema import TableName
from tailrace.source.postgres.catalog import Published, Shown
from tailrace.source.postgres.connection import PgConnection
from tailrace.source.postgres.slot import addition_sql

GENERATED_VERSION = 180000
"""From this version on, stored generated columns can be published."""
_SHOWN_NAMES = 20


class Leaf(NamedTuple):
    """A leaf partition of a published table. `identity` are the columns that its old rows have, unless it is FULL."""

    schema: str
    name: str
    replica_identity: str
    identity: Sequence[str]
    can_select: bool
    is_logged: bool = True

    @property
    def is_refused(self) -> bool:
        """Whether Postgres refuses UPDATE and DELETE on it while it is published."""
        return self.replica_identity == "n" or (self.replica_identity != "f" and not self.identity)


# Postgres sends old rows by the identity of the leaf, under the name of the root.
_LEAVES = """
SELECT root.oid::int8, n.nspname::text, c.relname::text, c.relreplident::text, ARRAY(
    SELECT a.attname::text FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey[0:i.indnkeyatts - 1])
    WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
      AND CASE c.relreplident WHEN 'd' THEN i.indisprimary ELSE i.indisreplident END),
    coalesce(has_table_privilege(c.oid, 'SELECT') AND has_schema_privilege(n.oid, 'USAGE'), false),
    c.relpersistence = 'p'
FROM unnest(%s::oid[]) AS root(oid) CROSS JOIN LATERAL pg_partition_tree(root.oid) AS t
JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE t.isleaf AND t.relid <> root.oid
"""


def read_leaves(connection: PgConnection, tables: Iterable[Published]) -> dict[int, list[Leaf]]:
    """By the OID of a partitioned table, its leaves."""
    found: dict[int, list[Leaf]] = {}
    for oid, *fields in connection.execute(_LEAVES, [[one.oid for one in tables]]).fetchall():
        found.setdefault(oid, []).append(Leaf(*fields))
    return found


def is_refused(table: Published, leaves: Sequence[Leaf]) -> bool:
    """Whether Postgres refuses the application's UPDATE and DELETE while the table is published."""
    if leaves:
        return any(leaf.is_refused for leaf in leaves)
    return table.identity == "n" or (table.identity != "f" and not table.schema.key)


HEAPS = """
unnest(%s::oid[]) AS root(oid)
CROSS JOIN LATERAL (SELECT root.oid UNION SELECT relid FROM pg_partition_tree(root.oid)) AS part(oid)
JOIN pg_class c ON c.oid = part.oid AND c.relkind = 'r'
"""
"""Tables, and the heaps that hold their rows: themselves, or their leaves. As a join, so that thousands of tables do
not look through the whole catalog each."""

# Rows are copied from the leaves of a partitioned table, where the policies of its root do not apply.
_HIDING = f"SELECT DISTINCT root.oid::int8 FROM {HEAPS} WHERE c.relrowsecurity AND row_security_active(c.oid)"  # noqa: S608


def check_tables(connection: PgConnection, tables: Sequence[Published]) -> list[Finding]:
    """The findings about each table that is, or will be, published."""
    role = _value(connection, "SELECT quote_ident(current_user)")
    hiding = {oid for (oid,) in connection.execute(_HIDING, [[published.oid for published in tables]])}
    leaves = read_leaves(connection, tables)
    findings: list[Finding] = []
    for published in tables:
        own = leaves.get(published.oid, [])
        table = str(published.schema.table)
        findings += _rights(connection, published, own, role)
        if published.oid in hiding:
            fix = f"ALTER ROLE {role} BYPASSRLS;"
            message = "row-level security may hide rows of it from the role"
            findings.append(Finding("error", table, message, fix, table))
        findings += _identity(connection, published, own)
        findings += _leaves(connection, published, own)
        findings += _unlogged(connection, published, own)
    return findings


def _rights(connection: PgConnection, published: Published, leaves: Sequence[Leaf], role: str) -> list[Finding]:
    """Whether the role may read the table, and every leaf of it."""
    table = published.schema.table
    denied = [] if published.can_select else [(table.schema, table.name)]
    denied += [(leaf.schema, leaf.name) for leaf in leaves if not leaf.can_select]
    if not denied:
        return []
    schemas = ", ".join(_quoted(connection, schema) for schema in sorted({schema for schema, _ in denied}))
    names = ", ".join(_quoted(connection, *name) for name in denied)
    fix = f"GRANT USAGE ON SCHEMA {schemas} TO {role}; GRANT SELECT ON {names} TO {role};"
    message = "the role may not read it"
    if published.can_select:
        message = f"the role may not read {len(denied)} of its partitions, from which its rows are copied"
    return [Finding("error", str(table), message, fix, str(table))]


def _identity(connection: PgConnection, published: Published, leaves: Sequence[Leaf]) -> list[Finding]:
    table, key = str(published.schema.table), published.schema.key
    name = _quoted(connection, published.schema.table.schema, published.schema.table.name)
    if published.identity == "n":
        message = "REPLICA IDENTITY NOTHING: Postgres refuses the application's UPDATE and DELETE while it is published"
        return [Finding("error", table, message, f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;", table)]
    if key:
        return [Finding("ok", table, f"key ({', '.join(key)})", table=table)]
    if is_refused(published, leaves):
        message = (
            "no primary key: it is kept as an append-only log, and Postgres refuses UPDATE and DELETE"
            " on it while it is published"
        )
        fix = f"ALTER TABLE {name} ADD PRIMARY KEY (…);  -- or REPLICA IDENTITY FULL"
        return [Finding("warning", table, message, fix, table)]
    if published.identity != "f":
        message = (
            "no primary key: its partitions send whole rows, but Postgres marks them by the replica identity of the"
            " table itself, which is not FULL, so whole rows and parts of rows look the same"
        )
        return [Finding("error", table, message, f"ALTER TABLE {name} REPLICA IDENTITY FULL;", table)]
    message = "no primary key: it is kept as an append-only log of its changes"
    return [Finding("warning", table, message, f"ALTER TABLE {name} ADD PRIMARY KEY (…);", table)]


def _leaves(connection: PgConnection, published: Published, leaves: Sequence[Leaf]) -> list[Finding]:
    """Partitions whose old rows would not identify a row of the root."""
    table, key = str(published.schema.table), published.schema.key
    findings: list[Finding] = []
    for leaf in leaves:
        name = _quoted(connection, leaf.schema, leaf.name)
        if leaf.is_refused and key:
            message = f"Postgres refuses UPDATE and DELETE on its partition {name}, which has no replica identity"
            fix = f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;"
            findings.append(Finding("warning", table, message, fix, table))
        if leaf.replica_identity == "f" or leaf.is_refused or (key and set(key) <= set(leaf.identity)):
            continue
        wanted = f"the key ({', '.join(key)})" if key else "whole rows"
        message = f"the replica identity of its partition {name} does not send {wanted} of deleted rows"
        fix = f"ALTER TABLE {name} REPLICA IDENTITY FULL;"
        # With a key, its changes stop the table; without one, they would be applied wrongly.
        findings.append(Finding("warning" if key else "error", table, message, fix, table))
    return findings


def _unlogged(connection: PgConnection, published: Published, leaves: Sequence[Leaf]) -> Iterable[Finding]:
    table = str(published.schema.table)
    for leaf in leaves:
        if not leaf.is_logged:
            name = _quoted(connection, leaf.schema, leaf.name)
            message = f"its partition {name} is UNLOGGED, so changes of its rows are not in the log"
            yield Finding("error", table, message, f"ALTER TABLE {name} SET LOGGED;", table)


# What is left out without an error.


def unlogged_partitions(connection: PgConnection, tables: Sequence[Published]) -> Iterable[Finding]:
    """The same as a warning, because a partition may become UNLOGGED while the table is followed."""
    leaves = read_leaves(connection, tables)
    for one in tables:
        for finding in _unlogged(connection, one, leaves.get(one.oid, [])):
            yield replace(finding, level="warning")


def left_out(connection: PgConnection, publication: str, missing: Sequence[Published]) -> Iterable[Finding]:
    """Tables that `tables` selects and that are not published."""
    leaves = read_leaves(connection, missing)
    refused = [one for one in missing if is_refused(one, leaves.get(one.oid, []))]
    if refused:
        names = [_quoted(connection, one.schema.table.schema, one.schema.table.name) for one in refused]
        yield Finding(
            "warning",
            "tables",
            f"{_counted(refused)} no primary key or other replica identity, so publishing would make Postgres refuse"
            f" the application's UPDATE and DELETE; not followed: {_listed(refused)}",
            f"ALTER TABLE {names[0]} ADD PRIMARY KEY (…);  -- or REPLICA IDENTITY FULL; then"
            f' ALTER PUBLICATION "{publication}" ADD TABLE {names[0]}; or set source.publish_without_identity: true',
        )
    others = [one for one in missing if one not in refused]
    if others:
        message = f"{len(others)} tables that tables.include matches are not in it and will not be followed: "
        addition = addition_sql(publication, [one.schema.table for one in others]).as_string(connection)
        fix = f"{addition};  -- as a role that owns both"
        yield Finding("warning", "publication", f"{message}{_listed(others)}", fix)


_GENERATED = """
SELECT a.attrelid::int8, a.attname::text, a.attgenerated::text FROM pg_attribute a
WHERE a.attrelid = ANY(%s) AND a.attgenerated <> '' AND a.attnum > 0 AND NOT a.attisdropped ORDER BY 1, a.attnum
"""


def unsent_columns(
    connection: PgConnection, publication: str, tables: Sequence[Published], shown: Mapping[TableName, Shown]
) -> Iterable[Finding]:
    """Generated columns that the publication does not send. A column list leaves them out on purpose."""
    by_oid = {one.oid: one for one in tables if shown.get(one.schema.table, Shown()).columns is None}
    unsent: dict[tuple[int, str], list[str]] = {}
    for oid, column, kind in connection.execute(_GENERATED, [list(by_oid)]).fetchall():
        if column not in by_oid[oid].schema.arrow.names:
            unsent.setdefault((oid, kind), []).append(column)
    for (oid, kind), columns in unsent.items():
        table = str(by_oid[oid].schema.table)
        if kind != "s":
            fix = "make it STORED: Postgres computes a virtual column only when it is read"
        elif connection.info.server_version >= GENERATED_VERSION:
            fix = f'ALTER PUBLICATION "{publication}" SET (publish_generated_columns = stored);'
        else:
            fix = "compute it at the destination; PostgreSQL 18 can publish it"
        listed = f"column {columns[0]} is" if len(columns) == 1 else f"columns {', '.join(columns)} are"
        yield Finding("warning", table, f"{listed} generated and not published, so not copied", fix, table)


def _counted(tables: Sequence[Published]) -> str:
    return "1 table has" if len(tables) == 1 else f"{len(tables)} tables have"


def _listed(tables: Sequence[Published]) -> str:
    names = ", ".join(str(one.schema.table) for one in tables[:_SHOWN_NAMES])
    return names + (" …" if len(tables) > _SHOWN_NAMES else "")


def _quoted(connection: PgConnection, *name: str) -> str:
    return sql.Identifier(*name).as_string(connection)


def _value(connection: PgConnection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    return None if row is None else row[0]
