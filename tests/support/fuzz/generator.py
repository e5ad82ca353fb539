"""Random sequences: from one seed always the same one, as long as the product does the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psycopg

from tests.support.fuzz.row_statement import RowStatements
from tests.support.fuzz.schema_statement import SchemaStatements
from tests.support.fuzz.script import (
    Alone,
    Batch,
    Discover,
    Receive,
    Restart,
    Resync,
    Setting,
    Settle,
    Step,
    Transaction,
)
from tests.support.fuzz.upstream_state import read_state

Session = psycopg.Connection[Any]

FAILPOINTS = (
    *("stream.planned", "fuzz.logged", "pipeline.before_apply", "stream.before_write", "memory.before_commit"),
    *("memory.committed", "stream.written", "stream.written@2", "pipeline.applied", "pipeline.before_release"),
    *("pipeline.released", "stream.staged", "stream.staged@2"),
)
RECEIVER_FAILPOINTS = ("receiver.before_append", "receiver.appended", "journal.appended")
LAKE_FAILPOINTS = ("delta.before_commit", "delta.committed", "delta.before_log_entry", "delta.held", "delta.staged")

FRAMES = (8 * 1024 * 1024, 8 * 1024 * 1024, 64, 500)
"""From which size on the receiver cuts a transaction."""

TABLES = {
    "keyed": (
        "CREATE TABLE t (id int PRIMARY KEY, a text, n int, at timestamp)",
        "INSERT INTO t SELECT i, 'v' || i, i * 1000, '2024-03-01 12:34:56.789' FROM generate_series(1, 6) i",
    ),
    "bag": (
        "CREATE TABLE bag (id int, n int, a varchar(20))",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT i % 3, i, 'b' || i FROM generate_series(1, 5) i",
    ),
    "pair": (
        "CREATE TABLE pair (a int, b text, n bigint, d numeric, PRIMARY KEY (a, b))",
        "INSERT INTO pair SELECT i, 'k' || i % 2, i, i + 0.125 FROM generate_series(1, 5) i",
    ),
    "indexed": (
        "CREATE TABLE indexed (id int NOT NULL, v varchar(20), w text)",
        "CREATE UNIQUE INDEX indexed_id ON indexed (id)",
        "ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_id",
        "INSERT INTO indexed SELECT i, 'v' || i, 'w' || i FROM generate_series(1, 4) i",
    ),
    "large": (
        "CREATE TABLE large (id int PRIMARY KEY, big text, n int)",
        "ALTER TABLE large ALTER COLUMN big SET STORAGE EXTERNAL",
        "INSERT INTO large SELECT i, repeat(md5(i::text), 90), i FROM generate_series(1, 4) i",
    ),
    "pages": (
        "CREATE TABLE pages (id int PRIMARY KEY, f text, n int DEFAULT 3)",
        "INSERT INTO pages SELECT i, repeat('x', 900), i FROM generate_series(1, 30) i",
    ),
    "parted": (
        "CREATE TABLE parted (id int PRIMARY KEY, a text, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE leaf_a PARTITION OF parted FOR VALUES FROM (0) TO (8)",
        "CREATE TABLE leaf_b PARTITION OF parted FOR VALUES FROM (8) TO (100)",
        "INSERT INTO parted SELECT i, 'p' || i, i FROM generate_series(5, 10) i",
    ),
    "outside": (
        "CREATE TABLE other.outside (id int PRIMARY KEY, a text)",
        "INSERT INTO other.outside VALUES (1, 'one'), (2, 'two')",
    ),
}


class Generator:
    """One random sequence: its setting and tables, and its steps as they are asked for."""

    def __init__(self, seed: int, *, delta_share: float = 0.1, publication: str = "fuzz") -> None:
        self.chance = chance = random.Random(seed)
        self.rows = RowStatements(chance)
        self.schemas = SchemaStatements(chance, publication)
        self.setting = Setting(
            trigger=chance.random() < 0.5,
            destination="delta" if chance.random() < delta_share else "memory",
            limit=chance.choice([1, 2, 5000, 5000]),
            limit_bytes=chance.choice([8192, 64_000_000, 64_000_000]),
            lanes=chance.choice([1, 1, 2]),
            pieces=chance.choice([0, 0, 0, 1, 3]),
            frame_bytes=chance.choice(FRAMES),
        )
        names = chance.sample(sorted(TABLES), chance.choice([1, 1, 2, 2, 3]))
        if all(name == "outside" for name in names):
            names.append("keyed")
        self.tables = tuple(statement for name in names for statement in TABLES[name])

    def steps(self, session: Session) -> Iterator[Step]:
        chance = self.chance
        if chance.random() < 0.8:
            yield Settle()
        for _ in range(chance.randint(2, 8)):
            kind = chance.random()
            if kind < 0.55:
                step = self.transaction(session)
                if step is not None:
                    yield step
            elif kind < 0.6:
                tables = [table for table in read_state(session) if table.schema == "app" and table.kind != "root"]
                if tables:
                    yield Alone(f"VACUUM FULL {chance.choice(tables).place}")
            elif kind < 0.85:
                yield Receive(self._crash(RECEIVER_FAILPOINTS, 0.1))
                yield Batch(self._crash(self._failpoints(), 0.4))
            elif kind < 0.9:
                yield Receive()
            elif kind < 0.95:
                yield Discover()
            elif kind < 0.97:
                names = [f"app.{table.name}" for table in read_state(session) if table.schema == "app"]
                if names:
                    yield Resync(chance.choice(names))
            else:
                yield Restart()

    def _failpoints(self) -> tuple[str, ...]:
        return FAILPOINTS + (LAKE_FAILPOINTS if self.setting.destination == "delta" else ())

    def _crash(self, names: tuple[str, ...], share: float) -> str:
        return self.chance.choice(names) if self.chance.random() < share else ""

    def transaction(self, session: Session) -> Transaction | None:
        """Statements that work together: each is tried, and the whole undone, before it is done for good."""
        chance = self.chance
        statements: list[str] = []
        open_savepoints: list[str] = []
        session.execute("BEGIN")
        try:
            for _ in range(chance.choice([1, 1, 2, 3, 5])):
                if chance.random() < 0.08 and not open_savepoints:
                    open_savepoints.append(self.schemas.new_name("s"))
                    self._try(session, statements, [f"SAVEPOINT {open_savepoints[-1]}"])
                tables = read_state(session)
                if not tables:
                    break
                if chance.random() < 0.5:
                    made = self.schemas.make(tables)
                    made = [self._dressed(one) for one in made] if made else None
                else:
                    one = self.rows.make([table for table in tables if table.columns] or tables)
                    made = [one] if one else None
                if made:
                    self._try(session, statements, made)
                if open_savepoints and chance.random() < 0.5:
                    name = open_savepoints.pop()
                    how = chance.choice(["ROLLBACK TO", "RELEASE"])
                    self._try(session, statements, [f"{how} {name}"])
        finally:
            session.execute("ROLLBACK")
        if not statements:
            return None
        if chance.random() < 0.04:
            statements.append("SELECT 1 / 0")
        joined = chance.random() < 0.2
        return Transaction(tuple(statements), joined=joined)

    def _try(self, session: Session, statements: list[str], made: list[str]) -> None:
        """Keep the statements if they work. Those of savepoints are the sequence's own, and tried as they are."""
        is_own = made[0].startswith(("SAVEPOINT", "ROLLBACK TO", "RELEASE"))
        if not is_own:
            session.execute("SAVEPOINT trial")
        try:
            for statement in made:
                session.execute(statement.encode())
        except psycopg.Error:
            session.execute("ROLLBACK TO trial")
        else:
            statements += made
        if not is_own:
            session.execute("RELEASE trial")

    def _dressed(self, statement: str) -> str:
        """The same command, sent another way now and then."""
        if not statement.startswith("ALTER TABLE") or ("'" in statement and "$" in statement):
            return statement
        match self.chance.randint(0, 11):
            case 0:
                return f"DO $do$ BEGIN {statement}; END $do$"
            case 1:
                return f"SELECT other.run($run${statement}$run$)"
            case 2:
                return f"SELECT other.run($run${statement}$run$) /* alter table */"
            case 3:
                return statement.replace("ALTER TABLE", "alter /* using */ table")
            case _:
                return statement
