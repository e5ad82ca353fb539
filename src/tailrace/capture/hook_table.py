"""Which tables hooks can capture."""

from __future__ import annotations

from tailrace.capture.exclusion import ExcludedTable
from tailrace.capture.layout import CaptureConnection, TableShape, list_tables, read_table_shape, require_capturable
from tailrace.errors import PreflightError


def sort_tables(connection: CaptureConnection) -> tuple[set[str], dict[str, ExcludedTable]]:
    """The tables of the file that hooks can capture, and those that they cannot."""
    hookable: set[str] = set()
    left_out: dict[str, ExcludedTable] = {}
    for table in list_tables(connection):
        try:
            _require_hookable(read_table_shape(connection, table))
        except PreflightError as error:
            left_out[table] = ExcludedTable.of(table, error)
        else:
            hookable.add(table)
    return hookable, left_out


def _require_hookable(shape: TableShape) -> None:
    """Raise PreflightError for a table whose rows the hook cannot read completely."""
    require_capturable(shape)
    if shape.generated:
        raise PreflightError(
            f"{shape.table} has generated columns, which SQLite's hook cannot read",
            fix="capture this file by triggers: tailrace sqlite enable FILE",
            table=shape.table,
        )
