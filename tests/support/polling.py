"""What tests of a polled server share: a table, and what came of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tailrace.model.change import Op
from tailrace.source.follower import Limit
from tailrace.testing.replay import SourceReplay
from tests.support.database import PostgresDatabase

LIMIT = Limit(rows=100_000, bytes=1 << 30)
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text, updated_at timestamptz, created_at timestamptz)"
Contents = Counter[tuple[Any, ...]]


def contents(database: PostgresDatabase, where: str = "true") -> Contents:
    return Counter(database.rows(f"SELECT * FROM t WHERE {where}"))


def operations(replay: SourceReplay) -> list[tuple[Op, int]]:
    """The operations of the batch that is planned, with the keys they are for."""
    assert replay.offset is not None
    assert replay.planned is not None
    found = []
    for split in replay.follower.plan(replay.offset, replay.planned):
        for changes in replay.source.read(split):
            found += [(Op(one["op"]), one["row"]["id"]) for one in changes.batch.to_pylist()]
    return found
