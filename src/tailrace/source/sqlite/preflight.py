# ruff: noqa: S608 - every name in the SQL here is quoted
"""Is the file ready? Every finding comes with the command that fixes it. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.capture import trigger
from tailrace.capture.exclusion import read_excluded
from tailrace.capture.layout import DELETE, SCHEMA_TABLE, UPDATE, quoted, trigger_capture
from tailrace.errors import Finding, PreflightError
from tailrace.model.schema import TableName
from tailrace.source.sqlite.catalog import SCHEMA, Listed, TableDefinition, list_tables
from tailrace.source.sqlite.log import TapeLog
from tailrace.system.file_lock import is_locked
from tailrace.system.turso_lock import server_lock

if TYPE_CHECKING:
    from tailrace.source.sqlite.source import SqliteSource

SAMPLED_CHANGES = 1000


def selected(source: SqliteSource, log: TapeLog) -> list[Listed]:
    """The tables that `tables` selects, those that cannot be followed included."""
    listed = list_tables(log.connection, log.table, by_triggers=log.by_triggers)
    names = source.context.tables.select([TableName(SCHEMA, name) for name in sorted(listed)])
    return [listed[table.name] for table in names]


def select_tables(source: SqliteSource, log: TapeLog) -> list[TableDefinition]:
    """The tables to follow."""
    found = [one.described for one in selected(source, log)]
    left_out = {one.table for one in read_excluded(log.connection, log.table)}
    return [table for table in found if table is not None and not table.lacks_rowid and table.name not in left_out]


def check(source: SqliteSource) -> list[Finding]:
    """What would stop the pipeline or surprise its user. Raises UnavailableError while the file is locked."""
    try:
        with source.engine.snapshot("checking the source") as connection:
            log = TapeLog(connection, source.options.cdc_table)
            version = log.version if log.version.has_commit_record else f"{log.version}, without transactions"
            return [
                Finding("ok", "capture table", f"{log.table} ({version})"),
                *(_journal(log) if source.options.type == "sqlite" else ()),
                *_triggers(log),
                *_tables(source, log),
            ]
    except PreflightError as error:
        path = Path(source.options.path)
        fix = "tailrace serve-sync FILE --tape" if is_locked(server_lock(path)) else error.fix
        fix = fix.replace("FILE", str(path)) if fix else None
        return [Finding("error", "source", error.message, fix)]


def _journal(log: TapeLog) -> Iterator[Finding]:
    row = log.connection.execute("PRAGMA journal_mode").fetchone()
    if row is not None and str(row[0]).lower() not in ("wal", "mvcc"):
        yield Finding(
            "warning",
            "journal mode",
            f"{row[0]}: readers and writers of the file wait for each other",
            "PRAGMA journal_mode = WAL;",
        )


def _triggers(log: TapeLog) -> Iterator[Finding]:
    if log.by_triggers and trigger.read_status(log.connection).pending:
        yield Finding(
            "warning",
            "triggers",
            "the schema has changed since they were created; the new parts are not captured",
            "tailrace sqlite enable FILE",
        )


def _tables(source: SqliteSource, log: TapeLog) -> Iterator[Finding]:
    listed = selected(source, log)
    names = [TableName(SCHEMA, name) for name in list_tables(log.connection, log.table, by_triggers=log.by_triggers)]
    for pattern in source.context.tables.idle_patterns(names):
        yield Finding("warning", "tables", f"the pattern {pattern} matches no table of the file")
    lacking = _lacking_before(log)
    left_out = {one.table: one for one in read_excluded(log.connection, log.table)}
    for one in listed:
        if one.name not in left_out:
            yield from _table(one, lacking)
    for excluded in source.context.tables.select([TableName(SCHEMA, name) for name in left_out]):
        finding = left_out[excluded.name].finding()
        yield replace(finding, level="error", fix=f"{finding.fix}; or exclude it under `tables`")
    yield Finding("ok" if listed else "warning", "tables", f"{len(listed)} selected")


def _table(one: Listed, lacking: Collection[str] | None) -> Iterator[Finding]:
    table = str(TableName(SCHEMA, one.name))
    subject = f"table {table}"
    exclude = "exclude it under `tables`"
    if one.described is None:
        yield Finding("error", subject, "its CREATE TABLE is not understood by this SQLite", exclude, table)
    elif one.described.lacks_rowid:
        yield Finding("error", subject, "has no rowid, and changes are captured by rowid", exclude, table)
    elif one.described.key and one.described.alias is None and (lacking is None or one.name in lacking):
        yield Finding(
            "error",
            subject,
            f"its key is ({', '.join(one.described.key)}), and the capture does not keep the rows that are deleted",
            f"capture in mode full or before; {exclude} otherwise",
            table,
        )
    elif not one.described.key:
        yield Finding(
            "warning",
            subject,
            "its key is the rowid, which VACUUM may renumber; the tape does not record that",
            f"tailrace resync FILE {table} after a VACUUM, or give it an INTEGER PRIMARY KEY",
            table,
        )


def _lacking_before(log: TapeLog) -> Collection[str] | None:
    """The tables whose old images the capture leaves out, according to its last changes; None: all tables.

    Turso's pragma belongs to a connection and is not stored; only triggers record their mode.
    """
    mode = trigger_capture(log.connection) if log.by_triggers else None
    if mode is not None:
        return () if mode.has_before else None
    sql = (
        f"SELECT DISTINCT table_name FROM (SELECT * FROM {quoted(log.table)} ORDER BY change_id DESC LIMIT ?) "
        'WHERE change_type IN (?, ?) AND "before" IS NULL AND table_name <> ?'
    )
    rows = log.connection.execute(sql, (SAMPLED_CHANGES, UPDATE, DELETE, SCHEMA_TABLE)).fetchall()
    return {str(name) for (name,) in rows}
