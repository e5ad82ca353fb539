"""The command `tailrace`.

Imports are inside the commands: help must come at once, and only `run` and `demo` may cost the start of Spark.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailrace.cli.report import EXIT_CODES, Debug, Json, print_json, reported

app = typer.Typer(
    name="tailrace",
    help="Follow a database and keep its tables up to date elsewhere, within seconds.",
    epilog="Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The pipeline's YAML file.", show_default=False)]
Plain = Annotated[bool, typer.Option("--plain", help="Print lines instead of the live view.")]


@app.command(epilog="Example: tailrace run shop.yaml --once")
@reported
def run(
    file: File,
    once: Annotated[bool, typer.Option("--once", help="Apply what is there now, then end.")] = False,
    plain: Plain = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a pipeline: copy its tables, then follow the changes until Ctrl-C.

    The first Ctrl-C or SIGTERM finishes the batch in hand, the second stops at once; nothing is lost either way.
    With --once, a table in error ends in exit code 8.
    """
    from tailrace.cli.service import run_pipeline
    from tailrace.config import load

    run_pipeline(load(file), once=once, plain=plain, as_json=as_json)


@app.command(epilog="Example: tailrace check shop.yaml")
@reported
def check(file: File, as_json: Json = False, debug: Debug = False) -> None:
    """Look whether source and destination are ready, without changing anything; exit code 3 if they are not."""
    from tailrace.cli.inspect import check_pipeline, print_findings
    from tailrace.config import load

    findings = check_pipeline(load(file))
    print_findings(findings, as_json=as_json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(3)


@app.command(epilog="Example: tailrace status shop.yaml --json")
@reported
def status(file: File, as_json: Json = False, debug: Debug = False) -> None:
    """Show how each table stands: state, rows, lag, and the last error with its fix. Works beside a running pipeline.

    Reads only the pipeline's state folder: no connection is made, no password needed.
    """
    from tailrace.cli.inspect import print_status
    from tailrace.config import load
    from tailrace.state import StateStore
    from tailrace.status import Status

    with StateStore.open_reading(load(file, connects=False).state) as store:
        print_status(Status.read(store), as_json=as_json)


@app.command(epilog="Example: tailrace tables shop.yaml")
@reported
def tables(file: File, as_json: Json = False, debug: Debug = False) -> None:
    """List the tables that the pipeline would follow now, with their keys, as the source has them."""
    from tailrace.cli.inspect import print_tables
    from tailrace.config import load
    from tailrace.registry import open_source

    print_tables(open_source(load(file)).tables(), as_json=as_json)


@app.command(epilog="Example: tailrace resync shop.yaml public.orders")
@reported
def resync(
    file: File,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table, as schema.table.", show_default=False)],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Ask for a table to be copied again from nothing. The running pipeline does it, or else the next run."""
    from tailrace.cli.request import ask_resync
    from tailrace.config import load

    ask_resync(load(file, connects=False), table, as_json=as_json)


@app.command(epilog="Example: tailrace demo --seconds 60")
@reported
def demo(
    folder: Annotated[Path, typer.Option(help="Where the demo keeps everything; taken up again if it exists.")] = Path(
        "demo"
    ),
    rows: Annotated[int, typer.Option(min=1, help="How many orders there are at the start.")] = 100_000,
    seconds: Annotated[float | None, typer.Option(min=0, help="End after this time; default: at Ctrl-C.")] = None,
    plain: Plain = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """See it work: a private PostgreSQL with a shop, people ordering, Delta tables that follow, and a comparison."""
    from tailrace.cli.demo import run_demo

    run_demo(folder, rows=rows, seconds=seconds, plain=plain, as_json=as_json)


@app.command(epilog="Example: tailrace schema > tailrace.schema.json")
@reported
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of a pipeline's file, for editors and for reading which keys there are."""
    from tailrace.config import json_schema

    print_json(json_schema())


@app.command(epilog="Example: tailrace version --json")
@reported
def version(as_json: Json = False, debug: Debug = False) -> None:
    """Print the version, and with --json those of the parts it stands on."""
    from tailrace.cli.inspect import print_versions

    print_versions(as_json=as_json)


def main() -> None:
    """The entry point of the console script."""
    app()
