"""Commands that show a pipeline without changing it: check, status, tables, metrics, version."""

from __future__ import annotations

import platform
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import typer

from tailrace.cli.error import print_json, print_result, to_dict
from tailrace.cli.signal import until_signal
from tailrace.cli.text import colored, say, say_lines
from tailrace.errors import ConfigError, Finding, PipelinePlace, TailraceError, UnavailableError, name_file

if TYPE_CHECKING:
    from rich.console import Console

    from tailrace.cli.prometheus import StatusAndQueue
    from tailrace.config.pipeline import PipelineConfig
    from tailrace.model.schema import TableSchema
    from tailrace.state import TableRecord


_PIPE_WIDTH = 200
_PARTS = ("pyspark", "deltalake", "pyarrow", "psycopg", "pydantic")


def check_pipeline(config: PipelineConfig) -> list[Finding]:
    from tailrace.alert import delivery
    from tailrace.config.registry import check, open_destination, open_source
    from tailrace.destination.preflight import check_folder

    findings = [*check(open_source(config), open_destination(config)), *delivery.check(config.alerts)]
    fix = "let this user write there, or set `state` to another folder"
    state = check_folder(config.state, "state", access_fix=fix)
    return [*findings, state] if state.level == "error" else findings


def print_findings(findings: list[Finding], file: Path | PipelinePlace, *, as_json: bool) -> None:
    values = show_findings(findings, file, as_json=as_json)
    if as_json:
        print_json(values)


def show_findings(findings: list[Finding], file: Path | PipelinePlace, *, as_json: bool) -> dict[str, Any]:
    """Print the findings unless JSON was asked for. The same as JSON values."""
    findings = [replace(finding, fix=name_file(finding.fix, file)) for finding in findings]
    for finding in findings if not as_json else ():
        color = {"ok": typer.colors.GREEN, "warning": typer.colors.YELLOW, "error": typer.colors.RED}[finding.level]
        say(colored(f"{finding.level:<7}", color), f" {finding.subject}: {finding.message}")
        if finding.fix:
            say_lines(f"fix: {finding.fix}", "        ")
    ok = not any(finding.level == "error" for finding in findings)
    return {"ok": ok, "findings": [finding.to_dict() for finding in findings]}


def show_status(config: PipelineConfig, file: Path, *, as_json: bool, of_many: bool = False) -> dict[str, Any]:
    """Print the status unless JSON was asked for. The same as JSON values.

    Raises ConfigError before the first run; one `of_many` destinations is said to have none, as `error`.
    """
    from tailrace.cli.progress_view import draw
    from tailrace.state.status import PipelineStatus

    place = PipelinePlace(file, config.member)
    try:
        with config.store_address.open_reading() as store:
            status = PipelineStatus.read(store)
    except ConfigError as error:
        if not of_many:
            raise
        error.message, error.fix = name_file(error.message, place) or "", name_file(error.fix, place)
        if not as_json:
            say(error.message)
        return {"error": to_dict(error)}
    if not as_json:
        make_console().print(draw(status, file))
        return {}
    values = status.to_dict()
    parts = (values["source"], values["last_run"], values["delivery"], *values["tables"], *values["notices"])
    for part in filter(None, parts):
        part.update(fix=name_file(part.get("fix"), place))
    for alert in values["alerts"]:
        alert["text"] = name_file(alert["text"], place)
    return values


def read_states(config: PipelineConfig) -> dict[str, TableRecord]:
    """What the state store knows of each table, by name; nothing before the first run."""
    try:
        with config.store_address.open_reading() as store:
            return {record.name: record for record in store.tables()}
    except ConfigError:
        return {}


def show_tables(tables: list[TableSchema], states: Mapping[str, TableRecord], *, as_json: bool) -> dict[str, Any]:
    """Print the tables unless JSON was asked for. The same as JSON values."""
    if as_json:
        values = [
            {
                "table": str(table.table),
                "key": list(table.key),
                **_standing(states.get(str(table.table))),
                "columns": [
                    {"name": c.name, "type": str(c.type), "upstream_type": c.upstream_type, "nullable": c.nullable}
                    for c in table.columns
                ],
            }
            for table in tables
        ]
        return {"tables": values}
    for table in tables:
        key = ", ".join(table.key) or "none: append-only"
        known = states.get(str(table.table))
        state = f"  {known.state}{', paused' if known.paused_at else ''}" if known else ""
        say(f"{table.table}  key {key}  {len(table.columns)} columns{state}")
        if known and known.reason:
            say(f"    {known.reason}")
    return {}


def _standing(known: TableRecord | None) -> dict[str, str | None]:
    since = known.entered_at.isoformat() if known else None
    paused = known.paused_at.isoformat() if known and known.paused_at else None
    state, reason = (str(known.state), known.reason) if known else (None, None)
    return {"state": state, "since": since, "reason": reason, "paused_at": paused}


def print_versions(*, as_json: bool) -> None:
    versions = {name: _version(name) for name in ("tailrace", *_PARTS)} | {"python": platform.python_version()}
    print_result(f"tailrace {versions['tailrace'] or 'from a source tree'}", versions, as_json=as_json)


def _version(package: str) -> str | None:
    try:
        return version_of(package)
    except PackageNotFoundError:
        return None


def make_console() -> Console:
    """Rich on stdout. A pipe gets wide lines, because no terminal wraps them there."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


# The command `tailrace metrics`: printed once, or served.


def print_metrics(file: Path) -> None:
    read = _metrics_reader(file)
    from tailrace.cli.prometheus import text_of

    typer.echo(text_of(read), nl=False)


def serve_metrics(file: Path, listen: str) -> None:
    """Answer `GET /metrics` until SIGINT or SIGTERM, whether or not the pipeline runs.

    Raises ConfigError for an invalid address, UnavailableError for one that cannot be listened on.
    """
    from tailrace.option.value import split_listen

    try:
        host, port = split_listen(listen)
    except ValueError as error:
        raise ConfigError(f"--listen {error}", fix="write --listen 127.0.0.1:9187") from None
    read = _metrics_reader(file)
    from prometheus_client import CollectorRegistry, make_wsgi_app

    from tailrace.cli.prometheus import PipelineMetrics

    registry = CollectorRegistry()
    registry.register(PipelineMetrics(read))
    with until_signal() as stop:
        try:
            _Server.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            server = make_server(host, port, make_wsgi_app(registry), _Server, _Request)
        except UnicodeError:
            raise ConfigError(f"--listen {listen} names no host", fix="write --listen 127.0.0.1:9187") from None
        except OSError as error:
            raise UnavailableError(
                f"cannot listen on {listen}: {error.strerror}", fix="choose another address with --listen"
            ) from error
        with server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            say(f"serving http://{listen.rpartition(':')[0]}:{server.server_port}/metrics")
            stop.wait()
            server.shutdown()
            thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a client closed the connection or was too slow."""


class _Request(WSGIRequestHandler):
    timeout = 30

    def log_message(self, *parts: object) -> None:
        """Nothing: Prometheus sends a request every few seconds."""


def _metrics_reader(file: Path) -> Callable[[], Mapping[str, StatusAndQueue | None]]:
    """Reads the pipeline's state, and its queue if it has one, at each call."""
    from tailrace.cli.queue import has_queue, open_queue
    from tailrace.config.pipeline import load_all
    from tailrace.state.status import PipelineStatus

    require_metrics()
    configs = load_all(file, connects=False)
    queues = {
        config.name: open_queue(file, connects=False, destination=config.member)
        for config in configs
        if has_queue(config.destination.type)
    }

    def read_one(config: PipelineConfig) -> StatusAndQueue | None:
        queue = queues.get(config.name)
        try:
            with config.store_address.open_reading() as store:
                return PipelineStatus.read(store), queue.status() if queue else None
        except TailraceError:
            return None

    return lambda: {config.name: read_one(config) for config in configs}


def require_metrics() -> None:
    """Raises ConfigError where the package that formats metrics is not installed."""
    try:
        import prometheus_client  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise ConfigError("metrics need prometheus-client", fix="pip install 'tailrace[metrics]'") from error
