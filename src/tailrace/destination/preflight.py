"""What destinations that keep tables check before anything is written: the folder, its space, the columns."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from tailrace.errors import Finding
from tailrace.model.schema import TableSchema
from tailrace.option.value import nearest

LEAVE_OUT = "let the source leave it out (column list of a publication, `columns` of a polled table)"
"""The second half of a fix for a column that cannot be kept: `tables.exclude` only excludes whole tables."""

LITTLE_SPACE = 1 << 30

ColumnProblem = tuple[str, str]
"""What is wrong, and how to fix it."""


def check_folder(folder: Path, subject: str, *, access_fix: str | None = None) -> Finding:
    """Whether files can be written to a folder, which may not exist yet. Creates nothing.

    `access_fix` replaces the fix for a folder that this user may not write to.
    """
    found = nearest(folder)
    if not found.is_dir():
        return Finding("error", subject, f"{found} is a file, not a directory", f"choose another path, or move {found}")
    if not os.access(found, os.W_OK | os.X_OK):
        return Finding("error", subject, f"{found} is not writable", access_fix or f"chown or chmod u+rwx {found}")
    free = shutil.disk_usage(found).free
    if free < LITTLE_SPACE:
        return Finding("warning", subject, f"only {free >> 20} MiB are free on {found}", "free some space")
    return Finding("ok", subject, f"writable, {free >> 30} GiB free")


def column_problems(
    table: TableSchema,
    kept_type: Callable[[pa.DataType], pa.DataType],
    is_reserved: Callable[[str], bool],
    fold: Callable[[str], str],
    same_case: str,
) -> list[ColumnProblem]:
    """Columns that the destination cannot keep: by their type (TypeError of `kept_type`), or by their name."""
    problems: list[ColumnProblem] = []
    for column in table.columns:
        try:
            kept_type(column.type)
        except TypeError as error:
            problems.append((f"column {column.name}: {error}", f"cast it upstream, or {LEAVE_OUT}"))
        if is_reserved(column.name):
            problems.append(
                (f"column {column.name} has a name that tailrace uses", f"rename it upstream, or {LEAVE_OUT}")
            )
    folded = [fold(column.name) for column in table.columns]
    if len(set(folded)) != len(folded):
        problems.append((f"two columns differ only in case, {same_case}", f"rename one upstream, or {LEAVE_OUT}"))
    return problems


def as_errors(table: TableSchema, problems: list[ColumnProblem]) -> list[Finding]:
    name = str(table.table)
    return [Finding("error", name, message, fix, name) for message, fix in problems]


def table_findings(table: TableSchema, problems: list[ColumnProblem], kept: str) -> list[Finding]:
    """The findings of one table: its problems, or where it is `kept`."""
    name = str(table.table)
    findings = as_errors(table, problems)
    if not table.key:
        findings.append(Finding("warning", name, "has no key: kept as a log, one row per change", table=name))
    return findings or [Finding("ok", name, kept, table=name)]
