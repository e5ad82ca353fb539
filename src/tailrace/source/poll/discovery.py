"""Which tables can be polled, by which of their columns, and why the others cannot."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tailrace.errors import Finding, UnfitError
from tailrace.model.schema import TableSchema
from tailrace.option.table import TableOptions, TableSettings
from tailrace.source.poll.connector import Connector, ConnectorSession, Polled
from tailrace.source.poll.version_column import VersionKind

_SHOWN_NAMES = 20


@dataclass(frozen=True)
class PollDiscovery:
    """The selected tables that can be followed, by upstream id; those that cannot, and the findings about them."""

    tables: dict[str, Polled]
    unfit: dict[str, tuple[Polled, Finding]]
    findings: list[Finding]


def select_tables(found: Iterable[TableSchema], options: TableOptions) -> PollDiscovery:
    """The selected ones of these tables. Pure."""
    by_name = {table.table: table for table in found}
    tables: dict[str, Polled] = {}
    unfit: dict[str, tuple[Polled, Finding]] = {}
    findings: list[Finding] = []
    for name in options.select(by_name):
        own = options.settings.get(str(name))
        polled, wrong = _polled(by_name[name], options.settings_of(str(name)), own)
        findings += wrong
        if wrong:
            unfit[polled.schema.upstream_id] = (polled, wrong[0])
        else:
            tables[polled.schema.upstream_id] = polled
    if not tables and not findings:
        known = ", ".join(str(name) for name in list(by_name)[:8]) or "no table that can be read"
        findings.append(Finding("error", "tables", "tables.include matches no table", f"the database has {known}"))
    return PollDiscovery(tables, unfit, findings)


def denied(connector: Connector, options: TableOptions) -> list[Finding]:
    """The selected tables that the user may not read: they are not polled."""
    names = [str(name) for name in options.select(connector.unreadable())]
    if not names:
        return []
    listed = ", ".join(names[:_SHOWN_NAMES]) + (" …" if len(names) > _SHOWN_NAMES else "")
    message = f"{len(names)} tables that tables.include matches may not be read and are not polled: {listed}"
    fix = f"GRANT SELECT ON {names[0]} TO the role of source.dsn, and USAGE on its schema; or exclude them"
    return [Finding("warning", "tables", message, fix)]


def _polled(table: TableSchema, settings: TableSettings, own: TableSettings | None) -> tuple[Polled, list[Finding]]:
    name = str(table.table)
    columns = {column.name for column in table.columns}
    wrong: list[Finding] = []

    def lacks(message: str, fix: str) -> None:
        wrong.append(Finding("error", name, message, fix, name))

    def chosen(key: str) -> str | None:
        """A column that `defaults` name for all tables need not be in every one of them."""
        column: str | None = getattr(settings, key)
        if column is not None and column not in columns:
            if own is not None and key in own.model_fields_set:
                lacks(f"it has no column {column}, which its {key} names", f"correct tables.settings.{name}.{key}")
            return None
        return column

    version, created = chosen("updated_at"), chosen("created_at")
    deletes = settings.deletes
    soft = deletes.soft if deletes is not None else None
    if soft is not None and soft not in columns:
        lacks(f"it has no column {soft}, which deletes.soft names", f"correct tables.settings.{name}.deletes")
    if not table.key:
        lacks("it has no primary key, so its rows cannot be identified", "give it one, or exclude it")
    if version is None and (deletes is None or deletes.full_diff is None):
        lacks(
            f"it has no column {settings.updated_at or 'with the time of the last change'}",
            f"name one with tables.settings.{name}.updated_at, or compare the whole table:"
            f" tables.settings.{name}.deletes: {{full_diff: {{every: 1h}}}}",
        )
    if settings.columns is not None:
        if unknown := set(settings.columns) - columns:
            lacks(f"it has no column {', '.join(sorted(unknown))}", f"correct tables.settings.{name}.columns")
        kept = {*settings.columns, *table.key, version, created, soft}
        table = replace(table, columns=tuple(column for column in table.columns if column.name in kept))
    scope = json.dumps([sorted(settings.columns) if settings.columns is not None else None, soft])
    return Polled(table, version, created, soft if soft in columns else None, scope), wrong


def examine(session: ConnectorSession, table: Polled) -> list[Finding]:
    """The findings about one table: whether its columns are usable, an index helps, and rows are invisible to polls."""
    name = table.name
    findings: list[Finding] = []
    for column in filter(None, (table.version, table.soft)):
        try:
            scale = session.scale(table, column)
        except UnfitError as error:
            findings.append(Finding("error", name, error.message, error.fix, name))
            continue
        if scale is None:
            fix = "name a column that holds a time, a date or a whole number"
            message = f"the values of {column} have no order that could be followed"
            findings.append(Finding("error", name, message, fix, name))
            continue
        if session.lacks_index(table, column):
            key = ", ".join(table.schema.key)
            message = f"no index begins with {column}: every poll reads the whole table"
            findings.append(Finding("warning", name, message, f"CREATE INDEX ON {name} ({column}, {key});", name))
        if scale.kind is VersionKind.LOCAL and scale.zone not in ("UTC", "Etc/UTC", "GMT"):
            message = f"{column} has no time zone; its values are taken to be in {scale.zone}"
            findings.append(
                Finding("warning", name, message, "set source.time_zone, or look_back: 1h over a clock change", name)
            )
    if table.created is not None and table.version is not None and not table.tells_inserts:
        message = (
            f"{table.created} and {table.version} are of types that cannot be compared: every change is an update, none"
            " an insert"
        )
        fix = f"give both the same type, or leave out tables.settings.{name}.created_at"
        findings.append(Finding("warning", name, message, fix, name))
    if keyless := session.count_keyless(table):
        key = " OR ".join(f"{column} IS NULL" for column in table.schema.key)
        message = f"{keyless} rows have a null in their key, so they cannot be identified"
        fix = f"give the rows of {name} WHERE {key} a key or delete them, and declare the key NOT NULL"
        findings.append(Finding("error", name, message, fix, name))
    if table.version is not None and (count := session.count_unversioned(table)):
        message = (
            f"{count} rows have no {table.version}: polling does not see them change, only copies and full diffs do"
        )
        fix = f"give them one, or set tables.settings.{name}.deletes: {{full_diff: …}}"
        findings.append(Finding("warning", name, message, fix, name))
    return findings or [Finding("ok", name, f"polled by {table.version or 'full diff'}", table=name)]
