"""Checks whether the database is ready. Every finding comes with the SQL that fixes it. Changes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from psycopg import sql

from tailrace.errors import Finding, PreflightError
from tailrace.journal import JournalReader, check_journal
from tailrace.model.change import START
from tailrace.model.schema import TableName
from tailrace.source.postgres import event_trigger, message_table
from tailrace.source.postgres.catalog import CatalogRelation, Published, Shown, describe, list_published, list_tables
from tailrace.source.postgres.connection import PgConnection, session
from tailrace.source.postgres.numeric import misplaced
from tailrace.source.postgres.slot import (
    PublicationMark,
    publication_exists,
    publication_sql,
    read_mark,
    read_slot,
    require,
    waiting_for,
)
from tailrace.source.postgres.table_check import (
    check_tables,
    is_refused,
    left_out,
    read_leaves,
    unlogged_partitions,
    unsent_columns,
)
from tailrace.source.source import RESYNC

if TYPE_CHECKING:
    from tailrace.source.postgres.source import PostgresSource

OLDEST_VERSION = 140000


def select_published(connection: PgConnection, source: PostgresSource) -> list[Published]:
    """The tables that `tables` selects from the publication; before there is one, from the whole database."""
    relations = list_tables(connection)
    shown: Mapping[TableName, Shown] | None
    if publication_exists(connection, source.options.publication):
        shown = list_published(connection, source.options.publication)
        candidates = [relation for relation in relations if relation.table in shown]
    else:
        shown = None
        candidates = [
            relation
            for relation in relations
            if stands_alone(relation, via_root=source.options.publish_via_partition_root)
        ]
    chosen = set(source.context.tables.select([relation.table for relation in candidates]))
    described = describe(connection, [relation for relation in candidates if relation.table in chosen], shown or {})
    found = [replace(one, schema=source.with_decimals(one.schema)) for one in described]
    return found if shown is not None else publishable(connection, source, found)


def select_followed(connection: PgConnection, source: PostgresSource) -> list[Published]:
    """The tables of `select_published`, and the one of logical messages where it is wanted."""
    wants_messages = source.options.messages and (
        source.is_pipeline or bool(source.context.tables.select([message_table.TABLE]))
    )
    return [*select_published(connection, source), *([message_table.PUBLISHED] if wants_messages else [])]


def stands_alone(relation: CatalogRelation, *, via_root: bool) -> bool:
    """Whether to follow this relation: partitions are followed as their root, or each on its own; never both."""
    return not relation.is_partition if via_root else not relation.partitioned


def publishable(connection: PgConnection, source: PostgresSource, tables: Sequence[Published]) -> list[Published]:
    """The tables that may be added to the publication: for others Postgres would refuse the application's UPDATE."""
    if source.options.publish_without_identity:
        return list(tables)
    leaves = read_leaves(connection, tables)
    return [one for one in tables if not is_refused(one, leaves.get(one.oid, []))]


_OWNED = "SELECT oid::int8 FROM pg_class WHERE oid = ANY(%s) AND pg_has_role(relowner, 'USAGE')"


def addable(connection: PgConnection, source: PostgresSource, tables: Sequence[Published]) -> list[Published]:
    """The tables that tailrace may add to its own publication: those that may be published and that the role owns."""
    owned = {oid for (oid,) in connection.execute(_OWNED, [[one.oid for one in tables]])}
    return publishable(connection, source, [one for one in tables if one.oid in owned])


def unpublished(
    source: PostgresSource, relations: Sequence[CatalogRelation], names: Collection[TableName]
) -> list[CatalogRelation]:
    """The tables that `tables` selects and that are not published."""
    candidates = [
        one
        for one in relations
        if stands_alone(one, via_root=source.options.publish_via_partition_root) and one.table not in names
    ]
    chosen = set(source.context.tables.select([one.table for one in candidates]))
    return [one for one in candidates if one.table in chosen]


def selection_hash(source: PostgresSource) -> str:
    """A short hash of the patterns in `tables`."""
    patterns = [source.context.tables.include, source.context.tables.exclude]
    return hashlib.sha256(json.dumps(patterns).encode()).hexdigest()[:12]


def declined(
    mark: PublicationMark,
    source: PostgresSource,
    missing: Sequence[CatalogRelation],
    followed: Collection[int] = (),
) -> frozenset[int]:
    """Which of the tables that are not published someone left out on purpose.

    Those that were removed from the publication before, and those that were `followed` until now. Any other is new:
    created, moved into a schema that matches, detached from its root. With other patterns, all of them are.
    """
    if mark.selection != selection_hash(source):
        return frozenset()
    return frozenset(
        one.oid for one in missing if one.oid in mark.declined or one.oid <= mark.seen or one.oid in followed
    )


def check(source: PostgresSource) -> list[Finding]:
    """Everything that would stop the pipeline or surprise its user. A refused login is a finding like any other.

    Raises UnavailableError when the server, or the store that the journal is in, does not answer.
    """
    try:
        with session(source.dsn, "checking the source") as connection:
            return [
                *check_journal(source.journal),
                *_server(connection),
                *_role(connection),
                *_publication(connection, source),
                *_slot(connection, source),
                _trigger(connection),
                *check_tables(connection, select_published(connection, source)),
            ]
    except PreflightError as error:
        return [Finding("error", "connection", error.message, error.fix)]


def notices(source: PostgresSource) -> list[Finding]:
    """What is left out without an error: tables that are not published, columns that are not sent, changes of unlogged
    partitions, and the messages of an event trigger of another version."""
    with session(source.dsn, "comparing the tables with the publication") as connection:
        trigger = _trigger(connection)
        return [
            *_left_out(connection, source),
            *unlogged_partitions(connection, select_published(connection, source)),
            *([trigger] if trigger.level == "warning" else []),
        ]


def _left_out(connection: PgConnection, source: PostgresSource) -> list[Finding]:
    relations = list_tables(connection)
    publication = source.options.publication
    exists = publication_exists(connection, publication)
    shown = list_published(connection, publication) if exists else {}
    selected = select_published(connection, source)
    missing = unpublished(source, relations, {published.schema.table for published in selected})
    mark = read_mark(connection, publication) if exists and source.extends_publication else None
    if not exists or mark is not None:
        # Those that may be published will be.
        choose = publishable if mark is None else addable
        may_be = {one.oid for one in choose(connection, source, describe(connection, missing, {}))}
        removed = declined(mark, source, missing) if mark is not None else ()
        missing = [one for one in missing if one.oid not in may_be or one.oid in removed]
    return [
        *left_out(connection, publication, describe(connection, missing, {})),
        *unsent_columns(connection, publication, selected, shown),
    ]


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
            return [replace(finding, level="error") for finding in _left_out(connection, source)] or [
                Finding("error", "tables", "tables.include matches no table", _known(relations))
            ]
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
        created = f"{source.options.publication!r} will be created for {len(names)} tables"
        return [Finding("ok", "publication", created), *_left_out(connection, source), *_numeric(selected, source)]
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
    findings += [*_left_out(connection, source), *_numeric(selected, source)]
    actions = connection.execute(
        "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = %s",
        [source.options.publication],
    ).fetchone()
    if actions is not None and not actions[0]:
        fix = f"ALTER PUBLICATION \"{source.options.publication}\" SET (publish = 'insert, update, delete, truncate');"
        findings.append(Finding("warning", "publication", "does not publish every kind of change", fix))
    return findings


def _numeric(selected: Sequence[Published], source: PostgresSource) -> list[Finding]:
    return misplaced([one.schema for one in selected], source.context.tables)


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
    with closing(JournalReader(source.journal)) as journal:
        if journal.mark() > START:
            require(status, source.options.slot, RESYNC)
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
        message = f"the event trigger is of version {version}, whose messages are not read"
        if version < event_trigger.VERSION:
            message += " and through which other roles can gain rights"
        return Finding("warning", "schema changes", message, "tailrace prepare FILE")
    return Finding("ok", "schema changes", "the event trigger is installed")
