"""An executor that comes later asks itself, before its first task, whether it sees what the driver sees."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailrace.destination import Batch, Stage
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.errors import PreflightError
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.stream import executor_check
from tailrace.stream.data_source import BlockReader, Feed, LogPartition
from tailrace.stream.executor_check import OPEN_GATE, ExecutorGate, kept_gate
from tailrace.stream.micro_batch import Applier
from tests.support.source_making import make_sqlite

MASTER = "spark://head:7077"


@pytest.fixture(autouse=True)
def another_process() -> Iterator[None]:
    """Nothing was asked yet."""
    executor_check._require_seen.cache_clear()
    yield
    executor_check._require_seen.cache_clear()


def tokens(folder: Path) -> list[Path]:
    return sorted(folder.glob(".tailrace-seen-*"))


def elsewhere(gate: ExecutorGate, seen: Callable[[str], str]) -> ExecutorGate:
    """The gate on a machine that has other folders at the same paths."""
    found: ExecutorGate = pickle.loads(pickle.dumps(gate))
    return ExecutorGate(found.version, found.folders, {key: seen(path) for key, path in found.tokens.items()})


def test_a_process_that_sees_the_folders_passes_and_one_that_does_not_names_the_folder(tmp_path: Path) -> None:
    lake, local = tmp_path / "lake", tmp_path / "another machine"
    lake.mkdir()
    local.mkdir()
    with kept_gate(MASTER, "shop", {"destination.path": lake}, is_new=False) as gate:
        pickle.loads(pickle.dumps(gate)).require()
        late = elsewhere(gate, lambda path: str(local / Path(path).name))
        with pytest.raises(PreflightError, match="does not see") as caught:
            late.require()
        assert str(lake) in caught.value.message
        assert "`destination.path`" in caught.value.message
        assert len(tokens(lake)) == 1
    assert tokens(lake) == []


def test_a_process_with_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"the driver 0\.0\.1"):
        ExecutorGate("0.0.1", {"state": tmp_path}).require()


def test_the_lake_of_a_new_pipeline_is_made_and_the_missing_lake_of_another_is_not(tmp_path: Path) -> None:
    lake = tmp_path / "a" / "lake"
    with kept_gate(MASTER, "shop", {"destination.path": lake}, is_new=False) as gate:
        assert not gate.folders
        gate.require()
        assert not lake.exists()
    with kept_gate(MASTER, "shop", {"destination.path": lake}, is_new=True) as gate:
        assert list(gate.folders) == ["destination.path"]
        gate.require()
    assert list(lake.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_what_others_have_there_stays(tmp_path: Path) -> None:
    left = [tmp_path / f".tailrace-seen-{name}-{'0' * 32}" for name in ("shop", "shop-2")]
    for path in left:
        path.touch()
    with kept_gate(MASTER, "shop", {"state": tmp_path}, is_new=False):
        assert [path.exists() for path in left] == [False, True]
        assert len(tokens(tmp_path)) == 2


def test_where_all_tasks_run_on_one_machine_nothing_is_asked(tmp_path: Path) -> None:
    with kept_gate("local[2]", "shop", {"state": tmp_path}, is_new=True) as gate:
        assert gate is OPEN_GATE
        assert tokens(tmp_path) == []
        gate.require()


def test_no_task_reads_or_writes_before_its_process_has_passed(tmp_path: Path) -> None:
    closed = ExecutorGate(folders={"state": tmp_path}, tokens={"state": str(tmp_path / "not there")})
    source = make_sqlite(tmp_path / "never-opened.db", tmp_path, TableOptions())
    reader = BlockReader(Feed(source, Limit(1, 1), lanes=1, gate=closed))
    with pytest.raises(PreflightError, match="does not see"):
        next(iter(reader.read(LogPartition([], {}))))
    applier = Applier(source, DeltaDestination(path=str(tmp_path / "lake")), 1, Stage(tmp_path / "staged"), gate=closed)
    with pytest.raises(PreflightError, match="does not see"):
        next(applier.run(iter(()), Batch("p", 0)))
