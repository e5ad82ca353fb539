"""A full diff is spread over tasks: each compares a stretch, and the lane of the table reads what all of them found."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tailrace.destination import Destination
from tailrace.destination.delta.destination import DeltaDestination
from tailrace.errors import TableError
from tailrace.model.change import Changes, Op
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.poll.diff import NewcomerSplit
from tailrace.stream.block import LOG, Pickled, rows_of
from tailrace.stream.data_source import BlockReader, Feed, LogPartition, ScanPartition
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.source_making import make_polled, with_options, with_tables

LIMIT = Limit(rows=100_000, bytes=1 << 30)
ROWS = 50


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def run(*statements: str) -> None:
        with closing(sqlite3.connect(tmp_path / "app.db", isolation_level=None)) as app:
            for statement in statements:
                app.execute(statement)

    return run


@pytest.fixture
def replay(tmp_path: Path, run: Callable[..., None]) -> SourceReplay:
    """A table that was copied, and of which every cycle asks for a full diff."""
    run(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, updated_at TEXT)",
        *(f"INSERT INTO t VALUES ({key}, 'v', '2001-01-01')" for key in range(ROWS)),
    )
    tables = TableOptions.model_validate(
        {"defaults": {"updated_at": "updated_at", "deletes": {"full_diff": {"every_cycles": 1}}}}
    )
    dsn = f"sqlite:///{tmp_path}/app.db"
    source = make_polled(dsn, tmp_path, tables, chunk_rows=10, interval=1e-6, idle_interval=30.0)
    replay = SourceReplay(source, LIMIT)
    replay.catch_up()
    return replay


def partitions_of(replay: SourceReplay, lake: Path) -> tuple[BlockReader, list[Any]]:
    wait_until(replay.plan)
    assert replay.offset is not None
    assert replay.planned is not None
    destination: Destination = DeltaDestination(path=str(lake))
    reader = BlockReader(Feed(replay.source, LIMIT, lanes=2, destination=Pickled.of(destination)))
    reader._follower = replay.follower
    return reader, list(reader.partitions(replay.offset, replay.planned))


def found_by(reader: BlockReader, partitions: list[Any]) -> list[Changes]:
    """What the lane reads: every row that crosses Spark is a reference."""
    rows = [row for each in partitions for batch in reader.read(each) for row in rows_of(batch)]
    assert all(row.kind == LOG for row in rows)
    rows.sort(key=lambda row: row.first)
    return [changes for row in rows for changes in reader.feed.source.read(row.log())]


def test_every_stretch_of_keys_is_a_task_of_its_own(
    replay: SourceReplay, run: Callable[..., None], tmp_path: Path
) -> None:
    run("DELETE FROM t WHERE id IN (3, 33)", "UPDATE t SET v = 'w' WHERE id IN (4, 44)")
    reader, partitions = partitions_of(replay, tmp_path / "lake")
    assert len(partitions) == ROWS // 10 + 2  # the chunks of the copy, what comes after the last, and polled keys
    assert all(isinstance(each, ScanPartition) for each in partitions)
    found = found_by(reader, partitions)
    positions = [one.first for one in found]
    assert positions == sorted(positions)
    operations = [(Op(one["op"]), one["row"]["id"]) for changes in found for one in changes.batch.to_pylist()]
    assert sorted(operations) == [(Op.UPDATE, 4), (Op.UPDATE, 44), (Op.DELETE, 3), (Op.DELETE, 33)]
    replay.write()
    replay.commit()
    assert replay.contents()["main.t"].total() == ROWS - 2
    assert not list((tmp_path / "poll").rglob("found-*"))


def test_a_task_that_is_repeated_leaves_the_same_to_be_read(
    replay: SourceReplay, run: Callable[..., None], tmp_path: Path
) -> None:
    run("DELETE FROM t WHERE id = 3")
    reader, partitions = partitions_of(replay, tmp_path / "lake")
    first, second = (found_by(reader, partitions) for _ in range(2))
    assert [one.batch for one in first] == [one.batch for one in second]


def test_a_table_that_cannot_be_compared_fails_where_it_is_written_and_not_before(
    replay: SourceReplay, run: Callable[..., None], tmp_path: Path
) -> None:
    reader, partitions = partitions_of(replay, tmp_path / "lake")
    run("DROP TABLE t")
    rows = [row for each in partitions for batch in reader.read(each) for row in rows_of(batch)]
    assert len(rows) == len(partitions)
    for row in rows[1:]:
        with pytest.raises(TableError, match="no longer there") as caught:
            list(reader.feed.source.read(row.log()))
        assert caught.value.table == "main.t"


def test_keys_that_polls_brought_are_shared_out_when_they_are_many(
    replay: SourceReplay, run: Callable[..., None], tmp_path: Path
) -> None:
    replay.source = with_tables(replay.source, _every(3))
    replay.crash()
    run(*(f"INSERT INTO t VALUES ({key}, 'new', datetime('now'))" for key in range(100, 135)))
    assert replay.step()
    run("DELETE FROM t WHERE id >= 100 AND id % 2 = 0")
    while True:
        reader, partitions = partitions_of(replay, tmp_path / "lake")
        if isinstance(partitions[0], ScanPartition):
            break
        replay.write()
        replay.commit()
    shares = [each for each in partitions if isinstance(each.scan.piece, NewcomerSplit)]
    assert len(shares) == 4
    gone = [one["row"]["id"] for changes in found_by(reader, partitions) for one in changes.batch.to_pylist()]
    assert sorted(gone) == list(range(100, 135, 2))


def test_a_table_that_was_empty_when_it_was_copied_is_compared_by_several_tasks_when_it_has_grown(
    replay: SourceReplay, run: Callable[..., None], tmp_path: Path
) -> None:
    replay.source = with_tables(replay.source, _every(3))
    replay.crash()
    run("DELETE FROM t")
    assert replay.offset is not None
    [table] = replay.offset["tables"]
    replay.directives = TableDirectives(resync={table: 1})
    replay.catch_up()
    run(*(f"INSERT INTO t VALUES ({key}, 'new', datetime('now'))" for key in range(35)))
    while True:
        _, partitions = partitions_of(replay, tmp_path / "lake")
        assert replay.planned is not None
        if replay.planned["tables"][table]["reading"]["kind"] == "diff":
            break
        replay.write()
        replay.commit()
    assert len(partitions) > 2
    assert all(isinstance(each, ScanPartition) for each in partitions)


def test_a_small_table_is_compared_by_the_task_that_writes_it(
    replay: SourceReplay, run: Callable[..., None], tmp_path: Path
) -> None:
    run("DELETE FROM t WHERE id >= 5")
    for _ in range(2):
        replay.catch_up()
    replay.source = with_options(replay.source, chunk_rows=100)
    assert replay.offset is not None
    [table] = replay.offset["tables"]
    replay.directives = TableDirectives(resync={table: 1})
    replay.catch_up()
    run("DELETE FROM t WHERE id = 3")
    reader, partitions = partitions_of(replay, tmp_path / "lake")
    assert [type(each) for each in partitions] == [LogPartition]
    [changes] = found_by(reader, partitions)
    assert [(Op(one["op"]), one["row"]["id"]) for one in changes.batch.to_pylist()] == [(Op.DELETE, 3)]


def _every(cycles: int) -> TableOptions:
    deletes = {"full_diff": {"every_cycles": cycles}}
    return TableOptions.model_validate({"defaults": {"updated_at": "updated_at", "deletes": deletes}})
