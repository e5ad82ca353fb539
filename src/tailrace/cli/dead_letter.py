"""`tailrace errors`: changes that could not be applied."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.error import CommandGroup, Debug, Json, PipelineFile, print_json
from tailrace.cli.text import say
from tailrace.errors import ConfigError, name_file
from tailrace.model.quantity_text import format_count

if TYPE_CHECKING:
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
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the changes that wait: where each is and why it could not be applied. Shows no row values."""
    from tailrace.config.pipeline import load

    with load(file, connects=False).store_address.open_reading() as store:
        letters = store.dead_letters(status=None if every else "waiting")
    if as_json:
        print_json({"errors": [_values(letter, file) for letter in letters]})
        return
    for letter in letters:
        tried = format_count(letter.tries, "time")
        say(f"{letter.id}  {letter.table}  at {letter.position}  {letter.status}, tried {tried}")
        say(f"    {letter.reason}")
    if not letters:
        say("no change waits")


@app.command(epilog="Example: tailrace errors show shop.yaml 3 --raw change.bin")
def show(
    file: PipelineFile,
    letter_id: DeadLetterId,
    raw: Annotated[
        Path | None, typer.Option(help="Write the change to this file, as the upstream sent it.", show_default=False)
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show one dead letter. Its bytes hold row values, so they are only written to the file you name with --raw."""
    letter = _find(file, letter_id)
    if raw is not None:
        try:
            raw.write_bytes(letter.raw or b"")
        except OSError as error:
            raise ConfigError(f"cannot write {raw}: {error.strerror}", fix="name another file with --raw") from error
    values = _values(letter, file)
    if as_json:
        print_json(values)
    else:
        for name, value in values.items():
            say(f"{name:<10} {value}")


@app.command(epilog="Example: tailrace errors retry shop.yaml 3")
def retry(file: PipelineFile, letter_id: DeadLetterId, as_json: Json = False, debug: Debug = False) -> None:
    """Retry its table from where it stopped, after you have fixed the cause."""
    from tailrace.cli.operate import ask
    from tailrace.config.pipeline import load

    ask(load(file, connects=False), "retry", _find(file, letter_id).table, as_json=as_json)


@app.command(epilog="Example: tailrace errors skip shop.yaml 3")
def skip(file: PipelineFile, letter_id: DeadLetterId, as_json: Json = False, debug: Debug = False) -> None:
    """Skip this one change; its table goes on. `errors list --all` still shows it, and a resync restores its row."""
    from tailrace.cli.operate import ask
    from tailrace.config.pipeline import load

    ask(load(file, connects=False), "skip", _find(file, letter_id).table, argument=str(letter_id), as_json=as_json)


def _find(file: Path, letter_id: int) -> DeadLetter:
    from tailrace.config.pipeline import load

    with load(file, connects=False).store_address.open_reading() as store:
        letter = store.dead_letter(letter_id)
    if letter is None:
        raise ConfigError(f"there is no dead letter {letter_id}", fix=f"tailrace errors list {file} --all")
    return letter


def _values(letter: DeadLetter, file: Path) -> dict[str, Any]:
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
