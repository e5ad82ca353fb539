"""What is checked about the file before anything is written to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tailrace.destination.preflight import ColumnProblem, check_folder, column_problems, table_findings
from tailrace.destination.replica.sql_name import fold_ascii
from tailrace.destination.sqlite.name import file_name, is_reserved
from tailrace.destination.sqlite.replica_file import foreign_content
from tailrace.destination.sqlite.value import kept_type
from tailrace.errors import Finding
from tailrace.model.schema import TableSchema


def check(path: Path, tables: Sequence[TableSchema]) -> list[Finding]:
    """Findings about the file and each table. Creates nothing."""
    findings = [_look_at_file(path.absolute())]
    if findings[0].level == "error":
        return findings
    seen: dict[str, TableSchema] = {}
    for table in tables:
        twin = seen.setdefault(fold_ascii(file_name(table.table)), table)
        findings += _look_at_table(table, twin)
    return findings


def _look_at_file(path: Path) -> Finding:
    subject = str(path)
    # SQLite keeps its log next to the file, so the folder must be writable too.
    folder = check_folder(path.parent, subject)
    if folder.level == "error":
        return folder
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return Finding("error", subject, "is not writable", f"chown or chmod u+rw {path}")
    if problem := foreign_content(path):
        return Finding("error", subject, problem, "set destination.path to a file that is not there yet")
    return folder


def _look_at_table(table: TableSchema, twin: TableSchema) -> list[Finding]:
    problems: list[ColumnProblem] = []
    if twin is not table:
        problems.append(
            (
                f"differs from {twin.table} only in case, and SQLite takes them for one",
                "keep one of them in another file",
            )
        )
    problems += unkept_columns(table)
    return table_findings(table, problems, f'kept as table "{file_name(table.table)}"')


def unkept_columns(table: TableSchema) -> list[ColumnProblem]:
    """Columns that a table of the file cannot have. Pure."""
    return column_problems(table, kept_type, _is_taken, fold_ascii, "and SQLite takes them for one")


def _is_taken(column: str) -> bool:
    # SQLite reserves its own prefix for tables only.
    return is_reserved(column) and not column.startswith("sqlite_")
