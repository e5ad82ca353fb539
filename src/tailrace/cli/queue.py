"""`tailrace queue`: what waits to be sent to a webhook."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.error import Debug, Json, PipelineFile, print_json, print_result, reported

if TYPE_CHECKING:
    from tailrace.destination.webhook.destination import WebhookDestination
    from tailrace.destination.webhook.queue import QueueReader

app = typer.Typer(no_args_is_help=True, help="Look at, send or give up what waits to be sent to a webhook.")

_LOOK_SECONDS = 0.2
_SHOW_SECONDS = 1.0


@app.command(epilog="Example: tailrace queue status shop.yaml --json")
@reported
def status(file: PipelineFile, as_json: Json = False, debug: Debug = False) -> None:
    """Show what waits, since when, who sends, and what last went wrong. Connects to nothing."""
    found = read_queue(queue_folder(file))
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        if value is not None:
            typer.echo(f"{name.replace('_', ' '):<14} {value}")


@app.command(epilog="Example: tailrace queue drain shop.yaml --timeout 60")
@reported
def drain(
    file: PipelineFile,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Give up after so many seconds; nothing is lost.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Send what waits, or see the running pipeline send it, until nothing does; exit code 4 if time runs out."""
    from tailrace.errors import UnavailableError

    if left := _drain(*_open(file), timeout, quiet=as_json):
        raise UnavailableError(f"{left} events still wait", fix="tailrace queue status FILE says why")
    print_result("nothing waits", {"pending": left}, as_json=as_json)


@app.command(epilog="Example: tailrace queue purge shop.yaml --yes")
@reported
def purge(
    file: PipelineFile,
    yes: Annotated[bool, typer.Option("--yes", help="Do it without asking.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Give up everything that waits: it is never sent. Also the way on after damage. The pipeline must not run."""
    from tailrace.destination.webhook.queue import QueueWriter
    from tailrace.destination.webhook.sender.leader import Leadership, open_engine
    from tailrace.destination.webhook.sender.lock import claim_queue, queue_id

    destination, pipeline = _open(file)
    folder = destination.queue.path
    waiting = read_queue(folder)["pending"]
    if not yes:
        typer.confirm(f"Never send {_events(waiting)} in {folder}?", abort=True, err=True)
    with claim_queue(folder):
        with QueueWriter(
            folder,
            segment_bytes=destination.queue.segment_bytes,
            max_bytes=destination.queue.max_bytes,
            accepts_damage=True,
        ) as writer:
            head = writer.give_up()
        leadership = Leadership(
            open_engine(destination.leader.lease.reveal()),
            pipeline,
            node=destination.node_id,
            queue=queue_id(folder),
            seconds=destination.leader.seconds,
        )
        try:
            leadership.pass_over(head)
        finally:
            leadership.close()
    print_result(f"given up: {_events(waiting)}", {"given_up": waiting}, as_json=as_json)


def _events(waiting: int | None) -> str:
    return "what waits, as far as it can be read," if waiting is None else f"the {waiting} events that wait"


def _open(file: Path) -> tuple[WebhookDestination, str]:
    from tailrace.config.pipeline import load
    from tailrace.config.registry import open_destination
    from tailrace.destination.webhook.destination import WebhookDestination

    config = load(file)
    _require_webhook(config.destination.type)
    destination = open_destination(config)
    assert isinstance(destination, WebhookDestination)
    return destination, config.name


def queue_folder(file: Path) -> Path:
    from tailrace.config.pipeline import load
    from tailrace.destination.webhook.option import WebhookOptions

    options = load(file, connects=False).destination
    _require_webhook(options.type)
    if not isinstance(options, WebhookOptions) or "${" in str(options.queue.path):
        options = load(file).destination  # which names the variables that are not set
    assert isinstance(options, WebhookOptions)
    return Path(options.queue.path)


def _require_webhook(kind: str) -> None:
    from tailrace.errors import ConfigError

    if kind != "webhook":
        raise ConfigError(f"the destination {kind} has no queue", fix="only `destination: {type: webhook}` has one")


def read_queue(folder: Path) -> dict[str, Any]:
    """How the queue stands, by its files alone."""
    from tailrace.destination.webhook.queue import QueueReader
    from tailrace.destination.webhook.sender.lock import is_claimed
    from tailrace.destination.webhook.sender.status import STATUS
    from tailrace.errors import DamagedError
    from tailrace.system.child_process import read_status

    said, running = read_status(folder, STATUS), is_claimed(folder)
    error = said.get("error") or {}
    with closing(QueueReader(folder)) as reader:
        try:
            waiting = _waiting(reader, said.get("delivered_to"))
        except DamagedError as damage:
            waiting, error = None, damage.describe()
        size = reader.size()
    return {
        "queue": str(folder),
        "running": running,
        "leader": running and bool(said.get("leader")),
        "node": said.get("node"),
        "pending": waiting,
        "oldest": said.get("oldest") if running else None,
        "bytes": size,
        "delivered": said.get("delivered"),
        "dropped": said.get("dropped"),
        "failures": said.get("failures"),
        "error": error.get("message") or said.get("last_error"),
        "fix": error.get("fix"),
    }


def _waiting(reader: QueueReader, delivered_to: str | None) -> int:
    from tailrace.model.change import START, Position

    place = max(reader.released, Position.parse(delivered_to) if delivered_to else START)
    return max(reader.count(Position(place.commit, 0)) - place.ordinal, 0)


def _drain(destination: WebhookDestination, pipeline: str, timeout: float | None, *, quiet: bool) -> int:
    """Send until nothing waits or time is over; how many events wait then. A running pipeline's sender does it."""
    from tailrace.destination.webhook.sender.lock import is_claimed
    from tailrace.destination.webhook.sender.sender import Sender
    from tailrace.errors import OwnedError

    folder = destination.queue.path
    deadline = time.monotonic() + timeout if timeout is not None else None
    shown = 0.0

    def over() -> bool:
        nonlocal shown
        if not quiet and time.monotonic() - shown > _SHOW_SECONDS:
            shown = time.monotonic()
            found = read_queue(folder)
            typer.echo(f"{found['pending']} events wait" + (f"; {found['error']}" if found["error"] else ""))
        return deadline is not None and time.monotonic() > deadline

    while not over():
        if not is_claimed(folder):
            with suppress(OwnedError):  # a pipeline that began a moment ago sends instead
                Sender(destination, pipeline, over, until_empty=True).run()
                break
        elif read_queue(folder)["pending"] == 0:
            break
        time.sleep(_LOOK_SECONDS)
    return _pending(folder)


def _pending(folder: Path) -> int:
    """How many events wait. Raises DamagedError when they cannot be counted."""
    from tailrace.destination.webhook.queue import QueueReader
    from tailrace.destination.webhook.sender.status import STATUS
    from tailrace.system.child_process import read_status

    with closing(QueueReader(folder)) as reader:
        return _waiting(reader, read_status(folder, STATUS).get("delivered_to"))
