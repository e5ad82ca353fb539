"""What can be known about a warehouse and its catalog before anything is written there."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.destination.iceberg.catalog import catalog_file, load_table, open_catalog, reaching
from tailrace.destination.iceberg.column import kept_type
from tailrace.destination.iceberg.option import IcebergOptions
from tailrace.destination.iceberg.snapshot import IcebergSnapshot, warehouse_folder
from tailrace.destination.preflight import ColumnProblem, check_folder, column_problems, table_findings
from tailrace.errors import Finding, PreflightError, UnavailableError
from tailrace.model.schema import TableSchema


def check(options: IcebergOptions, tables: Sequence[TableSchema]) -> list[Finding]:
    """Findings about the warehouse, the catalog and each table. Leaves nothing there."""
    findings = _look_at_warehouse(options)
    if any(finding.level == "error" for finding in findings):
        return findings
    for table in tables:
        findings += _look_at_table(options, table)
    return findings


def _look_at_warehouse(options: IcebergOptions) -> list[Finding]:
    findings: list[Finding] = []
    if (folder := warehouse_folder(options)) is not None:
        findings.append(check_folder(folder.absolute(), options.warehouse))
    file = catalog_file(options)
    if file is not None and not file.exists():
        return findings
    subject = str(file) if file is not None else f"{options.catalog.type} catalog {options.catalog.name}"
    try:
        with reaching(options, ""):
            open_catalog(options).list_namespaces()
    except (PreflightError, UnavailableError) as error:
        return [*findings, Finding("error", subject, error.message, error.fix)]
    return [*findings, Finding("ok", subject, "answers")]


def _look_at_table(options: IcebergOptions, table: TableSchema) -> list[Finding]:
    problems = unkept_columns(table)
    with reaching(options, str(table.table)):
        handle = load_table(options, table.table)
    if handle is not None and (problem := IcebergSnapshot(handle, table.table).problem()):
        problems.append((problem, "drop or rename that one, or choose another warehouse or catalog"))
    return table_findings(table, problems, f"kept as Iceberg table {options.catalog.name}.{table.table}")


def unkept_columns(table: TableSchema) -> list[ColumnProblem]:
    """Columns that an Iceberg table cannot have. Pure."""
    return column_problems(
        table,
        kept_type,
        lambda column: column.lower().startswith("_tailrace_"),
        str.lower,
        "which many readers of Iceberg do not tell apart",
    )
