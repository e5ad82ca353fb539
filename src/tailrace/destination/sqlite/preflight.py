"""What can be known about the file before anything is written to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tailrace.destination.part import LEAVE_OUT
from tailrace.destination.sqlite.name import file_name, fold, is_reserved
from tailrace.destination.sqlite.replica_file import foreign_content
from tailrace.destination.sqlite.value import kept_type
from tailrace.errors import Finding
from tailrace.model.schema import TableSchema
from tailrace.option.value import nearest

_LITTLE_SPACE = 1 << 30


def check(path: Path, tables: Sequence[TableSchema]) -> list[Finding]:
    """Findings about the file and each table. Creates nothing."""
    findings = [_look_at_file(path.absolute())]
    if findings[0].level == "error":
        return findings
    seen: dict[str, TableSchema] = {}
    for table in tables:
        twin = seen.setdefault(fold(file_name(table.table)), table)
        findings += _look_at_table(table, twin)
    return findings


def _look_at_file(path: Path) -> Finding:
    subject = str(path)
    found = nearest(path.parent)
    if not found.is_dir():
        return Finding("error", subject, f"{found} is a file, not a directory", f"choose another path, or move {found}")
    # SQLite keeps its log beside the file, so the folder must be writable too.
    if not os.access(found, os.W_OK | os.X_OK):
        return Finding("error", subject, f"{found} is not writable", f"chown or chmod u+rwx {found}")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        return Finding("error", subject, "is not writable", f"chown or chmod u+rw {path}")
    if problem := foreign_content(path):
        return Finding("error", subject, problem, "set destination.path to a file that is not there yet")
    free = shutil.disk_usage(found).free
    if free < _LITTLE_SPACE:
        return Finding("warning", subject, f"only {free >> 20} MiB are free on {found}", "free some space")
    return Finding("ok", subject, f"writable, {free >> 30} GiB free")


def _look_at_table(table: TableSchema, twin: TableSchema) -> list[Finding]:
    name = str(table.table)
    problems: list[tuple[str, str]] = []
    if twin is not table:
        problems.append(
            (
                f"differs from {twin.table} only in case, and SQLite takes them for one",
                "keep one of them in another file",
            )
        )
    for column in table.columns:
        try:
            kept_type(column.type)
        except TypeError as error:
            problems.append((f"column {column.name}: {error}", f"cast it upstream, or {LEAVE_OUT}"))
        if is_reserved(column.name) and not column.name.startswith("sqlite_"):
            problems.append(
                (f"column {column.name} has a name that tailrace uses", f"rename it upstream, or {LEAVE_OUT}")
            )
    folded = [fold(column.name) for column in table.columns]
    if len(set(folded)) != len(folded):
        problems.append(
            ("two columns differ only in case, and SQLite takes them for one", f"rename one upstream, or {LEAVE_OUT}")
        )
    findings = [Finding("error", name, message, fix) for message, fix in problems]
    if not table.key:
        findings.append(Finding("warning", name, "has no key: kept as a log, one row per change"))
    return findings or [Finding("ok", name, f'kept as table "{file_name(table.table)}"')]
