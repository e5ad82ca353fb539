"""`tailrace tape`: replay, undo and show the changes captured in a file."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.error import CommandGroup, Debug, Json, print_json, print_result
from tailrace.cli.sqlite import describe_excluded
from tailrace.cli.text import say
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.capture.change import CapturedChange
    from tailrace.capture.layout import CaptureConnection
    from tailrace.capture.tape import TapeTransaction

app = typer.Typer(
    cls=CommandGroup,
    name="tape",
    help="Replay, undo or show the changes captured in a file.",
    no_args_is_help=True,
    epilog="Example: tailrace tape show app.db",
)

TapeFile = Annotated[Path, typer.Argument(metavar="FILE", help="The SQLite or Turso file.", show_default=False)]
TapeSource = Annotated[
    Path, typer.Argument(metavar="SRC", help="The file with the captured changes.", show_default=False)
]
ReplicaFile = Annotated[Path, typer.Argument(metavar="DST", help="The file to bring up to date.", show_default=False)]
CaptureTable = Annotated[str, typer.Option("--table", help="The capture table.")]

_TABLE = "turso_cdc"
_SIGNS = {1: "+", 0: "~", -1: "-"}


@app.command(epilog="Example: tailrace tape apply app.db replica.db")
def apply(
    source: TapeSource,
    destination: ReplicaFile,
    start: Annotated[
        int | None, typer.Option("--from", min=0, help="The last change that an existing DST contains; 0: none.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Write rows by key into whatever DST holds; its other rows stay.")
    ] = False,
    table: CaptureTable = _TABLE,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Apply the changes of SRC to DST. A repeat continues where it stopped; a missing DST is copied first.

    DST has to be a replica: a row that is missing or in the way stops it. With --merge it may be any database.
    """
    from tailrace.capture import replica

    done = replica.apply(source, destination, table=table, start=start, merge=merge)
    copied = "copied, then " if done.copied else ""
    text = f"{copied}{done.changes} changes of {done.transactions} transactions applied, now at {done.last}"
    value = {
        "transactions": done.transactions,
        "changes": done.changes,
        "last": done.last,
        "copied": done.copied,
        "excluded": [finding.to_dict() for finding in done.excluded],
    }
    print_result("\n".join([text, *describe_excluded(done.excluded)]), value, as_json=as_json)


@app.command(epilog="Example: tailrace tape revert app.db --last 1")
def revert(
    file: TapeFile,
    to: Annotated[int | None, typer.Option("--to", min=0, help="Undo every change after this one.")] = None,
    last: Annotated[int | None, typer.Option("--last", min=1, help="Undo this many transactions.")] = None,
    table: CaptureTable = _TABLE,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Undo changes of the file, all in one transaction. They stay on the tape, and so does the undo."""
    from tailrace.capture import replica

    if (to is None) == (last is None):
        raise ConfigError("say how far to go back", fix="either --to CHANGE_ID or --last N")
    done = replica.revert(file, to=to, last=last, table=table)
    value = {"changes": done.changes, "to": done.to}
    print_result(f"{done.changes} changes undone, back at {done.to}", value, as_json=as_json)


@app.command(epilog="Example: tailrace tape show app.db --after 1200")
def show(
    file: TapeFile,
    after: Annotated[int, typer.Option("--after", min=0, help="Start after this change.")] = 0,
    table: CaptureTable = _TABLE,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what each transaction changed: + inserted, ~ updated, - deleted. Columns have their current names.

    Changes nothing.
    """
    from tailrace.capture.replica import open_file
    from tailrace.capture.tape import Tape

    with open_file(file, writes=False) as connection:
        tape = Tape(connection, table)
        groups = tape.transactions(after, ignore_schema_changes=False)
        if as_json:
            names: dict[str, list[str]] = {}
            print_json({"transactions": [_describe(connection, group, names) for group in groups]})
        else:
            _print_diff(connection, list(groups))


def _describe(connection: CaptureConnection, group: TapeTransaction, names: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "txn_id": group.txn_id,
        "time": group.time,
        "last": group.last,
        "changes": [
            {
                "change_id": change.change_id,
                "type": {1: "insert", 0: "update", -1: "delete"}[change.type],
                "table": change.table,
                "id": change.id,
                "before": _named(connection, change, "before", names),
                "after": _named(connection, change, "after", names),
            }
            for change in group.changes
        ],
    }


def _print_diff(connection: CaptureConnection, groups: list[TapeTransaction]) -> None:
    names: dict[str, list[str]] = {}
    for group in groups:
        when = datetime.fromtimestamp(group.time or 0, UTC).isoformat(sep=" ", timespec="seconds")
        label = f"transaction {group.txn_id}" if group.txn_id is not None else "changes"
        say(f"{label}  {when}  up to {group.last}")
        for change in group.changes:
            before, after = (_named(connection, change, image, names) for image in ("before", "after"))
            say(f"  {_SIGNS[change.type]} {change.table} #{change.id!s}  {_difference(before, after)}".rstrip())


def _difference(before: dict[str, str] | None, after: dict[str, str] | None) -> str:
    if before is None or after is None:
        return ", ".join(f"{name}={text}" for name, text in (before or after or {}).items())
    return ", ".join(
        f"{name}: {before.get(name, 'NULL')} → {text}" for name, text in after.items() if before.get(name) != text
    )


def _named(
    connection: CaptureConnection, change: CapturedChange, image: str, names: dict[str, list[str]]
) -> dict[str, str] | None:
    row = change.row(image)
    if row is None:
        return None
    known = names.setdefault(change.table or "", _column_names(connection, change.table or ""))
    labels = [*known, *(f"column {place}" for place in range(len(known) + 1, len(row) + 1))]
    return {label: _literal(value) for label, value in zip(labels, row, strict=False)}


def _column_names(connection: CaptureConnection, table: str) -> list[str]:
    from tailrace.capture.layout import quoted

    return [str(row[1]) for row in connection.execute(f"PRAGMA table_info({quoted(table)})").fetchall()]


def _literal(value: object) -> str:
    """A value as SQL writes it, so that '1', 1 and 1.0 look different."""
    from tailrace.capture.column_type import exact_text

    if value is None:
        return "NULL"
    if isinstance(value, str):
        text = exact_text(value)
        return text if text.startswith("X'") and text != value else "'" + text.replace("'", "''") + "'"
    return exact_text(value)
