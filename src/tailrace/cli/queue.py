"""`tailrace queue`: the events that wait to be sent."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.cli.destination import DestinationName
from tailrace.cli.error import CommandGroup, Debug, Json, PipelineFile, print_json, print_result
from tailrace.cli.text import say

if TYPE_CHECKING:
    from tailrace.destination.capability import QueueView

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Look at, send or give up the events that wait to be sent.",
    epilog="Example: tailrace queue status shop.yaml",
)

_SHOW_SECONDS = 1.0


@app.command(epilog="Example: tailrace queue status shop.yaml --json")
def status(
    file: PipelineFile, destination: DestinationName = None, as_json: Json = False, debug: Debug = False
) -> None:
    """Show how many events wait, since when, who sends them, and what went wrong last. Connects to nothing."""
    found = asdict(open_queue(file, connects=False, destination=destination).status())
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        if value is not None:
            say(f"{name.replace('_', ' '):<14} {value}")


@app.command(epilog="Example: tailrace queue drain shop.yaml --timeout 60")
def drain(
    file: PipelineFile,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Give up after so many seconds; nothing is lost.")
    ] = None,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Send the events that wait, or watch the running pipeline send them. Exits with 4 if the time runs out."""
    from tailrace.errors import UnavailableError

    if left := _drain(open_queue(file, destination=destination), timeout, quiet=as_json):
        raise UnavailableError(f"{left} events still wait", fix="tailrace queue status FILE says why")
    print_result("nothing waits", {"pending": left}, as_json=as_json)


@app.command(epilog="Example: tailrace queue purge shop.yaml --yes")
def purge(
    file: PipelineFile,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Give up every event that waits: it is never sent. Also helps after damage. The pipeline must not run."""
    queue = open_queue(file, destination=destination)
    waiting = queue.status().pending
    if not yes:
        typer.confirm(f"Never send {_events(waiting)} in {queue.place}?", abort=True, err=True)
    queue.purge()
    print_result(f"given up: {_events(waiting)}", {"given_up": waiting}, as_json=as_json)


def _events(waiting: int | None) -> str:
    return "what waits, as far as it can be read," if waiting is None else f"the {waiting} events that wait"


def has_queue(type_: str) -> bool:
    """Whether destinations of a type send from a queue."""
    from tailrace.config.registry import DESTINATIONS
    from tailrace.destination.capability import Queued

    return issubclass(DESTINATIONS.implementation(type_), Queued)


def open_queue(file: Path, *, connects: bool = True, destination: str | None = None) -> QueueView:
    """The queue of a pipeline's file; of several destinations, that of the one named.

    Without `connects`, for its status alone: variables of the file may be unset. Raises ConfigError for a destination
    without a queue, and for variables that are not set and needed.
    """
    from tailrace.config.pipeline import load
    from tailrace.config.registry import DESTINATIONS, open_destination
    from tailrace.destination.capability import Queued
    from tailrace.errors import ConfigError

    config = load(file, connects=connects, destination=destination)
    type_ = config.destination.type
    if not has_queue(type_):
        raise ConfigError(
            f"the destination {type_} has no queue",
            fix="use a destination that has one, such as `destination: {type: webhook}`",
        )
    # A section with variables that are not set may not be what its type takes, or not say where the queue is.
    if connects or isinstance(config.destination, DESTINATIONS.model(type_)):
        opened = open_destination(config)
        assert isinstance(opened, Queued)
        queue = opened.open_queue(config.name)
        if connects or "${" not in queue.place:
            return queue
    return open_queue(file, destination=destination)


def _drain(queue: QueueView, timeout: float | None, *, quiet: bool) -> int:
    """Send until nothing waits or the time is over; how many events wait then."""
    deadline = time.monotonic() + timeout if timeout is not None else None
    shown = 0.0

    def is_over() -> bool:
        nonlocal shown
        if not quiet and time.monotonic() - shown > _SHOW_SECONDS:
            shown = time.monotonic()
            found = queue.status()
            say(f"{found.pending} events wait" + (f"; {found.error}" if found.error else ""))
        return deadline is not None and time.monotonic() > deadline

    return queue.drain(is_over)
