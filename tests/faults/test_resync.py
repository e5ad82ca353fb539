"""A resync next to tables that are written to all the time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import psycopg

from tailrace.source.postgres.offset import PostgresOffset
from tailrace.state import BatchRecord, SqliteStore, TableState
from tests.support.database import PostgresDatabase
from tests.support.postgres_to_delta import Following
from tests.support.scenario import Scenario

OTHERS = ("north", "east", "south", "west")


@contextmanager
def writing(dsn: str) -> Iterator[None]:
    """A thread that changes every table, over and over, until the end of the block."""
    stopping = threading.Event()
    errors: list[Exception] = []

    def write() -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                turn = 0
                while not stopping.wait(0.01):
                    turn += 1
                    for table in (*OTHERS, "large"):
                        key = turn % 500
                        connection.execute(f"UPDATE {table} SET v = %s WHERE id = %s".encode(), [f"turn {turn}", key])
        except psycopg.Error as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
    assert errors == []


def test_a_resync_of_one_table_of_five_under_load_holds_up_no_batch_of_the_others(
    database: PostgresDatabase, make_scenario: Callable[..., Scenario]
) -> None:
    # One chunk a batch, so that the copy takes many.
    scenario = make_scenario(
        database.dsn, source={"copy": {"chunk_bytes": "1 MB"}}, batch={"max_bytes": "1 MB", "interval": "100ms"}
    )
    scenario.sql(
        *(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)" for name in OTHERS),
        *(f"INSERT INTO {name} SELECT i, '' FROM generate_series(1, 500) i" for name in OTHERS),
        "CREATE TABLE large (id int PRIMARY KEY, v text, filler text)",
        "INSERT INTO large SELECT i, '', repeat(md5(i::text), 30) FROM generate_series(1, 9000) i",
    )
    with Following(scenario) as following:
        following.catch_up()
        first_copy = len(batches(scenario))
        large = following.oid("large")
        ids = {int(following.oid(name)) for name in OTHERS}
        with writing(scenario.dsn):
            scenario.execute("resync", "public.large")
            following.run.wait_until(lambda status: not status.requests)
            following.wait_for(large, lambda record: record.state is TableState.READY)
        following.catch_up()
        following.require_same()

    resynced = [PostgresOffset.from_json(batch.offset) for batch in batches(scenario)[first_copy:]]
    copying = [offset for offset in resynced if offset.tables[int(large)].phase == "copy"]
    assert len(copying) >= 5
    for before, after in pairwise(copying):
        # Every batch of the copy brings all the others up to the log, and the log itself further.
        assert all(after.tables[oid].phase == "ready" for oid in ids)
        assert after.log > before.log


def batches(scenario: Scenario) -> list[BatchRecord]:
    """Every batch there was, oldest first."""
    with SqliteStore("shop", scenario.state).open_reading() as store:
        return store.recent_batches(1000)[::-1]
