"""`tailrace serve-sync` and `tailrace sync`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli.error import Debug, Json, print_error, print_result
from tailrace.cli.signal import until_signal
from tailrace.cli.text import say
from tailrace.cli.token import TokenName, read_token
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.sync.session import SyncResult


def serve_sync(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The SQLite file; a new one is created.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:8080",
    token_env: TokenName = None,
    cert: Annotated[Path | None, typer.Option(help="The certificate for TLS, a PEM file.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key, a PEM file without a passphrase.")] = None,
    history: Annotated[str, typer.Option(help="How much space old pages may take.")] = "256MB",
    max_body: Annotated[str, typer.Option(help="The largest push.")] = "64MB",
    max_seconds: Annotated[float, typer.Option(min=0.1, help="How long a push, or its arrival, may take.")] = 60.0,
    tape: Annotated[
        bool, typer.Option("--tape", help="Keep a tape in FILE-tape, so that a pipeline can follow FILE.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve an SQLite file to Turso's clients and to `tailrace sync`, until Ctrl-C.

    The file stays an ordinary SQLite file that other programs may read and write meanwhile. Without a token only this
    machine may connect.
    """
    from tailrace.option.value import parse_size, split_listen

    with _naming_the_extra():
        from tailrace.sync.serve import ServeOptions, serve
        from tailrace.sync.server import SyncLimits

    try:
        address = split_listen(listen)
        limits = SyncLimits(parse_size(max_body), max_seconds, read_token(token_env))
        options = ServeOptions(file, address, limits, cert, key, parse_size(history), tape)
    except ValueError as error:
        raise ConfigError(f"an option {error}", fix="tailrace serve-sync --help shows what it takes") from None
    with until_signal() as stop:
        serve(options, stop, lambda url: say(json.dumps({"url": url}) if as_json else f"serving {file} at {url}"))


def sync(
    local: Annotated[Path, typer.Argument(metavar="LOCAL", help="The local SQLite file; created if it is missing.")],
    remote: Annotated[str, typer.Argument(metavar="REMOTE", help="The URL of a sync server, or another SQLite file.")],
    conflict: Annotated[
        str | None, typer.Option(metavar="POLICY", help="local (the last push wins; default), remote or stop.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    token_env: TokenName = None,
    ca: Annotated[Path | None, typer.Option(help="The certificate authority of the server, a PEM file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Bring a local SQLite file and a remote up to date with each other: pull, push, pull.

    Own changes that are not pushed yet are kept on top of what is pulled. A repeat without changes sends nothing.
    """
    with _naming_the_extra():
        from tailrace.sync.session import SyncSession

    token = read_token(token_env)
    session = SyncSession(local, remote, conflict=conflict, token=token.reveal() if token else None, ca=ca)
    if not watch:
        result = session.run()
        print_result(_describe(result), result.to_dict(), as_json=as_json)
        return

    def report(result: SyncResult) -> None:
        if result.pushed or result.pulled or result.bootstrapped:
            say(json.dumps(result.to_dict()) if as_json else _describe(result))

    with until_signal() as stop:
        session.watch(stop, report, print_error)


@contextmanager
def _naming_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"sync needs the package {error.name}", fix="pip install 'tailrace[sync]'") from error


def _describe(result: SyncResult) -> str:
    parts = [f"{result.pushed} changes pushed", f"{result.pulled} rows pulled"]
    if result.conflicts:
        parts.append(f"{sum(result.conflicts.values())} conflicts")
    if result.dead_letters:
        parts.append(f"{result.dead_letters} own changes given up, kept in tailrace_sync_conflict")
    return ", ".join(parts)
