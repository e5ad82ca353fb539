"""The one place where a command prints text. Names come from databases, and may hold any character.

A newline or an escape sequence in a table's name must not look like a line, or a color, of tailrace.
"""

from __future__ import annotations

import logging
import os

import typer

from tailrace.system.plain_text import plain


class Styled(str):
    """Text that may go to a terminal as it is: it holds the escape sequences of a color."""

    __slots__ = ()


def colored(text: str, color: str) -> Styled:
    """The text in a color, unless NO_COLOR is set; typer leaves colors out where stdout is not a terminal."""
    return Styled(plain(text) if os.environ.get("NO_COLOR") else typer.style(plain(text), fg=color))


def say(*parts: str, err: bool = False) -> None:
    """Print the parts as one line."""
    typer.echo("".join(part if isinstance(part, Styled) else plain(part) for part in parts), err=err)


def say_lines(text: str, indent: str = "", *, err: bool = False) -> None:
    """Print text of several lines, such as SQL, each after the indent. Names in it may hold line breaks: where others
    than tailrace chose them, an indent keeps such a line from looking like the next line of tailrace."""
    for line in text.split("\n"):
        say(f"{indent}{line}", err=err)


class LineFormatter(logging.Formatter):
    """Log messages: what follows a line break is indented."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n  ".join(plain(line) for line in super().format(record).split("\n"))
