"""Commands that change a pipeline: prepare, reset, resync, pause, resume, retry, skip, warm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.cli.error import print_json, print_result
from tailrace.cli.text import say
from tailrace.errors import ConfigError, PreflightError
from tailrace.system.atomic_file import remove

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig
    from tailrace.state.record import RequestKind


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


def ask(
    config: PipelineConfig, kind: RequestKind, table: str | None, *, argument: str | None = None, as_json: bool
) -> None:
    """Record a request for one table, or for all that it can do something for, and print which process will do it.

    Raises ConfigError for a table the pipeline does not know, and for one that has nothing to skip.
    """
    from tailrace.state.operation import EFFECTS, leave_requests

    asked = leave_requests(config.store_address, kind, table, argument)
    if asked.needless is not None:
        print_result(asked.needless, {"requests": [], "done": asked.needless}, as_json=as_json)
        return
    if as_json:
        runner = asked.runner.pid if asked.runner else None
        values = [{"request": one.id, "kind": kind, "table": one.table, "runner": runner} for one in asked.requests]
        print_json(values[0] if table is not None else {"requests": values})
        return
    for request in asked.requests:
        say(f"{request.table} {EFFECTS[kind]} ({asked.when})")
