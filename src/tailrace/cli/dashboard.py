"""`tailrace dashboard`, and the dashboard next to `tailrace run`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli.error import Debug, Json
from tailrace.cli.signal import until_signal
from tailrace.cli.text import say
from tailrace.cli.token import TokenName, read_token
from tailrace.errors import ConfigError, TailraceError

if TYPE_CHECKING:
    from tailrace.cli.prometheus import StatusAndQueue
    from tailrace.dashboard.application import Metrics
    from tailrace.dashboard.pipeline import WatchedPipeline
    from tailrace.dashboard.serve import Dashboard
    from tailrace.destination.capability import QueueStatus, QueueView
    from tailrace.state.status import PipelineStatus

LISTEN = "127.0.0.1:8470"


HostNames = Annotated[
    list[str] | None,
    typer.Option("--host", metavar="NAME", help="A further name by which it is reached, such as a proxy's."),
]


def dashboard(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="The pipelines' YAML files.", show_default=False)
    ],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the dashboard listens.")] = LISTEN,
    token_env: TokenName = None,
    host: HostNames = None,
    cert: Annotated[Path | None, typer.Option(help="The certificate for TLS, a PEM file.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key, a PEM file without a passphrase.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve a page, a JSON API and metrics that show how pipelines stand, until Ctrl-C.

    Reads only the pipelines' state: does not start Spark, does not connect to source or destination, and a pipeline
    need not run. Its buttons leave the same requests as the commands `retry`, `skip`, `resync`, `pause` and `resume`.
    Without a token only this machine may connect.
    """
    with open_dashboard(files, listen, token_env, host or [], cert, key) as served, until_signal() as stop:
        url = served.url
        text = json.dumps({"url": url}) if as_json else f"serving the dashboard at {url} until Ctrl-C"
        served.serve(stop, lambda: say(text))


@contextmanager
def open_dashboard(
    files: Sequence[Path],
    listen: str,
    token_env: str | None,
    names: Sequence[str] = (),
    cert: Path | None = None,
    key: Path | None = None,
) -> Iterator[Dashboard]:
    """A dashboard of these files whose address is taken during the block, and that does not answer yet.

    Raises ConfigError for a file or an option that is wrong and where the extra is not installed, UnavailableError for
    an address that is in use.
    """
    from tailrace.config.pipeline import load_all
    from tailrace.option.value import split_listen

    try:
        from tailrace.cli.prometheus import text_of  # noqa: F401 - only whether its package is there
        from tailrace.dashboard import guard, pipeline, serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the dashboard needs the package {error.name}", fix="pip install 'tailrace[dashboard]'"
        ) from error
    try:
        address = split_listen(listen)
    except ValueError as error:
        raise ConfigError(f"--listen {error}", fix=f"write --listen {LISTEN}") from None
    if cert is None and key is not None:
        raise ConfigError("--key is given without --cert", fix="give both, or neither")
    if wrong := [name for name in names if guard.host_name(name) != name.lower()]:
        raise ConfigError(
            f"--host {wrong[0]} is no name", fix="write --host dash.example.com, without https:// and port"
        )
    access = guard.Access(address[0], frozenset(name.lower() for name in names), read_token(token_env))
    options = serve.DashboardOptions(address, access, cert, key)
    watched = [pipeline.WatchedPipeline(config, file) for file in files for config in load_all(file, connects=False)]
    with serve.open_dashboard(watched, options, _metrics(watched)) as served:
        yield served


@contextmanager
def serving_dashboard(file: Path, listen: str | None, token_env: str | None, names: Sequence[str]) -> Iterator[None]:
    """Serve the dashboard of a pipeline within the block; raises what `open_dashboard` does, before the block."""
    with open_dashboard([file], listen or LISTEN, token_env, names) as served, served.serving():
        say(f"the dashboard is at {served.url}", err=True)
        yield


def _metrics(watched: Sequence[WatchedPipeline]) -> Metrics:
    """The metrics of the pipelines, and of their queues as far as they can be opened."""
    from tailrace.cli.prometheus import text_of

    @cache
    def queues() -> Mapping[str, QueueView | None]:
        # With the first scrape: to know whether a type has a queue loads all that its destination needs.
        return {one.name: _queue(one) for one in watched}

    def read(found: Sequence[tuple[str, PipelineStatus | None]]) -> Mapping[str, StatusAndQueue | None]:
        return {name: (status, _status(queues()[name])) if status else None for name, status in found}

    return lambda found: text_of(lambda: read(found))


def _queue(watched: WatchedPipeline) -> QueueView | None:
    from tailrace.cli.queue import has_queue, open_queue

    try:
        if not has_queue(watched.config.destination.type):
            return None
        return open_queue(watched.file.file, connects=False, destination=watched.config.member)
    except ConfigError:
        return None  # where the queue is depends on a variable that the dashboard does without


def _status(queue: QueueView | None) -> QueueStatus | None:
    try:
        return queue.status() if queue is not None else None
    except TailraceError:
        return None
