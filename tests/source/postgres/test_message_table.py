"""Logical messages of other programs arrive as rows, once and in their place among the changes."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tailrace.option.table import TableOptions
from tailrace.source.follower import Limit
from tailrace.source.postgres.frame_builder import FrameBuilder, messages_of
from tailrace.source.postgres.message_table import OID, PUBLISHED, as_insert
from tailrace.source.postgres.pgoutput.decode import decode, only
from tailrace.source.postgres.pgoutput.message import LogicalMessage, Relation, parse
from tailrace.source.postgres.schema_diff import differences
from tailrace.testing.replay import SourceReplay
from tests.support.database import PostgresDatabase
from tests.support.source_making import make_postgres

MESSAGES = "pg_logical.message"


def test_messages_arrive_once_whether_or_not_they_are_part_of_a_transaction(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)")
    source = make_postgres(database.dsn, tmp_path, "look", TableOptions(), messages=True, heartbeat=0.1)
    assert [str(table.table) for table in source.tables()] == ["public.t", MESSAGES]
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        replay.catch_up()
        database.run(
            "SELECT pg_logical_emit_message(true, 'audit', 'Grüße')",
            "SELECT pg_logical_emit_message(false, 'audit', '\\x00ff'::bytea)",
            "BEGIN; INSERT INTO t VALUES (1); SELECT pg_logical_emit_message(true, '', 'rolled back'); ROLLBACK",
            "INSERT INTO t VALUES (2)",
        )
        replay.catch_up()
        replay.crash()
        database.run("SELECT pg_logical_emit_message(false, 'later', 'x')")
        replay.catch_up()
    rows = [row[:3] for row in replay.tables[MESSAGES].contents().elements()]
    assert sorted(rows) == [
        ("audit", b"\x00\xff", False),
        ("audit", "Grüße".encode(), True),
        ("later", b"x", False),
    ]
    assert replay.tables["public.t"].contents() == {(2,): 1}


def test_a_receiver_that_starts_again_does_not_take_a_message_for_another_history(
    database: PostgresDatabase, tmp_path: Path
) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)")
    source = make_postgres(database.dsn, tmp_path, "look", TableOptions(), messages=True, acknowledge="applied")
    for round_ in range(3):
        with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
            database.run(f"SELECT pg_logical_emit_message(false, 'round', '{round_}')")
            replay.catch_up()
    assert replay.tables[MESSAGES].schema == PUBLISHED.schema


def test_messages_of_others_are_left_out_unless_they_are_wanted(database: PostgresDatabase, tmp_path: Path) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY)")
    source = make_postgres(database.dsn, tmp_path, "look", TableOptions())
    with SourceReplay(source, Limit(1000, 10_000_000)) as replay:
        database.run("SELECT pg_logical_emit_message(false, 'audit', 'x')", "INSERT INTO t VALUES (1)")
        replay.catch_up()
    assert list(replay.tables) == ["public.t"]


def test_messages_keep_their_place_in_the_transaction_and_between_transactions() -> None:
    alone = [pa.array(as_insert(LogicalMessage(False, "p", b"c", lsn)), pa.binary()) for lsn in (0x100, 0x200)]
    frames = FrameBuilder(0, takes_messages=True).feed(pa.concat_arrays(alone))
    [changes] = [
        changes
        for frame in frames
        for changes in decode(
            messages_of(frame.payload), relations={}, transaction=None, tables={OID: only(PUBLISHED.schema)}
        )
    ]
    assert changes.numpy("commit").tolist() == [0x100, 0x200]
    assert changes.batch.column("txn").null_count == changes.batch.column("committed_at").null_count == 2
    assert [row["lsn"] for row in changes.row.to_pylist()] == ["0/100", "0/200"]
    assert frames[-1].last.commit == 0x200


def test_the_relation_of_messages_is_that_of_their_table() -> None:
    relation = parse(as_insert(LogicalMessage(True, "p", b"c", 1))[0])
    assert isinstance(relation, Relation)
    assert differences(PUBLISHED.schema, relation) == []
