"""Commands that change a pipeline: prepare, reset, resync, pause, resume, retry, skip, warm."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.cli.error import print_json, print_result
from tailrace.cli.text import say
from tailrace.errors import ConfigError, PreflightError
from tailrace.state.state_machine import TableState
from tailrace.system.atomic_file import remove

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig
    from tailrace.state.record import RequestKind, TableRecord


def prepare_source(config: PipelineConfig, *, print_sql: bool, remove: bool, as_json: bool) -> None:
    from tailrace.config.registry import open_source
    from tailrace.source.capability import Preparable

    source = open_source(config)
    if not isinstance(source, Preparable):
        raise ConfigError(
            f"a source of type {config.source.type} needs nothing to be installed", fix="tailrace run FILE"
        )
    if print_sql:
        script = source.setup_sql(remove=remove)
        print_result(script, {"sql": script}, as_json=as_json)
        return
    done = source.set_up(remove=remove)
    print_result(done, {"done": done}, as_json=as_json)


def reset_pipeline(config: PipelineConfig, *, as_json: bool) -> None:
    """Forget everything but the destination. Raises OwnedError while the pipeline runs, here or elsewhere.

    Repeating it, also after one that was interrupted, has the same result.
    """
    from tailrace.config.registry import open_source
    from tailrace.state import RunnerLock

    with RunnerLock(config.state), config.store_address.open() as store:
        store.claim_run(takes_over=not store.shared)
        open_source(config).reset()
        remove(Path(config.state) / "checkpoint")
        store.forget_pipeline()
    done = "the next run copies every table again; the destination keeps its rows until the new copies are complete"
    print_result(done, {"done": done}, as_json=as_json)


def warm_up(*, as_json: bool) -> None:
    """Make the archive of classes with which Spark starts faster. Raises PreflightError where it cannot be kept."""
    from tailrace.stream.class_archive import Archive
    from tailrace.stream.java import java_home

    archive = Archive.here()
    if archive is None:
        java_home()
        raise PreflightError(
            "there is no folder to keep the archive in", fix="set XDG_CACHE_HOME to a folder you may write to"
        )
    archive.make()
    size = archive.file.stat().st_size
    text = f"{archive.file} ({size // 1_000_000} MB): Spark starts with it from now on"
    print_result(text, {"archive": str(archive.file), "bytes": size}, as_json=as_json)


# Requests of an operator to the runner, through the state store.

_DOES: dict[str, str] = {
    "resync": "will be copied again; its old rows stay until the new copy is complete",
    "pause": "will be paused; its changes are kept until it is resumed",
    "resume": "will go on where it was paused",
    "retry": "will be tried again",
    "skip": "will go on without the changes that stopped it, which are kept as dead letters",
}


_NEEDS: dict[RequestKind, tuple[str, str]] = {
    "retry": ("in error", "not in error"),
    "resume": ("paused", "not paused"),
    "pause": ("running", "paused already"),
}
"""What a table must be for a request to do something, and what the one that was named is instead."""


def _is_of_use(kind: RequestKind, table: TableRecord, opened: Set[tuple[RequestKind, str]]) -> bool:
    """Whether a request does something for the table: in its state, or after what was asked before is done."""
    if kind == "retry":
        return table.state is TableState.ERRORED
    if kind in ("pause", "resume"):
        will_pause = ("pause", table.name) in opened or (
            table.paused_at is not None and ("resume", table.name) not in opened
        )
        return will_pause == (kind == "resume") or (kind, table.name) in opened
    return True


def ask(
    config: PipelineConfig, kind: RequestKind, table: str | None, *, argument: str | None = None, as_json: bool
) -> None:
    """Record a request for one table, or for all that it can do something for, and print which process will do it.

    A table that needs none of it, such as a retry of one that is not in error, is said so and nothing is asked. Raises
    ConfigError for a table the pipeline does not know, and for one that has nothing to skip.
    """
    from tailrace.config.registry import suggest

    with config.store_address.open_reading() as reader:
        records = {record.name: record for record in reader.tables()}
        known = list(records)
        opened = {(request.kind, request.table) for request in reader.open_requests()}
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
    wanted = [name for name in ([table] if table is not None else known) if _is_of_use(kind, records[name], opened)]
    if not wanted:
        which = f"{table} is" if table is not None else f"no table of pipeline {config.name} is"
        done = f"{which} {_NEEDS[kind][table is not None]}: nothing to do"
        print_result(done, {"requests": [], "done": done}, as_json=as_json)
        return
    with config.store_address.open() as store:
        requests = [store.ask(kind, name, argument) for name in wanted]
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
        say(f"{request.table} {_DOES[kind]} ({when})")
