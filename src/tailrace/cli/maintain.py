"""`tailrace maintain`: the housekeeping of the destination's tables, now."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.destination import DestinationName, show_each
from tailrace.cli.error import Debug, Json, PipelineFile
from tailrace.cli.text import colored, say
from tailrace.errors import ConfigError, PipelinePlace, TableError, name_file, suggest

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.config.pipeline import PipelineConfig
    from tailrace.destination.capability import Maintainable


@dataclass(frozen=True)
class _Outcome:
    """What became of one table. None: nothing was to be done, or there was no error."""

    table: str
    done: str | None
    seconds: float
    error: str | None = None
    fix: str | None = None


def maintain(
    file: PipelineFile,
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE]...", help="Tables, as schema.table; default: all.", show_default=False),
    ] = None,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Do all housekeeping of the destination's tables now: for Delta, merge small files, fold deletion vectors, vacuum.

    No row changes. The pipeline does the same by itself when it is due; use this before a large read, or after a
    change of `updates` or `compact`. It may run while the pipeline runs: batches do not wait for it. Files are deleted
    only as `vacuum` in the pipeline's file allows. Exits with 8 if a table could not be maintained; the others are.
    Does not start Spark or connect to the source.
    """
    from tailrace.config.pipeline import load_all

    configs = load_all(file, destination=destination)
    chosen = [config for config in configs if len(configs) == 1 or _has_maintenance(config)] or configs[:1]
    found = show_each(
        chosen, lambda config: _maintain_all(config, tables or [], file, as_json=as_json), as_json=as_json
    )
    if any(outcome["error"] for each in found for outcome in each["tables"]):
        raise typer.Exit(TableError.exit_code)


def _maintain_all(config: PipelineConfig, tables: list[str], file: Path, *, as_json: bool) -> dict[str, Any]:
    """Maintain the tables, and print what was done unless JSON was asked for. The same as JSON values."""
    destination = _maintainable(config)
    outcomes: list[_Outcome] = []
    for table in _chosen(config, tables):
        outcome = _maintain(destination, table, PipelinePlace(file, config.member))
        outcomes.append(outcome)
        if not as_json:
            _print(outcome)
    return {"tables": [asdict(outcome) for outcome in outcomes]}


def _has_maintenance(config: PipelineConfig) -> bool:
    from tailrace.config.registry import open_destination
    from tailrace.destination.capability import Maintainable

    return isinstance(open_destination(config), Maintainable)


def _maintainable(config: PipelineConfig) -> Maintainable:
    from tailrace.config.registry import open_destination
    from tailrace.destination.capability import Maintainable

    destination = open_destination(config)
    if not isinstance(destination, Maintainable):
        raise ConfigError(
            f"a destination of type {config.destination.type} has nothing to maintain", fix="tailrace run FILE"
        )
    return destination


def _chosen(config: PipelineConfig, wanted: list[str]) -> list[str]:
    """The tables asked for, or all that the pipeline has. Raises ConfigError for one that it does not have."""

    with config.store_address.open_reading() as reader:
        known = [record.name for record in reader.tables()]
    for table in wanted:
        if table not in known:
            raise ConfigError(
                f"pipeline {config.name} has no table {table}{suggest(table, known)}",
                fix="`tailrace status FILE` lists its tables",
            )
    return wanted or sorted(known)


def _maintain(destination: Maintainable, table: str, file: PipelinePlace) -> _Outcome:
    from tailrace.model.schema import TableName

    started = time.monotonic()
    try:
        done = destination.maintain_now(TableName.parse(table))
    except TableError as error:
        seconds = round(time.monotonic() - started, 3)
        return _Outcome(table, None, seconds, name_file(error.message, file), name_file(error.fix, file))
    return _Outcome(table, done, round(time.monotonic() - started, 3))


def _print(outcome: _Outcome) -> None:
    if outcome.error is not None:
        fix = f"; fix: {outcome.fix}" if outcome.fix else ""
        say(colored("failed", typer.colors.RED), f" {outcome.table}: {outcome.error}{fix}")
    elif outcome.done is None:
        say(colored("clean", typer.colors.GREEN), f"  {outcome.table}: nothing to do")
    else:
        say(colored("done", typer.colors.GREEN), f"   {outcome.table}: {outcome.done} ({outcome.seconds:.1f} s)")
