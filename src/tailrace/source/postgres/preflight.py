"""Checks whether the database is ready. Every finding comes with the SQL that fixes it. Changes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from psycopg import sql

from tailrace.errors import Finding, PreflightError
from tailrace.model.schema import TableName
from tailrace.source.postgres import event_trigger
from tailrace.source.postgres.catalog import CatalogRelation, Published, describe, list_published, list_tables
from tailrace.source.postgres.connection import PgConnection, session
from tailrace.source.postgres.slot import (
    PublicationMark,
    addition_sql,
    publication_exists,
    publication_sql,
    read_mark,
    read_slot,
    require,
    waiting_for,
)
from tailrace.source.source import RESYNC

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource

OLDEST_VERSION = 140000


def select_published(connection: PgConnection, source: PostgresSource) -> list[Published]:
    """The tables that `tables` selects from the publication; before there is one, from the whole database."""
    relations = list_tables(connection)
    if publication_exists(connection, source.options.publication):
        shown = list_published(connection, source.options.publication)
        candidates = [relation for relation in relations if relation.table in shown]
    else:
        shown = {}
        candidates = [
            relation
            for relation in relations
            if _stands_alone(relation, via_root=source.options.publish_via_partition_root)
        ]
    chosen = source.context.tables.select([relation.table for relation in candidates])
    return describe(connection, [relation for relation in candidates if relation.table in set(chosen)], shown)


def _stands_alone(relation: CatalogRelation, *, via_root: bool) -> bool:
    """Whether to follow this relation: partitions are followed as their root, or each on its own; never both."""
    return not relation.is_partition if via_root else not relation.partitioned


def unpublished(
    source: PostgresSource, relations: Sequence[CatalogRelation], names: Collection[TableName]
) -> list[CatalogRelation]:
    """The tables that `tables` selects and that are not published."""
    candidates = [
        one
        for one in relations
        if _stands_alone(one, via_root=source.options.publish_via_partition_root) and one.table not in names
    ]
    chosen = set(source.context.tables.select([one.table for one in candidates]))
    return [one for one in candidates if one.table in chosen]


def selection_hash(source: PostgresSource) -> str:
    """A short hash of the patterns in `tables`."""
    patterns = [source.context.tables.include, source.context.tables.exclude]
    return hashlib.sha256(json.dumps(patterns).encode()).hexdigest()[:12]


def mark_of(source: PostgresSource, relations: Sequence[CatalogRelation]) -> PublicationMark:
    """The publication's mark after these tables were considered."""
    return PublicationMark(selection_hash(source), max((one.oid for one in relations), default=0))


def new_to(mark: PublicationMark, source: PostgresSource, relation: CatalogRelation) -> bool:
    """Whether the table is new since the mark, so that no one can have left it out on purpose."""
    return relation.oid > mark.seen or mark.selection != selection_hash(source)


def check(source: PostgresSource) -> list[Finding]:
    """Everything that would stop the pipeline or surprise its user. A refused login is a finding like any other.

    Raises UnavailableError when the server does not answer.
    """
    try:
        with session(source.dsn, "checking the source") as connection:
            return [
                *_server(connection),
                *_role(connection),
                *_publication(connection, source),
                *_slot(connection, source),
                _trigger(connection),
                *_tables(connection, source),
            ]
    except PreflightError as error:
        return [Finding("error", "connection", error.message, error.fix)]


def _value(connection: PgConnection, query: str, *values: Any) -> Any:
    row = connection.execute(query, values).fetchone()
    return None if row is None else row[0]


def _server(connection: PgConnection) -> list[Finding]:
    version = connection.info.server_version
    if version < OLDEST_VERSION:
        return [Finding("error", "version", f"PostgreSQL {version // 10000} is too old", "upgrade to 14 or later")]
    findings = [Finding("ok", "version", f"PostgreSQL {version // 10000}.{version % 10000}")]
    level = _value(connection, "SHOW wal_level")
    if level != "logical":
        findings.append(
            Finding(
                "error",
                "wal_level",
                f"wal_level is {level}, logical replication needs logical",
                "ALTER SYSTEM SET wal_level = 'logical';  -- then restart the server",
            )
        )
    else:
        findings.append(Finding("ok", "wal_level", "logical"))
    encoding = _value(connection, "SHOW server_encoding")
    if encoding == "SQL_ASCII":
        findings.append(
            Finding("warning", "encoding", "the database is SQL_ASCII: text that is not UTF-8 stops its table")
        )
    keep = _value(connection, "SHOW max_slot_wal_keep_size")
    if keep not in ("-1", "-1MB"):
        findings.append(
            Finding(
                "warning",
                "max_slot_wal_keep_size",
                f"is {keep}: a pipeline that is down while more WAL than that is written loses its slot",
                "ALTER SYSTEM SET max_slot_wal_keep_size = -1;  -- or large enough for the longest pause",
            )
        )
    return findings


def _role(connection: PgConnection) -> list[Finding]:
    name, replication, superuser = connection.execute(
        "SELECT rolname, rolreplication, rolsuper FROM pg_roles WHERE rolname = current_user"
    ).fetchone() or ("?", False, False)
    # Managed services grant replication through a role of their own.
    managed = _value(
        connection,
        "SELECT count(*) FROM pg_roles r WHERE rolname IN ('rds_replication', 'cloudsqlsuperuser')"
        " AND pg_has_role(current_user, r.oid, 'MEMBER')",
    )
    if replication or superuser or managed:
        return [Finding("ok", "role", f"{name} may replicate")]
    fix = sql.SQL("ALTER ROLE {} REPLICATION;").format(sql.Identifier(name)).as_string(connection)
    return [Finding("error", "role", f"{name} lacks the REPLICATION attribute", fix)]


def _publication(connection: PgConnection, source: PostgresSource) -> list[Finding]:
    relations = list_tables(connection)
    selected = select_published(connection, source)
    names = [published.schema.table for published in selected]
    if not publication_exists(connection, source.options.publication):
        if not names:
            return [Finding("error", "tables", "tables.include matches no table", _known(relations))]
        statement = (
            publication_sql(
                source.options.publication, names, via_root=source.options.publish_via_partition_root
            ).as_string(connection)
            + ";"
        )
        if not source.options.create_publication:
            message = f"the publication {source.options.publication!r} does not exist and create_publication is off"
            return [Finding("error", "publication", message, statement)]
        if not _may_publish(connection, [published.oid for published in selected]):
            return [Finding("error", "publication", "the role may not create it; let an owner do it", statement)]
        return [Finding("ok", "publication", f"{source.options.publication!r} will be created for {len(names)} tables")]
    if not names:
        return [
            Finding(
                "error",
                "publication",
                f"{source.options.publication!r} holds no table that tables.include matches",
                f'ALTER PUBLICATION "{source.options.publication}" ADD TABLE …;  -- or widen tables.include',
            )
        ]
    findings = [Finding("ok", "publication", f"{source.options.publication!r} holds {len(names)} wanted tables")]
    mark = read_mark(connection, source.options.publication) if source.extends_publication else None
    missing = [
        one.table for one in unpublished(source, relations, set(names)) if not mark or not new_to(mark, source, one)
    ]
    if missing:
        addition = addition_sql(source.options.publication, missing).as_string(connection) + ";"
        listed = ", ".join(str(name) for name in missing[:5]) + (" …" if len(missing) > 5 else "")
        message = f"{len(missing)} tables that tables.include matches are not in it and will not be followed: {listed}"
        findings.append(Finding("warning", "publication", message, addition))
    actions = connection.execute(
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = %s",
        [source.options.publication],
    ).fetchone()
    if actions is not None and not actions[0]:
        fix = f"ALTER PUBLICATION \"{source.options.publication}\" SET (publish = 'insert, update, delete, truncate');"
        findings.append(Finding("warning", "publication", "does not publish every kind of change", fix))
    return findings


def _may_publish(connection: PgConnection, oids: list[int]) -> bool:
    """Creating a publication needs the CREATE right on the database, and ownership of each table."""
    query = (
        "SELECT has_database_privilege(current_database(), 'CREATE')"
        " AND (SELECT bool_and(pg_has_role(relowner, 'USAGE')) FROM pg_class WHERE oid = ANY(%s))"
    )
    return bool(_value(connection, query, oids))


def _known(relations: Sequence[CatalogRelation]) -> str:
    names = [str(relation.table) for relation in relations[:8]]
    return "the database has " + (", ".join(names) if names else "no tables that this role can see")


def _slot(connection: PgConnection, source: PostgresSource) -> list[Finding]:
    status = read_slot(connection, source.options.slot)
    if status is not None:
        if status.plugin != "pgoutput":
            message = f"{source.options.slot!r} exists with the plugin {status.plugin}"
            return [Finding("error", "slot", message, "choose another name with source.options.slot")]
        # Not a finding: no setup can restore a lost slot, and LostError has its own exit code and fix.
        require(status, source.options.slot, RESYNC)
        return [Finding("ok", "slot", f"{source.options.slot!r} exists, {status.backlog:,} bytes of lag")]
    limit = int(_value(connection, "SHOW max_replication_slots"))
    used = int(_value(connection, "SELECT count(*) FROM pg_replication_slots"))
    findings = []
    # One for the stream, and one briefly whenever a copy's snapshot is taken.
    if used + 2 > limit:
        fix = f"ALTER SYSTEM SET max_replication_slots = {used + 10};  -- then restart the server"
        findings.append(Finding("error", "slot", f"{used} of {limit} replication slots are taken, two are needed", fix))
    senders = int(_value(connection, "SHOW max_wal_senders"))
    busy = int(_value(connection, "SELECT count(*) FROM pg_stat_replication"))
    if busy + 2 > senders:
        fix = f"ALTER SYSTEM SET max_wal_senders = {busy + 10};  -- then restart the server"
        findings.append(Finding("error", "slot", f"{busy} of {senders} WAL senders are taken, two are needed", fix))
    findings += waiting_for(connection)
    return findings or [Finding("ok", "slot", f"{source.options.slot!r} will be created")]


def _trigger(connection: PgConnection) -> Finding:
    version = event_trigger.installed_version(connection)
    if version is None:
        message = "are derived from the log; the event trigger that makes them exact is not installed"
        return Finding("ok", "schema changes", message, "tailrace prepare FILE")
    if version != event_trigger.VERSION:
        return Finding(
            "warning", "schema changes", f"the event trigger is of version {version}", "tailrace prepare FILE"
        )
    return Finding("ok", "schema changes", "the event trigger is installed")


# Rows are copied from the leaves of a partitioned table, where the policies of its root do not apply.
_HIDING = """
SELECT root.oid::int8 FROM unnest(%s::oid[]) AS root(oid) WHERE EXISTS (
    SELECT FROM pg_class c WHERE c.relkind = 'r' AND row_security_active(c.oid)
    AND c.oid IN (SELECT root.oid UNION SELECT relid FROM pg_partition_tree(root.oid)))
"""


# Postgres sends old rows by the identity of the leaf, under the name of the root.
_LEAVES = """
SELECT root.oid::int8, n.nspname::text, c.relname::text, ARRAY(
    SELECT a.attname::text FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey[0:i.indnkeyatts - 1])
    WHERE i.indrelid = c.oid AND CASE c.relreplident WHEN 'd' THEN i.indisprimary ELSE i.indisreplident END)
FROM unnest(%s::oid[]) AS root(oid) CROSS JOIN LATERAL pg_partition_tree(root.oid) AS t
JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE t.isleaf AND t.relid <> root.oid AND c.relreplident IN ('d', 'i')
"""


def _leaves(connection: PgConnection, tables: Sequence[Published]) -> list[Finding]:
    """Partitions whose old rows would not identify a row of the root."""
    roots = {one.oid: one for one in tables if one.schema.key or one.identity == "f"}
    findings: list[Finding] = []
    for oid, schema, name, identity in connection.execute(_LEAVES, [list(roots)]).fetchall():
        key = roots[oid].schema.key
        # A partition without any identity sends no old rows: Postgres refuses UPDATE and DELETE.
        if identity and not (key and set(key) <= set(identity)):
            leaf = sql.Identifier(schema, name).as_string(connection)
            wanted = f"the key ({', '.join(key)})" if key else "whole rows"
            message = f"the replica identity of its partition {leaf} does not send {wanted} of deleted rows"
            fix = f"ALTER TABLE {leaf} REPLICA IDENTITY FULL;"
            # With a key, its changes stop the table; without one, they would be applied wrongly.
            findings.append(Finding("warning" if key else "error", str(roots[oid].schema.table), message, fix))
    return findings


def _tables(connection: PgConnection, source: PostgresSource) -> list[Finding]:
    findings: list[Finding] = []
    tables = select_published(connection, source)
    role = _value(connection, "SELECT quote_ident(current_user)")
    hiding = {oid for (oid,) in connection.execute(_HIDING, [[published.oid for published in tables]])}
    for published in tables:
        table = published.schema.table
        name = sql.Identifier(table.schema, table.name).as_string(connection)
        if not published.can_select:
            schema = sql.Identifier(table.schema).as_string(connection)
            fix = f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {name} TO {role};"
            findings.append(Finding("error", str(table), "the role may not read it", fix))
        if published.oid in hiding:
            fix = f"ALTER ROLE {role} BYPASSRLS;"
            findings.append(Finding("error", str(table), "row-level security may hide rows of it from the role", fix))
        if published.identity == "n":
            message = (
                "REPLICA IDENTITY NOTHING: Postgres refuses the application's UPDATE and DELETE while it is published"
            )
            findings.append(Finding("error", str(table), message, f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT;"))
        elif not published.schema.key and published.identity == "f":
            message = "no primary key: it is kept as an append-only log of its changes"
            findings.append(Finding("warning", str(table), message, f"ALTER TABLE {name} ADD PRIMARY KEY (…);"))
        elif not published.schema.key:
            message = (
                "no primary key: it is kept as an append-only log, and Postgres refuses UPDATE and DELETE"
                " on it while it is published"
            )
            fix = f"ALTER TABLE {name} ADD PRIMARY KEY (…);  -- or REPLICA IDENTITY FULL"
            findings.append(Finding("warning", str(table), message, fix))
        else:
            findings.append(Finding("ok", str(table), f"key ({', '.join(published.schema.key)})"))
    return findings + _leaves(connection, tables)
