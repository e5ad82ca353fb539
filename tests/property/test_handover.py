"""Copy, hand-over and log on a real server, without Spark, with crashes between any two steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.postgres.source import PostgresSource
from tailrace.testing.replay import SourceReplay
from tests.support.database import PostgresDatabase
from tests.support.source_making import make_postgres

TABLES = """
CREATE TABLE plain (id int PRIMARY KEY, v text, n numeric(12,2), at timestamptz);
CREATE TABLE pair (a text, b int, v text, PRIMARY KEY (a, b));
CREATE TABLE big (id int PRIMARY KEY, v int, blob text);
ALTER TABLE big ALTER blob SET STORAGE EXTERNAL;
CREATE TABLE whole (id int PRIMARY KEY, v text, blob text);
ALTER TABLE whole ALTER blob SET STORAGE EXTERNAL;
ALTER TABLE whole REPLICA IDENTITY FULL;
CREATE TABLE known (id int PRIMARY KEY, code text NOT NULL UNIQUE, v text, blob text);
ALTER TABLE known ALTER blob SET STORAGE EXTERNAL;
ALTER TABLE known REPLICA IDENTITY USING INDEX known_code_key;
CREATE TABLE bag (v text);
CREATE TABLE fullbag (v text, w int);
ALTER TABLE fullbag REPLICA IDENTITY FULL;
CREATE TABLE parted (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE parted_eu PARTITION OF parted FOR VALUES IN ('eu');
CREATE TABLE parted_us PARTITION OF parted FOR VALUES IN ('us');
"""
Contents = Mapping[str, Counter[tuple[Any, ...]]]
NAMES = ("plain", "pair", "big", "whole", "known", "bag", "fullbag", "parted")


class Writer:
    """Random transactions on the tables above."""

    def __init__(self, connection: psycopg.Connection[Any], random: random.Random) -> None:
        self.connection = connection
        self.random = random

    def load(self, rows: int) -> None:
        run = self.connection.execute
        run("INSERT INTO plain SELECT i, 'v' || i, i * 1.25, now() FROM generate_series(1, %s) i", [rows])
        run("INSERT INTO pair SELECT 'k' || i %% 7, i, 'v' FROM generate_series(1, %s) i", [rows])
        run("INSERT INTO big SELECT i, i, repeat(md5(i::text), 100) FROM generate_series(1, %s) i", [rows // 4])
        run("INSERT INTO whole SELECT i, 'v', repeat(md5(i::text), 100) FROM generate_series(1, %s) i", [rows // 4])
        run(
            "INSERT INTO known SELECT i, 'c' || i, 'v', repeat(md5(i::text), 100) FROM generate_series(1, %s) i",
            [rows // 4],
        )
        run("INSERT INTO bag SELECT 'b' || i %% 10 FROM generate_series(1, %s) i", [rows])
        run("INSERT INTO fullbag SELECT 'b' || i %% 10, i FROM generate_series(1, %s) i", [rows])
        run(
            "INSERT INTO parted SELECT i, CASE WHEN i %% 2 = 0 THEN 'eu' ELSE 'us' END, 'v'"
            " FROM generate_series(1, %s) i",
            [rows],
        )

    def transaction(self) -> None:
        with self.connection.transaction(force_rollback=self.random.random() < 0.1):
            for _ in range(self.random.randint(1, 6)):
                self.statement()

    def statement(self) -> None:
        run, k = self.connection.execute, self.random.randint(1, 400)
        table = self.random.choice(["plain", "big", "whole"])
        match self.random.randint(0, 12):
            case 12:
                # Known by another column than its primary key, which changes as well.
                run("UPDATE known SET id = id + 30000, v = 'm' WHERE id = %s", [k % 100])
                run("UPDATE known SET code = code || 'x' WHERE id %% 50 = %s", [k % 50])
                run("DELETE FROM known WHERE code = %s", [f"c{(k + 3) % 100}"])
                run("INSERT INTO known VALUES (%s, %s, 'new', NULL) ON CONFLICT DO NOTHING", [k, f"n{k}"])
            case 0:
                run("INSERT INTO plain VALUES (%s, 'new', 1.5, now()) ON CONFLICT (id) DO UPDATE SET v = 'again'", [k])
            case 1:
                run(f"DELETE FROM {table} WHERE id = %s", [k])
            case 2:
                run("UPDATE plain SET n = n + 1, v = NULL WHERE id BETWEEN %s AND %s + 20", [k, k])
            case 3:
                # The large value is not sent again: it must be found where it was.
                run("UPDATE big SET v = v + 1 WHERE id BETWEEN %s AND %s + 5", [k % 100, k % 100])
                run("UPDATE whole SET v = v || 'x' WHERE id BETWEEN %s AND %s + 5", [k % 100, k % 100])
            case 4:
                # A new key for a row whose large value stays.
                run(f"UPDATE {table} SET id = id + 10000 WHERE id = %s", [k % 100])
            case 5:
                a, b = k % 100, (k + 7) % 100
                run("UPDATE big SET id = -1 WHERE id = %s", [a])
                run("UPDATE big SET id = %s WHERE id = %s", [a, b])
                run("UPDATE big SET id = %s WHERE id = -1", [b])
                run("UPDATE big SET id = %s WHERE id = -1", [k + 20000])
            case 6:
                run("INSERT INTO bag VALUES ('b1'), ('b1'), ('c')")
            case 7:
                run("UPDATE fullbag SET v = 'u' WHERE w = %s", [k])
                run("DELETE FROM fullbag WHERE w = %s", [k + 1])
                run("INSERT INTO fullbag VALUES ('b', %s)", [k])
            case 8:
                run("UPDATE parted SET region = CASE region WHEN 'eu' THEN 'us' ELSE 'eu' END WHERE id = %s", [k])
            case 9:
                run("UPDATE pair SET b = b + 1000 WHERE b BETWEEN %s AND %s + 3", [k, k])
            case 10 if self.random.random() < 0.1:
                run("TRUNCATE pair, parted")
            case _:
                run("UPDATE big SET blob = repeat(md5(%s::text), 100) WHERE id = %s", [k, k % 100])


def contents(connection: psycopg.Connection[Any]) -> dict[str, Counter[tuple[Any, ...]]]:
    return {
        f"public.{name}": Counter(tuple(row) for row in connection.execute(f"SELECT * FROM {name}")) for name in NAMES
    }


def differences(lake: Contents, source: Contents) -> dict[str, tuple[int, int, list[Any]]]:
    """Per table that differs, how many rows are only in the lake, only in the source, and the start of a few."""
    found = {}
    for name in lake.keys() | source.keys():
        extra, missing = lake.get(name, Counter()) - source[name], source[name] - lake.get(name, Counter())
        if extra or missing:
            some = [str(row)[:60] for row in [*list(extra)[:3], *list(missing)[:3]]]
            found[name] = (extra.total(), missing.total(), some)
    return found


def make_source(database: PostgresDatabase, path: Path) -> PostgresSource:
    return make_postgres(
        database.dsn,
        path,
        "soak",
        TableOptions(include=["public.*"]),
        slot=f"soak_{database.name}",
        journal={"segment_bytes": 1_000_000},
        copying={"chunk_bytes": 16 * 8192},
        heartbeat=None,
    )


@pytest.mark.parametrize("seed", range(4))
def test_source_and_destination_are_equal_after_crashes_at_random_steps(
    seed: int, database: PostgresDatabase, tmp_path: Path
) -> None:
    with closing(database.connect()) as connection:
        run(seed, connection, make_source(database, tmp_path))


def run(seed: int, connection: psycopg.Connection[Any], source: PostgresSource) -> None:
    chance = random.Random(seed)
    connection.execute(TABLES)
    writer = Writer(connection, chance)
    writer.load(chance.choice([0, 60, 900]))
    # A small budget makes many batches, so that there is much between them.
    limit = Limit(rows=chance.choice([50, 5000]), bytes=chance.choice([200_000, 64_000_000]))
    with SourceReplay(source, limit) as replay:
        requests = 0
        for _ in range(40):
            for _ in range(chance.randint(0, 4)):
                writer.transaction()
            replay.live(chance.choice(["plan", "half", "write", "commit", *["never"] * 4]))
            if chance.random() < 0.1 and replay.offset and replay.offset["tables"]:
                requests += 1
                replay.directives = TableDirectives(resync={chance.choice(list(replay.offset["tables"])): requests})
        replay.catch_up()
    assert not differences(replay.contents(), contents(connection))
