"""How polled tables share a batch: none of them keeps the others waiting."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from tailrace.source.follower import Limit
from tailrace.source.poll.consumer import PollConsumer
from tailrace.source.poll.source import PollSource
from tailrace.source.poll.watermark import MemoryWatermarks
from tailrace.testing.replay import SourceReplay
from tests.support.database import PostgresDatabase

LIMIT = Limit(rows=20, bytes=1 << 30)
"""Two chunks."""


@pytest.fixture(autouse=True)
def new_tables_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.source.poll.follower.DISCOVERY_SECONDS", 0.0)


def create(database: PostgresDatabase, name: str, rows: int) -> None:
    database.run(
        f"CREATE TABLE {name} (id int PRIMARY KEY, v int, updated_at timestamptz)",
        f"INSERT INTO {name} SELECT i, 0, now() FROM generate_series(1, {rows}) i",
        f"ANALYZE {name}",
    )


def test_small_tables_are_copied_in_the_first_batches_next_to_a_huge_one_that_comes_first(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    create(database, "a_huge", 200)
    for name in ("b_small", "c_small", "d_small"):
        create(database, name, 3)
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.step()
        assert replay.tables.keys() == {"public.b_small", "public.c_small", "public.d_small"}
        replay.step()
        create(database, "e_late", 3)
        replay.step()
        assert "public.e_late" in replay.tables
        assert "public.a_huge" in replay.copies
        replay.catch_up()
        assert sum(replay.contents()["public.a_huge"].values()) == 200


def test_tables_are_polled_while_a_huge_one_is_copied(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    create(database, "b_busy", 3)
    with SourceReplay(make_source(), LIMIT) as replay:
        replay.catch_up()
        create(database, "a_huge", 200)
        replay.step()
        database.run("UPDATE b_busy SET v = 1, updated_at = now()")
        replay.step()
        assert "public.a_huge" in replay.copies
        assert {row["v"] for row in replay.tables["public.b_busy"].rows.values()} == {1}


def test_busy_tables_that_fill_a_batch_take_turns(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    names = ["a", "b", "c", "d"]
    for name in names:
        create(database, name, 50)
    with SourceReplay(make_source(look_back=0.0), LIMIT) as replay:
        replay.catch_up()
        for name in names:
            database.run(f"UPDATE {name} SET v = 1, updated_at = now()")
        replay.step()
        replay.step()
        changed = {name: sum(row["v"] for row in replay.tables[f"public.{name}"].rows.values()) for name in names}
        assert min(changed.values()) > 0, changed


def test_no_more_queries_reach_the_server_than_allowed(
    database: PostgresDatabase, make_source: Callable[..., PollSource]
) -> None:
    limit, own = 6.0, 5
    for number in range(8):
        create(database, f"t{number}", 5)
    database.run(f"ALTER DATABASE {database.name} SET log_statement = 'all'")
    log = database.server.data_dir / "server.log"
    before, began = len(log.read_bytes()), time.monotonic()
    with PollConsumer(make_source(max_queries_per_second=limit), MemoryWatermarks()) as consumer:
        for _ in range(2):
            assert consumer.wait(30)
            assert sum(len(changes) for changes in consumer.poll())
            consumer.commit()
            database.run("UPDATE t0 SET v = v + 1, updated_at = now()")
    seconds = time.monotonic() - began
    logged = log.read_bytes()[before:].decode()
    queries = re.findall(r"(?:statement|execute [^:]*): (?:COPY|SELECT|EXPLAIN|WITH)", logged)
    assert len(queries) > 50
    assert len(queries) <= limit * seconds + own, f"{len(queries)} queries in {seconds:.1f} s"
