"""Batches for a changelog, and its reader: what a pipeline does, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailrace.destination import Batch, Written
from tailrace.destination.event import event_stream
from tailrace.destination.parquet.destination import ParquetDestination
from tailrace.model.change import Changes
from tailrace.model.schema import TableSchema
from tailrace.source.source import SourceContext
from tailrace.source.tape.option import TapeOptions
from tailrace.source.tape.source import ChangelogSource
from tailrace.testing.replay import SourceReplay
from tailrace.testing.source import PLENTY


def write_events(
    destination: ParquetDestination,
    number: int,
    log: Sequence[Changes] = (),
    *,
    copied: Sequence[Changes] = (),
    begun: Sequence[TableSchema] = (),
    completed: Sequence[TableSchema] = (),
    pipeline: str = "p",
) -> Written:
    return destination.write_events(event_stream(copied, log, completed, begun), Batch(pipeline, number, 7))


def tape(path: str, folder: Path, begin: int | str | None = None) -> ChangelogSource:
    options = TapeOptions.model_validate({"type": "tape", "path": path, "from": begin})
    return ChangelogSource(options, SourceContext("copy", state_dir=folder / "state"))


def replayed(path: str, folder: Path, begin: int | str | None = None) -> dict[str, list[dict[str, Any]]]:
    """The rows of all tables that a pipeline from the changelog ends with."""
    with SourceReplay(tape(path, folder, begin), PLENTY) as replay:
        replay.catch_up()
        return {name: list(table.rows.values()) for name, table in replay.tables.items()}
