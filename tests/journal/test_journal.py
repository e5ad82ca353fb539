"""What a writer promises, and what readers see of it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tailrace.errors import LostError, OwnedError, UnavailableError
from tailrace.journal import Cursor, Frame, Journal, JournalPlace, cursors, open_storage
from tailrace.model.change import START, Position


def frame(number: int, *, complete: bool = True, payload: bytes = b"payload", count: int = 1) -> Frame:
    """A frame that holds the positions (number, 1) to (number, 9)."""
    return Frame(Position(number, 1), Position(number, 9), complete, count, b'{"n": %d}' % number, payload)


def end(number: int) -> Position:
    return Position(number, 9)


def numbers(path: JournalPlace, after: Position = START) -> list[int]:
    """The numbers of the frames that a fresh reader serves, each read and checked."""
    reader = Journal.open_reader(path)
    refs = reader.frames(after, reader.mark())
    found = [reader.read(ref).first.commit for ref in refs]
    reader.close()
    return found


def segments(path: JournalPlace) -> list[str]:
    return open_storage(path).names()


def test_an_empty_journal_stands_at_the_start(either_place: JournalPlace) -> None:
    reader = Journal.open_reader(either_place)
    assert (reader.head(), reader.mark(), reader.frames(START, START)) == (START, START, [])
    with Journal.open_writer(either_place) as writer:
        assert (writer.head, writer.mark) == (START, START)


def test_what_was_appended_is_read_back_the_same_by_another_process(either_place: JournalPlace) -> None:
    given = [
        frame(1, payload=b""),
        frame(2, payload=os.urandom(13)),
        Frame(Position(3, 0), Position(5, 7), True, 12, b"", pa.py_buffer(os.urandom(300_000))),
    ]
    with Journal.open_writer(either_place) as writer:
        writer.append(given)
    reader = Journal.open_reader(either_place)
    refs = reader.frames(START, reader.head())
    program = (
        "import pickle, sys; from tailrace.journal import Journal\n"
        "path, refs = pickle.load(sys.stdin.buffer); reader = Journal.open_reader(path)\n"
        "pickle.dump([bytes(reader.read(ref).payload) for ref in refs], sys.stdout.buffer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps((either_place, refs)), capture_output=True, check=True
    )
    assert pickle.loads(done.stdout) == [bytes(memoryview(one.payload)) for one in given]
    assert [(ref.first, ref.last, ref.complete, ref.count, ref.meta) for ref in refs] == [
        (one.first, one.last, one.complete, one.count, one.meta) for one in given
    ]


def test_a_payload_can_be_viewed_as_numbers_where_it_lies(either_place: JournalPlace) -> None:
    values = np.arange(1000, dtype=np.int64)
    with Journal.open_writer(either_place) as writer:
        writer.append([frame(1, payload=b"odd"), frame(2, payload=values.tobytes())])
    reader = Journal.open_reader(either_place)
    view = np.frombuffer(reader.read(reader.frames(end(1), end(2))[0]).payload, np.int64)
    assert view.flags.aligned
    assert (view == values).all()


def test_an_unfinished_transaction_is_not_served_until_its_end_is_there(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place, segment_bytes=1000) as writer:
        writer.append([frame(1)])
        reader = Journal.open_reader(either_place)
        for ordinal in range(1, 30):
            part = Frame(Position(2, ordinal), Position(2, ordinal), ordinal == 29, 1, b"", bytes(200))
            writer.append([part])
            reader.refresh()
            expected = (end(1), 0) if ordinal < 29 else (Position(2, 29), 29)
            assert (reader.head(), len(reader.frames(end(1), reader.head()))) == expected
    assert len(segments(either_place)) > 5


def test_a_half_received_transaction_is_forgotten_at_the_next_start_even_over_several_segments(
    either_place: JournalPlace,
) -> None:
    with Journal.open_writer(either_place, segment_bytes=1000) as writer:
        writer.append([frame(1)])
        for ordinal in range(1, 30):
            writer.append([Frame(Position(2, ordinal), Position(2, ordinal), False, 1, b"", bytes(200))])
        reader = Journal.open_reader(either_place)
    with Journal.open_writer(either_place, segment_bytes=1000) as writer:
        assert (writer.head, writer.mark, writer.damage) == (end(1), end(1), [])
        writer.append([frame(2)])
        reader.refresh()
        assert [ref.first for ref in reader.frames(START, end(2))] == [Position(1, 1), Position(2, 1)]
    assert numbers(either_place) == [1, 2]
    if isinstance(either_place, Path):  # objects stay until retention comes to them: their numbers have no gaps
        assert len(segments(either_place)) == 2


def test_a_transaction_the_upstream_broke_off_is_dropped_without_closing(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place) as writer:
        writer.append([frame(1)])
        writer.note(Position(2, 5))
        writer.append([frame(2, complete=False)])
        assert numbers(either_place) == [1]
        with pytest.raises(ValueError, match="unfinished"):
            writer.note(Position(3, 0))
        writer.drop_unfinished()
        assert (writer.head, writer.mark) == (end(1), Position(2, 5))
        before = segments(either_place)
        writer.drop_unfinished()
        assert segments(either_place) == before
        writer.append([frame(2)])
    assert numbers(either_place) == [1, 2]


def test_a_second_writer_is_refused_with_the_pid_of_the_first(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place), pytest.raises(OwnedError, match=f"process {os.getpid()}"):
        Journal.open_writer(either_place)
    Journal.open_writer(either_place).close()


def test_frames_that_go_back_are_refused(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place) as writer:
        writer.append([frame(5)])
        writer.note(Position(8, 0))
        for wrong in (frame(4), frame(5), frame(7), Frame(Position(9, 5), Position(9, 4), True, 1)):
            with pytest.raises(ValueError, match="frame"):
                writer.append([wrong])
        writer.append([frame(8)])
    assert numbers(either_place) == [5, 8]


def test_a_reader_keeps_up_with_a_growing_journal_over_many_segments(either_place: JournalPlace) -> None:
    reader = Journal.open_reader(either_place)
    with Journal.open_writer(either_place, segment_bytes=2000) as writer:
        for number in range(1, 200):
            writer.append([frame(number, payload=bytes(number * 7 % 400))])
            reader.refresh()
            assert reader.head() == end(number)
            assert [ref.first.commit for ref in reader.frames(end(number // 2), end(number))] == list(
                range(number // 2 + 1, number + 1)
            )


def test_a_range_can_be_limited_and_then_ends_at_a_commit_boundary(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place, segment_bytes=500) as writer:
        for number in range(1, 20):
            writer.append([frame(number, count=10, complete=number % 3 == 0)])
    reader = Journal.open_reader(either_place)
    assert reader.head() == end(18)
    assert [ref.first.commit for ref in reader.frames(START, end(18), rows=35)] == [1, 2, 3, 4, 5, 6]
    assert [ref.first.commit for ref in reader.frames(end(6), end(18), size=1)] == [7, 8, 9]
    assert len(reader.frames(START, end(18), rows=10**6, size=10**9)) == 18


def test_a_range_that_cuts_through_frames_includes_them(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place) as writer:
        writer.append([frame(number) for number in range(1, 6)])
    reader = Journal.open_reader(either_place)
    assert [ref.first.commit for ref in reader.frames(Position(2, 4), Position(4, 2))] == [2, 3, 4]
    assert [ref.first.commit for ref in reader.frames(end(2), Position(4, 0))] == [3]


def test_a_range_the_journal_does_not_reach_is_an_error_not_a_shorter_answer(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place) as writer:
        writer.append([frame(1)])
        reader = Journal.open_reader(either_place)
        with pytest.raises(UnavailableError, match="reaches only"):
            reader.frames(START, end(2))
        writer.note(end(2))
        assert len(reader.frames(START, end(2))) == 1


def test_a_note_survives_a_restart_and_retention_of_everything_before_it(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place, segment_bytes=300) as writer:
        for number in range(1, 10):
            writer.append([frame(number)])
        writer.note(Position(50, 3))
        writer.note(Position(40, 0))
    Cursor(either_place, "reader").advance(end(9))
    with Journal.open_writer(either_place, segment_bytes=300) as writer:
        writer.retain()
        assert (writer.head, writer.mark) == (end(9), Position(50, 3))
    reader = Journal.open_reader(either_place)
    assert (reader.head(), reader.mark()) == (end(9), Position(50, 3))


def test_notes_without_end_take_bounded_space(tmp_path: Path) -> None:
    with Journal.open_writer(tmp_path) as writer:
        writer.append([frame(1)])
        for number in range(2, 12_000):
            writer.note(Position(number, 0))
        assert writer.size() < 600_000
        assert len(segments(tmp_path)) == 2
        assert writer.size() == sum(file.stat().st_size for file in tmp_path.glob("*.seg"))
    reader = Journal.open_reader(tmp_path)
    assert (reader.head(), reader.mark()) == (end(1), Position(11_999, 0))
    assert numbers(tmp_path) == [1]


def test_retention_waits_for_the_slowest_cursor_and_spares_the_active_segment(tmp_path: Path) -> None:
    fast, slow = Cursor(tmp_path, "fast"), Cursor(tmp_path, "../slow é")
    with Journal.open_writer(tmp_path, segment_bytes=300) as writer:
        for number in range(1, 11):
            writer.append([frame(number)])
        before = segments(tmp_path)
        assert writer.retain() == []  # no reader has a cursor, so no frame counts as read
        fast.advance(end(10))
        slow.advance(end(4))
        removed = writer.retain()
        assert removed
        assert removed == before[: len(removed)]
        assert numbers(tmp_path, end(4)) == [5, 6, 7, 8, 9, 10]
        with pytest.raises(LostError):
            numbers(tmp_path, end(1))
        slow.drop()
        writer.retain()
        assert len(segments(tmp_path)) == 1
        assert (writer.head, numbers(tmp_path, end(10))) == (end(10), [])


def test_a_cursor_never_goes_back_and_keeps_its_place(either_place: JournalPlace) -> None:
    cursor = Cursor(either_place, "a/b")
    assert cursor.position == START
    cursor.advance(end(5))
    cursor.advance(end(3))
    assert Cursor(either_place, "a/b").position == end(5)
    assert cursors(either_place) == {"a/b": end(5)}
    cursor.drop()
    assert cursors(either_place) == {}


def test_a_journal_warns_long_before_it_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Cursor(tmp_path, "sleepy").advance(START)
    with Journal.open_writer(tmp_path, segment_bytes=1000, max_bytes=10_000) as writer:
        warned_at = 0.0
        for number in range(1, 100):
            if not writer.room():
                break
            if caplog.messages and not warned_at:
                warned_at = writer.usage()
            writer.append([frame(number, payload=bytes(100))])
        assert 0.8 <= warned_at < 0.9
        assert len(caplog.messages) == 1
        assert "sleepy" in caplog.messages[0]
        Cursor(tmp_path, "sleepy").advance(writer.head)
        writer.retain()
        assert writer.room()


def test_cutting_back_ends_the_journal_at_a_commit_boundary(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place, segment_bytes=600) as writer:
        for number in range(1, 20):
            writer.append([frame(number, complete=number % 2 == 0)])
        reader = Journal.open_reader(either_place)
        writer.cut_back(Position(9, 5))
        assert (writer.head, writer.mark) == (end(8), Position(9, 5))
        reader.refresh()
        assert reader.head() == end(8)
        writer.cut_back(end(7))
        assert (writer.head, writer.mark) == (end(6), end(7))
        writer.append([frame(8)])
        reader.refresh()
        assert [ref.first.commit for ref in reader.frames(START, end(8))] == [1, 2, 3, 4, 5, 6, 8]
    assert numbers(either_place) == [1, 2, 3, 4, 5, 6, 8]


def test_a_journal_that_starts_late_does_not_serve_readers_from_before(either_place: JournalPlace) -> None:
    with Journal.open_writer(either_place, origin=end(10)) as writer:
        assert writer.mark == end(10)
        writer.append([frame(11)])
    with pytest.raises(LostError):
        numbers(either_place, end(9))
    assert numbers(either_place, end(10)) == [11]
