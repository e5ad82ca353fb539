"""Commands that change a pipeline: prepare, reset, resync, pause, resume, retry, skip, warm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.cli.error import print_result
from tailrace.cli.text import say, say_lines
from tailrace.errors import ConfigError, DamagedError, PreflightError
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


def reset_pipeline(configs: Sequence[PipelineConfig], *, whole: bool, as_json: bool) -> None:
    """Forget everything but what the destinations hold; unless `whole`, only what belongs to one of several.

    Raises OwnedError while the pipeline, or that one destination, runs, here or elsewhere. Repeating it, also after one
    that was interrupted, has the same result.
    """
    from tailrace.config.registry import open_source
    from tailrace.state import RunnerLock
    from tailrace.stream.former import forget_former

    with ExitStack() as stack:
        folders = {config.state for config in configs} | ({configs[0].source_context.state_dir} if whole else set())
        for folder in sorted(folders):
            stack.enter_context(RunnerLock(folder))
        stores = [stack.enter_context(config.store_address.open()) for config in configs]
        for store in stores:
            store.claim_run(takes_over=not store.shared)
        for config in configs:
            if config.member is not None:
                open_source(config).forget()
        if whole:
            source = open_source(configs[0])
            kept = {open_source(each).context.reader for each in configs}
            # A cursor that cannot be read is removed with its journal.
            with suppress(DamagedError):
                forget_former(source, configs[0].store_address, kept)
            source.reset()
        for config, store in zip(configs, stores, strict=True):
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
) -> dict[str, Any]:
    """Record a request for one table, or for all that it can do something for, and say which process will do it: in
    lines, or only in the JSON values that it returns.

    Raises ConfigError for a table the pipeline does not know, and for one that has nothing to skip.
    """
    from tailrace.state.operation import EFFECTS, leave_requests

    asked = leave_requests(config.store_address, kind, table, argument)
    if asked.needless is not None:
        if not as_json:
            say_lines(asked.needless)
        return {"requests": [], "done": asked.needless}
    for request in asked.requests if not as_json else ():
        say(f"{request.table} {EFFECTS[kind]} ({asked.when})")
    runner = asked.runner.pid if asked.runner else None
    values = [{"request": one.id, "kind": kind, "table": one.table, "runner": runner} for one in asked.requests]
    return values[0] if table is not None else {"requests": values}
