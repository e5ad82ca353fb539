"""Serve a file until stopped."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import apsw
import uvicorn

from tailrace.capture.layout import served_tape
from tailrace.errors import ConfigError
from tailrace.option.value import is_loopback
from tailrace.sync.served_file import HISTORY_BYTES, ServedFile
from tailrace.sync.served_tape import ServedTape
from tailrace.sync.server import SyncEndpoint, SyncLimits
from tailrace.system.http_listener import HttpConnection, HttpServer, listening, secure

_CONNECTIONS = 256
_KEEP_ALIVE_SECONDS = 75
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 10
_MEMORY_FACTOR, _MEMORY_BYTES = 4, 128 << 20
"""What SQLite may take of memory, beyond a few times the largest push."""


@dataclass(frozen=True)
class ServeOptions:
    """What to serve, where and to whom."""

    file: Path
    address: tuple[str, int]
    limits: SyncLimits
    cert: Path | None = None
    key: Path | None = None
    history_bytes: int = HISTORY_BYTES
    keeps_tape: bool = False
    """Whether to begin a tape for pipelines; one that is there is kept up to date in any case."""


def serve(options: ServeOptions, stop: threading.Event, on_start: Callable[[str], None]) -> None:
    """Serve the file until `stop` is set; `on_start` gets the URL once requests are accepted.

    Raises ConfigError for an address that other machines reach without a token, OwnedError if the file is served
    already, UnavailableError if the address is taken, PreflightError for a file that cannot be served.
    """
    host, _ = options.address
    if options.limits.token is None and not is_loopback(host):
        raise ConfigError(
            f"without a token only this machine may connect, and {host} is open to others",
            fix="listen on 127.0.0.1, or set a token: --token-env NAME",
        )
    context = None
    if options.cert is not None:
        key = str(options.key) if options.key else None
        context = secure(str(options.cert), key, None, options="--cert, --key")
    with listening(options.address, _CONNECTIONS, option="--listen") as listener:
        limits = options.limits
        served = ServedFile(
            options.file, history_bytes=options.history_bytes, seconds=limits.seconds, largest_bytes=limits.body_bytes
        )
        tape: ServedTape | None = None
        memory = apsw.hard_heap_limit(_MEMORY_FACTOR * limits.body_bytes + _MEMORY_BYTES)
        try:
            if options.keeps_tape or served_tape(options.file).exists():
                tape = ServedTape(options.file)
                tape.advance()
            endpoint = SyncEndpoint(served, limits)
            config = uvicorn.Config(
                endpoint.application,
                http=HttpConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.ERROR,
                access_log=False,
                server_header=False,
                limit_concurrency=_CONNECTIONS,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                ssl_context_factory=(lambda config, default: context) if context is not None else None,
            )
            scheme = "https" if context is not None else "http"
            shown = f"[{host}]" if ":" in host else host
            url = f"{scheme}://{shown}:{listener.getsockname()[1]}"
            asyncio.run(_run(config, endpoint, listener, stop, tape, lambda: on_start(url)))
        finally:
            if tape is not None:
                tape.close()
            served.close()
            apsw.hard_heap_limit(memory)


async def _run(
    config: uvicorn.Config,
    endpoint: SyncEndpoint,
    listener: socket.socket,
    stop: threading.Event,
    tape: ServedTape | None,
    on_start: Callable[[], None],
) -> None:
    server = HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    others = [asyncio.create_task(endpoint.watch())]
    if tape is not None:
        others.append(asyncio.create_task(endpoint.keep_tape(tape)))
    announced = False
    try:
        while not stop.is_set() and not serving.done():
            for other in others:
                if other.done():
                    other.result()
            if server.started and not announced:
                announced = True
                on_start()
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        server.should_exit = True
        await endpoint.stop()
        await serving
        if tape is not None:
            await asyncio.to_thread(tape.close)
        for other in others:
            other.cancel()
            with suppress(asyncio.CancelledError):
                await other
