"""`tailrace run FILE --to console`: a second pipeline over the same tables, which leaves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tailrace.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.config.pipeline import PipelineConfig


@contextmanager
def looking(config: PipelineConfig) -> Iterator[PipelineConfig]:
    """A pipeline that prints the changes of another one's tables, with a state of its own until the block ends.

    It runs on this machine, sends no alerts, and has nothing in common with the other one but what it reads. Raises
    ConfigError for a source that cannot be read a second time without leaving something upstream.
    """
    from tailrace.config.pipeline import MemberConfig, SqliteStoreOptions
    from tailrace.config.registry import DESTINATIONS
    from tailrace.source.option import SourceOptions

    if isinstance(config, MemberConfig):
        config = config.alone()
    source = config.source.for_look() if isinstance(config.source, SourceOptions) else None
    if source is None:
        raise ConfigError(
            f"a source of type {config.source.type} cannot be looked at next to its pipeline: a second reader"
            " may take something upstream (a slot, a checkpoint, an address) that stays there if it is killed",
            fix="give the look a pipeline's file of its own, with another `name` and `destination: {type: console}`,"
            " and `tailrace reset` that file afterwards",
        )
    with TemporaryDirectory(prefix="tailrace-look-") as folder:
        state = Path(folder)
        printed = DESTINATIONS.model("console").model_validate({"type": "console", "path": str(state / "console")})
        yield config.model_copy(
            update={
                "source": source,
                "destination": printed,
                "state": state,
                "store": SqliteStoreOptions(),
                "spark": config.spark.model_copy(update={"master": "local[2]"}),
                "alerts": None,
            }
        )
