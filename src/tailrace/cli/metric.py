"""The command `tailrace metrics`: figures for Prometheus, printed once or served."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import typer

from tailrace.cli.signal import until_signal
from tailrace.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from tailrace.metric import StatusAndQueue


def print_metrics(file: Path) -> None:
    registry = _registry(file)
    from prometheus_client import generate_latest

    typer.echo(generate_latest(registry), nl=False)


def serve_metrics(file: Path, listen: str) -> None:
    """Answer `GET /metrics` until SIGINT or SIGTERM, whether or not the pipeline runs.

    Raises ConfigError for an address that is none, UnavailableError for one that cannot be had.
    """
    from tailrace.source.rqlite.option import split_listen

    try:
        host, port = split_listen(listen)
    except ValueError as error:
        raise ConfigError(f"--listen {error}", fix="write --listen 127.0.0.1:9187") from None
    registry = _registry(file)
    from prometheus_client import make_wsgi_app

    with until_signal() as told:
        try:
            _Server.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            server = make_server(host, port, make_wsgi_app(registry), _Server, _Request)
        except UnicodeError:
            raise ConfigError(f"--listen {listen} names no host", fix="write --listen 127.0.0.1:9187") from None
        except OSError as error:
            raise UnavailableError(f"cannot listen on {listen}: {error.strerror}", fix="choose another one") from error
        with server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            typer.echo(f"serving http://{listen.rpartition(':')[0]}:{server.server_port}/metrics")
            told.wait()
            server.shutdown()
            thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: somebody asked and went away, or was too slow."""


class _Request(WSGIRequestHandler):
    timeout = 30

    def log_message(self, *told: object) -> None:
        """Nothing: Prometheus asks every few seconds."""


def _registry(file: Path) -> CollectorRegistry:
    """What reads the pipeline's state, and its queue if it has one, each time somebody asks."""
    try:
        from prometheus_client import CollectorRegistry
    except ImportError as error:
        raise ConfigError("metrics need prometheus-client", fix="pip install 'tailrace[metrics]'") from error
    from tailrace.cli.queue import queue_folder, read_queue
    from tailrace.config import load
    from tailrace.metric import PipelineMetrics
    from tailrace.status import PipelineStatus

    config = load(file, connects=False)
    folder = queue_folder(file) if config.destination.type == "webhook" else None

    def read() -> StatusAndQueue:
        with config.store_address.open_reading() as store:
            return PipelineStatus.read(store), read_queue(folder) if folder else None

    registry = CollectorRegistry()
    registry.register(PipelineMetrics(config.name, read))
    return registry
