"""Random schema changes among random rows, on a real server, with crashes between any two steps."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.postgres import event_trigger
from tailrace.testing.replay import SourceReplay
from tests.support.database import PostgresDatabase
from tests.support.schema_changer import Changer
from tests.support.source_making import make_postgres


def contents(connection: psycopg.Connection[Any], names: list[str]) -> dict[str, Counter[tuple[Any, ...]]]:
    existing = [name for name in names if connection.execute("SELECT to_regclass(%s)", [name]).fetchone() != (None,)]
    return {
        f"public.{name}": Counter(tuple(row) for row in connection.execute(f"SELECT * FROM {name}"))
        for name in existing
    }


@pytest.mark.parametrize("trigger", [True, False], ids=["event trigger", "relation messages"])
@pytest.mark.parametrize("seed", range(3))
def test_source_and_destination_are_equal_after_random_schema_changes_and_crashes(
    seed: int, trigger: bool, database: PostgresDatabase, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    source = make_postgres(
        database.dsn,
        tmp_path,
        "soak",
        TableOptions(include=["public.*"]),
        slot=f"soak_{database.name}",
        journal={"segment_bytes": 1_000_000},
        copying={"chunk_bytes": 2 * 8192},
        heartbeat=None,
    )
    limit = Limit(rows=chance.choice([50, 5000]), bytes=chance.choice([200_000, 64_000_000]))
    with closing(database.connect()) as connection, SourceReplay(source, limit) as replay:
        changer = Changer(connection, chance, trigger=trigger)
        if trigger:
            event_trigger.install(connection)
        requests = 0
        for _ in range(30):
            for _ in range(chance.randint(0, 4)):
                changer.transaction()
            replay.live(chance.choice(["plan", "half", "write", "commit", *["never"] * 4]))
            if chance.random() < 0.05 and replay.offset and replay.offset["tables"]:
                requests += 1
                replay.directives = TableDirectives(resync={chance.choice(list(replay.offset["tables"])): requests})
        changer.touch_all()
        replay.catch_up()
        expected = contents(connection, changer.names())
    lake = replay.contents()
    for name, rows in expected.items():
        assert lake[name] == rows, name
