"""The queue: batches go in once, whole and in order; reading deletes nothing; what the sender has passed goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.destination import Batch
from tailrace.destination.webhook import queue as module
from tailrace.destination.webhook.batch_file import EventStage, as_copied
from tailrace.destination.webhook.queue import FRAME_EVENTS, QueueReader, QueueWriter
from tailrace.errors import DamagedError, LostError, OwnedError, UnavailableError
from tailrace.model.change import LAST_ORDINAL, START, Position
from tailrace.model.last_batch import LastBatch
from tailrace.system.failpoint import VARIABLE, FailpointError
from tests.support.destination_writing import files_of_at_most
from tests.support.webhook_queue import batch, events, ids, numbered, opened


def test_what_was_appended_is_read_in_order_and_again_and_again(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        assert writer.append(batch(0), [numbered(0, 3), numbered(3, 2)]) == 5
        assert writer.append(batch(1), [numbered(5, 2500)]) == 2500
    expected = [f"public.t:{number}:0" for number in range(2505)]
    assert ids(tmp_path) == expected
    assert ids(tmp_path) == expected


def test_a_large_batch_is_read_in_turns(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.append(batch(0), [numbered(0, 5 * FRAME_EVENTS)])
    reader = QueueReader(tmp_path)
    first = reader.read(START, 1)
    assert [len(table) for _, table in first] == [FRAME_EVENTS]
    again = reader.read(START, 2 * FRAME_EVENTS)
    assert [len(table) for _, table in again] == [FRAME_EVENTS] * 2
    rest = reader.read(again[-1][0], 1 << 30)
    assert len(rest) == 3
    assert reader.read(rest[-1][0], 1) == []


def test_a_batch_that_comes_again_is_not_appended_again_also_by_another_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.append(batch(7), [numbered(0, 3)])
        assert writer.holds(batch(7))
        assert writer.append(batch(7), [numbered(0, 3)]) == 0
    with opened(tmp_path) as writer:
        assert writer.append(batch(7), [numbered(0, 3)]) == 0
        assert writer.append(batch(8), [numbered(3, 1)]) == 1
    assert len(ids(tmp_path)) == 4


def test_a_pipeline_that_was_reset_counts_its_batches_from_the_start(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.append(batch(7), [numbered(0, 1)])
        assert writer.append(batch(0, "shop/2"), [numbered(1, 1)]) == 1
    assert len(ids(tmp_path)) == 2


def test_the_last_batch_is_known_although_everything_was_delivered_and_released(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes=20_000) as writer:
        for number in range(40):
            writer.append(batch(number), [numbered(number * 100, 100)])
        reader = QueueReader(tmp_path)
        reader.release(reader.head)
        writer.require_room()
        assert reader.count(reader.start) < 4000
    with opened(tmp_path, segment_bytes=20_000) as writer:
        writer.require_room()
        assert writer.append(batch(39), [numbered(3900, 100)]) == 0
        writer.append(batch(40), [numbered(4000, 1)])
    assert ids(tmp_path)[-1] == "public.t:4000:0"


def test_reading_deletes_nothing_and_only_released_frames_go(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes=20_000) as writer:
        for number in range(40):
            writer.append(batch(number), [numbered(number * 100, 100)])
        assert len(ids(tmp_path)) == 4000
        writer.require_room()
        assert len(ids(tmp_path)) == 4000
        reader = QueueReader(tmp_path)
        reader.release(Position(20, 0))
        writer.require_room()
        left = ids(tmp_path)
    assert left[-1] == "public.t:3999:0"
    assert 2000 <= len(left) < 4000
    assert left == [f"public.t:{number}:0" for number in range(4000 - len(left), 4000)]


def test_a_full_queue_takes_no_more_until_the_sender_has_passed_some(tmp_path: Path) -> None:
    with opened(tmp_path, segment_bytes=20_000, max_bytes=60_000) as writer:
        with pytest.raises(UnavailableError, match="is full"):
            _fill(writer)
        kept = ids(tmp_path)
        reader = QueueReader(tmp_path)
        reader.release(reader.head)
        writer.require_room()
        writer.append(batch(2000), [numbered(0, 1)])
    assert kept == [f"public.t:{number}:0" for number in range(len(kept))]


def test_a_queue_filled_by_a_single_batch_has_room_again_once_that_is_delivered(tmp_path: Path) -> None:
    with opened(tmp_path, max_bytes=60_000) as writer:
        writer.append(batch(0), [numbered(0, 5000)])
        reader = QueueReader(tmp_path)
        for place in (START, Position(reader.head.commit - 1, 0)):
            reader.release(place)
            with pytest.raises(UnavailableError, match="is full"):
                writer.require_room()
        assert ids(tmp_path)[-1] == "public.t:4999:0"
        reader.release(reader.head)
        writer.require_room()
        assert writer.append(batch(0), [numbered(0, 5000)]) == 0
        assert writer.append(batch(1), [numbered(5000, 1)]) == 1
    assert ids(tmp_path) == ["public.t:5000:0"]


def _fill(writer: QueueWriter) -> None:
    for number in range(1000):
        writer.require_room()
        writer.append(batch(number), [numbered(number * 100, 100)])


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(OwnedError):
        opened(tmp_path)


def test_a_damaged_queue_stops_with_the_place_of_the_damage(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        for number in range(3):
            writer.append(batch(number), [numbered(number * 10, 10)])
    file = max(tmp_path.glob("*.seg"), key=lambda one: one.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="quarantine"):
        opened(tmp_path)


def test_events_of_several_tables_come_in_the_order_of_their_commits_after_copied_rows(tmp_path: Path) -> None:
    stage = EventStage(tmp_path)
    copied = stage.write([as_copied(one) for one in events(("public.c", 5, 0), ("public.c", 5, 1)).to_batches()])
    first = stage.write(events(("public.a", 1, 0), ("public.a", 3, 2)).to_batches())
    second = stage.write(events(("public.b", 1, 2), ("public.b", 2, 0)).to_batches())
    stage.enter(batch(0), "public.b", copied=[], log=[second], completes=False)
    stage.enter(batch(0), "public.a", copied=[], log=[first], completes=False)
    stage.enter(batch(0), "public.c", copied=[copied], log=[], completes=True)
    assert stage.tables(batch(0)) == {"public.a", "public.b", "public.c"}
    found = pa.concat_tables(stage.gather(batch(0), stage.tables(batch(0))))
    assert found.column("id").to_pylist() == [
        "public.c:5:0",
        "public.c:5:1",
        "",
        "public.a:1:0",
        "public.b:1:2",
        "public.b:2:0",
        "public.a:3:2",
    ]
    assert found.column("marker").to_pylist() == [False, False, True, False, False, False, False]
    assert found.slice(0, 3).column("ordinal").to_pylist() == [LAST_ORDINAL] * 3
    only = pa.concat_tables(stage.gather(batch(0), {"public.b"}))
    assert only.column("id").to_pylist() == ["public.b:1:2", "public.b:2:0"]
    stage.clear()
    assert not stage.tables(batch(0))
    assert not list(tmp_path.rglob("*.arrow"))


_WRITER = """
import sys
from pathlib import Path
from tests.support.webhook_queue import batch, numbered, opened
with opened(Path(sys.argv[1]), segment_bytes=50_000) as writer:
    for number in range(int(sys.argv[2]), 200):
        writer.append(batch(number), [numbered(number * 10, 10)])
        print(number, flush=True)
"""


@pytest.mark.parametrize("place", ["queue.before_append", "journal.before_fsync", "journal.appended", "queue.appended"])
def test_a_killed_writer_loses_nothing_it_acknowledged_and_doubles_nothing(tmp_path: Path, place: str) -> None:
    acknowledged = -1
    for nth in (3, 17, 60):
        done = subprocess.run(
            # As Spark does: only the batch that was under way is repeated.
            [sys.executable, "-c", _WRITER, str(tmp_path / "queue"), str(acknowledged + 1)],
            env={**os.environ, VARIABLE: f"{place}:kill@{nth}", "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        acknowledged = max([acknowledged, *map(int, done.stdout.split())])
        found = ids(tmp_path / "queue")
        assert len(found) >= (acknowledged + 1) * 10
        assert found == [f"public.t:{number}:0" for number in range(len(found))]


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(0, 3000)),
            st.tuples(st.just("again"), st.just(0)),
            st.tuples(st.just("reopen"), st.just(0)),
            st.tuples(st.just("release"), st.integers(0, 100)),
            st.tuples(st.just("torn"), st.integers(1, 60)),
        ),
        max_size=14,
    )
)
def test_the_queue_is_always_a_suffix_of_what_was_appended(steps: Sequence[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        _follow(Path(name), steps)


def _follow(folder: Path, steps: Sequence[tuple[str, int]]) -> None:
    writer, appended, number, last = opened(folder, segment_bytes=30_000), 0, 0, 0
    released = START
    for step, argument in steps:
        if step == "append":
            last = argument
            writer.append(batch(number), [numbered(appended, argument)])
            appended, number = appended + argument, number + 1
        elif step == "again" and number and last:
            assert writer.append(batch(number - 1), [numbered(appended - last, last)]) == 0
        elif step == "reopen":
            writer.close()
            writer = opened(folder, segment_bytes=30_000)
        elif step == "release":
            reader = QueueReader(folder)
            released = max(released, Position(reader.head.commit * argument // 100, 0))
            reader.release(released)
            reader.close()
            writer.require_room()
        elif step == "torn":
            # Half an append, as a crash leaves it.
            writer.close()
            newest = max(folder.glob("*.seg"))
            newest.write_bytes(newest.read_bytes() + b"\x00torn" * argument)
            writer = opened(folder, segment_bytes=30_000)
    writer.close()
    found = ids(folder)
    assert found == [f"public.t:{n}:0" for n in range(appended - len(found), appended)]
    reader = QueueReader(folder)
    for position, _ in reader.read(released, 1 << 30):
        assert position > released
    if released == START:
        assert len(found) == appended


def test_an_error_between_staging_and_the_queue_leaves_the_batch_to_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as writer:
        monkeypatch.setenv(VARIABLE, "queue.before_append:raise")
        with pytest.raises(FailpointError):
            writer.append(batch(0), [numbered(0, 3)])
        monkeypatch.delenv(VARIABLE)
        assert writer.append(batch(0), [numbered(0, 3)]) == 3
    assert len(ids(tmp_path)) == 3


def test_a_copy_whose_last_part_is_empty_is_still_reported_complete(tmp_path: Path) -> None:
    stage = EventStage(tmp_path)
    stage.enter(batch(0), "public.a", copied=[stage.write([])], log=[], completes=True)
    found = pa.concat_tables(stage.gather(batch(0), {"public.a"})).to_pylist()
    assert [(row["table"], row["commit"], row["marker"]) for row in found] == [("public.a", 0, True)]


def test_a_batch_that_comes_again_brings_the_table_that_had_failed_the_first_time(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        assert writer.lacks(batch(0), {"a", "b"}) == {"a", "b"}
        writer.append(batch(0), [numbered(0, 2)], {"a"})
    for expected in (1, 0):
        with opened(tmp_path) as writer:
            lacking = writer.lacks(batch(0), {"a", "b"})
            assert lacking == ({"b"} if expected else set())
            assert writer.append(batch(0), [numbered(2, 1)], lacking) == expected
            assert writer.lacks(batch(1), {"a"}) == {"a"}
    assert ids(tmp_path) == [f"public.t:{number}:0" for number in range(3)]


def _spoil_header(segment: Path) -> None:
    data = bytearray(segment.read_bytes())
    data[20] ^= 1
    segment.write_bytes(data)


def _segments(folder: Path) -> list[Path]:
    """Those that hold events, oldest first."""
    return [file for file in sorted(folder.glob("*.seg")) if file.stat().st_size > 1000]


@pytest.mark.parametrize("which", [0, -1], ids=["the oldest file", "the newest file"])
def test_a_file_that_lost_its_header_stops_the_queue_until_it_is_given_up(tmp_path: Path, which: int) -> None:
    with opened(tmp_path, segment_bytes=20_000) as writer:
        for number in range(20):
            writer.append(batch(number), [numbered(number * 100, 100)])
        if which == -1:
            reader = QueueReader(tmp_path)
            reader.release(reader.head)
    head = QueueReader(tmp_path).head
    _spoil_header(_segments(tmp_path)[which])
    if which == 0:
        with pytest.raises(DamagedError, match="were not delivered"):
            ids(tmp_path)
    for _ in range(3):
        with pytest.raises(DamagedError, match="quarantine"):
            opened(tmp_path)
    with QueueWriter(tmp_path, segment_bytes=1 << 20, max_bytes=1 << 30, accepts_damage=True) as writer:
        place = writer.give_up()
    assert place > head
    with opened(tmp_path) as writer:
        writer.append(batch(100), [numbered(5000, 1)])
    assert ids(tmp_path, QueueReader(tmp_path).released) == ["public.t:5000:0"]
    assert list((tmp_path / "quarantine").iterdir())


def test_a_table_may_have_the_longest_name_there_is(tmp_path: Path) -> None:
    stage = EventStage(tmp_path)
    name = f"{'ü' * 31}.{'ж' * 31}"
    stage.enter(batch(0), name, copied=[], log=[], completes=True)
    assert stage.tables(batch(0)) == {name}


def test_a_disk_that_is_full_is_an_error_that_says_so_and_passes(tmp_path: Path) -> None:
    stage = EventStage(tmp_path)
    with opened(tmp_path) as writer:
        with files_of_at_most(2000):
            with pytest.raises(UnavailableError, match="cannot write to") as caught:
                stage.write(numbered(0, 5000).to_batches())
            assert "has space" in (caught.value.fix or "")
            with pytest.raises(UnavailableError, match="File too large"):
                writer.append(batch(0), [numbered(0, 5000)])
        writer.append(batch(0), [numbered(0, 10)])
        writer.append(batch(1), [numbered(10, 10)])
        reader = QueueReader(tmp_path)
        assert reader.head > Position(2 + 5000 // FRAME_EVENTS, -1)  # the numbers of what failed are not used again
        with files_of_at_most(0):
            with pytest.raises(UnavailableError, match="cannot write to"):
                reader.release(reader.head)
            with pytest.raises(UnavailableError, match="cannot write to"):
                writer.require_room()
            with pytest.raises(UnavailableError, match="cannot write to"):
                stage.enter(batch(0), "public.t", copied=[], log=[], completes=True)
        writer.require_room()
    assert len(ids(tmp_path)) == 20


def test_what_waits_is_counted_also_when_it_is_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COUNT_EVENTS", 10)
    with opened(tmp_path, segment_bytes=5000) as writer:
        for number in range(30):
            writer.append(batch(number), [numbered(number * 7, 7)])
    reader = QueueReader(tmp_path)
    assert (reader.count(START), reader.count(Position(10, 0)), reader.count(reader.head)) == (210, 140, 0)


def test_large_events_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 2000)
    with opened(tmp_path) as writer:
        for number in range(5):
            writer.append(batch(number), [numbered(number * 10, 10)])
    assert len(QueueReader(tmp_path).read(START, 1000)) < 5
    assert len(ids(tmp_path)) == 50


def test_a_queue_that_is_older_or_newer_than_the_state_stops_the_pipeline_and_a_new_life_goes_on(
    tmp_path: Path,
) -> None:
    with opened(tmp_path / "queue") as writer:
        for number in range(3):
            writer.append(Batch("shop/1", number, number), [numbered(number, 1)])
        assert writer.last_batch("shop/1") == LastBatch(2, 2)
        assert writer.last_batch("shop/2") is None
        assert writer.holds(Batch("shop/1", 2, 2, LastBatch(1, 1)))
        wrong = [
            Batch("shop/1", 1, 1),
            Batch("shop/1", 2, 9, LastBatch(1, 1)),
            Batch("shop/1", 3, 3, LastBatch(1, 1)),
            Batch("shop/1", 5, 5, LastBatch(4, 4)),
            Batch("shop/2", 5, 5, LastBatch(4, 4)),
        ]
        for batch in wrong:
            with pytest.raises(LostError, match="does not fit the state") as caught:
                writer.append(batch, [numbered(9, 1)])
            assert "tailrace reset FILE" in (caught.value.fix or "")
        assert not writer.holds(Batch("shop/1", 3, 3, LastBatch(2, 2)))
        assert not writer.holds(Batch("shop/2", 0, 0))
    assert len(ids(tmp_path / "queue")) == 3


def test_a_damaged_queue_that_was_given_up_goes_on_with_any_batch(tmp_path: Path) -> None:
    with opened(tmp_path) as writer:
        writer.append(Batch("shop/1", 0, 0), [numbered(0, 1)])
    for segment in tmp_path.glob("*.seg"):
        segment.write_bytes(bytes(len(segment.read_bytes())))
    with QueueWriter(tmp_path, segment_bytes=1 << 20, max_bytes=1 << 30, accepts_damage=True) as writer:
        writer.give_up()
    with opened(tmp_path) as writer:
        assert not writer.holds(Batch("shop/1", 1, 1, LastBatch(0, 0)))
        assert writer.append(Batch("shop/1", 1, 1, LastBatch(0, 0)), [numbered(1, 1)]) == 1
