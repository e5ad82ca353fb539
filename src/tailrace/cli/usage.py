"""Commands that are called wrongly: an unknown option, a missing argument, a value that is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import typer
from typer.core import TyperGroup

from tailrace.cli.report import fail
from tailrace.errors import ConfigError

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
