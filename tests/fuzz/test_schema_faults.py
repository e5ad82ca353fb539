"""Sequences that once ended wrong in silence, each with a crash at every step between planning and recording.

What the fuzzer finds is put here, as it prints it, once the fault is understood.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tests.support.fuzz.script import (
    Alone,
    Batch,
    Discover,
    Receive,
    Restart,
    Script,
    Setting,
    Settle,
    Step,
    Transaction,
)
from tests.support.fuzz.sequence import Fuzzer, SequenceError

CRASHES = ("stream.planned", "fuzz.logged", "pipeline.applied", "pipeline.before_release")
"""After a batch is planned, logged, applied and committed: from each the next process goes on in another way."""

ROWS = (
    "CREATE TABLE t (id int PRIMARY KEY, n int, a text)",
    "INSERT INTO t SELECT i, i * 1000, 'v' || i FROM generate_series(1, 4) i",
)
BAG = (
    "CREATE TABLE bag (id int, n int)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT i, i FROM generate_series(1, 3) i",
)


@dataclass(frozen=True)
class Fault:
    """What happens after the copy."""

    tables: tuple[str, ...]
    changes: tuple[Step, ...]
    pieces: int = 0
    crashes: tuple[str, ...] = ("stream.planned",)

    def scripts(self, trigger: bool) -> Iterator[Script]:
        """Each change in a batch of its own, then all in one, which dies at some of its steps."""
        setting = Setting(trigger=trigger)
        if self.pieces:
            setting = replace(setting, pieces=self.pieces, frame_bytes=64)
        if len(self.changes) > 1:
            single = [step for change in self.changes for step in (change, Receive(), Batch())]
            yield Script(self.tables, (Settle(), *single), setting)
        for crash in ("", *self.crashes):
            yield Script(self.tables, (Settle(), *self.changes, Receive(), Batch(crash), Batch()), setting)


def one(*statements: str) -> Transaction:
    return Transaction(statements)


def each(*statements: str) -> tuple[Transaction, ...]:
    return tuple(Transaction((statement,)) for statement in statements)


def timed(kind: str) -> tuple[str, ...]:
    return (
        f"CREATE TABLE t (id int PRIMARY KEY, at {kind})",
        "INSERT INTO t SELECT i, '2024-03-01 12:34:56.789' FROM generate_series(1, 3) i",
    )


def numbers(kind: str, value: str) -> tuple[str, ...]:
    return (
        f"CREATE TABLE t (id int PRIMARY KEY, n {kind})",
        f"INSERT INTO t SELECT i, {value} FROM generate_series(1, 3) i",
    )


def through(column: str, *kinds: str) -> tuple[str, ...]:
    return tuple(f"ALTER TABLE t ALTER COLUMN {column} TYPE {kind}" for kind in kinds)


PARTS = (
    "CREATE TABLE parted (id int PRIMARY KEY, a text) PARTITION BY RANGE (id)",
    "CREATE TABLE leaf1 PARTITION OF parted FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE leaf2 PARTITION OF parted FOR VALUES FROM (100) TO (200)",
    "INSERT INTO parted VALUES (1, 'one'), (2, 'two'), (101, 'three')",
)

FAULTS = {
    # -- several commands at one place in the log
    "a default that is dropped in the transaction that added it": Fault(
        ROWS,
        (
            one(
                "ALTER TABLE t ADD COLUMN c int DEFAULT 5",
                "ALTER TABLE t ALTER COLUMN c DROP DEFAULT",
                "ALTER TABLE t ALTER COLUMN n TYPE bigint",
            ),
        ),
        crashes=CRASHES,
    ),
    "a row between added columns of one transaction": Fault(
        ROWS,
        (
            one(
                "ALTER TABLE t ADD COLUMN c int DEFAULT 5",
                "ALTER TABLE t ADD COLUMN d int DEFAULT 6",
                "INSERT INTO t (id, n) VALUES (9, 9)",
                "ALTER TABLE t ADD COLUMN e int DEFAULT 7",
            ),
        ),
        crashes=CRASHES,
    ),
    "a row between added columns": Fault(
        ROWS,
        each(
            "ALTER TABLE t ADD COLUMN c int DEFAULT 5",
            "ALTER TABLE t ADD COLUMN d int DEFAULT 6",
            "INSERT INTO t (id, n) VALUES (9, 9)",
            "ALTER TABLE t ADD COLUMN e int DEFAULT 7",
            "INSERT INTO t (id, n) VALUES (10, 10)",
        ),
        crashes=CRASHES,
    ),
    "a delete of a table without a key after a default that was dropped": Fault(
        BAG,
        (
            one(
                "ALTER TABLE bag ADD COLUMN c int DEFAULT 5",
                "ALTER TABLE bag ALTER COLUMN c DROP DEFAULT",
                "ALTER TABLE bag ADD COLUMN d int DEFAULT 6",
                "DELETE FROM bag WHERE id = 1",
                "ALTER TABLE bag ADD COLUMN e int DEFAULT 7",
                "DELETE FROM bag WHERE id = 2",
            ),
        ),
        crashes=CRASHES,
    ),
    "a row right after a command in a subtransaction": Fault(
        ROWS,
        tuple(
            one(
                *("SAVEPOINT s", f"ALTER TABLE t ADD COLUMN c{number} int DEFAULT {number}", "RELEASE s"),
                f"INSERT INTO t (id, n) VALUES ({10 + number}, 9)",
                f"DO $$ BEGIN ALTER TABLE t ADD d{number} int; EXCEPTION WHEN OTHERS THEN RAISE; END $$",
                f"UPDATE t SET d{number} = 2 WHERE id = {10 + number}",
            )
            for number in range(5)
        ),
    ),
    "an added column that is renamed and dropped again at once": Fault(
        ROWS,
        (
            one(
                "ALTER TABLE t ADD COLUMN c int DEFAULT 5",
                "ALTER TABLE t RENAME COLUMN c TO d",
                "ALTER TABLE t ADD COLUMN c int DEFAULT 8",
                "INSERT INTO t (id) VALUES (9)",
                "ALTER TABLE t DROP COLUMN d",
            ),
        ),
        crashes=CRASHES,
    ),
    "a truncated partition before another command of the transaction": Fault(
        PARTS, (one("TRUNCATE leaf1", "ALTER TABLE parted DISABLE ROW LEVEL SECURITY"),), crashes=CRASHES
    ),
    "a default whose value the catalog drops before the next command": Fault(
        ROWS,
        (
            *each("ALTER TABLE t ADD COLUMN c int DEFAULT 5"),
            Alone("VACUUM FULL t"),
            *each("ALTER TABLE t DROP COLUMN a"),
        ),
    ),
    # -- values lost by a detour
    **{
        f"{name}, {how}": Fault(tables, changes)
        for name, tables, commands in (
            ("int through real", numbers("int", "16777217"), through("n", "real", "int")),
            ("timestamp through date", timed("timestamp"), through("at", "date", "timestamp")),
            ("timestamp through timestamptz", timed("timestamp"), through("at", "timestamptz", "date", "timestamp")),
            ("timestamp to timestamptz", timed("timestamp"), through("at", "timestamptz")),
            ("timestamptz to timestamp", timed("timestamptz"), through("at", "timestamp")),
            ("numeric through numeric(5,1)", numbers("numeric", "1.234"), through("n", "numeric(5,1)", "numeric")),
            ("bigint through float8", numbers("bigint", "9007199254740993"), through("n", "float8", "bigint")),
            ("timestamp through timestamp(0)", timed("timestamp"), through("at", "timestamp(0)", "timestamp")),
        )
        for how, changes in (("in one transaction", (one(*commands),)), ("in one batch", each(*commands)))
    },
    **{
        f"a new column with a default of {old}, then {new}, {how}": Fault(ROWS, tuple(changes))
        for old, value, new in (
            ("int", "5", "text"),
            ("date", "'2024-03-01'", "timestamp"),
            ("bigint", "9007199254740993", "float8"),
        )
        for commands in [
            (
                f"ALTER TABLE t ADD COLUMN c {old} DEFAULT {value}",
                "ALTER TABLE t ALTER COLUMN c DROP DEFAULT",
                f"ALTER TABLE t ALTER COLUMN c TYPE {new}",
                "INSERT INTO t (id) VALUES (9)",
            )
        ]
        for how, changes in (("in one transaction", [one(*commands)]), ("in one batch", [*each(*commands)]))
    },
    "DROP EXPRESSION of the last column": Fault(
        (
            "CREATE TABLE t (id int PRIMARY KEY, n int, g int GENERATED ALWAYS AS (n * 2) STORED)",
            "INSERT INTO t (id, n) SELECT i, i FROM generate_series(1, 3) i",
        ),
        each("ALTER TABLE t ALTER COLUMN g DROP EXPRESSION", "INSERT INTO t VALUES (9, 9, 9)"),
    ),
    "USING inside a function, with a comment that looks like the command": Fault(
        (
            *ROWS,
            "CREATE FUNCTION other.shift() RETURNS void LANGUAGE plpgsql AS"
            " 'BEGIN ALTER TABLE app.t ALTER COLUMN n TYPE int USING n + 1; END'",
        ),
        each("SELECT other.shift() /* alter table */"),
    ),
    "USING after another command of the same text": Fault(
        (
            *ROWS,
            "CREATE TABLE u (id int PRIMARY KEY)",
            "CREATE FUNCTION other.shift() RETURNS void LANGUAGE plpgsql AS"
            " 'BEGIN ALTER TABLE app.t ALTER COLUMN n TYPE bigint USING n + 1; END'",
        ),
        (Transaction(("ALTER TABLE u ADD COLUMN c int", "SELECT other.shift()"), joined=True),),
    ),
    # -- a transaction in several frames
    "a transaction that is cut before its first row": Fault(
        ROWS,
        (
            one(
                *(f"ALTER TABLE t ADD COLUMN c{number} int DEFAULT {number}" for number in range(3)),
                "INSERT INTO t (id, n) VALUES (9, 9)",
                "ALTER TABLE t ADD COLUMN d int DEFAULT 6",
                "UPDATE t SET n = 1 WHERE id = 1",
            ),
        ),
        pieces=2,
    ),
    "USING that keeps the type": Fault(ROWS, each("ALTER TABLE t ALTER COLUMN a TYPE text USING upper(a)")),
    # -- the key, the identity, and tables that come and go
    "DROP INDEX of the replica identity": Fault(
        (
            "CREATE TABLE t (id int NOT NULL, a text)",
            "CREATE UNIQUE INDEX t_id ON t (id)",
            "ALTER TABLE t REPLICA IDENTITY USING INDEX t_id",
            "INSERT INTO t VALUES (1, 'one'), (2, 'two')",
        ),
        each("DROP INDEX t_id", "INSERT INTO t VALUES (1, 'another')"),
    ),
    "DROP INDEX CONCURRENTLY of the replica identity": Fault(
        (
            "CREATE TABLE t (id int NOT NULL, a text)",
            "CREATE UNIQUE INDEX t_id ON t (id)",
            "ALTER TABLE t REPLICA IDENTITY USING INDEX t_id",
            "INSERT INTO t VALUES (1, 'one'), (2, 'two')",
        ),
        (Alone("DROP INDEX CONCURRENTLY t_id"), *each("INSERT INTO t VALUES (1, 'another')")),
    ),
    "a table without a key whose index of its identity is dropped": Fault(
        (
            "CREATE TABLE t (id int NOT NULL, a text)",
            "CREATE UNIQUE INDEX t_id ON t (id)",
            "ALTER TABLE t REPLICA IDENTITY USING INDEX t_id",
            "INSERT INTO t VALUES (1, 'one'), (2, 'two')",
        ),
        (one("DROP INDEX t_id", "INSERT INTO t VALUES (1, 'another')", "ALTER TABLE t REPLICA IDENTITY FULL"),),
    ),
    "a primary key of other columns, and rows that share the old one": Fault(
        (
            "CREATE TABLE t (id int PRIMARY KEY, n int NOT NULL)",
            "INSERT INTO t VALUES (1, 1), (2, 2)",
        ),
        each(
            "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, n)",
            "INSERT INTO t VALUES (1, 2), (2, 3)",
        ),
    ),
    "a key that is gone for a while, in which rows share it": Fault(
        ROWS,
        (
            one(
                "ALTER TABLE t REPLICA IDENTITY FULL",
                "ALTER TABLE t DROP CONSTRAINT t_pkey",
                "INSERT INTO t VALUES (1, 5, NULL)",
                "UPDATE t SET id = 99 WHERE a IS NULL",
                "ALTER TABLE t ADD PRIMARY KEY (id)",
                "ALTER TABLE t REPLICA IDENTITY DEFAULT",
            ),
        ),
        crashes=CRASHES,
    ),
    "ALTER VIEW t RENAME COLUMN of a table": Fault(
        ROWS, each("ALTER VIEW t RENAME COLUMN a TO title", "UPDATE t SET title = 'new' WHERE id = 1")
    ),
    "ALTER VIEW t RENAME COLUMN of a table, without a row": Fault(ROWS, each("ALTER VIEW t RENAME COLUMN a TO title")),
    "a table moved from an excluded schema": Fault(
        (*ROWS, "CREATE TABLE other.late (id int PRIMARY KEY, a text)", "INSERT INTO other.late VALUES (1, 'one')"),
        (*each("ALTER TABLE other.late SET SCHEMA app", "INSERT INTO late VALUES (2, 'two')"), Discover()),
    ),
    "a table that leaves the schema and comes back": Fault(
        ROWS,
        each(
            "ALTER TABLE t SET SCHEMA other",
            "INSERT INTO other.t VALUES (9, 9)",
            "DELETE FROM other.t WHERE id = 1",
            "ALTER TABLE other.t SET SCHEMA app",
        ),
    ),
    "a detached partition": Fault(
        PARTS,
        (*each("ALTER TABLE parted DETACH PARTITION leaf2", "INSERT INTO leaf2 VALUES (102, 'four')"), Discover()),
    ),
    # -- what is published
    "deletes that are not published for a while": Fault(
        ROWS,
        each(
            "ALTER PUBLICATION fuzz SET (publish = 'insert,update')",
            "DELETE FROM t WHERE id = 1",
            "ALTER PUBLICATION fuzz SET (publish = 'insert,update,delete,truncate')",
        ),
    ),
    "deletes that are not published for a while, in one transaction": Fault(
        ROWS,
        (
            one(
                "ALTER PUBLICATION fuzz SET (publish = 'insert,update')",
                "DELETE FROM t WHERE id = 1",
                "ALTER PUBLICATION fuzz SET (publish = 'insert,update,delete,truncate')",
            ),
        ),
    ),
    "deletes that are not published while the pipeline looks": Fault(
        ROWS,
        (
            *each("ALTER PUBLICATION fuzz SET (publish = 'insert,update')", "DELETE FROM t WHERE id = 1"),
            Discover(),
            *each("ALTER PUBLICATION fuzz SET (publish = 'insert,update,delete,truncate')"),
            Discover(),
        ),
    ),
    **{
        f"a table that is unlogged for a while, {how}": Fault(
            (*ROWS, "CREATE PUBLICATION fuzz FOR TABLES IN SCHEMA app"), changes
        )
        for commands in [
            (
                "ALTER TABLE t SET UNLOGGED",
                "INSERT INTO t VALUES (9, 9)",
                "DELETE FROM t WHERE id = 1",
                "ALTER TABLE t SET LOGGED",
            )
        ]
        for how, changes in (("in one transaction", (one(*commands),)), ("in several", each(*commands)))
    },
    "a partition that is unlogged for a while": Fault(
        PARTS,
        each(
            "ALTER TABLE leaf1 SET UNLOGGED",
            "INSERT INTO parted VALUES (3, 'four')",
            "DELETE FROM parted WHERE id = 1",
            "ALTER TABLE leaf1 SET LOGGED",
        ),
    ),
    # -- what only the catalog shows
    "a default that is dropped, and the rows rewritten, before the catalog is read": Fault(
        ROWS,
        (
            *each("ALTER TABLE t ADD COLUMN c int DEFAULT 5", "ALTER TABLE t ALTER COLUMN c DROP DEFAULT"),
            Alone("VACUUM FULL t"),
            *each("INSERT INTO t (id) VALUES (9)"),
        ),
    ),
    "a version that the catalog no longer shows when it is derived again": Fault(
        ROWS,
        (
            *each("ALTER TABLE t ADD COLUMN c int DEFAULT 5", "INSERT INTO t (id) VALUES (9)"),
            Receive(),
            Batch("stream.planned"),
            *each("ALTER TABLE t ALTER COLUMN c DROP DEFAULT"),
            Alone("VACUUM FULL t"),
        ),
    ),
    **{
        f"a version that the catalog no longer shows when its batch is repeated after {crash}": Fault(
            ROWS,
            (
                *each("ALTER TABLE t ADD COLUMN c int DEFAULT 5", "INSERT INTO t (id) VALUES (9)"),
                Receive(),
                Batch(crash),
                *each("ALTER TABLE t ALTER COLUMN c DROP DEFAULT"),
                Alone("VACUUM FULL t"),
            ),
        )
        for crash in CRASHES[1:]
    },
    "a column that is gone when its version is derived again": Fault(
        ROWS,
        (
            *each("ALTER TABLE t ADD COLUMN c int DEFAULT 5", "INSERT INTO t (id) VALUES (9)"),
            Receive(),
            Batch("stream.planned"),
            *each("ALTER TABLE t DROP COLUMN n, ADD COLUMN n int DEFAULT 3", "INSERT INTO t (id) VALUES (10)"),
        ),
    ),
    "columns added and dropped before the catalog is read": Fault(
        ROWS,
        each(
            "ALTER TABLE t ADD COLUMN c int DEFAULT 5",
            "INSERT INTO t (id) VALUES (9)",
            "ALTER TABLE t DROP COLUMN c, ADD COLUMN d int DEFAULT 6",
            "INSERT INTO t (id) VALUES (10)",
            "ALTER TABLE t ADD COLUMN c int DEFAULT 7",
            "UPDATE t SET n = 1 WHERE id = 9",
        ),
    ),
    "a varchar and a text column that swap names": Fault(
        (
            "CREATE TABLE t (id int PRIMARY KEY, a varchar(20), b text)",
            "INSERT INTO t SELECT i, 'a' || i, 'b' || i FROM generate_series(1, 3) i",
        ),
        (
            one(
                "ALTER TABLE t RENAME COLUMN a TO c",
                "ALTER TABLE t RENAME COLUMN b TO a",
                "ALTER TABLE t RENAME COLUMN c TO b",
                "INSERT INTO t VALUES (9, 'nine', 'neuf')",
            ),
        ),
    ),
    "two tables that swap names and get no row": Fault(
        (
            *ROWS,
            "CREATE TABLE u (id int PRIMARY KEY, n int, a text)",
            "INSERT INTO u VALUES (7, 7, 'seven')",
        ),
        (one("ALTER TABLE t RENAME TO w", "ALTER TABLE u RENAME TO t", "ALTER TABLE w RENAME TO u"),),
    ),
    "a column that was dropped and added again": Fault(
        ROWS,
        (one("ALTER TABLE t DROP COLUMN n", "ALTER TABLE t ADD COLUMN n int", "INSERT INTO t (id, n) VALUES (9, 9)"),),
    ),
    "a last column that was dropped and added again before its next value": Fault(
        ROWS,
        (
            one("ALTER TABLE t DROP COLUMN a", "ALTER TABLE t ADD COLUMN a text"),
            *each("UPDATE t SET a = 'new' WHERE id = 2"),
        ),
    ),
    "a rename without a row, after a version that the catalog completed": Fault(
        ROWS,
        each(
            "ALTER TABLE t ADD COLUMN c numeric(8,2) DEFAULT 0.25; DELETE FROM t WHERE id = 1",
            "ALTER TABLE t RENAME COLUMN a TO title",
        ),
    ),
    "a column of a partitioned table that was dropped and added again": Fault(
        PARTS, (one("ALTER TABLE parted DROP COLUMN a", "ALTER TABLE parted ADD COLUMN a text"),)
    ),
    "a column that was dropped and added again, without a row": Fault(
        ROWS, (one("ALTER TABLE t DROP COLUMN n", "ALTER TABLE t ADD COLUMN n int DEFAULT 30000"),)
    ),
    "a new column that is dropped and added again after the row that showed it": Fault(
        ROWS,
        (
            one("ALTER TABLE t ADD COLUMN c text", "INSERT INTO t (id, c) VALUES (9, 'first')"),
            one("ALTER TABLE t DROP COLUMN c", "ALTER TABLE t ADD COLUMN c text"),
        ),
    ),
    "USING, without a row that follows": Fault(ROWS, each("ALTER TABLE t ALTER COLUMN n TYPE int USING n + 1")),
    # -- loud without need
    "a type that became narrower once its values fit": Fault(
        ROWS,
        each(
            "UPDATE t SET n = 100000 WHERE id = 1",
            "UPDATE t SET n = 1",
            "ALTER TABLE t ALTER COLUMN n TYPE smallint",
            "INSERT INTO t VALUES (9, 9)",
        ),
    ),
    "a type that became narrower in the transaction that made its values fit": Fault(
        ROWS,
        (
            one(
                "UPDATE t SET n = 100000 WHERE id = 1",
                "UPDATE t SET n = 1",
                "ALTER TABLE t ALTER COLUMN n TYPE smallint",
                "INSERT INTO t VALUES (9, 9)",
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("trigger", [True, False], ids=["event trigger", "relation messages"])
def test_both_ends_are_equal_wherever_the_pipeline_dies(name: str, trigger: bool, fuzzer: Fuzzer) -> None:
    fault = FAULTS[name]
    failed: list[SequenceError] = []
    for script in fault.scripts(trigger):
        try:
            fuzzer.replay(script)
        except SequenceError as error:
            failed.append(error)
    assert not failed, f"{len(failed)} of the sequences fail, the first one with: {failed[0]}"


COPYING = (
    *(
        statement
        for table in ("one", "two")
        for statement in (
            f"CREATE TABLE {table} (id int PRIMARY KEY, a text)",
            f"INSERT INTO {table} SELECT i, repeat('x', 900) FROM generate_series(1, 30) i",
        )
    ),
)


@pytest.mark.parametrize("crash", CRASHES)
def test_a_crash_while_every_table_is_copied_needs_no_reset(crash: str, fuzzer: Fuzzer) -> None:
    # The journal of the last rows before the copy fills several files, which no one needs once it is released.
    rows = tuple(Transaction((f"INSERT INTO one VALUES (10{number}, repeat('x', 1500))",)) for number in range(6))
    steps: tuple[Step, ...] = (Receive(), *rows, Batch(), Receive(), Batch(crash), Restart(), Receive(), Batch())
    script = Script(COPYING, steps, Setting(limit_bytes=8192))
    fuzzer.replay(script)
    fuzzer.replay(replace(script, setting=replace(script.setting, trigger=False)))


@pytest.mark.parametrize("trigger", [True, False], ids=["event trigger", "relation messages"])
def test_a_copied_table_becomes_ready_when_the_last_change_of_the_log_fills_a_batch(
    trigger: bool, fuzzer: Fuzzer
) -> None:
    tables = ("CREATE TABLE t (id int PRIMARY KEY, v text, w text)", "CREATE TABLE u (id int PRIMARY KEY)")
    steps = (
        Settle(),
        one("ALTER TABLE t RENAME TO t1", "TRUNCATE t1"),
        one(
            "ALTER TABLE t1 RENAME COLUMN v TO x",
            "ALTER TABLE t1 RENAME COLUMN w TO v",
            "ALTER TABLE t1 RENAME COLUMN x TO w",
        ),
        Receive(),
        one("INSERT INTO t1 VALUES (10, 'a', 'b'), (11, 'a', 'b')"),
    )
    fuzzer.replay(Script(tables, steps, Setting(trigger=trigger, limit=1)))
