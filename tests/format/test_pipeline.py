"""What a stopped pipeline of the first release left opens without Spark, and without the server that is gone."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tailrace.config.pipeline import load
from tailrace.config.registry import open_source
from tailrace.destination.webhook.queue import QueueReader, QueueWriter
from tailrace.destination.webhook.sender.lock import queue_id
from tailrace.destination.webhook.sender.status import Report
from tailrace.journal import Journal
from tailrace.model.change import START, Op, Position
from tailrace.source.offset import log_ranges
from tailrace.source.poll.key_snapshot import HASH, KeySnapshot
from tailrace.source.postgres.log_split import PgRange, log_splits
from tailrace.source.postgres.offset import PostgresOffset
from tailrace.state import SqliteStore
from tailrace.stream.checkpoint import Checkpoint
from tests.support.format_fixture import unpack

PIPELINES = [
    "poll-delta",
    "postgres-delta",
    "rqlite-webhook",
    "slatedb-delta",
    "sqlite-delta",
    "sqlite-sqlite",
    "turso-sqlite",
]


def offset(state: Path, batch: int) -> dict[str, Any]:
    """The offset at which a batch ends, from Spark's log."""
    text = (state / "checkpoint" / "offsets" / str(batch)).read_text().splitlines()[-1]
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("name", PIPELINES)
def test_a_checkpoint_belongs_to_its_state_and_ends_where_the_state_does(name: str, tmp_path: Path) -> None:
    file = unpack(name, tmp_path)
    config = load(file)
    checkpoint = Checkpoint(tmp_path / "state" / "checkpoint")
    with SqliteStore(config.name, tmp_path / "state").open() as store:
        checkpoint.require(store)
        last, done = store.last_batch(), checkpoint.last_commit()
        assert last is not None
        assert done is not None
        assert (last.id, last.offset) == done
        tables = {table.upstream_id for table in store.tables()}
    assert {table.upstream_id for table in open_source(config).progress(done[1])} == tables


# -- Postgres -------------------------------------------------------------------------------------------------


def test_the_journal_of_a_postgres_that_is_gone_is_planned_and_decoded(tmp_path: Path) -> None:
    source = open_source(load(unpack("postgres-delta", tmp_path)))
    state = tmp_path / "state"
    start, end = (PostgresOffset.from_json(offset(state, batch)) for batch in (1, 2))
    with SqliteStore("shop", state).open_reading() as store:
        wanted = {
            oid: PgRange(one.after, one.upto, tuple(store.schemas_between(str(oid), one.after, one.upto)))
            for oid, one in log_ranges(start, end).items()
        }
    reader = Journal.open_reader(state / "journal")
    splits = log_splits(reader.frames(start.log, end.log), wanted, 1)
    reader.close()
    found: dict[str, list[tuple[Op, dict[str, Any]]]] = {}
    for changes in (changes for split in splits for changes in source.read(split)):
        rows = changes.batch.to_pylist()
        found.setdefault(str(changes.table.table), []).extend((Op(row["op"]), row["row"]) for row in rows)
    assert [(op, row["id"], row["name"], str(row["balance"]), row["tags"]) for op, row in found["public.accounts"]] == [
        (Op.UPDATE, 1, "account 1", "2.50", ["a", None]),
        (Op.UPDATE, 2, "account 2", "4.00", ["a", None]),
        (Op.INSERT, 6, "new", "None", None),
    ]
    assert [(op, row["id"], row.get("note")) for op, row in found["public.items"]] == [
        (Op.DELETE, 7, None),
        (Op.UPDATE, 8, "seen"),
    ]


def test_the_last_status_of_a_postgres_receiver_is_shown(tmp_path: Path) -> None:
    source = open_source(load(unpack("postgres-delta", tmp_path)))
    raw = json.loads((tmp_path / "state" / "journal" / "receiver.json").read_text())
    assert list(raw) == ["pid", "at", "gear", "durable", "server", "confirmed", "restart", "journal_bytes", "error"]
    status = source.status()
    assert (status.gear, status.journal_bytes, status.error, status.fix) == ("streaming", 1976, None, None)
    assert [
        int(getattr(status, name)[:16], 16) + 1 for name in ("received", "server", "slot_restart", "slot_confirmed")
    ] == [raw[name] for name in ("durable", "server", "restart", "confirmed")]
    assert (
        list(source.idle_until() or ())
        == json.loads((tmp_path / "state" / "journal" / "follower.json").read_text())["passed"]
    )


# -- polling --------------------------------------------------------------------------------------------------


def test_the_stored_key_snapshot_of_a_polled_table_is_still_read(tmp_path: Path) -> None:
    unpack("poll-delta", tmp_path)
    known = KeySnapshot.of(str(tmp_path / "state" / "poll" / "pipeline"), "notes")
    for step in (1, 3):
        bases = known.bases(step)
        assert bases is not None
        rows = [row for base in bases for row in base.read().to_pylist()]
        assert sorted(row["id"] for row in rows) == list(range(15))
        assert all(row[HASH] is not None for row in rows)
    polled = known.polled(1, 3)
    assert polled is not None
    assert set(polled.column_names) >= {"id", HASH}
    assert known.window(2).tolist() == known.window(3).tolist()


# -- the queue ------------------------------------------------------------------------------------------------


def test_a_half_sent_queue_holds_what_was_not_delivered(tmp_path: Path) -> None:
    unpack("rqlite-webhook", tmp_path)
    queue = tmp_path / "state" / "queue"
    status = json.loads((queue / "sender.json").read_text())
    with closing(QueueReader(queue)) as reader:
        assert (str(reader.head), reader.released) == (status["head"], Position(2, 0))
        assert Position.parse(status["delivered_to"]) == Position(2, 2)
        # Of the batch in hand, two of five events were delivered.
        assert reader.count(reader.released) - 2 == status["pending"] == 3
        frames = reader.read(START, 100)
    events = [row for _, table in frames for row in table.to_pylist() if not row["marker"]]
    assert [row["commit"] for row in events] == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    assert {row["table"] for row in events} == {"rqlite.t"}
    assert len(queue_id(queue)) == 32


def test_a_sender_writes_its_status_with_the_same_keys_and_values(tmp_path: Path) -> None:
    unpack("rqlite-webhook", tmp_path)
    file = tmp_path / "state" / "queue" / "sender.json"
    before = json.loads(file.read_text())
    with closing(Report(file.parent, "n1")) as report:
        report.leads(2)
        report.reached(Position(2, 2))
        report.publish()
    after = json.loads(file.read_text())
    assert list(after) == list(before)
    same = ("node", "leader", "follows", "epoch", "head", "delivered_to", "pending", "dropped")
    assert {key: after[key] for key in same} == {key: before[key] for key in same}


def test_a_queue_is_appended_to_after_its_last_batch(tmp_path: Path) -> None:
    unpack("rqlite-webhook", tmp_path)
    queue = tmp_path / "state" / "queue"
    with QueueWriter(queue, segment_bytes=1_000_000, max_bytes=10_000_000), closing(QueueReader(queue)) as reader:
        assert reader.head == Position(3, 0)
