"""Serve the dashboard until stopped: alone, or next to a pipeline that runs."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tailrace.dashboard.application import DashboardApplication, Metrics
from tailrace.dashboard.guard import Access
from tailrace.dashboard.pipeline import WatchedPipeline
from tailrace.errors import ConfigError
from tailrace.option.value import is_loopback
from tailrace.system.http_listener import HttpConnection, HttpServer, listening, secure
from tailrace.system.trace import origin

SHORTEST_TOKEN = 16
"""Characters. A token that can be guessed is none."""
_CONNECTIONS = 256
_KEEP_ALIVE_SECONDS = 30
_LOOK_SECONDS = 0.1
_THREADS = 4
"""For each pipeline; they are started when they are needed."""
_GRACE_SECONDS = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DashboardOptions:
    """Where the dashboard listens, to whom it answers, and its certificate if it has one."""

    address: tuple[str, int]
    access: Access
    cert: Path | None = None
    key: Path | None = None

    def require(self) -> None:
        """Raises ConfigError for an address that other machines reach without a token, and for a token too short."""
        host, token = self.address[0], self.access.token
        if token is None and not is_loopback(host):
            raise ConfigError(
                f"without a token only this machine may connect, and {host} is open to others",
                fix="listen on 127.0.0.1, or set a token: export DASHBOARD_TOKEN=$(openssl rand -hex 32) and"
                " --token-env DASHBOARD_TOKEN",
            )
        if token is not None and len(token.reveal()) < SHORTEST_TOKEN:
            raise ConfigError(
                f"the token has fewer than {SHORTEST_TOKEN} characters",
                fix="make one that no one guesses: openssl rand -hex 32",
            )


class Dashboard:
    """A dashboard with its socket: from its making on the address is taken, `serve` answers."""

    def __init__(
        self,
        pipelines: Sequence[WatchedPipeline],
        options: DashboardOptions,
        metrics: Metrics,
        listener: socket.socket,
    ) -> None:
        self._listener = listener
        self._options = options
        self._threads = _THREADS * (len(pipelines) + 1)
        self._application = DashboardApplication(pipelines, options.access, metrics).application

    @property
    def url(self) -> str:
        host = self._options.address[0]
        shown = f"[{host}]" if ":" in host else host
        scheme = "https" if self._options.cert is not None else "http"
        return f"{scheme}://{shown}:{self._listener.getsockname()[1]}/"

    def serve(self, stop: threading.Event, on_start: Callable[[], None] = lambda: None) -> None:
        """Answer requests until `stop` is set; those that are under way are finished. Blocks."""
        asyncio.run(self._serve(stop, on_start))

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve from a thread within the block. An error of it is logged and ends nothing else."""
        stop = threading.Event()
        thread = threading.Thread(target=self._serve_apart, args=(stop,), name="dashboard", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(2 * _GRACE_SECONDS)

    def _serve_apart(self, stop: threading.Event) -> None:
        try:
            self.serve(stop)
        except Exception as error:  # noqa: BLE001 - whatever it is, the pipeline must go on
            _log.error("the dashboard has ended with %s; the pipeline goes on", origin(error))

    async def _serve(self, stop: threading.Event, on_start: Callable[[], None]) -> None:
        # A store that does not answer holds up a few threads of its own, and no other pipeline.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(self._threads, "dashboard"))
        server = HttpServer(self._configure())
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        is_announced = False
        try:
            while not stop.is_set() and not serving.done():
                if server.started and not is_announced:
                    is_announced = True
                    on_start()
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            server.should_exit = True
            await serving

    def _configure(self) -> uvicorn.Config:
        options = self._options
        context = None
        if options.cert is not None:
            key = str(options.key) if options.key else None
            context = secure(str(options.cert), key, None, options="--cert, --key")
        return uvicorn.Config(
            self._application,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_GRACE_SECONDS,
            ssl_context_factory=(lambda config, default: context) if context is not None else None,
        )


@contextmanager
def open_dashboard(
    pipelines: Sequence[WatchedPipeline], options: DashboardOptions, metrics: Metrics
) -> Iterator[Dashboard]:
    """A dashboard whose address is taken for the duration of the block.

    Raises ConfigError for pipelines of the same name and for an address that is not allowed, UnavailableError for one
    that is in use.
    """
    options.require()
    names: dict[str, Path] = {}
    for one in pipelines:
        if one.name in names:
            raise ConfigError(
                f"{names[one.name]} and {one.file} describe two pipelines of the name {one.name}",
                fix="give each a `name` of its own, or serve them from two addresses",
            )
        names[one.name] = one.file.file
    with listening(options.address, _CONNECTIONS, option="--listen") as listener:
        yield Dashboard(pipelines, options, metrics, listener)
