"""What an operator asks of a runner, through the state store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tailrace.cli.report import print_json
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.config import PipelineConfig


def ask_resync(config: PipelineConfig, table: str, *, as_json: bool) -> None:
    """Record the request and say who will do it. Raises ConfigError for a table the pipeline does not know."""
    from tailrace.registry import suggest
    from tailrace.state import StateStore
    from tailrace.state.lock import find_owner

    with StateStore.open_reading(config.state) as reader:
        known = [record.name for record in reader.tables()]
    if table not in known:
        raise ConfigError(
            f"pipeline {config.name} has no table {table}{suggest(table, known)}",
            fix="`tailrace status FILE` lists its tables",
        )
    with StateStore.open(config.state, name=config.name) as store:
        request = store.ask("resync", table)
    owner = find_owner(config.state)
    if as_json:
        print_json(
            {"request": request.id, "kind": request.kind, "table": table, "runner": owner.pid if owner else None}
        )
    elif owner:
        typer.echo(f"{table} will be copied again; process {owner.pid} picks that up with its next batch")
    else:
        typer.echo(f"{table} will be copied again when the pipeline runs next; it does not run now")
