"""`tailrace verify`: compare the destination with the source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.destination import DestinationName, show_each
from tailrace.cli.error import Debug, Json, PipelineFile
from tailrace.cli.text import colored, say
from tailrace.errors import ConfigError, TableError

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig
    from tailrace.verify.comparison import Verdict


def verify(
    file: PipelineFile,
    table: Annotated[str | None, typer.Option("--table", help="Only this table, as schema.table.")] = None,
    keys: Annotated[int, typer.Option("--keys", min=0, help="How many differing keys to list for each table.")] = 20,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare keys and row hashes of source and destination, and list the keys that differ. Exits with 8 if any do.

    Reads every row of both sides and changes nothing.
    It can be run at any time: while the pipeline runs, a table that differs is compared again after some seconds, and
    rows that changed meanwhile are counted as in flight. Does not start Spark.
    Tables without a key, or kept as a changelog, cannot be compared and are listed as skipped. What the pipeline
    selects and does not follow is listed as omitted.
    """
    from tailrace.config.pipeline import load_all

    found = show_each(
        load_all(file, destination=destination),
        lambda config: _compare(config, table, keys, as_json=as_json),
        as_json=as_json,
        summary=lambda values: {"equal": all(each["equal"] for each in values)},
    )
    if not all(each["equal"] for each in found):
        raise typer.Exit(TableError.exit_code)


def _compare(config: PipelineConfig, table: str | None, keys: int, *, as_json: bool) -> dict[str, Any]:
    """Print how each table compares unless JSON was asked for. The same as JSON values."""
    from tailrace.verify.comparison import find_omitted
    from tailrace.verify.comparison import verify as compare

    verdicts = []
    for verdict in compare(config, table, shown=keys):
        verdicts.append(verdict)
        if not as_json:
            _print(verdict)
    omitted = find_omitted(config, [verdict.table for verdict in verdicts]) if table is None else []
    for finding in omitted if not as_json else ():
        say(colored("omitted", typer.colors.YELLOW), f" {finding.subject}: {finding.message}")
    if not any(verdict.compared for verdict in verdicts):
        raise ConfigError(
            "no table can be compared: each has no key, or is kept as a changelog, or cannot be read",
            fix="give one of them a key; tailrace check FILE names what cannot be read",
        )
    equal = all(verdict.equal for verdict in verdicts if verdict.compared)
    tables = [verdict.to_dict() for verdict in verdicts]
    return {"equal": equal, "tables": tables, "omitted": [finding.to_dict() for finding in omitted]}


def _print(verdict: Verdict) -> None:
    if not verdict.compared:
        skipped = colored("skipped", typer.colors.YELLOW)
        say(skipped, f" {verdict.table}: {verdict.reason}")
        return
    if verdict.equal:
        flying = f"; {verdict.in_flight:,} were in flight" if verdict.in_flight else ""
        say(colored("equal", typer.colors.GREEN), f"   {verdict.table}: {verdict.source_rows:,} rows{flying}")
        return
    say(
        colored("differs", typer.colors.RED),
        f" {verdict.table}: {verdict.source_rows:,} rows in the source,"
        f" {verdict.destination_rows:,} in the destination; {verdict.missing:,} missing, {verdict.extra:,} too many,"
        f" {verdict.different:,} different",
    )
    for one in verdict.differences:
        say(f"        {one.kind}: ({', '.join(one.key)})")
