"""How a command reports an error: one screen with the cause, the fix and the exit code."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperGroup

from tailrace.cli.log import stamp
from tailrace.cli.text import say, say_lines
from tailrace.errors import ConfigError, TailraceError, name_file
from tailrace.system import trace
from tailrace.system.plain_text import plain

_FILE = "tailrace.file"
_JSON = "tailrace.json"
_DEBUG = "tailrace.debug"
RUN = "tailrace.run"
"""Where a context keeps the name of the pipeline that the command runs."""


def _keep_file(context: typer.Context, file: Path) -> Path:
    context.meta[_FILE] = file
    return file


PipelineFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The pipeline's YAML file.", show_default=False, callback=_keep_file),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text; errors as well, on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

INTERRUPTED = 130
UNREAD = 141
"""The exit code that a shell shows for a program ended by SIGPIPE."""

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
    UNREAD: "the output was closed",
}


def _unexpected(error: Exception) -> TailraceError:
    # Leave out the exception's text. It may hold anything, even a password.
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    kept = trace.place_of(error)
    fix = f"report it with {kept}" if kept else "run it again with --debug, and report it with the traceback"
    reported = TailraceError(f"unexpected {type(error).__name__}{where}", fix=fix)
    reported.__cause__ = error
    return reported


def fail(
    error: TailraceError, *, as_json: bool, debug: bool = False, file: Path | None = None, run: str | None = None
) -> NoReturn:
    """Report the error and leave with its exit code: a panel on a terminal, text elsewhere, JSON on stdout if asked.

    `run` is the name of the pipeline that the command ran: its JSON begins as every line of a run.
    """
    error.message, error.fix = name_file(error.message, file) or "", name_file(error.fix, file)
    if debug:
        traceback.print_exception(error)
    if as_json:
        # On one line, as the events that `run` and `receive` print before it.
        head = stamp(run, "error", "error") | {"table": error.table, "code": error.code} if run else {}
        say(json.dumps({**head, "error": to_dict(error)}, ensure_ascii=False))
    else:
        print_error(error)
    raise typer.Exit(error.exit_code)


def print_error(error: TailraceError) -> None:
    """A panel where stderr is a terminal, text elsewhere."""
    if sys.stderr.isatty():
        _print_panel(error)
    else:
        say(f"error[{error.code}]: {error.located}", err=True)
        if error.fix:
            say_lines(f"fix: {error.fix}", "  ", err=True)


def to_dict(error: TailraceError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "code": error.code,
        "docs": error.docs,
        "message": error.message,
        "table": error.table,
        "position": error.position,
        "fix": error.fix,
        "exit_code": error.exit_code,
    }


def print_json(value: object) -> None:
    say_lines(json.dumps(value, indent=2, ensure_ascii=False))


def print_result(text: str, value: object, *, as_json: bool) -> None:
    """Print the text, or the same as a value where JSON was asked for."""
    if as_json:
        print_json(value)
    else:
        say_lines(text)


def _print_panel(error: TailraceError) -> None:
    from rich.console import Console, Group
    from rich.panel import Panel
    from rich.text import Text

    where = [f"{label} {value}" for label, value in (("table", error.table), ("at", error.position)) if value]
    parts = [Text(plain(error.message))]
    parts += [Text(plain(", ".join(where)), "dim")] if where else []
    if error.fix:
        lines = [plain(line) for line in error.fix.split("\n")]
        parts.append(Text.assemble(("fix: ", "bold green"), "\n".join(lines)))
    frame = Panel(
        Group(*parts),
        title=error.code,
        title_align="left",
        subtitle=error.docs,
        subtitle_align="left",
        border_style="red",
        expand=False,
    )
    Console(stderr=True).print(frame)


UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)
"""An unknown option, a missing argument, an invalid value; typer has no public name for it."""


class CommandGroup(TyperGroup):
    """Commands under one word. Their help names a flag alone: typer would print `<bool>` next to it."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        return command and _without_types(command, command.get_params(ctx))

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)
        _without_types(self, params)
        return params


def _without_types(command: Any, params: list[Any]) -> Any:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return command


class Commands(CommandGroup):
    """All commands. An error of any of them ends in a report and its exit code.

    A call that is wrong is reported as JSON where it asks for that, else as typer does.
    """

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        as_json, debug = "--json" in args, "--debug" in args
        try:
            context = super().make_context(info_name, args, *rest, **extra)
        except UsageError as error:
            _refuse(error, as_json=as_json)
        context.meta.update({_JSON: as_json, _DEBUG: debug})
        return context

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            _refuse(error, as_json=ctx.meta[_JSON])
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:  # noqa: BLE001 - the last place where it can be reported in a line
            known = error if isinstance(error, TailraceError) else _unexpected(error)
            meta = ctx.meta
            fail(known, as_json=meta[_JSON], debug=meta[_DEBUG], file=meta.get(_FILE), run=meta.get(RUN))


def _refuse(error: typer.BadParameter, *, as_json: bool) -> NoReturn:
    if not as_json:
        raise error
    command = error.ctx.command_path if error.ctx else "tailrace"
    fail(ConfigError(error.format_message(), fix=f"`{command} --help` shows what it takes"), as_json=True)
