"""What can be known about a Delta destination before anything is written there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from tailrace.destination.delta.column import DeltaLayout, delta_type
from tailrace.destination.delta.log import MARK, foreign_content, reaching
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.part import LEAVE_OUT, METADATA
from tailrace.errors import Finding
from tailrace.model.schema import TableSchema
from tailrace.option.value import nearest

_LITTLE_SPACE = 1 << 30
_PARTITION_TYPES = (pa.types.is_string, pa.types.is_integer, pa.types.is_date, pa.types.is_boolean)


def check(root: str, tables: Sequence[tuple[TableSchema, TablePath, DeltaLayout]]) -> list[Finding]:
    """Findings about the path and each table. Creates nothing."""
    findings = [] if "://" in root and not root.startswith("file://") else _look_at_path(root)
    if any(finding.level == "error" for finding in findings):
        return findings
    seen: dict[str, TableSchema] = {}
    for table, place, layout in tables:
        with reaching(place, str(table.table)):
            findings += _look_at_table(table, place, layout)
        twin = seen.setdefault(place.uri.lower(), table)
        if twin is not table:
            findings.append(
                Finding(
                    "warning",
                    str(table.table),
                    f"differs from {twin.table} only in case; some file systems take them for one",
                    "keep one of them at another destination path",
                )
            )
    return findings


def _look_at_path(root: str) -> list[Finding]:
    path = Path(root.removeprefix("file://")).absolute()
    if "%" in root:
        return [
            Finding("error", root, "delta-rs decodes % in a path and would look elsewhere", "choose a path without %")
        ]
    found = nearest(path)
    if not found.is_dir():
        return [Finding("error", root, f"{found} is a file, not a directory", f"choose another path, or move {found}")]
    if not os.access(found, os.W_OK | os.X_OK):
        return [Finding("error", root, f"{found} is not writable", f"chown or chmod u+rwx {found}")]
    free = shutil.disk_usage(found).free
    if free < _LITTLE_SPACE:
        return [Finding("warning", root, f"only {free >> 20} MiB are free on {found}", "free some space")]
    return [Finding("ok", root, f"writable, {free >> 30} GiB free")]


def _look_at_table(table: TableSchema, place: TablePath, layout: DeltaLayout) -> list[Finding]:
    name = str(table.table)
    problems: list[tuple[str, str]] = []
    for column in layout.partition_by:
        if column not in table.arrow.names:
            problems.append((f"partition_by names {column}, which the table lacks", f"correct partition_by of {name}"))
        elif not any(fits(table.column(column).type) for fits in _PARTITION_TYPES):
            problems.append(
                (
                    f"partition_by names {column} of type {table.column(column).type}",
                    "partition by text, integer, date or boolean",
                )
            )
    for entry in table.columns:
        try:
            delta_type(entry.type)
        except TypeError as error:
            problems.append((f"column {entry.name}: {error}", f"cast it upstream, or {LEAVE_OUT}"))
        if entry.name.startswith("_tailrace_"):
            problems.append(
                (f"column {entry.name} has a name that tailrace uses", f"rename it upstream, or {LEAVE_OUT}")
            )
    for wanted in layout.metadata:
        if wanted not in METADATA:
            problems.append((f"metadata names {wanted}", f"name some of {', '.join(METADATA)}"))
    folded = [entry.name.lower() for entry in table.columns]
    if len(set(folded)) != len(folded):
        problems.append(
            ("two columns differ only in case, which Delta does not allow", f"rename one upstream, or {LEAVE_OUT}")
        )
    if problem := _foreign(place):
        problems.append((problem, f"move {place.uri} away, or choose another path"))
    findings = [Finding("error", name, message, fix) for message, fix in problems]
    if not table.key:
        findings.append(Finding("warning", name, "has no key: kept as a log, one row per change"))
    return findings or [Finding("ok", name, f"kept {'with its history ' if layout.history else ''}at {place.uri}")]


def _foreign(place: TablePath) -> str | None:
    if place.is_file():
        return foreign_content(place)
    try:
        described = DeltaTable(place.uri, storage_options=dict(place.options) or None).metadata().description
    except TableNotFoundError:
        return foreign_content(place)
    except (DeltaError, OSError) as error:
        return foreign_content(place) or f"cannot be read: {str(error).splitlines()[0]}"
    return None if described == MARK else f"the Delta table at {place.uri} was not made by tailrace"
