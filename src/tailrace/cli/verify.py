"""`tailrace verify`: compare the destination with the source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli.error import Debug, Json, PipelineFile, colored, print_json
from tailrace.errors import ConfigError, TableError

if TYPE_CHECKING:
    from tailrace.verify.comparison import Verdict


def verify(
    file: PipelineFile,
    table: Annotated[str | None, typer.Option("--table", help="Only this table, as schema.table.")] = None,
    keys: Annotated[int, typer.Option("--keys", min=0, help="How many differing keys to list for each table.")] = 20,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare keys and row hashes of source and destination, and list the keys that differ. Exits with 8 if any do.

    Run it when the pipeline has caught up: changes that are not applied yet are differences too. Does not start Spark.
    Tables without a key, or kept with their history, cannot be compared and are listed as skipped.
    """
    from tailrace.config.pipeline import load
    from tailrace.verify.comparison import verify as compare

    verdicts = []
    for verdict in compare(load(file), table, shown=keys):
        verdicts.append(verdict)
        if not as_json:
            _print(verdict)
    if not any(verdict.compared for verdict in verdicts):
        raise ConfigError(
            "no table can be compared: each has no key, or is kept with its history", fix="give one of them a key"
        )
    equal = all(verdict.equal for verdict in verdicts if verdict.compared)
    if as_json:
        print_json({"equal": equal, "tables": [verdict.to_dict() for verdict in verdicts]})
    if not equal:
        raise typer.Exit(TableError.exit_code)


def _print(verdict: Verdict) -> None:
    if not verdict.compared:
        skipped = colored("skipped", typer.colors.YELLOW)
        typer.echo(f"{skipped} {verdict.table}: it has no key, or is kept with its history")
        return
    if verdict.equal:
        typer.echo(f"{colored('equal', typer.colors.GREEN)}   {verdict.table}: {verdict.source_rows:,} rows")
        return
    typer.echo(
        f"{colored('differs', typer.colors.RED)} {verdict.table}: {verdict.source_rows:,} rows in the source,"
        f" {verdict.destination_rows:,} in the destination; {verdict.missing:,} missing, {verdict.extra:,} too many,"
        f" {verdict.different:,} different"
    )
    for key in verdict.keys:
        typer.echo(f"        ({', '.join(key)})")
