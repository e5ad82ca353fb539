"""Copying tables share batches: a huge one does not keep small ones waiting."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tailrace.source.follower import Limit
from tailrace.source.journal_log import FrameSplit
from tailrace.source.postgres.frame_builder import FrameMeta
from tailrace.source.split import Split
from tailrace.stream.data_source import LogPartition, spread
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.postgres_receiving import arrived, make_source

CHUNK_BYTES = 16 * 8192
SMALL = 30

pytestmark = pytest.mark.server


def test_small_tables_are_ready_long_before_a_huge_one_with_a_lower_oid(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    database.run(
        "CREATE TABLE huge (id int PRIMARY KEY, v text)",
        "INSERT INTO huge SELECT n, repeat('x', 400) FROM generate_series(1, 20000) n",
        *(f"CREATE TABLE small{number} (id int PRIMARY KEY)" for number in range(SMALL)),
        *(f"INSERT INTO small{number} SELECT generate_series(1, {number})" for number in range(SMALL)),
    )
    source = make_source(database, tmp_path, "public.*", copying={"chunk_bytes": CHUNK_BYTES})
    with SourceReplay(source, Limit(1_000_000, 2 * CHUNK_BYTES)) as replay, closing(database.connect()) as session:
        [[huge]] = session.execute("SELECT 'huge'::regclass::oid::int8").fetchall()

        def phases() -> dict[str, str]:
            replay.step()
            return {oid: entry["phase"] for oid, entry in (replay.offset or {})["tables"].items()}

        def small_are_ready() -> bool:
            found = phases()
            return len(found) == SMALL + 1 and all(found[oid] == "ready" for oid in found if oid != str(huge))

        wait_until(small_are_ready)
        assert phases()[str(huge)] == "copy"
        assert replay.batch < 20  # with its 66 chunks first, the huge table alone would take 33
        replay.catch_up()
        assert len(replay.contents()["public.huge"]) == 20000
        assert {len(replay.contents()[f"public.small{number}"]) for number in range(1, SMALL)} == set(range(1, SMALL))


def test_a_block_carries_the_tables_of_its_lane_and_reads_the_same_changes(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    tables = 40
    database.run(*(f"CREATE TABLE t{number} (id int PRIMARY KEY, v text)" for number in range(tables)))
    source = make_source(database, tmp_path, "public.*")
    with SourceReplay(source, Limit(1_000_000, 64_000_000)) as replay, closing(database.connect()) as session:
        replay.catch_up()
        session.execute(" ".join(f"INSERT INTO t{number} VALUES ({number}, 'v');" for number in range(tables)).encode())
        arrived(session, source)
        wait_until(replay.plan)
        assert replay.offset is not None
        assert replay.planned is not None
        splits = replay.follower.plan(replay.offset, replay.planned)
        whole = {str(changes.table.table): len(changes) for split in splits for changes in source.read(split)}
        assert len(whole) == tables
        lanes = spread(splits, 8)
        found: dict[str, int] = {}
        for part in _by_lane(LogPartition(splits, lanes)):
            assert isinstance(part, FrameSplit)
            for ref in part.frames:
                meta = FrameMeta.from_bytes(ref.meta)
                assert meta.rows.keys() <= part.ranges.keys()
                assert not meta.relations
            found |= {str(changes.table.table): len(changes) for changes in source.read(part)}
        assert found == whole


def _by_lane(partition: LogPartition) -> list[Split]:
    return [
        split.only([table for table in split.weights if partition.lanes[table] == lane])
        for split in partition.splits
        for lane in {partition.lanes[table] for table in split.weights}
    ]
