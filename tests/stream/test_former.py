"""What is kept for destinations that a file no longer has is let go, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.pipeline import PipelineConfig, all_from_dict
from tailrace.config.registry import open_source
from tailrace.errors import ConfigError
from tailrace.source.sqlite.cursor import Cursors
from tailrace.state import BatchRecord
from tailrace.stream.fan_out import widen_master
from tailrace.stream.former import forget_former

LAKE = {"name": "lake", "type": "delta", "path": "lake"}
OTHER = {"name": "other", "type": "delta", "path": "other"}


def pipelines(folder: Path, **sections: Any) -> list[PipelineConfig]:
    return all_from_dict({"name": "shop", "source": {"type": "sqlite", "path": "app.db"}, **sections}, folder=folder)


def begin(config: PipelineConfig) -> None:
    """Leave what a run leaves."""
    source = open_source(config)
    Cursors(source.folder).advance(source.context.reader, 7)
    with config.store_address.open() as store:
        store.apply_batch(BatchRecord(3, {}, None, 0, 0, 0.0), [])
    (config.state / "checkpoint").mkdir()


def has_run(config: PipelineConfig) -> bool:
    try:
        with config.store_address.open_reading() as store:
            return store.last_batch() is not None
    except ConfigError:
        return False


def test_those_that_are_gone_are_forgotten_and_those_that_stay_are_not(tmp_path: Path) -> None:
    [single] = pipelines(tmp_path, destination={"type": "delta", "path": "lake"})
    lake, other = pipelines(tmp_path, destinations=[LAKE, OTHER])
    for config in (single, lake, other):
        begin(config)
    source = open_source(lake)
    cursors = Cursors(source.folder)
    cursors.advance("stream main.items", 2)

    for _ in range(2):
        forget_former(source, lake.store_address, {"pipeline lake"})
        assert sorted(cursors.readers()) == ["pipeline lake", "stream main.items"]
        assert [has_run(config) for config in (single, lake, other)] == [False, True, False]
        assert [(config.state / "checkpoint").exists() for config in (single, lake, other)] == [False, True, False]

    forget_former(open_source(single), single.store_address, {"pipeline"})
    assert sorted(cursors.readers()) == ["stream main.items"]
    assert not has_run(lake)


@pytest.mark.parametrize(
    ("master", "wide"),
    [
        ("local[2]", "local[6]"),
        ("local", "local[6]"),
        ("local[1]", "local[6]"),
        ("local[8,3]", "local[24,3]"),
        ("local[*]", f"local[{max(2, os.cpu_count() or 1) * 3}]"),
        ("spark://cluster:7077", "spark://cluster:7077"),
        ("local-cluster[2,1,1024]", "local-cluster[2,1,1024]"),
        ("yarn", "yarn"),
    ],
)
def test_each_destination_on_one_machine_has_the_slots_that_the_master_names(master: str, wide: str) -> None:
    assert widen_master(master, 3) == wide
