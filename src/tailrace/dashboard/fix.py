"""A fix as text, and the commands in it that can be copied."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from tailrace.errors import PipelinePlace, name_file

_STATEMENT = re.compile(
    r"(?:^|`|: )((?:ALTER|CREATE|DROP|GRANT|REVOKE|SELECT|UPDATE|INSERT|DELETE|SET|COMMENT) [^`\n]+?)(?:;|`|$)",
    re.MULTILINE,
)
_INSTALL = re.compile(r"pip install '[^']+'")


def fix_of(text: str | None, file: Path | PipelinePlace, table: str | None = None) -> dict[str, Any] | None:
    """A fix with the pipeline's file in its commands: all of it as `text`, what can be run as `commands`."""
    if text is None:
        return None
    return {"text": name_file(text, file), "commands": commands_in(text, file, table)}


def commands_in(text: str, file: Path | PipelinePlace, table: str | None = None) -> list[str]:
    """The SQL statements and commands of a fix, in their order, with the pipeline's file in them."""
    name = f"(?: {re.escape(table)})?" if table is not None else ""
    ours = re.compile(rf"\btailrace ((?:errors |queue )?(?!sqlite |tape )[a-z]+) FILE\b( --[a-z]+)*({name})(?! ID)")
    found = [
        (each.start(), command(each[1], file, table if each[3] else None) + (each[2] or ""))
        for each in ours.finditer(text)
    ]
    found += [(each.start(), f"{each[1]};") for each in _STATEMENT.finditer(text)]
    found += [(each.start(), each[0]) for each in _INSTALL.finditer(text)]
    return list(dict.fromkeys(command for _, command in sorted(found)))


def command(word: str, file: Path | PipelinePlace, table: str | None = None) -> str:
    """The command line that does the same as an action of the dashboard."""
    line = name_file(f"tailrace {word} FILE", file) or ""
    return line if table is None else f"{line} {shlex.quote(table)}"
