"""A token that a command takes from the environment, so that no list of processes shows it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.option.value import Secret

TokenName = Annotated[
    str | None, typer.Option("--token-env", metavar="NAME", help="The environment variable that holds the token.")
]


def read_token(name: str | None) -> Secret | None:
    """The token in the environment variable of this name. Raises ConfigError where it is not set or cannot be sent."""
    from tailrace.option.value import Secret, require_header_text

    if name is None:
        return None
    if not (text := os.environ.get(name, "")):
        raise ConfigError(f"the environment variable {name} is not set", fix=f"export {name}=…")
    require_header_text(text, f"the environment variable {name}")
    return Secret(text)
