"""What an operator asks of a runner, through the state store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tailrace.cli.report import print_json
from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.config import PipelineConfig
    from tailrace.state.record import RequestKind

_DOES: dict[str, str] = {
    "resync": "will be copied again; its old rows stay until the new copy is complete",
    "pause": "will be paused; its changes are kept until it is resumed",
    "resume": "will go on where it was paused",
    "retry": "will be tried again",
    "skip": "will go on without the changes that stopped it, which are kept as dead letters",
}


def ask(
    config: PipelineConfig, kind: RequestKind, table: str | None, *, argument: str | None = None, as_json: bool
) -> None:
    """Record a request for a table, or for all of them, and say who will do it.

    Raises ConfigError for a table the pipeline does not know, and for one that has nothing to skip.
    """
    from tailrace.registry import suggest

    with config.store_address.open_reading() as reader:
        known = [record.name for record in reader.tables()]
        waiting = {letter.table for letter in reader.dead_letters(status="waiting")} if kind == "skip" else set()
    if table is not None and table not in known:
        raise ConfigError(
            f"pipeline {config.name} has no table {table}{suggest(table, known)}",
            fix="`tailrace status FILE` lists its tables",
        )
    if kind == "skip" and table not in waiting:
        raise ConfigError(
            f"no change of {table} waits to be skipped",
            fix="`tailrace errors list FILE` lists what waits; `tailrace status FILE` says why a table is in error",
        )
    with config.store_address.open() as store:
        requests = [store.ask(kind, name, argument) for name in ([table] if table is not None else known)]
        owner = store.runner()
    if as_json:
        runner = owner.pid if owner else None
        values = [{"request": one.id, "kind": kind, "table": one.table, "runner": runner} for one in requests]
        print_json(values[0] if table is not None else {"requests": values})
        return
    when = (
        f"process {owner.pid} does it before its next batch"
        if owner
        else "the pipeline does not run now: at its next start"
    )
    for request in requests:
        typer.echo(f"{request.table} {_DOES[kind]} ({when})")
