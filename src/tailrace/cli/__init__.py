"""The command `tailrace`.

Imports are inside the commands: help must come at once, and only `run`, `demo` and `warm` start Spark.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli import alert, dead_letter, queue, slatedb, sqlite, tape
from tailrace.cli.dashboard import HostNames, dashboard
from tailrace.cli.destination import DestinationName, place_of, show_each
from tailrace.cli.doctor import doctor
from tailrace.cli.error import EXIT_CODES, RUN, Commands, Debug, Json, PipelineFile, print_json
from tailrace.cli.init import init
from tailrace.cli.maintain import maintain
from tailrace.cli.output import guard_output
from tailrace.cli.sync import serve_sync, sync
from tailrace.cli.token import TokenName
from tailrace.cli.verify import verify
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.state.record import RequestKind

app = typer.Typer(
    name="tailrace",
    cls=Commands,
    epilog="Example: tailrace init postgresql://shop@localhost/shop. Exit codes: "
    + ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
    + ".",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

OneTable = Annotated[str, typer.Argument(metavar="TABLE", help="The table, as schema.table.", show_default=False)]
AnyTable = Annotated[
    str | None,
    typer.Argument(metavar="[TABLE]", help="The table, as schema.table; default: all tables.", show_default=False),
]
Plain = Annotated[bool, typer.Option("--plain", help="Print lines instead of the live view.")]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def begin(
    is_asked: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Copy the tables of a database elsewhere and keep them up to date, within seconds."""


app.command(epilog="Example: tailrace init postgresql://shop@localhost/shop")(init)


@app.command(epilog="Example: tailrace run shop.yaml --once")
def run(
    context: typer.Context,
    file: PipelineFile,
    once: Annotated[bool, typer.Option("--once", help="Apply all changes up to now, then exit.")] = False,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="console",
            help="Print the changes instead, with a state that is thrown away; the pipeline goes on untouched.",
            show_default=False,
        ),
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="PLACE",
            help="Where a new pipeline from a tape begins: a batch by number, a position or a time.",
            show_default=False,
        ),
    ] = None,
    plain: Plain = False,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Serve the dashboard meanwhile.")] = False,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where the dashboard listens; default: 127.0.0.1:8470.", show_default=False
        ),
    ] = None,
    token_env: TokenName = None,
    host: HostNames = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a pipeline: copy its tables, then apply their changes until Ctrl-C.

    What it changes upstream: in Postgres it creates the publication and the slot if they are missing, and sends a
    heartbeat; in SlateDB each copy makes a checkpoint; in SQLite and Turso it deletes applied changes if you set
    `purge`. docs/commands.md has the whole list.
    The first Ctrl-C or SIGTERM finishes the current batch, the second stops at once; nothing is lost either way.
    With --once, exits with 8 if a table is in error.
    With --to console, for SQLite, Turso and poll: changes nothing upstream, at the destination or in the state.
    """
    from tailrace.cli.dashboard import serving_dashboard
    from tailrace.cli.look import looking
    from tailrace.cli.run import run_pipeline
    from tailrace.config.pipeline import load_all
    from tailrace.config.registry import begin_at

    configs = load_all(file)
    if begin is not None:
        configs = [begin_at(config, begin) for config in configs]
    if to not in (None, "console"):
        raise ConfigError("--to can only be console", fix="set `destination` in the file to write elsewhere")
    if to and (once or dashboard):
        raise ConfigError(
            "--to console prints what changes from now on, and has no dashboard",
            fix="leave out --once and --dashboard",
        )
    if not dashboard and (listen or token_env or host):
        raise ConfigError("--listen, --token-env and --host are options of the dashboard", fix="add --dashboard")
    context.meta[RUN] = configs[0].source_context.name
    with (
        looking(configs[0]) if to else nullcontext() as look,
        serving_dashboard(file, listen, token_env, host or []) if dashboard else nullcontext(),
    ):
        run_pipeline([look] if look else configs, file, once=once, plain=plain, as_json=as_json)


@app.command(epilog="Example: tailrace check shop.yaml")
def check(file: PipelineFile, destination: DestinationName = None, as_json: Json = False, debug: Debug = False) -> None:
    """Check that source and destination are ready. Exits with 3 if something is missing.

    Changes nothing upstream, at the destination or in the state.
    """
    from tailrace.cli.inspect import check_pipeline, show_findings
    from tailrace.config.pipeline import load_all
    from tailrace.config.registry import require_apart

    configs = load_all(file, destination=destination)
    require_apart(configs)
    found = show_each(
        configs,
        lambda config: show_findings(check_pipeline(config), place_of(file, config), as_json=as_json),
        as_json=as_json,
        summary=lambda values: {"ok": all(each["ok"] for each in values)},
    )
    if not all(each["ok"] for each in found):
        raise typer.Exit(3)


@app.command(epilog="Example: tailrace status shop.yaml --json")
def status(
    file: PipelineFile, destination: DestinationName = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Show each table's state, rows, lag, and last error with its fix. Also works while the pipeline runs.

    Reads only the pipeline's state: does not connect to source or destination, and needs none of their passwords.
    """
    from tailrace.cli.inspect import show_status
    from tailrace.config.pipeline import load_all

    configs = load_all(file, connects=False, destination=destination)
    show_each(
        configs, lambda config: show_status(config, file, as_json=as_json, of_many=len(configs) > 1), as_json=as_json
    )


@app.command(epilog="Example: tailrace metrics shop.yaml --listen 127.0.0.1:9187")
def metrics(
    file: PipelineFile,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve them at /metrics until Ctrl-C instead of printing them once."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print each table's state, rows and lag as Prometheus metrics. Reads only the state; the pipeline need not run."""
    from tailrace.cli.inspect import print_metrics, serve_metrics

    if listen is None:
        print_metrics(file)
    else:
        serve_metrics(file, listen)


@app.command(epilog="Example: tailrace tables shop.yaml")
def tables(
    file: PipelineFile, destination: DestinationName = None, as_json: Json = False, debug: Debug = False
) -> None:
    """List the tables that the source has and the pipeline selects, with their keys. Changes nothing.

    Once the pipeline has run, also the state of each.
    """
    from tailrace.cli.inspect import read_states, show_tables
    from tailrace.config.pipeline import load_all
    from tailrace.config.registry import open_source

    configs = load_all(file, destination=destination)
    found = open_source(configs[0]).tables()
    show_each(configs, lambda config: show_tables(found, read_states(config), as_json=as_json), as_json=as_json)


@app.command(epilog="Example: tailrace prepare shop.yaml --print-sql")
def prepare(
    file: PipelineFile,
    print_sql: Annotated[
        bool, typer.Option("--print-sql", help="Print the statements instead of running them.")
    ] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what was installed.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Install what makes schema changes exact: in Postgres an event trigger. Needs a superuser or similar rights.

    It changes the source: --print-sql shows how without doing it, --remove undoes it. Other sources need nothing.
    Without it, schema changes are derived from the log, which is enough for most; docs/schema-changes.md explains the
    difference.
    """
    from tailrace.cli.operate import prepare_source
    from tailrace.config.pipeline import load_all

    prepare_source(load_all(file)[0], print_sql=print_sql, remove=remove, as_json=as_json)


@app.command(epilog="Example: tailrace resync shop.yaml public.orders")
def resync(
    file: PipelineFile,
    table: OneTable,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Copy one table again from scratch, while the others go on. Its old rows stay until the new copy replaces them.

    The running pipeline does it, or the next run.
    """
    _ask(file, "resync", table, destination, as_json)


@app.command(epilog="Example: tailrace pause shop.yaml public.orders")
def pause(
    file: PipelineFile,
    table: AnyTable = None,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Pause one table, or all. Changes stay in the journal until you resume, up to `journal.max_bytes`."""
    _ask(file, "pause", table, destination, as_json)


@app.command(epilog="Example: tailrace resume shop.yaml public.orders")
def resume(
    file: PipelineFile,
    table: AnyTable = None,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Resume one paused table, or all, from where it stopped."""
    _ask(file, "resume", table, destination, as_json)


@app.command(epilog="Example: tailrace retry shop.yaml public.orders")
def retry(
    file: PipelineFile,
    table: AnyTable = None,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Retry one table in error, or all, from where it stopped."""
    _ask(file, "retry", table, destination, as_json)


@app.command(epilog="Example: tailrace skip shop.yaml public.orders")
def skip(
    file: PipelineFile,
    table: OneTable,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Skip the change that stopped a table. It is kept as a dead letter, and the table goes on after it."""
    _ask(file, "skip", table, destination, as_json)


def _ask(file: Path, kind: RequestKind, table: str | None, destination: str | None, as_json: bool) -> None:
    from tailrace.cli.operate import ask
    from tailrace.config.pipeline import load, load_all

    if kind in ("resync", "skip"):
        # What cannot be taken back is asked of one destination.
        configs = [load(file, connects=False, destination=destination)]
    else:
        configs = load_all(file, connects=False, destination=destination)
    show_each(configs, lambda config: ask(config, kind, table, as_json=as_json), as_json=as_json)


@app.command(epilog="Example: tailrace reset shop.yaml --yes")
def reset(
    file: PipelineFile,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask first.")] = False,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Start over: drop the slot, the journal and the state. The next run copies every table again.

    Use it when the upstream or the journal has lost changes that are needed. The destination keeps its rows until the
    new copies are complete. Upstream it drops the slot in Postgres and leftover checkpoints in SlateDB, and changes
    nothing else: publication, event trigger and captured changes stay. With --destination, slot and journal stay as
    well, and the other destinations go on.
    """
    from tailrace.cli.operate import reset_pipeline
    from tailrace.config.pipeline import load_all

    configs = load_all(file, destination=destination)
    name = configs[0].source_context.name if destination is None else configs[0].name
    if not yes:
        typer.confirm(f"Forget the progress of pipeline {name} and copy every table again?", abort=True, err=True)
    reset_pipeline(configs, whole=destination is None, as_json=as_json)


@app.command(epilog="Example: tailrace receive events.yaml")
def receive(file: PipelineFile, as_json: Json = False, debug: Debug = False) -> None:
    """Receive what is pushed to the pipeline's source, without applying it, until Ctrl-C. Does not start Spark.

    For `source: {type: rqlite}`: no event is lost while the pipeline is stopped, upgraded or moved.
    """
    from tailrace.cli.run import receive as receive_only

    receive_only(file, as_json=as_json)


app.command(epilog="Example: tailrace dashboard shop.yaml")(dashboard)
app.command(epilog="Example: tailrace doctor shop.yaml")(doctor)
app.command(epilog="Example: tailrace maintain shop.yaml public.orders")(maintain)
app.command(epilog="Example: tailrace verify shop.yaml --table public.orders")(verify)
app.command("serve-sync", epilog="Example: tailrace serve-sync shop.db --listen 127.0.0.1:8080")(serve_sync)
app.command(epilog="Example: tailrace sync phone.db http://127.0.0.1:8080")(sync)
app.add_typer(alert.app)
app.add_typer(dead_letter.app, name="errors")
app.add_typer(queue.app, name="queue")
app.add_typer(slatedb.app)
app.add_typer(sqlite.app)
app.add_typer(tape.app)


@app.command(epilog="Example: tailrace demo --seconds 60")
def demo(
    folder: Annotated[Path, typer.Option(help="The folder of the demo; an existing one is continued.")] = Path("demo"),
    rows: Annotated[int, typer.Option(min=1, help="How many orders the shop starts with.")] = 100_000,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many seconds; default: at Ctrl-C.")
    ] = None,
    plain: Plain = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """See it work: a private PostgreSQL with a shop and its customers, copied to Delta tables, compared at the end.

    It starts that PostgreSQL itself, in its folder, and touches no other database.
    """
    from tailrace.cli.demo import run_demo

    run_demo(folder, rows=rows, seconds=seconds, plain=plain, as_json=as_json)


@app.command(epilog="Example: tailrace warm")
def warm(as_json: Json = False, debug: Debug = False) -> None:
    """Make later starts of Spark on this machine some seconds faster. Takes half a minute, once.

    Stores the classes that Spark loads (about 160 MB) in the user's cache. Run it again after an upgrade.
    """
    from tailrace.cli.operate import warm_up

    warm_up(as_json=as_json)


@app.command(epilog="Example: tailrace schema > tailrace.schema.json")
def schema(debug: Debug = False) -> None:
    """Print the JSON Schema of a pipeline file: every key it may have. Editors can check a file with it."""
    from tailrace.config.pipeline import json_schema

    print_json(json_schema())


@app.command(epilog="Example: tailrace version --json")
def version(as_json: Json = False, debug: Debug = False) -> None:
    """Print the version; with --json also those of the main dependencies."""
    from tailrace.cli.inspect import print_versions

    print_versions(as_json=as_json)


def main() -> None:
    """The entry point of the console script."""
    guard_output()
    app()
