"""What may happen to a receiver: messages sent again, damage, a full disk, a server put back, a dead connection."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pyarrow as pa
import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import LostError, UnavailableError
from tailrace.journal import Cursor, FrameRef, JournalReader, local_storage
from tailrace.journal.object_storage import ObjectStorage
from tailrace.journal.segment import create_segment
from tailrace.journal.storage import Pace
from tailrace.model.change import START, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.source.postgres import frame_builder, receiver
from tailrace.source.postgres.bulk import bulk
from tailrace.source.postgres.frame_builder import FrameBuilder, FrameMeta, messages_of, scan
from tailrace.source.postgres.log_split import PgRange, log_splits
from tailrace.source.postgres.offset import before
from tailrace.source.postgres.pgoutput.decode import decode, only
from tailrace.source.postgres.pgoutput.message_batch import MessageBatch
from tailrace.source.postgres.receiver import PostgresReceiver
from tailrace.source.postgres.slot import emit_heartbeat, read_slot, require
from tailrace.source.postgres.source import PostgresSource
from tailrace.system import silence, status_file
from tailrace.system.atomic_file import replace_text
from tailrace.testing.wait import PATIENCE_SECONDS, wait_until
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
from tests.support.slatedb_bucket import serving
from tests.support.source_making import with_options

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Disk:
    """The journal's disk. While it is `full` it takes nothing, and counts by whom it was asked."""

    def __init__(self) -> None:
        self.full = False
        self.refused: Counter[str] = Counter()

    def guard(self, write: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        def write_or_refuse(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
            if self.full:
                self.refused[write.__name__] += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*arguments, **options)

        return write_or_refuse


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(local_storage, "_write", made.guard(local_storage._write))
    monkeypatch.setattr(local_storage, "create_segment", made.guard(create_segment))
    monkeypatch.setattr(status_file, "replace_text", made.guard(replace_text))
    return made


def frames(source: PostgresSource) -> list[FrameRef]:
    with closing(JournalReader(source.journal)) as reader:
        return list(reader.frames(origin(source), reader.head()))


def damage(source: PostgresSource, ref: FrameRef, at: int) -> None:
    """Change one bit of a frame in the journal."""
    with (source.folder / ref.segment).open("r+b") as file:
        file.seek(ref.offset + at)
        (byte,) = file.read(1)
        file.seek(ref.offset + at)
        file.write(bytes([byte ^ 1]))


def peek(session: Session, source: PostgresSource) -> pa.Array[Any]:
    """What the slot would send, which stays where it is."""
    rows = session.execute(
        "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '1',"
        " 'publication_names', %s, 'messages', 'true')",
        [source.options.slot, source.options.publication],
        binary=True,
    )
    return pa.array([bytes(data) for (data,) in rows], pa.binary())


def test_a_large_transaction_that_a_second_backlog_step_sends_again_is_taken_once(
    session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "BACKLOG_BYTES", 200_000)
    monkeypatch.setattr(receiver, "READ_BYTES", 20_000)
    monkeypatch.setattr(frame_builder, "FRAME_BYTES", 100_000)
    session.execute("INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series(0, 1999) i")
    receive_all, steps, written = PostgresReceiver._receive_all, iter([1]), threading.Event()

    def receive_all_while_busy(self: PostgresReceiver, reader: pa.RecordBatchReader) -> bool:
        done = receive_all(self, reader)
        # The step ends at the server's head of when it began, and moves no slot. Now another one is worth it.
        if next(steps, None):
            session.execute("INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series(2000, 9999) i")
            written.set()
        return done

    monkeypatch.setattr(PostgresReceiver, "_receive_all", receive_all_while_busy)
    with receiving(source.receiver_options()):
        assert written.wait(PATIENCE_SECONDS)
        arrived(session, source)
    assert ids(source) == list(range(10_000))


@pytest.mark.parametrize("rows_before", [0, 1])
def test_large_logical_messages_of_other_programs_are_skipped(
    session: Session, source: PostgresSource, rows_before: int
) -> None:
    with receiving(source.receiver_options()):
        with session.transaction():
            session.execute("INSERT INTO t SELECT i, 'before' FROM generate_series(1, %s::int) i", [rows_before])
            for _ in range(3):
                session.execute("SELECT pg_logical_emit_message(true, 'outbox', repeat('x', 9000000))")
            session.execute("INSERT INTO t VALUES (2, 'behind')")
        arrived(session, source)
    assert ids(source) == [1, 2][-1 - rows_before :]


@pytest.mark.parametrize("known", [0, 1])
def test_rows_before_a_new_shape_are_read_by_their_own_where_transactions_are_sent_again(
    session: Session, source: PostgresSource, known: int
) -> None:
    session.execute("ALTER TABLE t ADD COLUMN w text")
    (table,) = source.discover().values()
    session.execute("INSERT INTO t VALUES (1, 'v', 'w')")
    session.execute("INSERT INTO t VALUES (2, 'v', 'w')")
    # The same names and types in another order.
    session.execute("ALTER TABLE t DROP COLUMN v; ALTER TABLE t ADD COLUMN v text")
    session.execute("INSERT INTO t (id, v, w) VALUES (3, 'v', 'w')")
    messages = peek(session, source)
    (frame,) = FrameBuilder(int(scan(MessageBatch.of(messages)).end_lsn[known - 1]) if known else 0).feed(messages)
    meta = FrameMeta.from_bytes(frame.meta)
    decoded = decode(
        messages_of(frame.payload),
        relations=meta.parsed_relations(),
        transaction=meta.transaction,
        tables={table.oid: only(table.schema)},
    )
    read = [(row["id"], row["v"], row["w"]) for changes in decoded for row in changes.row.to_pylist()]
    assert read == [(number, "v", "w") for number in (1, 2, 3)][known:]
    assert len(meta.shapes) == 2 - known


def test_what_is_acknowledged_before_a_large_transaction_is_in_the_journal(
    session: Session, source: PostgresSource
) -> None:
    session.execute("SELECT pg_logical_emit_message(true, 'tailrace', 'heartbeat')")
    session.execute("INSERT INTO t VALUES (1, repeat('x', 9000000))")
    messages = peek(session, source)
    made = PostgresReceiver(source.receiver_options(), lambda: False)
    with made.writer:
        made.receive(messages.slice(0, len(messages) - 1))
        assert made.writer.within_transaction
        assert made._acknowledged() <= made.writer.mark.commit + 1


def test_damage_within_a_large_transaction_is_received_again(
    session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_builder, "FRAME_BYTES", 100_000)
    Cursor(source.journal, source.context.reader).advance(origin(source))
    source = with_options(source, acknowledge="applied", journal={"segment_bytes": 64_000_000})
    with receiving(source.receiver_options()):
        session.execute("INSERT INTO t VALUES (0, 'first')")
        arrived(session, source)
        session.execute("INSERT INTO t SELECT i, repeat(md5(i::text), 1000) FROM generate_series(1, 999) i")
        session.execute("INSERT INTO t VALUES (1000, 'last')")
        arrived(session, source)
    parts = [ref for ref in frames(source) if not ref.complete]
    assert len(parts) > 2
    damage(source, parts[1], parts[1].length - 100)
    with receiving(source.receiver_options()):
        session.execute("INSERT INTO t VALUES (1001, 'later')")
        arrived(session, source)
    assert ids(source) == list(range(1002))


def test_damage_that_every_reader_has_passed_stops_no_reader(session: Session, source: PostgresSource) -> None:
    cursor = Cursor(source.journal, source.context.reader)
    cursor.advance(origin(source))
    with receiving(source.receiver_options()):
        for number in range(3):
            session.execute("INSERT INTO t VALUES (%s, 'x')", [number])
            arrived(session, source)
        goal = server_lsn(session)
        wait_until(lambda: confirmed(session, source) >= goal)
    _, second, third = frames(source)
    cursor.advance(third.last)
    damage(source, second, 40)
    with receiving(source.receiver_options()):
        session.execute("INSERT INTO t VALUES (3, 'x')")
        arrived(session, source)
    assert ids(source, third.last) == [3]


def test_a_receiver_that_cannot_write_its_status_waits_for_room(
    session: Session, source: PostgresSource, disk: Disk
) -> None:
    with receiving(source.receiver_options()) as made:
        wait_until(lambda: made.mode == "streaming")
        disk.full = True
        session.execute("INSERT INTO t VALUES (1, 'x')")
        wait_until(lambda: disk.refused["_write"] > 0 and disk.refused["replace_text"] > 1)
        disk.full = False
        arrived(session, source)
    assert ids(source) == [1]


def test_a_receiver_whose_disk_is_full_within_a_large_transaction_waits_for_room(
    session: Session, source: PostgresSource, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_builder, "FRAME_BYTES", 100_000)
    receive = PostgresReceiver.receive

    def receive_until_full(self: PostgresReceiver, messages: pa.Array[Any]) -> None:
        receive(self, messages)
        if self.writer.within_transaction and not disk.refused:
            disk.full = True

    monkeypatch.setattr(PostgresReceiver, "receive", receive_until_full)
    with receiving(source.receiver_options()):
        session.execute("INSERT INTO t SELECT i, repeat('x', 2000) FROM generate_series(0, 9999) i")
        wait_until(lambda: disk.refused["create_segment"] > 1)
        disk.full = False
        arrived(session, source)
    assert ids(source) == list(range(10_000))


def test_a_server_put_back_to_an_earlier_state_is_noticed(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with EmbeddedPostgres(tmp_path / "server") as server:
        database = PostgresDatabase(server, "postgres")
        database.run("CREATE TABLE t (id int PRIMARY KEY, v text)")
        source = make_received(database, tmp_path)
        server.stop()
        subprocess.run(["cp", "-a", server.data_dir, saved], check=True)
        server.start()
        with closing(database.connect()) as session, receiving(source.receiver_options()):
            session.execute("INSERT INTO t SELECT i, repeat('x', 500) FROM generate_series(1, 5000) i")
            arrived(session, source)
        server.stop()
        shutil.rmtree(server.data_dir)
        subprocess.run(["cp", "-a", saved, server.data_dir], check=True)
        server.start()
        failing = receiving(source.receiver_options(), fails=True)
        with pytest.raises(LostError, match="restored to an earlier state") as caught, failing:
            pass
        assert caught.value.fix


def test_a_walsender_left_by_our_broken_connection_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shorter in every place, and in the same order: a walsender lives on for longer than a stranger is waited for.
    monkeypatch.setattr(silence, "SILENCE_SECONDS", 1.5)
    monkeypatch.setattr(receiver, "PATIENCE_SECONDS", 0.3)
    with (
        EmbeddedPostgres(tmp_path / "server", settings={"wal_sender_timeout": "5s"}) as server,
        Proxy("127.0.0.1", server.port) as proxy,
        closing(server.connect()) as session,
    ):
        session.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        source = make_received(PostgresDatabase(server, "postgres"), tmp_path)
        direct = source.receiver_options()
        through = replace(direct, dsn=direct.dsn.replace(f":{server.port}/", f":{proxy.port}/"))
        assert through.dsn != direct.dsn
        with receiving(through) as made:
            wait_until(
                lambda: require(read_slot(session, source.options.slot), source.options.slot, "").active_pid is not None
            )
            made.options = direct
            proxy.blackhole()
            session.execute("INSERT INTO t VALUES (1, 'x')")
            arrived(session, source)
        assert ids(source) == [1]


def test_the_length_of_a_small_frame_is_read_a_few_times_however_many_there_are() -> None:
    class Length(int):
        added = 0

        def __radd__(self, other: int) -> int:
            Length.added += 1
            return int(self) + other

    table = TableSchema(TableName("public", "t"), (Column("id", pa.int32()),), ("id",))
    meta = FrameMeta({1: 1}, {}, None).to_bytes()
    refs = [
        FrameRef("s", 1000 * i, Length(1000), Position(i, 0), Position(i, 5), True, 1, meta, 0) for i in range(1, 1001)
    ]
    (split,) = log_splits(refs, {1: PgRange(START, refs[-1].last, only(table))}, 1)
    assert split.weights == {"public.t": 1_000_000}
    assert Length.added <= 3 * len(refs)


def test_a_connection_that_breaks_during_a_result_is_reported_as_such(database: PostgresDatabase) -> None:
    ours = "SELECT pid FROM pg_stat_activity WHERE query LIKE 'COPY%generate_series%'"

    def read() -> None:
        with bulk(database.dsn, "reading") as connection, connection.cursor() as cursor:
            cursor.execute("SELECT repeat('x', 1000) FROM generate_series(1, 100000)")
            batches = cursor.fetch_batches()
            next(batches)
            with closing(database.connect()) as session:
                session.execute(f"SELECT pg_terminate_backend(pid) FROM ({ours}) reading")
                wait_until(lambda: not session.execute(ours).fetchall())
            list(batches)

    with pytest.raises(UnavailableError, match="Postgres does not answer, while reading"):
        read()


def test_nothing_is_acknowledged_past_what_the_journal_records_of_gathered_messages(
    session: Session, source: PostgresSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store takes what several reads brought as one piece, and the last of it may be a heartbeat alone."""
    monkeypatch.setattr(ObjectStorage, "pace", Pace(3600.0, 8 << 20, 3600.0, 3600.0))
    with serving() as store:
        options = replace(source.receiver_options(), journal="s3://shop/journal", storage_options=store.options)
        made = PostgresReceiver(options, lambda: False)
        made._stored_at = time.monotonic()
        with closing(made.writer):
            seen = len(peek(session, source))
            for number, what in enumerate(("row", "heartbeat", "row", "heartbeat", "heartbeat")):
                if what == "row":
                    session.execute("INSERT INTO t VALUES (%s, 'x')", [number])
                else:
                    emit_heartbeat(session)
                everything = peek(session, source)
                made.receive(everything[seen:])
                seen = len(everything)
            assert made.durable < made.framer.durable_end
            made._store_gathered(at_once=True)
            assert made.durable == made.framer.durable_end
            assert made.writer.mark == before(made.durable)
