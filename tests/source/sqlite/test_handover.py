"""Copy, hand-over and log of real files, without Spark, with DDL, resyncs, and crashes between any two steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tailrace.source.follower import Limit, TableDirectives
from tailrace.testing.replay import SourceReplay
from tests.support.sqlite_application import KINDS, Application, Kind, Traffic, differences, held, make_source


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_file_and_destination_are_equal_after_crashes_at_random_steps(seed: int, kind: Kind, tmp_path: Path) -> None:
    run(seed, kind, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_a_capture_of_ids_and_old_rows_ends_up_the_same(seed: int, kind: Kind, tmp_path: Path) -> None:
    run(seed, kind, tmp_path, mode="before", ddl=False)


def run(seed: int, kind: Kind, folder: Path, *, mode: str = "full", ddl: bool = True) -> None:
    chance = random.Random(seed)
    application = Application(folder / "app.db", kind, mode)
    traffic = Traffic(application, chance, ddl=ddl)
    # Some rows are older than the capture.
    traffic.load(chance.choice([0, 30, 120]))
    application.capture()
    limit = Limit(rows=chance.choice([5, 60, 5000]), bytes=chance.choice([20_000, 64_000_000]))
    with SourceReplay(make_source(application, folder), limit) as replay:
        requests = 0
        for _ in range(30):
            for _ in range(chance.randint(0, 3)):
                traffic.transaction()
            replay.live(chance.choice(["plan", "half", "write", "commit", *["never"] * 4]))
            settled = replay.planned is None and not replay.stale
            if chance.random() < 0.1 and settled and replay.offset and replay.offset["tables"]:
                requests += 1
                replay.directives = TableDirectives(resync={chance.choice(list(replay.offset["tables"])): requests})
        replay.catch_up()
        assert not differences(held(replay.tables), application.contents())
    application.close()
