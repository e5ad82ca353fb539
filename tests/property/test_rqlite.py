"""Copy, hand-over and log of a scripted rqlite cluster, without Spark, with crashes between any two steps."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailrace.source.follower import Limit, TableDirectives
from tailrace.testing.replay import MemoryTable, SourceReplay
from tests.support.rqlite_following import free_port, make_source
from tests.support.rqlite_node import RqliteNode, as_json

TABLES = (
    "CREATE TABLE plain (id INTEGER PRIMARY KEY, v TEXT, n REAL, b BLOB, at DATETIME)",
    "CREATE TABLE word (w TEXT NOT NULL PRIMARY KEY, n INTEGER, ok BOOLEAN)",
    "CREATE TABLE pair (a TEXT, b INTEGER, v TEXT, PRIMARY KEY (a, b)) WITHOUT ROWID",
    "CREATE TABLE bag (v TEXT, n NUMERIC)",
)
NAMES = ("plain", "word", "pair", "bag")

Contents = dict[str, Counter[frozenset[tuple[str, Any]]]]


class Writer:
    """Random requests to the node."""

    def __init__(self, node: RqliteNode, chance: random.Random) -> None:
        self.node = node
        self.chance = chance
        self.added = 0

    def load(self, rows: int) -> None:
        number = f"WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c WHERE i < {rows})"
        if rows:
            self.node.execute(
                f"{number} INSERT INTO plain SELECT i, 'v' || i, i * 1.25, zeroblob(i % 5), '2024-01-01' FROM c",
                f"{number} INSERT INTO word SELECT 'w' || i, i, i % 2 FROM c",
                f"{number} INSERT INTO pair SELECT 'k' || i % 7, i, 'v' FROM c",
                f"{number} INSERT INTO bag SELECT 'b' || i % 10, i FROM c",
                transaction=True,
            )

    def request(self) -> None:
        statements = [self.statement() for _ in range(self.chance.randint(1, 5))]
        self.node.execute(*statements, transaction=self.chance.random() < 0.5)

    def statement(self) -> list[Any]:
        k = self.chance.randint(0, 300)
        match self.chance.randint(0, 11):
            case 0:
                return [
                    "INSERT INTO plain (id, v, n) VALUES (?, 'new', 2.0) ON CONFLICT (id) DO UPDATE SET v = 'again'",
                    k,
                ]
            case 1:
                return ["REPLACE INTO plain (id, v, b) VALUES (?, 'replaced', ?)", k, [0, k % 256]]
            case 2:
                return ["DELETE FROM plain WHERE id BETWEEN ? AND ? + 2", k, k]
            case 3:
                return ["UPDATE plain SET n = n + 1, v = NULL WHERE id BETWEEN ? AND ? + 10", k, k]
            case 4:
                return ["UPDATE plain SET id = -id - 1 WHERE id = ?", k]
            case 5:
                return ["INSERT OR IGNORE INTO word VALUES (?, ?, ?)", f"w{k}", k * 10**15, k % 2]
            case 6:
                return ["UPDATE OR IGNORE word SET w = w || 'x' WHERE n % 50 = ?", k % 50]
            case 7:
                return ["DELETE FROM word WHERE n % 40 = ?", k % 40]
            case 8:
                return ["UPDATE OR IGNORE pair SET b = b + 1000, a = 'moved' WHERE b BETWEEN ? AND ? + 3", k, k]
            case 9:
                return ["INSERT OR REPLACE INTO pair VALUES (?, ?, ?)", f"k{k % 7}", k, f"n{k}"]
            case 10:
                return ["INSERT INTO bag VALUES (?, ?)", f"b{k}", k / 4]
            case _:
                return ["UPDATE bag SET v = v || '.' WHERE rowid % 60 = ?", k % 60]

    def alter(self) -> None:
        """Columns come, go and change their name. Tables with other keys than the rowid get their insert first: what
        came without its row is read again by rowid."""
        self.added += 1
        match self.chance.randint(0, 4):
            case 0:
                self.node.execute(f"ALTER TABLE plain ADD COLUMN c{self.added} TEXT DEFAULT 'none'")
                self.node.execute(f"UPDATE plain SET c{self.added} = 'set' WHERE id % 3 = 0")
            case 1:
                names = [name for (name,) in self.node.rows("SELECT name FROM pragma_table_info('plain')")]
                if added := [name for name in names if name.startswith("c")]:
                    self.node.execute(f"ALTER TABLE plain DROP COLUMN {self.chance.choice(added)}")
            case 2:
                self.node.execute(f"ALTER TABLE bag ADD COLUMN c{self.added} INTEGER")
                self.node.execute(f"INSERT INTO bag (v, c{self.added}) VALUES ('added', 1)")
            case 3:
                self.node.execute(f"ALTER TABLE word ADD COLUMN c{self.added} BLOB")
                self.node.execute(f"INSERT INTO word (w, c{self.added}) VALUES ('first {self.added}', x'00FF')")
            case _:
                names = [name for (name,) in self.node.rows("SELECT name FROM pragma_table_info('bag')")]
                if added := [name for name in names if name.startswith("c")]:
                    self.node.execute(f"ALTER TABLE bag RENAME COLUMN {added[0]} TO c{self.added}")


def contents(node: RqliteNode) -> Contents:
    found: Contents = {}
    for name in NAMES:
        columns = [column for (column,) in node.rows("SELECT name FROM pragma_table_info(?)", name)]
        rowid = ["rowid"] if name == "bag" else []
        rows = node.rows(f"SELECT {', '.join([*rowid, *columns])} FROM {name}")
        names = ["_rowid", *columns] if rowid else columns
        found[f"svc.{name}"] = Counter(frozenset(zip(names, row, strict=True)) for row in rows)
    return found


def shown(table: MemoryTable) -> Counter[frozenset[tuple[str, Any]]]:
    return Counter(frozenset(row.items()) for row in table.rows.values())


def differences(replay: SourceReplay, node: RqliteNode) -> dict[str, tuple[list[Any], list[Any]]]:
    upstream = contents(node)
    found = {}
    for name in upstream:
        here = shown(replay.tables[name])
        if here != upstream[name]:
            # Columns that are new upstream come with the next change.
            found[name] = ([*(here - upstream[name])][:3], [*(upstream[name] - here)][:3])
    return found


@pytest.mark.parametrize("seed", range(4))
def test_cluster_and_destination_are_equal_after_crashes_failovers_and_new_columns(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    port = free_port()
    with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc", max_batch_size=1000) as node:
        node.execute(*TABLES)
        writer = Writer(node, chance)
        writer.load(chance.choice([0, 60, 400]))
        limit = Limit(rows=chance.choice([50, 5000]), bytes=chance.choice([20_000, 64_000_000]))
        with SourceReplay(make_source(tmp_path, port, api=node.url, copying={"chunk_rows": 40}), limit) as replay:
            requests = 0
            for _ in range(30):
                for _ in range(chance.randint(0, 4)):
                    writer.request()
                if chance.random() < 0.2:
                    writer.alter()
                if chance.random() < 0.15:
                    node.fail_over(back=chance.randint(0, 20))
                replay.live(chance.choice(["plan", "half", "write", "commit", *["never"] * 6]))
                if chance.random() < 0.1:
                    requests += 1
                    replay.directives = TableDirectives(resync={f"svc.{chance.choice(NAMES)}": requests})
            # One more change for each table, so that its newest columns are known.
            node.execute(
                "UPDATE plain SET v = 'last'",
                "INSERT OR REPLACE INTO word (w, n) VALUES ('last', 1)",
                "INSERT OR REPLACE INTO pair VALUES ('last', 1, 'v')",
                "INSERT INTO bag (v) VALUES ('last')",
            )
            node.execute("INSERT INTO plain (v) VALUES ('very last')", "INSERT INTO word (w) VALUES ('very last')")
            node.execute("INSERT INTO bag (v) VALUES ('very last')")
            replay.catch_up()
            assert not differences(replay, node)
        assert node.dropped == 0


@pytest.mark.parametrize("seed", range(2))
def test_tables_of_which_only_events_are_known_are_equal_as_well(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    port = free_port()
    with RqliteNode(f"http://127.0.0.1:{port}/cdc", service="svc", max_batch_size=1000) as node:
        node.execute(*(sql.replace(" WITHOUT ROWID", "") for sql in TABLES))
        writer = Writer(node, chance)
        with SourceReplay(make_source(tmp_path, port), Limit(chance.choice([50, 5000]), 64_000_000)) as replay:
            for _ in range(15):
                for _ in range(chance.randint(0, 4)):
                    writer.request()
                if chance.random() < 0.2:
                    node.fail_over(back=chance.randint(0, 20))
                replay.live(chance.choice(["plan", "half", "write", "commit", *["never"] * 4]))
            _ = replay.follower
            node.settle()
            replay.catch_up()
            for name in NAMES:
                columns = [column for (column,) in node.rows("SELECT name FROM pragma_table_info(?)", name)]
                upstream = {rowid: row for rowid, *row in node.rows(f"SELECT rowid, {', '.join(columns)} FROM {name}")}
                table = replay.tables.get(f"svc.{name}")
                here = {key: row for (key,), row in table.rows.items()} if table is not None else {}
                assert {key: [loose(row[column]) for column in columns] for key, row in here.items()} == {
                    key: [loose(as_json(value)) for value in row] for key, row in upstream.items()
                }


def loose(value: Any) -> str | None:
    """A value as text: where nothing but values is known, a number may stand in a column of texts."""
    whole = isinstance(value, float) and value == int(value)
    return None if value is None else str(int(value) if whole else value)
