"""The receiver on a real server: both gears, acknowledgement, the size bound, loss and ownership."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import LostError, OwnedError, TailraceError, UnavailableError
from tailrace.journal import Cursor, Journal, JournalReader, JournalWriter
from tailrace.model.change import Position
from tailrace.source.postgres import frame_builder, receiver
from tailrace.source.postgres.connection import Replication
from tailrace.source.postgres.frame_builder import FrameMeta, messages_of
from tailrace.source.postgres.offset import before
from tailrace.source.postgres.pgoutput.decode import decode, only
from tailrace.source.postgres.receiver import STATUS, PostgresReceiver
from tailrace.source.postgres.replication_stream import ReplicationStream
from tailrace.source.postgres.slot import read_slot, require
from tailrace.source.postgres.source import PostgresSource
from tailrace.system.child_process import read_status
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.postgres_receiving import (
    Session,
    arrived,
    confirmed,
    ids,
    make_received,
    origin,
    receiving,
    server_lsn,
)
from tests.support.proxy import Proxy
from tests.support.source_making import with_options


def test_streamed_transactions_are_in_the_journal_in_commit_order(session: Session, source: PostgresSource) -> None:
    with receiving(source.receiver_options()) as made:
        for start in range(0, 50, 10):
            session.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(%s::int, %s::int) i", [start, start + 9])
        arrived(session, source)
        assert made.mode == "streaming"
    assert ids(source) == list(range(50))


def test_a_backlog_is_read_in_bulk_and_streaming_continues_after_it(
    session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "BACKLOG_BYTES", 200_000)
    monkeypatch.setattr(receiver, "STEP_BYTES", 2_000_000)
    gears: set[str] = set()
    publish = PostgresReceiver.publish

    def publish_and_note(self: PostgresReceiver, error: TailraceError | None) -> None:
        gears.add(self.mode)
        publish(self, error)

    monkeypatch.setattr(PostgresReceiver, "publish", publish_and_note)
    for start in range(0, 20_000, 500):
        session.execute(
            "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(%s::int, %s::int) i", [start, start + 499]
        )
    with receiving(source.receiver_options()):
        arrived(session, source)
        session.execute("INSERT INTO t VALUES (20000, 'live')")
        arrived(session, source)
    assert ids(source) == list(range(20_001))
    assert "backlog" in gears


def rewind(session: Session, source: PostgresSource) -> int:
    """Bytes of WAL that any decoding reads again first; a long open transaction makes this grow."""
    slot = require(read_slot(session, source.options.slot), source.options.slot, "")
    return slot.confirmed - slot.restart


def test_a_long_open_transaction_is_followed_by_streaming_not_in_bulk(
    database: PostgresDatabase, session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "BACKLOG_BYTES", 100_000)
    monkeypatch.setattr(receiver, "STEP_BYTES", 1_000_000)
    with closing(database.connect()) as idle:
        idle.execute("BEGIN; INSERT INTO other VALUES ('open for hours')")
        session.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(0, 9999) i")
        with receiving(source.receiver_options()):
            arrived(session, source)
            wait_until(lambda: rewind(session, source) > 500_000)
        session.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(10000, 12999) i")
        with receiving(source.receiver_options()) as made:
            arrived(session, source)
            assert made.mode == "streaming"
        idle.execute("ROLLBACK")
    assert ids(source) == list(range(13_000))


def test_the_slot_moves_on_while_only_unpublished_tables_change(session: Session, source: PostgresSource) -> None:
    with receiving(source.receiver_options()):
        session.execute("INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 1000)")
        goal = server_lsn(session)
        wait_until(lambda: confirmed(session, source) >= goal)
    assert ids(source) == []


def test_a_heartbeat_moves_the_slot_of_a_quiet_server(session: Session, source: PostgresSource) -> None:
    start = server_lsn(session)
    with receiving(with_options(source, heartbeat=0.1).receiver_options()):
        wait_until(lambda: confirmed(session, source) > start)


def test_applied_acknowledgement_holds_the_slot_until_the_cursor_moves(
    session: Session, source: PostgresSource
) -> None:
    Cursor(source.journal, source.context.reader).advance(origin(source))
    with receiving(with_options(source, acknowledge="applied").receiver_options()):
        session.execute("INSERT INTO t VALUES (1, 'x')")
        goal = server_lsn(session)
        arrived(session, source)
        status = read_status(source.folder, STATUS)
        wait_until(lambda: read_status(source.folder, STATUS)["at"] > status["at"] + 1)
        assert confirmed(session, source) < goal
        Cursor(source.journal, source.context.reader).advance(JournalReader(source.journal).head())
        wait_until(lambda: confirmed(session, source) >= goal)


def test_a_full_journal_makes_postgres_keep_the_rest(session: Session, source: PostgresSource) -> None:
    cursor = Cursor(source.journal, source.context.reader)
    cursor.advance(origin(source))
    small = with_options(source, journal={"max_bytes": 2_000_000})
    seen: set[int] = set()
    with receiving(small.receiver_options()) as made:
        for start in range(0, 6000, 100):
            session.execute(
                "INSERT INTO t SELECT i, repeat(md5(i::text), 30) FROM generate_series(%s::int, %s::int) i",
                [start, start + 99],
            )
        wait_until(lambda: made.mode == "full")
        assert made.writer.size() < 8_000_000
        goal = before(server_lsn(session))
        while JournalReader(source.journal).mark() < goal:
            reader = JournalReader(source.journal)
            seen |= _keys_after(reader, cursor.position, source)
            cursor.advance(reader.head())
        seen |= _keys_after(JournalReader(source.journal), cursor.position, source)
    assert seen == set(range(6000))


def _keys_after(reader: JournalReader, after: Position, source: PostgresSource) -> set[int]:
    tables = {oid: only(published.schema) for oid, published in source.discover().items()}
    found: set[int] = set()
    for ref in reader.frames(after, reader.head()):
        meta = FrameMeta.from_bytes(ref.meta)
        messages = messages_of(reader.read(ref).payload)
        for changes in decode(messages, relations=meta.parsed_relations(), transaction=meta.transaction, tables=tables):
            found |= set(changes.row.field("id").to_pylist())
    return found


def test_a_transaction_larger_than_a_frame_is_cut_and_served_whole(
    session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_builder, "FRAME_BYTES", 100_000)
    with receiving(source.receiver_options()):
        session.execute("INSERT INTO t SELECT i, repeat('x', 2000) FROM generate_series(0, 9999) i")
        arrived(session, source)
    reader = JournalReader(source.journal)
    frames = reader.frames(origin(source), reader.head())
    assert len(frames) > 2
    assert [ref.complete for ref in frames] == [False] * (len(frames) - 1) + [True]
    assert ids(source) == list(range(10_000))


def test_a_large_transaction_broken_off_by_the_network_arrives_once(
    database: PostgresDatabase, session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_builder, "FRAME_BYTES", 50_000)
    host, port = "127.0.0.1", database.server.port
    with Proxy(host, port) as proxy:
        through = with_options(source, dsn=source.dsn.replace(f":{port}/", f":{proxy.port}/"))
        assert through.dsn != source.dsn
        cuts = iter(range(3))
        append = PostgresReceiver.receive

        def cut_now_and_then(self: PostgresReceiver, messages: Any) -> None:
            append(self, messages)
            if self.writer.within_transaction and next(cuts, None) is not None:
                proxy.cut()

        monkeypatch.setattr(PostgresReceiver, "receive", cut_now_and_then)
        with receiving(through.receiver_options()):
            session.execute("INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series(0, 19999) i")
            arrived(session, source)
    assert next(cuts, None) is None
    assert ids(source) == list(range(20_000))


def test_a_keepalive_within_a_large_transaction_is_no_boundary(
    session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_builder, "FRAME_BYTES", 50_000)
    receive, signs = ReplicationStream.receive, iter(range(3))
    with receiving(source.receiver_options()) as made:

        def receive_or_hear(self: ReplicationStream, wait_seconds: float) -> Any:
            if made.writer.within_transaction and next(signs, None) is not None:
                self.position = made.durable + 1  # as the server says it: before the commit that is being sent
                return None
            return receive(self, wait_seconds)

        monkeypatch.setattr(ReplicationStream, "receive", receive_or_hear)
        session.execute("INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series(0, 9999) i")
        arrived(session, source)
    assert next(signs, None) is None
    assert ids(source) == list(range(10_000))


@pytest.mark.parametrize("gear", ["streaming", "backlog"])
def test_what_a_full_disk_refused_is_received_again(
    session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch, gear: str
) -> None:
    monkeypatch.setattr(receiver, "BACKLOG_BYTES", 0 if gear == "backlog" else 1 << 30)
    monkeypatch.setattr(receiver, "READ_BYTES", 20_000)
    append, refusals = JournalWriter.append, iter([True, False, True])

    def append_or_refuse(self: JournalWriter, frames: Any) -> None:
        if next(refusals, False):
            raise UnavailableError("no space left on device")
        append(self, frames)

    monkeypatch.setattr(JournalWriter, "append", append_or_refuse)
    for number in range(200):
        session.execute("INSERT INTO t VALUES (%s, repeat('x', 1000))", [number])
    with receiving(source.receiver_options()):
        arrived(session, source)
        for number in range(200, 300):
            session.execute("INSERT INTO t VALUES (%s, repeat('x', 1000))", [number])
        arrived(session, source)
    assert next(refusals, None) is None
    assert ids(source) == list(range(300))


def test_what_the_journal_has_is_not_received_twice_after_a_restart(session: Session, source: PostgresSource) -> None:
    for start in range(3):
        with receiving(source.receiver_options()):
            session.execute("INSERT INTO t VALUES (%s, 'x')", [start])
            arrived(session, source)
    assert ids(source) == [0, 1, 2]


def test_a_journal_that_was_lost_is_noticed(session: Session, source: PostgresSource) -> None:
    with receiving(source.receiver_options()):
        session.execute("INSERT INTO t VALUES (1, 'x')")
        arrived(session, source)
        goal = server_lsn(session)
        wait_until(lambda: confirmed(session, source) >= goal)
    old = origin(source)
    shutil.rmtree(source.folder)
    Journal.open_writer(source.journal, origin=old).close()
    failing = receiving(source.receiver_options(), fails=True)
    with pytest.raises(LostError, match="journal ends at") as caught, failing:
        pass
    assert caught.value.fix


def test_a_slot_that_is_gone_is_noticed(session: Session, source: PostgresSource) -> None:
    session.execute("SELECT pg_drop_replication_slot(%s)", [source.options.slot])
    with pytest.raises(LostError, match="is gone"), receiving(source.receiver_options(), fails=True):
        pass
    with pytest.raises(LostError, match="is gone"):
        source.prepare()


def test_a_publication_that_was_dropped_and_made_again_is_noticed_where_the_server_does_not_decode_its_absence(
    postgres_server: Callable[[int], EmbeddedPostgres],
    make_database: Callable[[EmbeddedPostgres], PostgresDatabase],
    tmp_path: Path,
) -> None:
    database = make_database(postgres_server(16))
    database.run("CREATE TABLE t (id int PRIMARY KEY)")
    source = make_received(database, tmp_path)
    database.run("DROP PUBLICATION receive", "INSERT INTO t VALUES (1)", "CREATE PUBLICATION receive FOR TABLE t")
    with pytest.raises(LostError, match="created again"), receiving(source.receiver_options(), fails=True):
        pass


def test_a_slot_that_another_program_reads_is_refused(
    session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "PATIENCE_SECONDS", 0.3)
    with Replication(source.dsn) as other:
        ReplicationStream(other, source.options.slot, source.options.publication, 0)
        with pytest.raises(OwnedError, match="is read by process"), receiving(source.receiver_options(), fails=True):
            pass
