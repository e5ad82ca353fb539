"""What is checked about the database before anything is written to it."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.destination.postgres.name import BOOK_SCHEMA, is_reserved, is_too_long, place_of
from tailrace.destination.postgres.option import PostgresDestinationOptions
from tailrace.destination.postgres.session import Session, opened, place_name, reaching
from tailrace.destination.postgres.value import kept_type
from tailrace.destination.preflight import LEAVE_OUT, ColumnProblem, column_problems, table_findings
from tailrace.destination.replica.sql_name import quote
from tailrace.errors import Finding, TailraceError
from tailrace.model.schema import TableName, TableSchema

OLDEST = 140000
MOST_COLUMNS = 1_590
"""Postgres has 1,600, some of which are tailrace's own."""


def check(options: PostgresDestinationOptions, tables: Sequence[TableSchema]) -> list[Finding]:
    """Findings about the database and each table. Creates nothing."""
    subject = place_name(options)
    try:
        with reaching(options, None), opened(options) as session:
            findings = _look_at_database(session, subject)
            if any(finding.level == "error" for finding in findings):
                return findings
            seen: dict[TableName, TableSchema] = {}
            for table in tables:
                place = place_of(table.table, options.schema_name)
                findings += _look_at_table(session, table, place, seen.setdefault(place, table))
    except TailraceError as error:
        return [Finding("error", subject, error.message, error.fix)]
    return findings


def unkept_columns(table: TableSchema, place: TableName) -> list[ColumnProblem]:
    """Columns and names that the database cannot have. Pure."""
    problems = column_problems(table, kept_type, is_reserved, lambda name: name, "")
    problems += [
        (f"column {column.name} has a name of more than 63 bytes", f"rename it upstream, or {LEAVE_OUT}")
        for column in table.columns
        if is_too_long(column.name)
    ]
    if len(table.columns) > MOST_COLUMNS:
        problems.append((f"it has {len(table.columns)} columns, more than Postgres keeps", LEAVE_OUT))
    if is_too_long(place.name) or is_too_long(place.schema):
        problems.append((f"{place} is a name of more than 63 bytes", "rename the table upstream, or exclude it"))
    if is_reserved(place.name) or is_reserved(place.schema) or place.schema.startswith("pg_"):
        problems.append((f"{place} is a name that tailrace or Postgres reserves", "set destination.schema"))
    return problems


def _look_at_database(session: Session, subject: str) -> list[Finding]:
    [(version, is_standby, may_create, has_book)] = session.run(
        "SELECT current_setting('server_version_num')::int8, pg_is_in_recovery(),"
        " has_database_privilege(current_database(), 'CREATE'),"
        " coalesce((SELECT has_schema_privilege(oid, 'USAGE, CREATE') FROM pg_namespace WHERE nspname = ?), false)",
        (BOOK_SCHEMA,),
    )
    if version < OLDEST:
        return [Finding("error", subject, f"runs PostgreSQL {version // 10000}", "use PostgreSQL 14 or later")]
    if is_standby:
        return [Finding("error", subject, "is a standby, which takes no writes", "name the primary in destination.dsn")]
    if not (may_create or has_book):
        [(database, role)] = session.run("SELECT quote_ident(current_database()), quote_ident(current_user)")
        return [
            Finding(
                "error",
                subject,
                "the role may create no schema there",
                f"GRANT CREATE ON DATABASE {database} TO {role}",
            )
        ]
    return [Finding("ok", subject, f"PostgreSQL {version // 10000}, writable")]


def _look_at_table(session: Session, table: TableSchema, place: TableName, twin: TableSchema) -> list[Finding]:
    problems: list[ColumnProblem] = []
    if twin is not table:
        problems.append(
            (f"would be kept as {place}, as is {twin.table}", "set destination.schema to a pattern with {schema}")
        )
    problems += unkept_columns(table, place)
    if not problems:
        problems += _there(session, table, place)
    return table_findings(table, problems, f"kept as table {place}")


def _there(session: Session, table: TableSchema, place: TableName) -> list[ColumnProblem]:
    """What is in the way where the table would be kept."""
    book = session.bookkeeping()
    if session.has_book():
        if problem := session.replica_problem(table.table):
            return [problem]
        try:
            if book.kept(table.table) is not None:
                return []
        except TailraceError as error:
            return [(error.message, error.fix or "")]
    if book.is_taken(table.table):
        return [
            (
                f"{place} is there already, and tailrace did not make it; is it the source's own table?",
                "name another database in destination.dsn, or another schema in destination.schema",
            )
        ]
    allowed = session.run(
        "SELECT coalesce((SELECT has_schema_privilege(oid, 'USAGE, CREATE') FROM pg_namespace WHERE nspname = ?),"
        " has_database_privilege(current_database(), 'CREATE')), quote_ident(current_user)",
        (place.schema,),
    )
    [(may_create, role)] = allowed
    if may_create:
        return []
    return [
        (
            f"the role may create no table in schema {place.schema}",
            f"GRANT USAGE, CREATE ON SCHEMA {quote(place.schema)} TO {role}",
        )
    ]
