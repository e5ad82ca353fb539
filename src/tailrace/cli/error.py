"""How a command reports an error: one screen with the cause, the fix and the exit code."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec, cast

import typer
from typer.core import TyperGroup

from tailrace.errors import ConfigError, TailraceError
from tailrace.system import trace

Arguments = ParamSpec("Arguments")

PipelineFile = Annotated[Path, typer.Argument(metavar="FILE", help="The pipeline's YAML file.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text; errors as well, on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

INTERRUPTED = 130
UNREAD = 141
"""What a shell says of a program that SIGPIPE ended."""

EXIT_CODES = {
    0: "done",
    1: "unexpected error",
    2: "the file or an argument is wrong",
    3: "the source or destination is not set up",
    4: "something is down or out of reach",
    5: "another process runs the pipeline",
    6: "changes that are still needed are gone",
    7: "stored bytes are damaged",
    8: "a table is in error",
    INTERRUPTED: "interrupted",
    UNREAD: "nobody reads the output",
}


def reported(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """A command whose errors end in a report and their exit code. It reads the command's `as_json` and `debug`."""

    @functools.wraps(command)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        as_json, debug = bool(kwargs.get("as_json")), bool(kwargs.get("debug"))
        try:
            command(*args, **kwargs)
        except TailraceError as error:
            fail(error, as_json=as_json, debug=debug)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort, SystemExit):
            raise
        except Exception as error:  # noqa: BLE001 - the last place where it can be told in a line
            fail(_unexpected(error), as_json=as_json, debug=debug)

    return run


def _unexpected(error: Exception) -> TailraceError:
    # Its own text stays out: it was not written to be shown and may hold anything, a password included.
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kept = trace.place_of(error)
    fix = f"report it with {kept}" if kept else "run it again with --debug for the whole story, and report it"
    told = TailraceError(f"unexpected {type(error).__name__}{where}", fix=fix)
    told.__cause__ = error
    return told


def fail(error: TailraceError, *, as_json: bool, debug: bool) -> NoReturn:
    """Report the error and leave with its exit code: a panel on a terminal, text elsewhere, JSON on stdout if asked."""
    if debug:
        traceback.print_exception(error)
    if as_json:
        # One line: those that `run` and `receive` print before it are lines, too.
        typer.echo(json.dumps({"error": to_dict(error)}, ensure_ascii=False))
    else:
        print_error(error)
    raise typer.Exit(error.exit_code)


def print_error(error: TailraceError) -> None:
    """A panel where stderr is a terminal, text elsewhere."""
    if sys.stderr.isatty():
        _print_panel(error)
    else:
        typer.echo(f"error: {error}", err=True)


def to_dict(error: TailraceError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "table": error.table,
        "position": error.position,
        "fix": error.fix,
        "exit_code": error.exit_code,
    }


def colored(text: str, color: str) -> str:
    """The text in a color, unless NO_COLOR is set; a pipe gets none in any case."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, fg=color)


def print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_result(text: str, value: object, *, as_json: bool) -> None:
    """Print the text, or the same as a value where JSON was asked for."""
    if as_json:
        print_json(value)
    else:
        typer.echo(text)


def _print_panel(error: TailraceError) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    where = [f"{label} {value}" for label, value in (("table", error.table), ("at", error.position)) if value]
    parts = [Text(error.message)]
    parts += [Text(", ".join(where), "dim")] if where else []
    parts += [Text.assemble(("fix: ", "bold green"), error.fix)] if error.fix else []
    title = type(error).__name__.removesuffix("Error").lower()
    Console(stderr=True).print(Panel(Group(*parts), title=title, title_align="left", border_style="red", expand=False))


# Commands that are called wrongly: an unknown option, a missing argument, a value that is none.

UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)
"""What all these are; typer has no public name for it."""
_JSON = "tailrace.json"


class Commands(TyperGroup):
    """All commands. One that is called wrongly says so as JSON where the call asks for that, else as typer does."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        as_json = "--json" in args
        with _told(as_json=as_json):
            context = super().make_context(info_name, args, *rest, **extra)
        context.meta[_JSON] = as_json
        return context

    def invoke(self, ctx: Any) -> Any:
        with _told(as_json=ctx.meta[_JSON]):
            return super().invoke(ctx)


@contextmanager
def _told(*, as_json: bool) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if not as_json:
            raise
        command = error.ctx.command_path if error.ctx else "tailrace"
        told = ConfigError(error.format_message(), fix=f"`{command} --help` shows what it takes")
        fail(told, as_json=True, debug=False)
