"""What is checked about the file before anything is written to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import duckdb

from tailrace.destination.duckdb.name import file_name, folded, is_reserved
from tailrace.destination.duckdb.replica_file import foreign_content, is_locked, opened
from tailrace.destination.duckdb.value import kept_type
from tailrace.destination.preflight import ColumnProblem, check_folder, column_problems, table_findings
from tailrace.destination.replica.sql_name import fold_ascii
from tailrace.errors import Finding, PreflightError
from tailrace.model.schema import TableSchema

_LOOK_SECONDS = 1.0
"""How long `check` waits for a file that another process has open; a pipeline has it open while it writes."""


def check(path: Path, tables: Sequence[TableSchema]) -> list[Finding]:
    """Findings about the file and each table. Creates nothing."""
    findings = [_look_at_file(path.absolute())]
    if findings[0].level == "error":
        return findings
    seen: dict[str, TableSchema] = {}
    for table in tables:
        findings += _look_at_table(table, seen.setdefault(folded(table.table), table))
    return findings


def unkept_columns(table: TableSchema) -> list[ColumnProblem]:
    """Columns that a table of the file cannot have. Pure."""
    problems = column_problems(table, kept_type, is_reserved, fold_ascii, "and DuckDB takes them for one")
    if not table.columns:
        problems.append(("it has no column, and DuckDB keeps no such table", "add a column upstream"))
    return problems


def _look_at_file(path: Path) -> Finding:
    subject = str(path)
    # DuckDB keeps its log next to the file, so the folder must be writable too.
    folder = check_folder(path.parent, subject)
    if folder.level == "error" or not path.exists():
        return folder
    if not os.access(path, os.R_OK | os.W_OK):
        return Finding("error", subject, "is not writable", f"chown or chmod u+rw {path}")
    if problem := foreign_content(path):
        return Finding("error", subject, problem, "set destination.path to a file that is not there yet")
    try:
        with opened(path, _LOOK_SECONDS, read_only=True):
            return folder
    except PreflightError as error:
        return Finding("error", subject, error.message, error.fix)
    except duckdb.Error as error:
        if is_locked(error):
            holder = str(error).partition("held in ")[2].partition(". ")[0]
            by = f" ({holder})" if holder else ""
            return Finding(
                "warning",
                subject,
                f"another process has the file open{by}: nothing is written meanwhile",
                "close it there; DuckDB lets one process write, or several read",
            )
        return Finding("error", subject, f"cannot be read by DuckDB ({type(error).__name__})", f"move {path} away")


def _look_at_table(table: TableSchema, twin: TableSchema) -> list[Finding]:
    problems: list[ColumnProblem] = []
    if twin is not table:
        problems.append(
            (
                f"differs from {twin.table} only in case, and DuckDB takes them for one",
                "keep one of them in another file",
            )
        )
    name = file_name(table.table)
    return table_findings(table, [*problems, *unkept_columns(table)], f"kept as table {name}")
