"""What must come out right while a pipeline runs: one process for all of these tests, a fresh set of rows for each."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable

from tailrace.demo.server import EmbeddedPostgres
from tailrace.model.schema import TableName
from tailrace.source.postgres.offset import parse_lsn
from tailrace.state import SqliteStore
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.invocation import invoke
from tests.support.process import send
from tests.support.runner import RunningPipeline
from tests.support.scenario import Scenario

pytestmark = pytest.mark.xdist_group("following")

TABLES = [
    "CREATE TABLE keyed (id int PRIMARY KEY, v text)",
    "CREATE TABLE long (id int PRIMARY KEY, title text, body text, raw bytea)",
    "ALTER TABLE long ALTER body SET STORAGE EXTERNAL, ALTER raw SET STORAGE EXTERNAL",
    "CREATE TABLE parted (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE parted_high PARTITION OF parted DEFAULT",
    "CREATE TABLE keyless (v text)",
    "CREATE TABLE marked (id int PRIMARY KEY, v int)",
    "INSERT INTO marked SELECT i, 0 FROM generate_series(1, 1000) i",
    "CREATE TABLE busy (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, filler text)",
    "CREATE TABLE unfollowed (filler text)",
    "INSERT INTO long SELECT i, 'copied', repeat(md5(i::text), 400), decode(repeat(md5(i::text), 300), 'hex')"
    " FROM generate_series(1, 20) i",
]
KEYED, LONG = TableName("public", "keyed"), TableName("public", "long")


@pytest.fixture(scope="module")
def following(
    postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scenario, RunningPipeline]]:
    """A pipeline that runs and has copied everything."""
    with PostgresDatabase(postgres, "following") as database:
        scenario = Scenario(
            tmp_path_factory.mktemp("following"),
            database.dsn,
            name="following",
            tables={"exclude": ["*.unfollowed"]},
            source={"heartbeat": "1s", "journal": {"segment_bytes": "1 MB"}},
            destination={"updates": {"public.marked": "merge_on_read"}, "compact": {"files": 4}},
        ).prepare()
        scenario.sql(*TABLES)
        with scenario.run() as run:
            scenario.catch_up(run)
            yield scenario, run


def test_a_changed_key_and_a_swap_of_two_keys_are_one_commit(following: tuple[Scenario, RunningPipeline]) -> None:
    scenario, run = following
    scenario.sql("INSERT INTO keyed SELECT i, 'row ' || i FROM generate_series(1, 10) i")
    scenario.catch_up(run)
    before = len(scenario.batch_ids(KEYED))

    scenario.sql(
        "BEGIN; UPDATE keyed SET id = 99 WHERE id = 1; UPDATE keyed SET id = 1 WHERE id = 2;"
        " UPDATE keyed SET id = 2 WHERE id = 99; UPDATE keyed SET id = 300, v = 'moved' WHERE id = 3; COMMIT"
    )
    scenario.catch_up(run)

    assert scenario.differences() == []
    assert len(scenario.batch_ids(KEYED)) == before + 1
    rows = DeltaTable(str(scenario.lake / "public" / "keyed")).to_pyarrow_table().to_pylist()
    assert {row["id"]: row["v"] for row in rows if row["id"] in (1, 2, 3, 99, 300)} == {
        1: "row 2",
        2: "row 1",
        300: "moved",
    }


def test_long_values_that_the_log_leaves_out_keep_their_value(following: tuple[Scenario, RunningPipeline]) -> None:
    scenario, run = following
    scenario.sql(
        "UPDATE long SET title = 'after the copy' WHERE id = 1",
        "BEGIN; UPDATE long SET title = 'one' WHERE id = 2; UPDATE long SET title = 'two' WHERE id = 2; COMMIT",
        "BEGIN; UPDATE long SET title = 'moved', id = 103 WHERE id = 3; UPDATE long SET title = 'again' WHERE id = 103;"
        " COMMIT",
        "BEGIN; UPDATE long SET body = repeat('y', 9000) WHERE id = 4;"
        " UPDATE long SET title = 'kept' WHERE id = 4; COMMIT",
        "BEGIN; INSERT INTO long VALUES (50, 'new', repeat('z', 9000));"
        " UPDATE long SET title = 'same' WHERE id = 50; COMMIT",
    )
    scenario.catch_up(run)
    assert scenario.differences() == []


def test_a_row_that_the_lake_has_lost_is_read_again_when_the_log_leaves_values_out(
    following: tuple[Scenario, RunningPipeline],
) -> None:
    scenario, run = following
    DeltaTable(str(scenario.lake / "public" / "long")).delete("id = 7")
    assert [difference.missing for difference in scenario.differences()] == [1]

    scenario.sql("UPDATE long SET title = 'back again' WHERE id = 7")
    scenario.catch_up(run)

    assert scenario.differences() == []


def test_truncate_empties_every_table_it_names_in_order(following: tuple[Scenario, RunningPipeline]) -> None:
    scenario, run = following
    scenario.sql(
        "INSERT INTO parted SELECT i, 'before' FROM generate_series(1, 200) i",
        "INSERT INTO keyless VALUES ('before')",
        "INSERT INTO keyed VALUES (1000, 'before') ON CONFLICT DO NOTHING",
        "BEGIN; INSERT INTO parted VALUES (500, 'gone'); TRUNCATE parted, keyless, keyed;"
        " INSERT INTO parted VALUES (5, 'after'), (500, 'after'); INSERT INTO keyless VALUES ('after'); COMMIT",
        "INSERT INTO keyed VALUES (1, 'after')",
    )
    scenario.catch_up(run)
    assert scenario.differences() == []


def test_the_slot_advances_while_only_tables_that_are_not_followed_are_busy(
    following: tuple[Scenario, RunningPipeline],
) -> None:
    scenario, _ = following
    scenario.sql("INSERT INTO unfollowed SELECT repeat('x', 500) FROM generate_series(1, 5000)")
    written = scenario.value("SELECT pg_current_wal_lsn()::text")
    slot = "FROM pg_replication_slots WHERE slot_name = 'tailrace_following'"

    wait_until(lambda: scenario.value(f"SELECT confirmed_flush_lsn >= '{written}' {slot}"))
    # The server moves restart_lsn when it logs its running transactions, which it does every 15 s, or here.
    wait_until(
        lambda: scenario.value(f"SELECT pg_log_standby_snapshot() IS NOT NULL AND restart_lsn >= '{written}' {slot}")
    )


def test_tables_do_not_lag_while_only_others_are_busy(following: tuple[Scenario, RunningPipeline]) -> None:
    scenario, run = following
    scenario.catch_up(run)

    def needs_no_batch() -> bool:
        batch = _batch(scenario)
        scenario.sql("INSERT INTO unfollowed SELECT repeat('x', 100) FROM generate_series(1, 1000)")
        position = parse_lsn(scenario.value("SELECT pg_current_wal_insert_lsn()"))
        run.wait_until(
            lambda now: (
                int((now.position or "0")[:16], 16) >= position and all(table.lag_seconds == 0 for table in now.tables)
            )
        )
        return _batch(scenario) == batch

    # A look at the catalog may find what an earlier test changed, which is a batch, once.
    assert any(needs_no_batch() for _ in range(3))


def test_marked_rows_are_folded_by_the_workers_while_batches_go_on(
    following: tuple[Scenario, RunningPipeline],
) -> None:
    scenario, run = following
    log = scenario.lake / "public/marked/_delta_log"

    def is_folded() -> bool:
        scenario.sql("UPDATE marked SET v = v + 1 WHERE id % 5 = 0")
        return any('"operation":"OPTIMIZE"' in entry.read_text() for entry in log.glob("*.json"))

    wait_until(is_folded)
    scenario.catch_up(run)
    assert scenario.differences() == []


def test_a_transaction_left_open_holds_up_neither_batches_nor_the_journal(
    following: tuple[Scenario, RunningPipeline],
) -> None:
    scenario, run = following
    with closing(psycopg.connect(scenario.dsn)) as forgotten:
        forgotten.execute("INSERT INTO keyed VALUES (4242, 'uncommitted')")
        first = _batch(scenario)
        for _ in range(12):
            scenario.sql(
                "INSERT INTO busy (filler) SELECT repeat(md5(random()::text), 30) FROM generate_series(1, 1000)"
            )
            scenario.catch_up(run)
        # Twelve steps of about 1 MB went through; what was applied goes from the journal.
        run.wait_until(
            lambda status: (
                status.source is not None
                and status.source.gear == "streaming"
                and status.source.journal_bytes is not None
                and status.source.journal_bytes < 6_000_000
            )
        )
        with SqliteStore("shop", scenario.state).open_reading() as store:
            seconds = [batch.seconds for batch in reversed(store.recent_batches(_batch(scenario) - first))]
        # The machine may be busy; the best of six is the batch's own.
        assert min(seconds[-6:]) < 3 * min(seconds[:6]) + 0.5
        forgotten.commit()
    scenario.catch_up(run)
    assert scenario.differences() == []


def test_a_second_start_is_refused_and_names_the_first(
    following: tuple[Scenario, RunningPipeline], tmp_path: Path
) -> None:
    scenario, run = following
    copy = tmp_path / "second.yaml"
    copy.write_text(scenario.file.read_text())
    second = invoke("run", copy, "--once")
    assert second.exit_code == 5, second.output
    assert str(run.pid) in second.output
    scenario.catch_up(run)
    assert scenario.doubled() == []


def test_a_receiver_and_workers_that_die_are_replaced(following: tuple[Scenario, RunningPipeline]) -> None:
    scenario, run = following
    for program in (b"tailrace.source.postgres", b"worker_daemon\0pyspark.worker"):
        victims = run.processes(program)
        assert victims
        scenario.sql("INSERT INTO keyless SELECT 'during' FROM generate_series(1, 100)")
        send(victims, signal.SIGKILL)
        scenario.catch_up(run)
    assert scenario.differences() == []
    assert scenario.doubled() == []


def _batch(scenario: Scenario) -> int:
    with SqliteStore("shop", scenario.state).open_reading() as store:
        last = store.last_batch()
    assert last is not None
    return last.id
