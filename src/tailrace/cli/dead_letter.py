"""`tailrace errors`: changes that could not be applied."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tailrace.cli.destination import DestinationName, place_of, show_each
from tailrace.cli.error import CommandGroup, Debug, Json, PipelineFile, print_json
from tailrace.cli.text import say
from tailrace.errors import ConfigError, PipelinePlace, name_file
from tailrace.model.quantity_text import format_count

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig
    from tailrace.state.record import DeadLetter

app = typer.Typer(
    cls=CommandGroup,
    help="Changes that could not be applied, kept as dead letters: list, show, retry, skip.",
    no_args_is_help=True,
    epilog="Example: tailrace errors list shop.yaml",
)

DeadLetterId = Annotated[
    int,
    typer.Argument(
        metavar="ID", min=0, max=2**63 - 1, help="The number that `tailrace errors list` shows.", show_default=False
    ),
]


@app.command("list", epilog="Example: tailrace errors list shop.yaml")
def list_dead_letters(
    file: PipelineFile,
    every: Annotated[bool, typer.Option("--all", help="Also show those that were skipped or resolved.")] = False,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the changes that wait: where each is and why it could not be applied. Shows no row values."""
    from tailrace.config.pipeline import load_all

    configs = load_all(file, connects=False, destination=destination)
    show_each(configs, lambda config: _list(config, file, every=every, as_json=as_json), as_json=as_json)


def _list(config: PipelineConfig, file: Path, *, every: bool, as_json: bool) -> dict[str, Any]:
    """Print the dead letters unless JSON was asked for. The same as JSON values."""
    with config.store_address.open_reading() as store:
        letters = store.dead_letters(status=None if every else "waiting")
    for letter in letters if not as_json else ():
        tried = format_count(letter.tries, "time")
        say(f"{letter.id}  {letter.table}  at {letter.position}  {letter.status}, tried {tried}")
        say(f"    {letter.reason}")
    if not letters and not as_json:
        say("no change waits")
    return {"errors": [_values(letter, place_of(file, config)) for letter in letters]}


@app.command(epilog="Example: tailrace errors show shop.yaml 3 --raw change.bin")
def show(
    file: PipelineFile,
    letter_id: DeadLetterId,
    raw: Annotated[
        Path | None, typer.Option(help="Write the change to this file, as the upstream sent it.", show_default=False)
    ] = None,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show one dead letter. Its bytes hold row values, so they are only written to the file you name with --raw."""
    letter, config = _find(file, letter_id, destination)
    if raw is not None:
        try:
            raw.write_bytes(letter.raw or b"")
        except OSError as error:
            raise ConfigError(f"cannot write {raw}: {error.strerror}", fix="name another file with --raw") from error
    values = _values(letter, place_of(file, config))
    if as_json:
        print_json(values)
    else:
        for name, value in values.items():
            say(f"{name:<10} {value}")


@app.command(epilog="Example: tailrace errors retry shop.yaml 3")
def retry(
    file: PipelineFile,
    letter_id: DeadLetterId,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Retry its table from where it stopped, after you have fixed the cause."""
    _ask(file, "retry", letter_id, destination, as_json=as_json)


@app.command(epilog="Example: tailrace errors skip shop.yaml 3")
def skip(
    file: PipelineFile,
    letter_id: DeadLetterId,
    destination: DestinationName = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Skip this one change; its table goes on. `errors list --all` still shows it, and a resync restores its row."""
    _ask(file, "skip", letter_id, destination, as_json=as_json)


def _ask(file: Path, kind: Literal["retry", "skip"], letter_id: int, destination: str | None, *, as_json: bool) -> None:
    from tailrace.cli.operate import ask

    letter, config = _find(file, letter_id, destination)
    argument = str(letter_id) if kind == "skip" else None
    show_each([config], lambda one: ask(one, kind, letter.table, argument=argument, as_json=as_json), as_json=as_json)


def _find(file: Path, letter_id: int, destination: str | None) -> tuple[DeadLetter, PipelineConfig]:
    from tailrace.config.pipeline import load

    config = load(file, connects=False, destination=destination)
    with config.store_address.open_reading() as store:
        letter = store.dead_letter(letter_id)
    if letter is None:
        listed = name_file("tailrace errors list FILE --all", place_of(file, config))
        raise ConfigError(f"there is no dead letter {letter_id}", fix=listed)
    return letter, config


def _values(letter: DeadLetter, file: PipelinePlace) -> dict[str, Any]:
    return {
        "id": letter.id,
        "table": letter.table,
        "position": letter.position,
        "kind": letter.kind,
        "reason": letter.reason,
        "fix": name_file(letter.fix, file),
        "status": letter.status,
        "tries": letter.tries,
        "bytes": len(letter.raw or b""),
        "version": letter.version,
        "first_at": letter.first_at.isoformat(),
        "last_at": letter.last_at.isoformat(),
    }
