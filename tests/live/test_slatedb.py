"""A pipeline from a SlateDB that real processes write, into Delta, through everything that happens to both."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from deltalake import DeltaTable

from tailrace.source.slatedb.object_store import ObjectStore, SlateDbDatabase
from tailrace.testing.wait import wait_until
from tests.support.invocation import apply, invoke
from tests.support.runner import RunningPipeline, all_ready
from tests.support.slatedb_traffic import FOLDS, MAPPING, SHORT_MILLIS, TABLES
from tests.support.slatedb_writing import Writer, scan

ROOT = Path(__file__).parents[2]


class Scene:
    """A store, a pipeline's file and a lake in one folder."""

    def __init__(self, folder: Path, **source: Any) -> None:
        self.store = folder / "store"
        self.store.mkdir()
        self.lake = folder / "lake"
        self.file = folder / "pipeline.yaml"
        sections = {
            "name": "slate",
            "source": {"type": "slatedb", "path": "db1", "store": {"type": "local", "path": str(self.store)}, **source},
            "tables": MAPPING,
            "destination": {"type": "delta", "path": str(self.lake)},
            "state": str(folder / "state"),
            "spark": {"master": "local[2]"},
        }
        self.file.write_text(yaml.safe_dump(sections))
        self._writers: list[subprocess.Popen[str]] = []

    def close(self) -> None:
        """End the writers that a failed test has left."""
        for writer in self._writers:
            writer.kill()
            writer.communicate()

    def write(self, seed: int, writes: int = 0, min_age: str = "300s") -> subprocess.Popen[str]:
        """A writer as a process; without a number of writes it goes on until it is killed or fenced."""
        program = [sys.executable, "-m", "tests.support.slatedb_traffic"]
        arguments = [*program, str(self.store), str(seed), str(writes), min_age]
        writer = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._writers.append(writer)
        return writer

    def in_lake(self) -> dict[bytes, tuple[Any, ...]]:
        rows: dict[bytes, tuple[Any, ...]] = {}
        for name in ("db1", "counter", "user"):
            for row in DeltaTable(str(self.lake / "slatedb" / name)).to_pyarrow_table().to_pylist():
                key, value = _encoded(name, row)
                assert key not in rows
                rows[key] = (value, row["seq"])
        return rows

    def in_store(self) -> dict[bytes, tuple[Any, ...]]:
        found = scan(SlateDbDatabase("db1", ObjectStore("local", str(self.store))), int(time.time() * 1000), FOLDS)
        return {key: (value, seq) for key, value, seq, _ in found.values()}


@pytest.fixture
def make_scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    """`make_scene(**source)` is a pipeline with these keys of `source` next to path and store."""
    with ExitStack() as made:

        def make(**source: Any) -> Scene:
            return made.enter_context(closing(Scene(tmp_path, **source)))

        yield make


def _encoded(table: str, row: dict[str, Any]) -> tuple[bytes, bytes]:
    if table == "counter":
        return b"c:" + row["key"].encode(), struct.pack(">q", row["value"])
    if table == "user":
        value = b'{"name": "%s", "age": %d}' % (row["name"].encode(), row["age"])
        return b"u:" + struct.pack(">Q", int(row["id"])), value
    return row["key"], row["value"]


def some_writes(writer: subprocess.Popen[str], lines: int = 3) -> None:
    assert writer.stdout is not None
    for _ in range(lines):
        assert writer.stdout.readline(), writer.stderr and writer.stderr.read()


def end(writer: subprocess.Popen[str]) -> int:
    writer.communicate()
    return writer.returncode


def let_short_rows_expire(scene: Scene) -> None:
    last = time.monotonic() + SHORT_MILLIS / 1000
    wait_until(lambda: time.monotonic() > last)
    assert scene.in_store()


def test_lake_and_store_are_equal_after_crashed_reopened_and_fenced_writers_and_a_killed_pipeline(
    tmp_path: Path, make_scene: Callable[..., Scene]
) -> None:
    # While it runs it keeps what the writers' collectors delete; while it is down, no one does.
    scene = make_scene(keep_wal=str(tmp_path / "kept"), on_collected="resnapshot")
    first = scene.write(1, min_age="4s")
    some_writes(first, 10)
    with RunningPipeline(scene.file) as run:
        run.wait_until(all_ready)
        some_writes(first)
        first.kill()
        end(first)
        second = scene.write(2, min_age="4s")
        some_writes(second)
        third = scene.write(3, min_age="4s")
        some_writes(third)
        # The one that was fenced ends by itself at its next write.
        assert end(second) != 0
        # The writer's own collector deletes what the pipeline has kept; fence files it leaves alone.
        early = scene.store / "db1" / "wal" / f"{2:020}.sst"
        wait_until(lambda: not early.exists())
        run.kill()
    with RunningPipeline(scene.file) as run:
        run.wait_until(all_ready)
        some_writes(third)
        third.kill()
        end(third)
        last = scene.write(4, writes=500, min_age="4s")
        assert end(last) == 0
        run.kill()
    let_short_rows_expire(scene)
    apply(scene.file)
    assert scene.in_lake() == scene.in_store()


def test_a_pipeline_killed_when_its_copy_begins_loses_nothing_and_a_collected_log_needs_a_new_snapshot(
    make_scene: Callable[..., Scene],
) -> None:
    scene = make_scene()
    assert end(scene.write(0, writes=400)) == 0
    with RunningPipeline(scene.file, once=True, failpoints="slatedb.checkpoint:kill") as run:
        assert run.wait() == -signal.SIGKILL
    for seed in (1, 2):
        assert end(scene.write(seed, writes=400)) == 0
        let_short_rows_expire(scene)
        apply(scene.file)
        assert scene.in_lake() == scene.in_store()

    with Writer(scene.store, TABLES) as writer:
        for number in range(5):
            writer.put(b"unread%d" % number, b"")
            writer.flush()
        writer.collect()
    refused = invoke("run", scene.file, "--once")
    assert refused.exit_code == 6, refused.output
    assert "re-snapshot" in refused.output
    for table in ("slatedb.db1", "slatedb.counter", "slatedb.user"):
        assert invoke("resync", scene.file, table).exit_code == 0
    apply(scene.file)
    assert scene.in_lake() == scene.in_store()
