"""`tailrace sqlite`: capture for a whole SQLite file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.error import CommandGroup, Debug, Json, print_result
from tailrace.model.quantity_text import format_count

if TYPE_CHECKING:
    from tailrace.errors import Finding

app = typer.Typer(
    cls=CommandGroup,
    name="sqlite",
    help="Capture the changes of an SQLite file, from every program that writes it.",
    no_args_is_help=True,
    epilog="Example: tailrace sqlite status app.db",
)

SqliteFile = Annotated[Path, typer.Argument(metavar="FILE", help="The SQLite file.", show_default=False)]
CaptureTable = Annotated[str, typer.Option("--table", help="The capture table.")]

_TABLE = "turso_cdc"


@app.command(epilog="Example: tailrace sqlite enable app.db --mode full")
def enable(
    file: SqliteFile,
    mode: Annotated[str, typer.Option("--mode", help="id, before, after or full.")] = "full",
    table: CaptureTable = _TABLE,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Capture every change of the file with triggers. Run it again after DDL to bring the triggers up to date."""
    from tailrace.capture import trigger
    from tailrace.capture.replica import open_file

    with open_file(file) as connection:
        captured = trigger.enable(connection, f"{mode},{table}")
        left_out = trigger.read_status(connection).excluded
    text = f"capturing {captured.mode} into {captured.table} ({captured.version})"
    value = {**captured.to_dict(), "excluded": [finding.to_dict() for finding in left_out]}
    print_result("\n".join([text, *describe_excluded(left_out)]), value, as_json=as_json)


def describe_excluded(findings: Sequence[Finding]) -> list[str]:
    """One line for each table that is not captured."""
    return [f"warning   {one.subject} is {one.message}; {one.fix}" for one in findings]


@app.command(epilog="Example: tailrace sqlite disable app.db")
def disable(
    file: SqliteFile,
    drop: Annotated[bool, typer.Option("--drop", help="Also drop the captured changes.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Stop capturing the file. The captured changes stay readable unless you drop them."""
    from tailrace.capture import trigger
    from tailrace.capture.replica import open_file

    with open_file(file) as connection:
        dropped = trigger.disable(connection, drop=drop)
    tape = ("the tape is dropped" if dropped else "there was no tape to drop") if drop else ""
    print_result(", ".join(filter(None, ("off", tape))), {"mode": "off", "dropped": dropped}, as_json=as_json)


@app.command(epilog="Example: tailrace sqlite status app.db --json")
def status(file: SqliteFile, table: CaptureTable = _TABLE, as_json: Json = False, debug: Debug = False) -> None:
    """Show whether triggers capture the file, and how many changes are captured. Changes nothing."""
    from tailrace.capture import layout, trigger
    from tailrace.capture.exclusion import excluded
    from tailrace.capture.replica import open_file
    from tailrace.capture.tape import Tape

    with open_file(file, writes=False) as connection:
        state = trigger.read_status(connection)
        name = state.captured.table or table
        left_out = state.excluded or excluded(connection, name)
        counted = Tape(connection, name).statistics() if layout.has_table(connection, name) else None
        version = layout.read_version(connection, name) if counted else None
    value: dict[str, Any] = {
        **state.captured.to_dict(),
        "tables": state.tables,
        "pending_schema_changes": state.pending,
        "excluded": [finding.to_dict() for finding in left_out],
        "tape": None,
    }
    lines = [f"triggers  {state.captured.mode}, {format_count(state.tables, 'table')}"]
    if state.pending:
        lines.append(f"pending   {format_count(state.pending, 'schema change')}: tailrace sqlite enable {file}")
    if counted is not None:
        value["tape"] = {
            "table": name,
            "version": version,
            "cdc_operations": counted.cdc_operations,
            "first": counted.first,
            "last": counted.last,
            "changes": counted.tables,
        }
        range_ = f", {counted.first} to {counted.last}" if counted.cdc_operations else ""
        lines.append(f"tape      {name} ({version}), {format_count(counted.cdc_operations, 'change')}{range_}")
    print_result("\n".join([*lines, *describe_excluded(left_out)]), value, as_json=as_json)


@app.command(epilog="Example: tailrace sqlite purge app.db --upto 120000")
def purge(
    file: SqliteFile,
    upto: Annotated[
        int, typer.Option("--upto", min=0, help="The last change that every reader has read.", show_default=False)
    ],
    table: CaptureTable = _TABLE,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Delete captured changes up to one. Later changes are numbered on from there; numbers never start over."""
    from tailrace.capture.replica import open_file
    from tailrace.capture.tape import purge as forget

    with open_file(file) as connection:
        count = forget(connection, upto, table)
    print_result(f"{format_count(count, 'change')} purged", {"purged": count}, as_json=as_json)
