"""Which of a file's destinations a command is about: one of them, or each after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tailrace.cli.error import print_json
from tailrace.cli.text import say
from tailrace.errors import PipelinePlace

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig

DestinationName = Annotated[
    str | None,
    typer.Option(
        "--destination",
        metavar="NAME",
        help="Of a file with several destinations, only this one.",
        show_default=False,
    ),
]


def place_of(file: Path, config: PipelineConfig) -> PipelinePlace:
    """How a fix names the pipeline."""
    return PipelinePlace(file, config.member)


def show_each(
    configs: Sequence[PipelineConfig],
    show: Callable[[PipelineConfig], Mapping[str, Any]],
    *,
    as_json: bool,
    summary: Callable[[list[Mapping[str, Any]]], Mapping[str, Any]] = lambda values: {},
) -> list[Mapping[str, Any]]:
    """Show each destination: `show` prints text unless JSON was asked for, and returns the same as JSON values.

    As JSON, several are a list `destinations`, each with its `name`, after what `summary` says of all together.
    """
    values: list[Mapping[str, Any]] = []
    for config in configs:
        if len(configs) > 1 and not as_json:
            say(f"{config.member}:")
        values.append(show(config))
    if as_json and len(configs) == 1:
        print_json(values[0])
    elif as_json:
        listed = [{"name": config.member, **each} for config, each in zip(configs, values, strict=True)]
        print_json({**summary(values), "destinations": listed})
    return values
