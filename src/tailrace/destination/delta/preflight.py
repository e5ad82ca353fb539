"""What can be known about a Delta destination before anything is written there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from tailrace.destination.delta.column import DeltaLayout, delta_type
from tailrace.destination.delta.log import problem_of
from tailrace.destination.delta.store_error import reaching
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.preflight import ColumnProblem, check_folder, column_problems, table_findings
from tailrace.errors import Finding, TableError
from tailrace.model.schema import TableSchema

_PARTITION_TYPES = (pa.types.is_string, pa.types.is_integer, pa.types.is_date, pa.types.is_boolean)


def check(root: str, tables: Sequence[tuple[TableSchema, TablePath, DeltaLayout]]) -> list[Finding]:
    """Findings about the path and each table. Creates nothing."""
    findings = [] if "://" in root and not root.startswith("file://") else _look_at_path(root)
    if any(finding.level == "error" for finding in findings):
        return findings
    seen: dict[str, TableSchema] = {}
    for table, place, layout in tables:
        try:
            with reaching(place, str(table.table)):
                findings += _look_at_table(table, place, layout)
        except TableError as error:
            findings.append(Finding("error", str(table.table), error.message, error.fix, str(table.table)))
        twin = seen.setdefault(place.uri.lower(), table)
        if twin is not table:
            findings.append(
                Finding(
                    "warning",
                    str(table.table),
                    f"differs from {twin.table} only in case; some file systems treat the two names as one",
                    "keep one of them at another destination path",
                    str(table.table),
                )
            )
    return findings


def _look_at_path(root: str) -> list[Finding]:
    if "%" in root:
        return [
            Finding("error", root, "delta-rs decodes % in a path and would look elsewhere", "choose a path without %")
        ]
    return [check_folder(Path(root.removeprefix("file://")).absolute(), root)]


def _look_at_table(table: TableSchema, place: TablePath, layout: DeltaLayout) -> list[Finding]:
    name = str(table.table)
    problems: list[ColumnProblem] = []
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
    problems += unkept_columns(table)
    if problem := problem_of(place):
        problems.append((problem, f"move {place.uri} away, or choose another path"))
    return table_findings(table, problems, f"kept {'with its history ' if layout.history else ''}at {place.uri}")


def unkept_columns(table: TableSchema) -> list[ColumnProblem]:
    """Columns that a Delta table cannot have. Pure."""
    return column_problems(
        table,
        delta_type,
        lambda column: column.lower().startswith("_tailrace_"),
        str.lower,
        "which Delta does not allow",
    )
