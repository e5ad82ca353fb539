"""What can be known about a Delta destination before anything is written there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from tailrace.destination.delta.column import DeltaLayout, delta_type
from tailrace.destination.delta.log import MARK, foreign_content, reaching
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.preflight import ColumnProblem, check_folder, column_problems, table_findings
from tailrace.errors import Finding
from tailrace.model.schema import TableSchema

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
                    f"differs from {twin.table} only in case; some file systems treat the two names as one",
                    "keep one of them at another destination path",
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
    problems += column_problems(
        table, delta_type, lambda column: column.startswith("_tailrace_"), str.lower, "which Delta does not allow"
    )
    if problem := _foreign(place):
        problems.append((problem, f"move {place.uri} away, or choose another path"))
    return table_findings(table, problems, f"kept {'with its history ' if layout.history else ''}at {place.uri}")


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
