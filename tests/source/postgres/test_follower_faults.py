"""What may happen to a follower: crashes, pauses, rewritten tables, snapshots and journals that end too soon."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import UnavailableError
from tailrace.journal import FrameRef, JournalReader
from tailrace.source.follower import Limit, TableDirectives
from tailrace.source.postgres import follower
from tailrace.source.postgres.frame_builder import DDL_PREFIX
from tailrace.source.postgres.receiver import STATUS
from tailrace.source.postgres.source import PostgresSource
from tailrace.source.schema_file import SchemaFile
from tailrace.system.child_process import read_status
from tailrace.system.failpoint import VARIABLE
from tailrace.testing.replay import SourceReplay
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.postgres_receiving import Session, arrived, make_source

CHUNK_BYTES = 16 * 8192
PLENTY = Limit(1_000_000, 64_000_000)
ONE_CHUNK = Limit(1_000_000, CHUNK_BYTES)


@contextmanager
def following(
    database: PostgresDatabase, folder: Path, *statements: str, limit: Limit = PLENTY
) -> Iterator[tuple[Session, SourceReplay]]:
    """A session on a database that has run these statements, and a pipeline of all its tables that has seen nothing."""
    database.run(*statements)
    source = make_source(database, folder, "public.*", copying={"chunk_bytes": CHUNK_BYTES})
    with closing(database.connect()) as session, SourceReplay(source, limit) as replay:
        yield session, replay


def oid(session: Session, table: str) -> str:
    row = session.execute("SELECT %s::regclass::oid::int8", [table]).fetchone()
    assert row is not None
    return str(row[0])


def rows(session: Session, table: str) -> Counter[tuple[Any, ...]]:
    return Counter(session.execute(f"TABLE {table}".encode()).fetchall())


def entry(replay: SourceReplay, table: str) -> dict[str, Any]:
    """The entry of a table in the batch that is planned, or in the last one."""
    tables: dict[str, dict[str, Any]] = (replay.planned or replay.offset or {"tables": {}})["tables"]
    return tables.get(table, {"phase": "unknown"})


def step_until(replay: SourceReplay, table: str, phase: str) -> None:
    """Run batches until a table is in this phase."""

    def is_there() -> bool:
        replay.step()
        return bool(entry(replay, table)["phase"] == phase)

    wait_until(is_there)


def test_a_recopy_that_was_found_due_is_not_forgotten_in_a_crash(database: PostgresDatabase, tmp_path: Path) -> None:
    tables = ("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t SELECT generate_series(1, 50), 'v'")
    with following(database, tmp_path, *tables) as (session, replay):
        replay.catch_up()
        session.execute("ALTER TABLE t ADD COLUMN w text DEFAULT md5(random()::text)")
        session.execute("INSERT INTO t VALUES (51, 'v')")
        wait_until(replay.plan)
        # The version is stored by now, the offset with the new copy is not.
        replay.planned = None
        replay.crash()
        replay.catch_up()
        assert replay.contents()["public.t"] == rows(session, "t")


def test_a_recopy_is_not_forgotten_by_a_restart_while_its_table_is_paused(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    tables = (
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 50), 'v'",
    )
    with following(database, tmp_path, *tables) as (session, replay):
        replay.catch_up()
        replay.directives = TableDirectives(paused=[oid(session, "t")])
        replay.catch_up()
        session.execute("ALTER TABLE t ADD COLUMN w text DEFAULT md5(random()::text)")
        session.execute("INSERT INTO t VALUES (51, 'v'); INSERT INTO u VALUES (1)")
        replay.catch_up()
        replay.crash()
        replay.directives = TableDirectives()
        replay.catch_up()
        assert replay.contents()["public.t"] == rows(session, "t")


@pytest.mark.parametrize("has_trigger", [True, False])
def test_a_message_that_the_event_trigger_did_not_write_changes_nothing(
    database: PostgresDatabase, tmp_path: Path, has_trigger: bool
) -> None:
    with following(database, tmp_path, "CREATE TABLE t (id int PRIMARY KEY, v text)") as (session, replay):
        if has_trigger:
            replay.source.set_up(remove=False)  # type: ignore[attr-defined]
        replay.catch_up()
        table = oid(session, "t")
        copied = entry(replay, table)["x"]
        forged = {"v": 2, "oid": int(table), "token": "guessed", "tag": "ALTER TABLE", "recopy": True, "reason": "none"}
        session.execute("SELECT pg_logical_emit_message(true, %s, %s::text)", [DDL_PREFIX, json.dumps(forged)])
        session.execute("INSERT INTO t VALUES (1, 'after')")
        replay.catch_up()
        assert entry(replay, table)["x"] == copied
        assert replay.contents()["public.t"] == rows(session, "t")


def test_a_single_run_follows_a_table_that_was_created_since_the_last_one(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    with following(database, tmp_path, "CREATE TABLE t (id int PRIMARY KEY)") as (session, replay):
        replay.catch_up()
        replay.crash()
        session.execute("CREATE TABLE u (id int PRIMARY KEY)")
        session.execute("INSERT INTO u VALUES (1)")
        replay.catch_up()
        assert replay.contents()["public.u"] == rows(session, "u")


@pytest.mark.parametrize("has_trigger", [True, False])
def test_a_single_run_ends_though_a_table_changes_after_it_began(
    database: PostgresDatabase, tmp_path: Path, has_trigger: bool
) -> None:
    tables = ("CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t VALUES (1, 1)")
    with following(database, tmp_path, *tables) as (session, replay):
        if has_trigger:
            replay.source.set_up(remove=False)  # type: ignore[attr-defined]
        replay.catch_up()
        target = replay.follower.target()
        session.execute("ALTER TABLE t ALTER n TYPE int USING n + 1")
        replay.follower.discover(at_once=True)  # type: ignore[attr-defined]

        def is_done() -> bool:
            replay.step()
            return replay.offset is not None and replay.follower.done(replay.offset, target)

        wait_until(is_done)
        replay.catch_up()
        assert replay.contents()["public.t"] == rows(session, "t")


SMALL_AND_LARGE = (
    "CREATE TABLE large (id int PRIMARY KEY, v text)",
    "CREATE TABLE small (id int PRIMARY KEY, v text)",
    "INSERT INTO large SELECT i, repeat('x', 800) FROM generate_series(1, 3000) i",
    "INSERT INTO small SELECT generate_series(1, 50), 'v'",
)


@contextmanager
def copying_next_to_small(database: PostgresDatabase, folder: Path) -> Iterator[tuple[Session, SourceReplay, str, str]]:
    """A large table, by its OID, in the middle of a new copy, next to a small one that is level with the log."""
    with following(database, folder, *SMALL_AND_LARGE, limit=ONE_CHUNK) as (session, replay):
        replay.catch_up()
        large, small = oid(session, "large"), oid(session, "small")
        replay.directives = TableDirectives(resync={large: 1})
        step_until(replay, large, "copy")
        yield session, replay, large, small


def test_a_table_that_was_rewritten_after_a_snapshot_is_not_copied_from_it(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    with copying_next_to_small(database, tmp_path) as (session, replay, large, small):
        session.execute("ALTER TABLE small ALTER v TYPE text USING upper(v)")
        replay.directives = TableDirectives(resync={large: 1, small: 2})
        replay.catch_up()
        assert replay.contents()["public.small"] == rows(session, "small")


def test_a_table_is_copied_from_another_snapshot_when_the_session_of_its_own_ended(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    with copying_next_to_small(database, tmp_path) as (session, replay, large, small):
        ended = session.execute(
            "SELECT pg_terminate_backend(pid, 300000) FROM pg_stat_activity WHERE state = 'idle in transaction'"
            " AND query = 'SELECT pg_export_snapshot()' AND datname = current_database()"
        ).fetchall()
        assert ended == [(True,)]
        replay.directives = TableDirectives(resync={large: 1, small: 2})
        with pytest.raises(UnavailableError, match="snapshot ended"):
            replay.catch_up()
        replay.crash()
        replay.catch_up()
        assert replay.contents()["public.small"] == rows(session, "small")
        assert replay.contents()["public.large"] == rows(session, "large")


TWO_TABLES = (
    "CREATE TABLE t (id int PRIMARY KEY, v text)",
    "CREATE TABLE u (id int PRIMARY KEY)",
    "INSERT INTO t VALUES (1, 'v')",
)


def test_a_batch_ends_at_the_commit_with_which_it_is_full(database: PostgresDatabase, tmp_path: Path) -> None:
    with following(database, tmp_path, *TWO_TABLES, limit=Limit(rows=10, bytes=1 << 30)) as (session, replay):
        replay.catch_up()
        for number in range(10):
            # One frame to a transaction, since a frame is never cut.
            session.execute("INSERT INTO u SELECT generate_series(%s::int, %s::int)", [number * 4, number * 4 + 3])
            _arrive(replay, session)
        sizes: list[int] = []
        before = 0
        while replay.step():
            now = replay.contents()["public.u"].total()
            sizes.append(now - before)
            before = now
        assert sizes == [12, 12, 12, 4]


def test_what_a_batch_reads_of_the_log_does_not_grow_while_a_table_is_copied(
    database: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    frames = JournalReader.frames

    def frames_counted(self: JournalReader, *bounds: Any, **limits: Any) -> list[FrameRef]:
        found = frames(self, *bounds, **limits)
        looked[-1] += len(found)
        return found

    monkeypatch.setattr(JournalReader, "frames", frames_counted)
    with following(database, tmp_path, *SMALL_AND_LARGE, limit=ONE_CHUNK) as (session, replay):
        looked.append(0)
        step_until(replay, oid(session, "large"), "copy")
        while entry(replay, oid(session, "large"))["phase"] == "copy":
            session.execute("UPDATE small SET v = v || '.' WHERE id = 1")
            session.execute("UPDATE large SET v = v || '.' WHERE id = 1")
            _arrive(replay, session)
            looked.append(0)
            assert replay.step()
        assert len(looked) > 8
        assert max(looked[2:-1]) <= 2 * min(looked[2:-1]), looked
        replay.catch_up()
        assert replay.contents()["public.large"] == rows(session, "large")


def test_a_single_run_ends_although_another_row_is_written_before_each_batch(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    with following(database, tmp_path, *TWO_TABLES) as (session, replay):
        replay.catch_up()
        target = replay.follower.target()
        assert any(_has_nothing_to_do(replay, session) for _ in range(5))
        assert replay.offset is not None
        assert replay.follower.done(replay.offset, target)
        replay.catch_up()
        assert replay.contents()["public.u"] == rows(session, "u")


def _has_nothing_to_do(replay: SourceReplay, session: Session) -> bool:
    session.execute("INSERT INTO u SELECT count(*) FROM u")
    _arrive(replay, session)
    return not replay.step()


def _arrive(replay: SourceReplay, session: Session) -> None:
    """Wait until everything committed now is in the journal."""
    assert isinstance(replay.source, PostgresSource)
    arrived(session, replay.source)


def test_a_single_run_waits_for_what_was_committed_before_it_and_has_not_been_received(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    with following(database, tmp_path, *TWO_TABLES) as (session, replay):
        replay.catch_up()
        assert replay.offset is not None
        receiver = read_status(tmp_path / "journal", STATUS)["pid"]
        os.kill(receiver, signal.SIGSTOP)
        try:
            session.execute("INSERT INTO u VALUES (1)")
            target = replay.follower.target()
            assert not replay.step()
            assert not replay.follower.done(replay.offset, target)
        finally:
            os.kill(receiver, signal.SIGCONT)
        wait_until(lambda: not replay.step() and replay.follower.done(replay.offset or {}, target))
        assert replay.contents()["public.u"] == rows(session, "u")


def test_a_single_run_is_not_at_its_end_while_a_resync_waits_for_its_snapshot(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    with following(database, tmp_path, *TWO_TABLES) as (session, replay), closing(database.connect()) as writer:
        replay.catch_up()
        assert replay.offset is not None
        # A snapshot waits for every transaction that writes.
        with writer.transaction():
            writer.execute("INSERT INTO u VALUES (1)")
            replay.directives = TableDirectives(resync={oid(session, "t"): 1})
            target = replay.follower.target()
            wait_until(lambda: not replay.step())
            assert not replay.follower.done(replay.offset, target)
        replay.catch_up()
        assert entry(replay, oid(session, "t"))["request"] == 1


def test_a_table_in_error_stays_where_it_is_while_its_resync_waits_for_its_snapshot(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    with following(database, tmp_path, *TWO_TABLES) as (session, replay), closing(database.connect()) as writer:
        replay.catch_up()
        assert replay.offset is not None
        t = oid(session, "t")
        [before] = [str(one.position) for one in replay.source.progress(replay.offset) if one.upstream_id == t]
        session.execute("INSERT INTO t VALUES (2, 'cannot be applied')")
        wait_until(replay.plan)
        assert replay.planned is not None
        with writer.transaction():
            writer.execute("INSERT INTO u VALUES (1)")
            orders = TableDirectives(stopped={t: before}, resync={t: 1})
            stopped = replay.follower.latest(replay.planned, PLENTY, orders)
            assert (stopped["tables"][t]["phase"], stopped["tables"][t]["at"]) == ("stopped", before)
            assert replay.follower.latest(stopped, PLENTY, orders) == stopped
        wait_until(lambda: replay.follower.latest(stopped, PLENTY, orders)["tables"][t].get("request") == 1)


def test_a_copy_without_key_that_a_crash_broke_off_is_not_taken_for_done_after_a_pause(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    tables = ("CREATE TABLE bag (v text)", "INSERT INTO bag SELECT 'v' || i FROM generate_series(1, 50) i")
    with following(database, tmp_path, *tables) as (session, replay):
        bag = oid(session, "bag")

        def is_read() -> bool:
            if replay.planned is not None:
                replay.write()
                replay.commit()
            replay.plan()
            return bool(entry(replay, bag).get("next"))

        wait_until(is_read)
        replay.crash()
        replay.directives = TableDirectives(paused=[bag])
        step_until(replay, bag, "stopped")
        replay.directives = TableDirectives()
        replay.catch_up()
        assert replay.contents()["public.bag"] == rows(session, "bag")


def test_changes_that_were_seen_and_then_lost_in_a_power_cut_are_waited_for(
    database: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = tmp_path / "journal"
    with following(database, tmp_path, "CREATE TABLE t (id int PRIMARY KEY, v text)") as (session, replay):
        replay.catch_up()
        session.execute("INSERT INTO t VALUES (1, 'kept')")
        replay.catch_up()
        replay.crash()
        with closing(JournalReader(journal)) as reader:
            kept = reader.head()
        with monkeypatch.context() as hanging:
            # Readers see what the receiver wrote, and the receiver does not acknowledge it to Postgres.
            hanging.setenv(VARIABLE, "receiver.appended:hang")
            replay.step()
        session.execute("INSERT INTO t VALUES (2, 'seen')")

        def is_seen() -> bool:
            replay.step()
            return len(replay.contents()["public.t"]) == 2

        wait_until(is_seen)
        os.kill(read_status(journal, STATUS)["pid"], signal.SIGKILL)
        replay.crash()
        with closing(JournalReader(journal)) as reader:
            (seen,) = reader.frames(kept, reader.head())
        os.truncate(journal / seen.segment, seen.offset)
        session.execute("INSERT INTO t VALUES (3, 'later')")

        def is_level() -> bool:
            try:
                replay.catch_up()
            except UnavailableError:
                return False
            return True

        wait_until(is_level)
        assert replay.contents()["public.t"] == rows(session, "t")


def test_the_first_changes_of_a_backlog_wait_for_others_only_for_a_moment(
    database: PostgresDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with following(database, tmp_path, "CREATE TABLE t (id int PRIMARY KEY)") as (session, replay):
        replay.catch_up()
        monkeypatch.setattr(follower, "GATHER_SECONDS", 1000.0)
        monkeypatch.setattr(follower, "read_status", lambda *_: {"gear": "backlog"})
        with closing(JournalReader(tmp_path / "journal")) as reader:
            before = reader.head()
            session.execute("INSERT INTO t VALUES (1)")

            def has_come() -> bool:
                reader.refresh()
                return reader.head() > before

            wait_until(has_come)
        assert not replay.plan()
        monkeypatch.setattr(follower, "GATHER_SECONDS", 0.0)
        assert replay.plan()


def open_files(folder: Path) -> list[str]:
    """The files of a folder that this process has open."""
    return [str(file) for each in Path("/proc/self/fd").iterdir() if (file := each.resolve()).is_relative_to(folder)]


def test_a_follower_that_was_stopped_and_a_source_that_was_prepared_leave_no_file_of_the_journal_open(
    source: PostgresSource, tmp_path: Path
) -> None:
    for _ in range(2):
        source.prepare()
    assert open_files(source.folder) == []
    stopped = source.follow(SchemaFile(tmp_path / "versions"))
    assert open_files(source.folder) != []
    for _ in range(2):
        stopped.stop()
    assert open_files(source.folder) == []
