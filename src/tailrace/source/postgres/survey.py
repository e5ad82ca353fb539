"""Every table of a database, as `tailrace init` lists them: its key, estimated rows, and what keeps it out."""

from __future__ import annotations

from collections.abc import Sequence

from psycopg import sql

from tailrace.source.capability import SurveyedTable
from tailrace.source.postgres.catalog import Published, describe, list_tables
from tailrace.source.postgres.connection import PgConnection, session
from tailrace.source.postgres.preflight import stands_alone
from tailrace.source.postgres.table_check import HEAPS, Leaf, is_refused, read_leaves

# The planner's estimate; -1 for a heap that was never analyzed, and which is empty only if it has no page.
_ROWS = f"""
SELECT root.oid::int8, sum(greatest(c.reltuples, 0))::int8,
    bool_or(c.reltuples < 0 AND pg_relation_size(c.oid) > 0)
FROM {HEAPS} GROUP BY 1
"""  # noqa: S608


def survey(dsn: str, *, via_root: bool) -> list[SurveyedTable]:
    """All tables, in the order of their names. `via_root`: a partitioned table counts as one."""
    with session(dsn, "listing the tables") as connection:
        relations = [one for one in list_tables(connection) if stands_alone(one, via_root=via_root)]
        tables = describe(connection, relations, {})
        leaves = read_leaves(connection, tables)
        counted = connection.execute(_ROWS, [[one.oid for one in tables]]).fetchall()
        rows = {oid: None if is_unknown else count for oid, count, is_unknown in counted}
        found = [_surveyed(connection, one, leaves.get(one.oid, []), rows.get(one.oid, 0)) for one in tables]
    return sorted(found, key=lambda one: one.table)


def _surveyed(connection: PgConnection, one: Published, leaves: Sequence[Leaf], rows: int | None) -> SurveyedTable:
    table, key = one.schema.table, one.schema.key
    name = sql.Identifier(table.schema, table.name).as_string(connection)
    if key and not is_refused(one, leaves):
        return SurveyedTable(table, key, rows)
    if key:
        reason = "Postgres would refuse UPDATE and DELETE on it while it is published: it has no replica identity"
        return SurveyedTable(table, key, rows, reason, f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;")
    reason = "no primary key, so publishing it would make Postgres refuse UPDATE and DELETE on it"
    if not is_refused(one, leaves):
        reason = "no primary key: it can only be kept as an append-only log of its changes"
    return SurveyedTable(table, key, rows, reason, f"ALTER TABLE {name} ADD PRIMARY KEY (…);")
