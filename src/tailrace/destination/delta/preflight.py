"""What can be known about a Delta destination before anything is written there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from tailrace.destination.delta.column import DeltaLayout, delta_type
from tailrace.destination.delta.log import DeltaSnapshot, problem_of
from tailrace.destination.delta.option import Updates
from tailrace.destination.delta.store_error import reaching
from tailrace.destination.delta.table_folder import TablePath
from tailrace.destination.preflight import ColumnProblem, check_folder, column_problems, table_findings
from tailrace.errors import Finding, TableError
from tailrace.model.schema import TableSchema
from tailrace.option.value import nearest
from tailrace.system.atomic_file import can_move_new
from tailrace.system.object_store import probe_conditional_put

_PARTITION_TYPES = (pa.types.is_string, pa.types.is_integer, pa.types.is_date, pa.types.is_boolean)


def check(
    root: str, options: Mapping[str, str], tables: Sequence[tuple[TableSchema, TablePath, DeltaLayout, Updates]]
) -> list[Finding]:
    """Findings about the path and each table. Leaves nothing there."""
    is_remote = "://" in root and not root.startswith("file://")
    findings = [probe_conditional_put(root, options)] if is_remote else _look_at_path(root)
    if any(finding.level == "error" for finding in findings):
        return findings
    seen: dict[str, TableSchema] = {}
    for table, place, layout, updates in tables:
        try:
            with reaching(place, str(table.table)):
                findings += _look_at_table(table, place, layout, updates)
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
    folder = Path(root.removeprefix("file://")).absolute()
    found = check_folder(folder, root)
    if found.level != "error" and not can_move_new(nearest(folder)):
        return [
            Finding(
                "error",
                root,
                "its file system has neither hard links nor renames that never replace a file, so two writers of a"
                " table would lose each other's changes",
                "choose a path on another file system, or in an object store",
            )
        ]
    return [found]


def _look_at_table(table: TableSchema, place: TablePath, layout: DeltaLayout, updates: Updates) -> list[Finding]:
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
    history = {"current": "", "changelog": "as a changelog ", "history": "with its history "}[layout.mode]
    how = "" if problem else _how_replaced(place, layout, updates)
    return table_findings(table, problems, f"kept {history}at {place.uri}{how}")


def _how_replaced(place: TablePath, layout: DeltaLayout, updates: Updates) -> str:
    """How changed rows of a table are replaced, where that concerns its readers."""
    if not layout.table.key:
        return ""
    found = DeltaSnapshot.load(place, place.table)
    is_marked = found is not None and found.has_vectors
    if updates == "merge_on_read" or (updates == "auto" and is_marked):
        return (
            ", by merge on read: Spark, Polars, DuckDB and delta-rs's QueryBuilder read it, DeltaTable.to_pandas and"
            " to_pyarrow_table refuse it"
        )
    if updates == "auto":
        return "; by merge on read once rewriting its files costs too much (updates: auto)"
    return ", by copy on write; until maintenance has folded them, it has deletion vectors" if is_marked else ""


def unkept_columns(table: TableSchema) -> list[ColumnProblem]:
    """Columns that a Delta table cannot have. Pure."""
    return column_problems(
        table,
        delta_type,
        lambda column: column.lower().startswith("_tailrace_"),
        str.lower,
        "which Delta does not allow",
    )
