"""`tailrace demo`: a shop on a private PostgreSQL, its customers, a lake, and a comparison at the end."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tailrace.cli.dashboard import LISTEN, open_dashboard
from tailrace.cli.error import print_json
from tailrace.cli.run import run_pipeline
from tailrace.cli.story_view import StoryView
from tailrace.cli.text import say
from tailrace.config.pipeline import PipelineConfig, load
from tailrace.errors import ConfigError, PreflightError, TailraceError, UnavailableError

if TYPE_CHECKING:
    from tailrace.demo.server import EmbeddedPostgres

DEMO_FOLDER = Path("demo")

_DATABASE = "shop"
_FILE = "demo.yaml"
_TRANSACTIONS_PER_SECOND = 50.0


def run_demo(folder: Path, *, rows: int, seconds: float | None, plain: bool, as_json: bool) -> None:
    """Run the demo in a folder until Ctrl-C or for some seconds, then compare the shop with the lake, row by row.

    A folder that was used before is continued, however that run ended. Raises ConfigError for one that cannot be
    written, PreflightError where no server can start, TailraceError when shop and lake differ.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).touch()
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", fix="choose another --folder") from error
    try:
        from tailrace.demo.server import EmbeddedPostgres

        server = EmbeddedPostgres(folder / "postgres", fast=False)
    except (ImportError, RuntimeError) as error:
        raise PreflightError(
            "the demo needs a PostgreSQL server to start", fix="pip install 'tailrace[embedded]'"
        ) from error

    from tailrace.demo.traffic import Traffic

    with server:
        loaded = _open_shop(server, rows)
        dsn = server.dsn(_DATABASE)
        file = _write_pipeline(folder, dsn)
        config = load(file)
        is_drawn = sys.stdout.isatty() and not plain
        story = None if as_json else StoryView(is_continued=is_drawn)
        _say(
            f"the shop: {loaded:,} rows in {dsn}, and {_TRANSACTIONS_PER_SECOND:.0f} transactions a second",
            as_json=as_json,
        )
        with _serving_dashboard(file) as address:
            shown = f"; as a page: {address}" if address else ""
            _say(f"in another terminal: {_program()} status {shlex.quote(str(file))}{shown}", as_json=as_json)
            _say("Spark starts, which takes some seconds; then the lake is filled", as_json=as_json)
            with Traffic(dsn, seed=int(time.time()), rate=_TRANSACTIONS_PER_SECOND) as traffic:
                view = None if is_drawn else story
                run_pipeline([config], file, once=False, plain=plain, as_json=as_json, seconds=seconds, view=view)
        done = traffic.counts
        _say("the shop is closed; the lake catches up", as_json=as_json)
        run_pipeline([config], file, once=True, plain=True, as_json=as_json, view=story)
        _compare(config, dsn, folder / "lake", done, as_json=as_json)
        if not as_json:
            _ask_lake(folder / "lake")
            _say_next(file)


@contextmanager
def _serving_dashboard(file: Path) -> Iterator[str | None]:
    """Serve the dashboard within the block, on some port if its own is taken; None where its extra is not installed."""
    with ExitStack() as opened:
        address = None
        for listen in (LISTEN, "127.0.0.1:0"):
            try:
                dashboard = opened.enter_context(open_dashboard([file], listen, None))
            except UnavailableError:
                continue
            except ConfigError:
                break
            opened.enter_context(dashboard.serving())
            address = dashboard.url
            break
        yield address


def _say(text: str, *, as_json: bool) -> None:
    say(text, err=as_json)


def _program() -> str:
    # `make demo` runs it from an environment that is not activated.
    return "tailrace" if shutil.which("tailrace") else shlex.quote(os.path.relpath(sys.argv[0]))


def _open_shop(server: EmbeddedPostgres, orders: int) -> int:
    """Create and fill the shop, unless it is there; returns how many rows it has."""
    from tailrace.demo.workload import ORDERS_PER_SCALE, TABLES, create_shop, load_shop

    with server.connect() as connection:
        if not connection.execute("SELECT FROM pg_database WHERE datname = %s", [_DATABASE]).fetchall():
            connection.execute(f"CREATE DATABASE {_DATABASE}")
    with server.connect(_DATABASE) as connection:
        if not connection.execute("SELECT FROM pg_tables WHERE schemaname = 'public'").fetchall():
            with connection.transaction():
                create_shop(connection)
                load_shop(connection, orders / ORDERS_PER_SCALE)
            connection.execute("VACUUM ANALYZE")
        counts = [connection.execute(f"SELECT count(*) FROM {name}").fetchone() for name in TABLES]  # noqa: S608
    return sum(row[0] for row in counts if row)


def _write_pipeline(folder: Path, dsn: str) -> Path:
    pipeline = {
        "name": "demo",
        "source": {"type": "postgres", "dsn": dsn.replace("${", "$${")},
        "tables": {"include": ["public.*"]},
        "destination": {"type": "delta", "path": "./lake"},
        "state": "./state",
    }
    file = folder / _FILE
    file.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    return file


def _compare(config: PipelineConfig, dsn: str, lake: Path, done: dict[str, int], *, as_json: bool) -> None:
    from tailrace.config.registry import open_source
    from tailrace.demo.compare import compare, count_lake

    tables = open_source(config).tables()
    differences = compare(dsn, tables, lake)
    counts = {str(table.table): count_lake(table, lake) for table in tables}
    if as_json:
        print_json({"equal": not differences, "rows": counts, "traffic": done})
    if differences:
        listed = "; ".join(str(difference) for difference in differences)
        raise TailraceError(f"shop and lake differ: {listed}")
    if not as_json:
        changes = sum(done.get(kind, 0) for kind in ("insert", "update", "delete"))
        say("")
        say(f"compared row by row, both ways: {len(tables)} tables, {sum(counts.values()):,} rows are equal")
        say(f"while it ran, people changed {changes:,} rows in {done.get('transactions', 0):,} transactions")


_QUERY = "SELECT status, count(*) AS orders, sum(total) AS total FROM orders GROUP BY status ORDER BY orders DESC"


def _ask_lake(lake: Path) -> None:
    """Ask the lake a question without tailrace and without Spark, and show the answer."""
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    place = lake / "public" / "orders"
    answer = pa.table(QueryBuilder().register("orders", DeltaTable(place)).execute(_QUERY).read_all())
    say("")
    say("anyone can ask the lake; this was deltalake, without Spark and without tailrace:")
    say("")
    say(f"  {_QUERY}")
    say("")
    say(f"  {'status':<12} {'orders':>9} {'total':>18}")
    for row in answer.to_pylist():
        say(f"  {row['status']:<12} {row['orders']:>9,} {row['total']:>18,}")


def _say_next(file: Path) -> None:
    program, shown, folder = _program(), shlex.quote(str(file)), file.parent
    extra = "" if find_spec("starlette") else "; pip install 'tailrace[dashboard]'"
    steps = [
        (f"status {shown}", "tables, positions, the last run"),
        (f"dashboard {shown}", f"the same as a page, http://{LISTEN}/, with what happened when{extra}"),
        (
            "demo" if folder == DEMO_FOLDER else f"demo --folder {shlex.quote(str(folder))}",
            "again: it goes on from here, also after a kill -9",
        ),
    ]
    width = max(len(step) for step, _ in steps)
    say("")
    say("next:")
    for step, about in steps:
        say(f"  {program} {step:<{width}}  {about}")
