"""A journal in an object store: the same promises, kept with pieces that are put once."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys

import pytest

from tailrace.errors import DamagedError, LostError, OwnedError, PreflightError, UnavailableError
from tailrace.journal import Cursor, Frame, FrameReader, Journal, ObjectPlace, check_journal, cursors
from tailrace.journal.object_storage import ObjectStorage
from tailrace.journal.writer import KEPT_PIECES
from tailrace.model.change import START, Position
from tests.support.slatedb_bucket import BucketProcess


@pytest.fixture
def place(object_place: ObjectPlace) -> ObjectPlace:
    return object_place


def frame(number: int, *, complete: bool = True, payload: bytes = b"payload") -> Frame:
    return Frame(Position(number, 1), Position(number, 9), complete, 1, b'{"n": %d}' % number, payload)


def end(number: int) -> Position:
    return Position(number, 9)


def served(place: ObjectPlace, after: Position = START) -> list[int]:
    reader = Journal.open_reader(place)
    return [one.first.commit for one in reader.read_all(reader.frames(after, reader.mark()))]


def pieces(server: BucketProcess, place: ObjectPlace) -> list[str]:
    prefix = place.url.removeprefix("s3://") + "/"
    return sorted(name for name in server.objects(prefix) if name.endswith(".seg"))


def test_what_was_appended_is_read_back_the_same_by_another_process(place: ObjectPlace) -> None:
    given = [frame(1, payload=b""), frame(2, payload=os.urandom(13)), frame(3, payload=os.urandom(300_000)), frame(4)]
    with Journal.open_writer(place) as writer:
        writer.append(given[:3])
        writer.append(given[3:])
    reader = Journal.open_reader(place)
    refs = reader.frames(START, reader.head())
    program = (
        "import pickle, sys; from tailrace.journal import FrameReader\n"
        "place, refs = pickle.load(sys.stdin.buffer); reader = FrameReader(place)\n"
        "pickle.dump([bytes(one.payload) for one in reader.read_all(refs)], sys.stdout.buffer)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps((place, refs)), capture_output=True, check=True
    )
    assert pickle.loads(done.stdout) == [one.payload for one in given]
    assert "CANARY" not in repr(place)


def test_a_reader_follows_by_number_and_lists_nothing(server: BucketProcess, place: ObjectPlace) -> None:
    with Journal.open_writer(place) as writer:
        reader = Journal.open_reader(place)
        before = server.requests()
        for number in range(1, 30):
            writer.append([frame(number)])
            reader.refresh()
            assert reader.head() == end(number)
            (ref,) = reader.frames(end(number - 1), end(number))
            assert FrameReader(place).read(ref).first == Position(number, 1)
        assert server.requests()["LIST"] == before["LIST"]
        assert server.requests()["PUT"] - before["PUT"] == 29


def test_an_answer_that_is_lost_does_not_store_anything_twice(server: BucketProcess, place: ObjectPlace) -> None:
    with Journal.open_writer(place) as writer:
        writer.append([frame(1)])
        server.lose_answer("0003.seg")
        writer.append([frame(2)])
        writer.append([frame(3)])
    assert served(place) == [1, 2, 3]


def test_an_append_that_failed_but_was_done_is_void_and_can_be_repeated_differently(
    server: BucketProcess, place: ObjectPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open_writer(place) as writer:
        writer.append([frame(1)])
        reader = Journal.open_reader(place)
        # The answer is lost, and no request after it is answered either: the writer cannot know.
        stored = ObjectStorage.load
        monkeypatch.setattr(ObjectStorage, "load", _unanswered)
        server.lose_answer("0003.seg")
        with pytest.raises(UnavailableError):
            writer.append([frame(2, complete=False), frame(3)])
        monkeypatch.setattr(ObjectStorage, "load", stored)
        assert writer.head == end(1)
        writer.append([frame(2)])
        reader.refresh()
        assert [ref.first.commit for ref in reader.frames(START, reader.head())] == [1, 2]
        writer.append([frame(3)])
        reader.refresh()
        assert [ref.first.commit for ref in reader.frames(START, reader.head())] == [1, 2, 3]
    assert served(place) == [1, 2, 3]
    with Journal.open_writer(place) as writer:
        assert (writer.head, writer.damage) == (end(3), [])


def _unanswered(self: ObjectStorage, name: str) -> bytes | None:
    raise UnavailableError("no answer")


def test_while_the_store_is_down_nothing_is_stored_and_then_it_goes_on(
    server: BucketProcess, place: ObjectPlace
) -> None:
    with Journal.open_writer(place) as writer:
        writer.append([frame(1)])
        reader = Journal.open_reader(place)
        server.stop()
        try:
            with pytest.raises(UnavailableError, match="cannot use s3://"):
                writer.append([frame(2)])
            with pytest.raises(UnavailableError):
                reader.refresh()
            assert writer.mark == end(1)
        finally:
            server.start()
        writer.append([frame(2)])
        reader.refresh()
        assert reader.head() == end(2)
    assert served(place) == [1, 2]


def test_a_second_writer_is_refused_and_one_that_takes_over_fences_the_first(
    place: ObjectPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Journal.open_writer(place)
    first.append([frame(1)])
    assert Journal.is_written(place)
    with pytest.raises(OwnedError, match=f"process {os.getpid()}"):
        Journal.open_writer(place)
    monkeypatch.setattr("tailrace.journal.object_storage.LEASE_SECONDS", -60.0)
    second = Journal.open_writer(place)
    monkeypatch.undo()
    with pytest.raises(OwnedError, match="another receiver"):
        first.append([frame(2)])
    second.append([frame(2)])
    first.close()
    assert Journal.is_written(place)  # the lease is the second one's
    second.close()
    assert not Journal.is_written(place)
    assert served(place) == [1, 2]


_WRITER = """
import pickle, sys
from tailrace.model.change import Position
from tailrace.journal import Frame, Journal
writer = Journal.open_writer(pickle.load(sys.stdin.buffer))
number = writer.head.commit
while True:
    number += 1
    writer.append([Frame(Position(number, 1), Position(number, 9), True, 1, b"", b"%08d" % number)])
    print(number, flush=True)
"""


def test_a_killed_writer_loses_nothing_it_reported_and_the_next_need_not_wait(place: ObjectPlace) -> None:
    reported = 0
    for lines in (1, 30):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(place))
            process.stdin.close()
            for _ in range(lines):
                reported = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
        found = served(place)
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= reported
        with Journal.open_writer(place) as writer:
            assert writer.head.commit >= reported
            assert writer.damage == []


def test_retention_waits_for_the_slowest_cursor_and_bounds_the_pieces(
    server: BucketProcess, place: ObjectPlace
) -> None:
    fast, slow = Cursor(place, "fast"), Cursor(place, "a/b c")
    with Journal.open_writer(place) as writer:
        for number in range(1, 40):
            writer.append([frame(number)])
        fast.advance(end(39))
        slow.advance(end(10))
        assert cursors(place) == {"fast": end(39), "a/b c": end(10)}
        removed = writer.retain()
        # The opening piece, and those of 1 to 9: the piece of 10 may still be followed by a cut.
        assert len(removed) == 11
        assert served(place, end(10)) == list(range(11, 40))
        reader = Journal.open_reader(place)
        with pytest.raises(LostError):
            reader.frames(START, end(5))
        slow.advance(end(39))
        writer.retain()
        assert len(pieces(server, place)) == KEPT_PIECES + 1
        for number in range(50, 150):
            writer.note(Position(number, 0))
        assert len(pieces(server, place)) <= 2 * KEPT_PIECES + 2
        assert Journal.open_reader(place).mark() == Position(149, 0)
        assert writer.size() == sum(
            size for name, size in server.objects(place.url.removeprefix("s3://")).items() if name.endswith(".seg")
        )
    with Journal.open_writer(place) as writer:
        assert (writer.mark, writer.damage) == (Position(149, 0), [])


def test_a_piece_removed_after_it_was_planned_is_lost_and_one_never_seen_is_not(
    server: BucketProcess, place: ObjectPlace
) -> None:
    with Journal.open_writer(place) as writer:
        for number in range(1, 40):
            writer.append([frame(number)])
        reader = Journal.open_reader(place)
        (ref,) = reader.frames(START, end(1))
        Cursor(place, "other").advance(end(39))
        writer.retain()
        with pytest.raises(LostError, match="removed while it was needed"):
            reader.read(ref)
    other = ObjectPlace(place.url + "-elsewhere", place.options)
    with pytest.raises(PreflightError, match="does not see the journal"):
        FrameReader(other).read(ref)


def test_damage_is_found_when_it_is_read_and_a_missing_piece_at_the_start(
    server: BucketProcess, place: ObjectPlace
) -> None:
    with Journal.open_writer(place) as writer:
        for number in range(1, 8):
            writer.append([frame(number)])
    (ref,) = Journal.open_reader(place).frames(end(2), end(3))
    name = f"{place.url.removeprefix('s3://')}/{ref.segment}"
    server.damage(name, ref.offset + ref.length - 8)
    with pytest.raises(DamagedError, match="payload"):
        served(place)
    server.remove(name)
    with pytest.raises(DamagedError):
        served(place)
    with Journal.open_writer(place) as writer:
        (damage,) = writer.damage
        assert (damage.after, damage.last) == (end(2), end(3))
        assert served(place, end(3)) == [4, 5, 6, 7]
        writer.cut_back(end(2))
        writer.append([frame(number) for number in range(3, 6)])
    assert served(place) == [1, 2, 3, 4, 5]
    with Journal.open_writer(place) as writer:
        assert (writer.head, writer.damage) == (end(5), [])


def test_pieces_that_could_not_be_removed_are_removed_the_next_time(
    server: BucketProcess, place: ObjectPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.journal.object_storage.RETRY_SECONDS", 0.01)
    with Journal.open_writer(place) as writer:
        for number in range(1, 40):
            writer.append([frame(number)])
        Cursor(place, "reader").advance(end(39))
        # The list of cursors, the cursor, the first pieces; then the store is away.
        server.plan(*["done"] * 5, *["refused"] * 9)
        with pytest.raises(UnavailableError):
            writer.retain()
        server.plan()
        writer.retain()
        assert len(pieces(server, place)) == KEPT_PIECES + 1
        assert writer.size() == sum(server.objects(place.url.removeprefix("s3://") + "/0").values())
        # A note is stored although an old one cannot be removed.
        for number in range(50, 50 + KEPT_PIECES):
            writer.note(Position(number, 0))
        server.plan("done", *["refused"] * 9)
        writer.note(Position(100, 0))
        server.plan()
        assert writer.mark == Position(100, 0)
        writer.note(Position(101, 0))
        assert len(pieces(server, place)) <= 2 * KEPT_PIECES + 2


def test_a_lease_that_could_not_be_given_up_keeps_no_later_writer_of_the_process_out(
    server: BucketProcess, place: ObjectPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tailrace.journal.object_storage.RETRY_SECONDS", 0.01)
    # The lease is written, and then the store is away.
    server.plan("done", "done", *["refused"] * 20)
    with pytest.raises(UnavailableError):
        Journal.open_writer(place)
    server.plan()
    assert f"{place.url.removeprefix('s3://')}/lock" in server.objects()
    with Journal.open_writer(place) as writer, pytest.raises(OwnedError):
        Journal.open_writer(place)
    assert writer.head == START


def test_a_half_received_transaction_is_forgotten_at_the_next_start(place: ObjectPlace) -> None:
    with Journal.open_writer(place) as writer:
        writer.append([frame(1)])
        writer.append([frame(2, complete=False)])
        writer.append([Frame(Position(3, 0), Position(3, 1), False, 1, b"", b"x")])
        reader = Journal.open_reader(place)
        assert reader.head() == end(1)
    with Journal.open_writer(place) as writer:
        assert (writer.head, writer.mark, writer.damage) == (end(1), end(1), [])
        writer.append([frame(2)])
        reader.refresh()
        assert [ref.first.commit for ref in reader.frames(START, end(2))] == [1, 2]
        writer.append([frame(3, complete=False)])
        writer.drop_unfinished()
        writer.append([frame(3)])
    assert served(place) == [1, 2, 3]


def test_a_journal_is_removed_with_everything_in_it(server: BucketProcess, place: ObjectPlace) -> None:
    with Journal.removing(place):
        pass  # a missing one is no error
    with Journal.open_writer(place) as writer:
        writer.append([frame(1)])
        Cursor(place, "reader").advance(end(1))
        with pytest.raises(OwnedError), Journal.removing(place):
            pass
    with pytest.raises(LostError), Journal.removing(place):
        raise LostError("not now")
    assert served(place) == [1]
    with Journal.removing(place), pytest.raises(OwnedError):
        Journal.open_writer(place)
    assert server.objects(place.url.removeprefix("s3://")) == {}
    assert cursors(place) == {}
    assert Journal.open_reader(place).mark() == START


def test_a_store_that_overwrites_is_refused_before_anything_is_lost(server: BucketProcess, place: ObjectPlace) -> None:
    (finding,) = check_journal(place)
    assert (finding.level, finding.subject) == ("ok", "journal")
    server.ignore_conditions(True)
    try:
        (finding,) = check_journal(place)
    finally:
        server.ignore_conditions(False)
    assert finding.level == "error"
    assert "If-None-Match" in finding.message
    assert "CANARY" not in str(finding)
    assert server.objects(place.url.removeprefix("s3://")) == {}
