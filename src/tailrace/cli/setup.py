"""Setting the upstream up, and beginning again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tailrace.cli.report import print_result
from tailrace.errors import ConfigError, PreflightError
from tailrace.wholefile import remove

if TYPE_CHECKING:
    from tailrace.config import PipelineConfig


@runtime_checkable
class Preparable(Protocol):
    """A source that follows better with something installed upstream."""

    def setup_sql(self, *, remove: bool) -> str:
        """The statements that install it, or remove it."""
        ...

    def set_up(self, *, remove: bool) -> str:
        """Do it, and say what was done. A repeat changes nothing. Raises PreflightError without the right to."""
        ...


def prepare_source(config: PipelineConfig, *, print_sql: bool, remove: bool, as_json: bool) -> None:
    from tailrace.registry import open_source

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

    A repeat, also of one that was broken off, ends in the same.
    """
    from tailrace.registry import open_source
    from tailrace.state import RunnerLock

    with RunnerLock(config.state), config.store_address.open() as store:
        store.claim_run(takes_over=config.store.type == "sqlite")
        open_source(config).reset()
        remove(Path(config.state) / "checkpoint")
        store.forget_pipeline()
    done = "the next run copies every table anew; the destination keeps its rows until the new copies are complete"
    print_result(done, {"done": done}, as_json=as_json)


def warm_up(*, as_json: bool) -> None:
    """Make the archive of classes with which Spark starts sooner. Raises PreflightError where that cannot be."""
    from tailrace.java import java_home
    from tailrace.stream.archive import Archive

    archive = Archive.here()
    if archive is None:
        java_home()
        raise PreflightError(
            "there is no place to keep the archive", fix="set XDG_CACHE_HOME to a folder you may write to"
        )
    archive.make()
    size = archive.file.stat().st_size
    text = f"{archive.file} ({size // 1_000_000} MB): Spark starts with it from now on"
    print_result(text, {"archive": str(archive.file), "bytes": size}, as_json=as_json)
