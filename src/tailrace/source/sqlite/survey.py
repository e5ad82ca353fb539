# ruff: noqa: S608 - every name in the SQL here is quoted
"""Every table of a file, as `tailrace init` lists them, whether or not its changes are captured yet."""

from __future__ import annotations

from tailrace.capture.layout import CaptureConnection, quoted
from tailrace.model.schema import TableName
from tailrace.source.capability import SurveyedTable
from tailrace.source.sqlite.catalog import SCHEMA, Listed, list_tables

_COUNTED_ROWS = 1_000_000
"""Larger tables are estimated, because counting reads every row."""


def survey(connection: CaptureConnection, cdc_table: str) -> list[SurveyedTable]:
    """All tables, in the order of their names."""
    listed = list_tables(connection, cdc_table, by_triggers=False)
    return [_surveyed(connection, listed[name]) for name in sorted(listed)]


def _surveyed(connection: CaptureConnection, one: Listed) -> SurveyedTable:
    table, described = TableName(SCHEMA, one.name), one.described
    if described is None:
        return SurveyedTable(table, (), None, "its CREATE TABLE is not understood by this SQLite", "rewrite it")
    if described.lacks_rowid:
        reason, fix = "has no rowid, and changes are captured by rowid", "create it without WITHOUT ROWID"
        return SurveyedTable(table, described.key, None, reason, fix)
    rows = _count(connection, one.name)
    if described.key:
        return SurveyedTable(table, described.key, rows)
    reason = "no primary key: its key would be the rowid, which VACUUM may renumber"
    return SurveyedTable(table, (), rows, reason, "give it an INTEGER PRIMARY KEY")


def _count(connection: CaptureConnection, name: str) -> int | None:
    sql = f"SELECT count(*) FROM (SELECT 1 FROM {quoted(name)} LIMIT {_COUNTED_ROWS})"
    (rows,) = connection.execute(sql).fetchone()
    if rows < _COUNTED_ROWS:
        return int(rows)
    (rows,) = connection.execute(f"SELECT max(rowid) - min(rowid) + 1 FROM {quoted(name)}").fetchone()
    return int(rows)
