"""The command `tailrace`.

Imports are inside the commands: help must come at once, and only `run`, `demo` and `warm` may cost the start of Spark.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli import dead_letter, queue, sqlite, tape
from tailrace.cli.error import EXIT_CODES, Commands, Debug, Json, PipelineFile, print_json
from tailrace.cli.output import guard_output
from tailrace.cli.verify import verify

if TYPE_CHECKING:
    from tailrace.state.record import RequestKind

app = typer.Typer(
    name="tailrace",
    cls=Commands,
    help="Follow a database and keep its tables up to date elsewhere, within seconds.",
    epilog="Exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + ".",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

OneTable = Annotated[str, typer.Argument(metavar="TABLE", help="The table, as schema.table.", show_default=False)]
AnyTable = Annotated[
    str | None,
    typer.Argument(metavar="[TABLE]", help="The table, as schema.table; all without it.", show_default=False),
]
Plain = Annotated[bool, typer.Option("--plain", help="Print lines instead of the live view.")]


@app.command(epilog="Example: tailrace run shop.yaml --once")
def run(
    file: PipelineFile,
    once: Annotated[bool, typer.Option("--once", help="Apply what is there now, then end.")] = False,
    plain: Plain = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a pipeline: copy its tables, then follow the changes until Ctrl-C.

    The first Ctrl-C or SIGTERM finishes the batch in hand, the second stops at once; nothing is lost either way.
    With --once, a table in error ends in exit code 8.
    """
    from tailrace.cli.run import run_pipeline
    from tailrace.config.pipeline import load

    run_pipeline(load(file), file, once=once, plain=plain, as_json=as_json)


@app.command(epilog="Example: tailrace check shop.yaml")
def check(file: PipelineFile, as_json: Json = False, debug: Debug = False) -> None:
    """Look whether source and destination are ready, without changing anything; exit code 3 if they are not."""
    from tailrace.cli.inspect import check_pipeline, print_findings
    from tailrace.config.pipeline import load

    findings = check_pipeline(load(file))
    print_findings(findings, file, as_json=as_json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(3)


@app.command(epilog="Example: tailrace status shop.yaml --json")
def status(file: PipelineFile, as_json: Json = False, debug: Debug = False) -> None:
    """Show how each table stands: state, rows, lag, and the last error with its fix. Works beside a running pipeline.

    Reads only the pipeline's state: no connection to source or destination is made, no password of theirs needed.
    """
    from tailrace.cli.inspect import print_status
    from tailrace.config.pipeline import load
    from tailrace.state.status import PipelineStatus

    with load(file, connects=False).store_address.open_reading() as store:
        print_status(PipelineStatus.read(store), file, as_json=as_json)


@app.command(epilog="Example: tailrace metrics shop.yaml --listen 127.0.0.1:9187")
def metrics(
    file: PipelineFile,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve them at /metrics until Ctrl-C, instead of once here.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Print how each table stands as metrics for Prometheus. Reads only the state, also while nothing runs."""
    from tailrace.cli.inspect import print_metrics, serve_metrics

    if listen is None:
        print_metrics(file)
    else:
        serve_metrics(file, listen)


@app.command(epilog="Example: tailrace tables shop.yaml")
def tables(file: PipelineFile, as_json: Json = False, debug: Debug = False) -> None:
    """List the tables that the pipeline would follow now, with their keys, as the source has them.

    Once the pipeline has run, also the state each of them is in.
    """
    from tailrace.cli.inspect import print_tables, read_states
    from tailrace.config.pipeline import load
    from tailrace.config.registry import open_source

    config = load(file)
    print_tables(open_source(config).tables(), read_states(config), as_json=as_json)


@app.command(epilog="Example: tailrace prepare shop.yaml --print-sql")
def prepare(
    file: PipelineFile,
    print_sql: Annotated[
        bool, typer.Option("--print-sql", help="Print the statements instead of running them.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take it out again.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Install what makes schema changes exact: in Postgres an event trigger, which needs a superuser or its like.

    Without it they are derived from the log, which suffices for most; docs/schema-changes.md has the difference.
    """
    from tailrace.cli.operate import prepare_source
    from tailrace.config.pipeline import load

    prepare_source(load(file), print_sql=print_sql, remove=remove, as_json=as_json)


@app.command(epilog="Example: tailrace resync shop.yaml public.orders")
def resync(file: PipelineFile, table: OneTable, as_json: Json = False, debug: Debug = False) -> None:
    """Copy a table again from nothing, beside the others. Its old rows stay until the new copy can replace them.

    The running pipeline does it, or else the next run.
    """
    _ask(file, "resync", table, as_json)


@app.command(epilog="Example: tailrace pause shop.yaml public.orders")
def pause(file: PipelineFile, table: AnyTable = None, as_json: Json = False, debug: Debug = False) -> None:
    """Let a table (or all) rest. Its changes are kept in the journal, up to the journal's bound."""
    _ask(file, "pause", table, as_json)


@app.command(epilog="Example: tailrace resume shop.yaml public.orders")
def resume(file: PipelineFile, table: AnyTable = None, as_json: Json = False, debug: Debug = False) -> None:
    """Let a paused table (or all) go on where it was."""
    _ask(file, "resume", table, as_json)


@app.command(epilog="Example: tailrace retry shop.yaml public.orders")
def retry(file: PipelineFile, table: AnyTable = None, as_json: Json = False, debug: Debug = False) -> None:
    """Try a table in error (or all) again, from where it stopped."""
    _ask(file, "retry", table, as_json)


@app.command(epilog="Example: tailrace skip shop.yaml public.orders")
def skip(file: PipelineFile, table: OneTable, as_json: Json = False, debug: Debug = False) -> None:
    """Let a table in error go on without the change that stopped it, which stays among the dead letters."""
    _ask(file, "skip", table, as_json)


def _ask(file: Path, kind: RequestKind, table: str | None, as_json: bool) -> None:
    from tailrace.cli.operate import ask
    from tailrace.config.pipeline import load

    ask(load(file, connects=False), kind, table, as_json=as_json)


@app.command(epilog="Example: tailrace reset shop.yaml --yes")
def reset(
    file: PipelineFile,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Begin again: drop the slot, the journal and the state, so that the next run copies every table anew.

    For when the upstream or the journal lost what was needed. The destination keeps its rows until then.
    """
    from tailrace.cli.operate import reset_pipeline
    from tailrace.config.pipeline import load

    config = load(file)
    if not yes:
        typer.confirm(
            f"Forget how far pipeline {config.name} has come, and copy every table anew?", abort=True, err=True
        )
    reset_pipeline(config, as_json=as_json)


@app.command(epilog="Example: tailrace receive events.yaml")
def receive(file: PipelineFile, as_json: Json = False, debug: Debug = False) -> None:
    """Take in what is pushed to a pipeline's source, and nothing else, until Ctrl-C; no Spark is started.

    For `source: {type: rqlite}`: its events are safe while the pipeline is stopped, upgraded or moved.
    """
    from tailrace.cli.run import receive as receive_only

    receive_only(file, as_json=as_json)


app.command(epilog="Example: tailrace verify shop.yaml --table public.orders")(verify)
app.add_typer(dead_letter.app, name="errors")
app.add_typer(queue.app, name="queue")
app.add_typer(sqlite.app)
app.add_typer(tape.app)


@app.command(epilog="Example: tailrace demo --seconds 60")
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


@app.command(epilog="Example: tailrace warm")
def warm(as_json: Json = False, debug: Debug = False) -> None:
    """Make every later start of Spark on this machine some seconds shorter. Takes half a minute, once.

    Keeps an archive of the classes Spark loads (about 160 MB) in the user's cache. Once more after an upgrade.
    """
    from tailrace.cli.operate import warm_up

    warm_up(as_json=as_json)


@app.command(epilog="Example: tailrace schema > tailrace.schema.json")
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of a pipeline's file, for editors and for reading which keys there are."""
    from tailrace.config.pipeline import json_schema

    print_json(json_schema())


@app.command(epilog="Example: tailrace version --json")
def version(as_json: Json = False, debug: Debug = False) -> None:
    """Print the version, and with --json those of the parts it stands on."""
    from tailrace.cli.inspect import print_versions

    print_versions(as_json=as_json)


def main() -> None:
    """The entry point of the console script."""
    guard_output()
    app()
