"""What thousands of tables cost the planner grows with their number, and no faster."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tailrace.demo.server import EmbeddedPostgres
from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.postgres.catalog import STORAGE
from tailrace.testing.replay import SourceReplay
from tests.support.database import PostgresDatabase
from tests.support.source_making import make_postgres

FEW, MANY = 20, 80


def calls_to_begin_copies(database: PostgresDatabase, folder: Path, tables: int) -> Counter[str]:
    """How often each function is called, by its name, by the call that begins to copy all these tables."""
    database.run(*(f"CREATE TABLE t{number} (id int PRIMARY KEY)" for number in range(tables)))
    source = make_postgres(database.dsn, folder, "many", TableOptions(include=["public.*"]), slot=database.name)
    source.prepare()
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        start = end = replay.follower.start()
        while not any(entry["phase"] != "init" for entry in end.get("tables", {}).values()):
            profile = cProfile.Profile()
            end = profile.runcall(replay.follower.latest, start, replay.limit, TableDirectives())
        profile.runcall(source.discover)
    calls: Counter[str] = Counter()
    for (_, _, name), (_, count, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        calls[name] += count
    return calls


def test_beginning_the_copies_of_many_tables_costs_what_they_are(
    postgres: EmbeddedPostgres, make_database: Callable[[EmbeddedPostgres], PostgresDatabase], tmp_path: Path
) -> None:
    few, many = (
        calls_to_begin_copies(make_database(postgres), tmp_path / str(tables), tables) for tables in (FEW, MANY)
    )
    allowed = 2 * MANY // FEW
    assert many["place"] > 0
    assert {name: count for name, count in many.items() if count > 1000 and count > allowed * few[name]} == {}


def test_the_key_of_a_table_is_not_sought_among_the_constraints_of_all(database: PostgresDatabase) -> None:
    database.run(*(f"CREATE TABLE t{number} (id int PRIMARY KEY)" for number in range(MANY)))
    with database.connect() as connection:
        oids = [oid for (oid,) in connection.execute("SELECT oid::int8 FROM pg_class WHERE relkind = 'r'")]
        [(constraints,)] = connection.execute("SELECT count(*) FROM pg_constraint").fetchall()
        query = f"EXPLAIN (ANALYZE, FORMAT JSON) {STORAGE} WHERE root.oid = ANY(%s)"
        [(plan,)] = connection.execute(query, [oids]).fetchall()
    assert constraints > MANY
    assert rows_looked_at(plan[0]["Plan"], "pg_constraint") < 3 * constraints


def rows_looked_at(node: dict[str, Any], relation: str) -> float:
    found = sum(rows_looked_at(one, relation) for one in node.get("Plans", []))
    if node.get("Relation Name") == relation:
        found += float(node["Actual Loops"]) * (node["Actual Rows"] + node.get("Rows Removed by Filter", 0))
    return found
