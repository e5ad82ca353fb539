from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.errors import DamagedError, LostError
from tailrace.model.last_batch import LastBatch
from tailrace.state import BatchRecord, SqliteStore, StateStore
from tailrace.stream.checkpoint import Checkpoint


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StateStore]:
    with SqliteStore("shop", tmp_path / "state").open() as store:
        yield store


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path / "checkpoint")


def log(checkpoint: Checkpoint, batch_id: int, *, done: bool) -> None:
    """What Spark writes for a batch."""
    for name in ("offsets", "commits"):
        (checkpoint.folder / name).mkdir(parents=True, exist_ok=True)
    offsets = ["v1", json.dumps({"batchTimestampMs": 1}), json.dumps({"at": batch_id})]
    (checkpoint.folder / "offsets" / str(batch_id)).write_text("\n".join(offsets))
    (checkpoint.folder / "offsets" / f".{batch_id}.crc").touch()
    if done:
        (checkpoint.folder / "commits" / str(batch_id)).write_text('v1\n{"nextBatchWatermarkMs":0}')


def test_a_new_pipeline_and_one_that_goes_on_are_let_through(store: StateStore, checkpoint: Checkpoint) -> None:
    checkpoint.require(store)
    log(checkpoint, 0, done=True)
    store.apply_batch(BatchRecord(0, {"at": 0}))
    checkpoint.require(store)
    log(checkpoint, 1, done=True)
    checkpoint.require(store)


def test_a_checkpoint_that_is_gone_is_noticed(store: StateStore, checkpoint: Checkpoint) -> None:
    store.apply_batch(BatchRecord(0, {}))
    with pytest.raises(LostError, match="is missing") as raised:
        checkpoint.require(store)
    assert "tailrace reset FILE" in (raised.value.fix or "")


def test_a_checkpoint_of_another_state_is_noticed_once_it_has_batches(
    store: StateStore, checkpoint: Checkpoint
) -> None:
    checkpoint.require(store)
    store.forget_pipeline()
    checkpoint.require(store)
    log(checkpoint, 0, done=False)
    store.forget_pipeline()
    with pytest.raises(LostError, match="than the one in the store"):
        checkpoint.require(store)


@pytest.mark.parametrize("again", ["not yet", "planned", "done with another range"])
def test_a_checkpoint_older_than_the_state_is_noticed(store: StateStore, checkpoint: Checkpoint, again: str) -> None:
    log(checkpoint, 0, done=True)
    for batch_id in (0, 1):
        store.apply_batch(BatchRecord(batch_id, {"at": batch_id * 10}))
    if again != "not yet":
        log(checkpoint, 1, done=again != "planned")
    with pytest.raises(LostError, match="older than the state: it lacks batch 1") as raised:
        checkpoint.require(store)
    assert "tailrace reset FILE" in (raised.value.fix or "")


@pytest.mark.parametrize(("name", "last"), [("offsets", 2), ("commits", 1)])
def test_an_entry_that_a_power_cut_left_empty_does_not_count(
    store: StateStore, checkpoint: Checkpoint, name: str, last: int
) -> None:
    for batch_id in range(last + 1):
        log(checkpoint, batch_id, done=batch_id < last or name == "commits")
    store.apply_batch(BatchRecord(0, {"at": 0}))
    entry, sum_ = (checkpoint.folder / name / each for each in (str(last), f".{last}.crc"))
    entry.write_bytes(b"")
    sum_.touch()
    checkpoint.require(store)
    assert not entry.exists()
    assert not sum_.exists()
    assert checkpoint.last_commit() == (last - 1, {"at": last - 1})
    assert {int(kept.name) for kept in (checkpoint.folder / "offsets").glob("[0-9]*")} == set(range(2))


def test_a_start_that_a_power_cut_left_half_done_begins_again(store: StateStore, checkpoint: Checkpoint) -> None:
    checkpoint.require(store)
    own, sum_ = (checkpoint.folder / name for name in ("metadata", ".metadata.crc"))
    own.touch()
    sum_.touch()
    checkpoint.require(store)
    assert not own.exists()
    assert not sum_.exists()


def test_the_last_committed_batch_is_returned_with_its_offset(checkpoint: Checkpoint) -> None:
    assert checkpoint.last_commit() is None
    for batch_id in range(11):
        log(checkpoint, batch_id, done=batch_id < 10)
    assert checkpoint.last_commit() == (9, {"at": 9})


def test_a_changed_destination_is_reported_once_and_the_first_one_never(store: StateStore, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    reported = [checkpoint.note_destination(f"delta {at}", store) for at in ("a", "a", "\udcff", "\udcff", "a")]
    assert reported == [None, None, "delta a", None, "delta \udcff"]


def applied(store: StateStore, checkpoint: Checkpoint, batch_id: int) -> None:
    store.record_applied(LastBatch(batch_id, checkpoint.end_of(batch_id)), {})


def test_a_batch_that_was_applied_and_that_spark_has_not_logged_yet_is_let_through(
    store: StateStore, checkpoint: Checkpoint
) -> None:
    log(checkpoint, 0, done=True)
    log(checkpoint, 1, done=False)
    for batch_id in (0, 1):
        applied(store, checkpoint, batch_id)
        checkpoint.require(store)
    assert checkpoint.last_planned() == LastBatch(1, checkpoint.end_of(1))


def test_a_state_older_than_its_checkpoint_is_noticed(store: StateStore, checkpoint: Checkpoint) -> None:
    for batch_id in range(2):
        log(checkpoint, batch_id, done=True)
    applied(store, checkpoint, 0)
    with pytest.raises(LostError, match="the state is older than its checkpoint") as raised:
        checkpoint.require(store)
    assert "tailrace reset FILE" in (raised.value.fix or "")


@pytest.mark.parametrize("again", ["not planned", "planned with another range"])
def test_a_checkpoint_without_the_batch_that_was_applied_last_is_noticed(
    store: StateStore, checkpoint: Checkpoint, again: str
) -> None:
    for batch_id in range(2):
        log(checkpoint, batch_id, done=batch_id == 0)
    applied(store, checkpoint, 1)
    entry = checkpoint.folder / "offsets" / "1"
    if again == "not planned":
        entry.unlink()
    else:
        entry.write_text(entry.read_text().replace('"at": 1', '"at": 2'))
    with pytest.raises(LostError, match="it lacks batch 1"):
        checkpoint.require(store)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("offsets/1", b'v1\n{}\n{"at"'),
        ("offsets/1", b"v1\n{}"),
        ("offsets/1", b"\xff\xfe"),
        ("offsets/1", b"v1\n{}\n7"),
        ("commits/1", b"v1"),
        ("commits/1", b"v1\nx"),
        ("metadata", b'{"id":'),
    ],
)
def test_a_damaged_entry_is_called_damaged_and_the_fix_is_named(
    store: StateStore, checkpoint: Checkpoint, name: str, content: bytes
) -> None:
    for batch_id in range(2):
        log(checkpoint, batch_id, done=True)
    (checkpoint.folder / name).write_bytes(content)
    with pytest.raises(DamagedError, match="the checkpoint is damaged") as raised:
        checkpoint.require(store)
    assert name in raised.value.message
    assert "tailrace reset FILE" in (raised.value.fix or "")


def test_a_flipped_bit_in_an_entry_is_noticed_by_its_checksum(store: StateStore, checkpoint: Checkpoint) -> None:
    log(checkpoint, 0, done=True)
    entry = checkpoint.folder / "offsets" / "0"
    sums = b"crc\0" + (512).to_bytes(4) + zlib.crc32(entry.read_bytes()).to_bytes(4)
    (checkpoint.folder / "offsets" / ".0.crc").write_bytes(sums)
    checkpoint.require(store)
    entry.write_text(entry.read_text().replace('"at": 0', '"at": 8'))
    with pytest.raises(DamagedError, match="does not match its checksum"):
        checkpoint.require(store)
