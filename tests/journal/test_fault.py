"""Crashes, failing disks and damaged bytes: nothing acknowledged is missing, nothing wrong is served."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.errors import DamagedError, LostError, OwnedError, PreflightError, UnavailableError
from tailrace.journal import Cursor, Frame, FrameReader, Journal, cursors, local_storage
from tailrace.model.change import START, Position
from tailrace.system.failpoint import VARIABLE, FailpointError
from tailrace.system.file_lock import try_lock
from tests.support.power_loss import Disk


def frame(number: int, *, complete: bool = True, payload: bytes | None = None) -> Frame:
    body = b"%08d" % number * 3 if payload is None else payload
    return Frame(Position(number, 1), Position(number, 9), complete, 1, b"meta %d" % number, body)


def end(number: int) -> Position:
    return Position(number, 9)


def served(path: Path, after: Position = START) -> list[int]:
    """What a fresh reader serves, each frame read and compared with what was given."""
    reader = Journal.open_reader(path)
    try:
        found = []
        for ref in reader.frames(after, reader.mark()):
            one = reader.read(ref)
            number = one.first.commit
            assert (bytes(memoryview(one.payload)), one.meta) == (b"%08d" % number * 3, b"meta %d" % number)
            found.append(number)
        return found
    finally:
        reader.close()


def newest(path: Path) -> Path:
    return max(path.glob("*.seg"))


def flip(file: Path, at: int, bit: int = 1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= bit
    file.write_bytes(data)


_WRITER = """
import sys
from tailrace.model.change import Position
from tailrace.journal import Frame, Journal
writer = Journal.open_writer(sys.argv[1], segment_bytes=200_000)
number = writer.head.commit
while True:
    group = []
    for _ in range(1 + number % 7):
        number += 1
        places = Position(number, 1), Position(number, 9)
        group.append(Frame(*places, True, 1, b"meta %d" % number, b"%08d" % number * 3))
    writer.append(group)
    print(number, flush=True)
"""


def test_a_killed_writer_loses_nothing_it_reported(tmp_path: Path) -> None:
    reported = 0
    for lines in (1, 40, 300):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(lines):
                reported = int(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            for line in process.stdout.read().splitlines(keepends=True):
                reported = int(line) if line.endswith(b"\n") else reported
        found = served(tmp_path)
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= reported
        with Journal.open_writer(tmp_path) as writer:
            assert writer.head.commit >= reported
            assert writer.damage == []


def test_a_reader_next_to_a_busy_writer_sees_only_whole_frames_and_a_growing_head(tmp_path: Path) -> None:
    reader, seen = Journal.open_reader(tmp_path), START
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.DEVNULL) as process:
        while seen.commit < 5000:
            reader.refresh()
            head = reader.head()
            assert head >= seen
            frames = [reader.read(ref) for ref in reader.frames(seen, head)]
            assert [one.first.commit for one in frames] == list(range(seen.commit + 1, head.commit + 1))
            seen = head
        process.kill()
    assert len(list(tmp_path.glob("*.seg"))) > 2


@pytest.mark.parametrize("place", ["journal.before_fsync", "journal.appended", "journal.rolled"])
def test_a_writer_killed_at_any_step_leaves_a_journal_that_opens(tmp_path: Path, place: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WRITER, str(tmp_path)],
        env={**os.environ, VARIABLE: f"{place}:kill@3"},
        stdout=subprocess.PIPE,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == -signal.SIGKILL
    reported = max(map(int, done.stdout.split()), default=0)
    with Journal.open_writer(tmp_path) as writer:
        assert writer.head.commit >= reported
        assert writer.damage == []
        following = writer.head.commit + 1
        writer.append([frame(following)])
    assert served(tmp_path) == list(range(1, following + 1))


_RECEIVER = """
import sys
from tailrace.model.change import Position
from tailrace.journal import Frame, Journal

writer = Journal.open_writer(sys.argv[1], segment_bytes=512)
for number in range(writer.head.commit + 1, 1000):
    # Half of a transaction that the upstream breaks off and begins again.
    writer.append([Frame(Position(number, 1), Position(number, 4), False, 1, b"", b"broken off")])
    writer.drop_unfinished()
    writer.append([Frame(Position(number, 1), Position(number, 9), True, 1, b"meta %d" % number, b"%08d" % number * 3)])
    writer.note(Position(number, 10))
    print(number, flush=True)
"""


@pytest.mark.parametrize("place", ["journal.before_cut", "journal.rolled", "journal.noted"])
def test_a_writer_killed_among_notes_and_cuts_leaves_whole_transactions_alone(tmp_path: Path, place: str) -> None:
    reported = 0
    for nth in (1, 2, 5):
        done = subprocess.run(
            [sys.executable, "-c", _RECEIVER, str(tmp_path)],
            env={**os.environ, VARIABLE: f"{place}:kill@{nth}"},
            stdout=subprocess.PIPE,
            check=False,
            start_new_session=True,
        )
        assert done.returncode == -signal.SIGKILL
        reported = max([reported, *map(int, done.stdout.split())])
        with Journal.open_writer(tmp_path) as writer:
            assert writer.damage == []
            assert not writer.within_transaction
            head = writer.head.commit
        assert head >= reported
        assert served(tmp_path) == list(range(1, head + 1))


def test_a_power_cut_takes_nothing_that_was_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, path = Disk(monkeypatch), tmp_path / "journal"
    cursor = Cursor(path, "reader")
    with Journal.open_writer(path, segment_bytes=1000) as writer:
        for number in range(1, 40):
            writer.append([frame(number)])
            if number % 3 == 0:
                writer.note(Position(number, 20))
            if number % 5 == 0:
                cursor.advance(end(number - 2))
            if number % 10 == 0:
                writer.retain()
            left = disk.left(path, tmp_path / f"left after {number}")
            with Journal.open_writer(left) as found:
                assert (found.head, found.mark, found.damage) == (writer.head, writer.mark, [])
            assert cursors(left) == cursors(path)
            reached = cursors(left).get("reader", START)
            assert served(left, reached) == list(range(reached.commit + 1, number + 1))


def test_an_append_that_failed_half_way_does_not_count_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.open_writer(tmp_path) as writer:
        writer.append([frame(1)])
        reader = Journal.open_reader(tmp_path)
        monkeypatch.setenv(VARIABLE, "journal.before_fsync:raise")
        with pytest.raises(FailpointError):
            writer.append([frame(2), frame(3)])
        assert writer.head == end(1)
        reader.refresh()
        seen = reader.frames(START, reader.head())
        monkeypatch.delenv(VARIABLE)
        writer.append([frame(2)])
        reader.refresh()
        assert [ref.first.commit for ref in reader.frames(START, reader.head())] == [1, 2]
        assert len(seen) == 3  # on this machine written bytes are seen at once
        with pytest.raises(UnavailableError):
            reader.frames(START, seen[-1].last)
    assert served(tmp_path) == [1, 2]


def test_a_journal_cut_at_any_byte_serves_exactly_the_whole_frames_before(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    with Journal.open_writer(origin) as writer:
        sizes = [newest(origin).stat().st_size]
        for number in range(1, 5):
            writer.append([frame(number)])
            sizes.append(newest(origin).stat().st_size)
    name, whole = newest(origin).name, newest(origin).read_bytes()
    for length in range(sizes[0], len(whole) + 1):
        path = tmp_path / str(length)
        path.mkdir()
        (path / name).write_bytes(whole[:length])
        expected = list(range(1, sum(size <= length for size in sizes[1:]) + 1))
        assert served(path) == expected
        with Journal.open_writer(path) as writer:
            assert writer.damage == []
            writer.append([frame(len(expected) + 1)])
        assert served(path) == [*expected, len(expected) + 1]


def test_a_segment_cut_inside_its_header_is_set_aside(tmp_path: Path) -> None:
    with Journal.open_writer(tmp_path, segment_bytes=200) as writer:
        writer.append([frame(1)])
        writer.append([frame(2)])
    os.truncate(newest(tmp_path), 20)
    assert served(tmp_path) == [1]
    with Journal.open_writer(tmp_path) as writer:
        assert (writer.head, writer.mark) == (end(1), end(1))
        assert [damage.after for damage in writer.damage] == [end(1)]
        writer.append([frame(2)])
    assert served(tmp_path) == [1, 2]
    assert len(list((tmp_path / "quarantine").iterdir())) == 1


def test_a_flipped_bit_anywhere_in_a_durable_frame_is_found_and_never_served(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    with Journal.open_writer(origin) as writer:
        for number in range(1, 4):
            writer.append([frame(number)])
        file = newest(origin)
        second = Journal.open_reader(origin).frames(end(1), end(2))[0]
    whole = file.read_bytes()
    used = set(range(96)) | set(range(96, 96 + len(second.meta))) | set(range(second.length - 24, second.length))
    for at in sorted(used):
        path = tmp_path / str(at)
        path.mkdir()
        (path / file.name).write_bytes(whole)
        flip(path / file.name, second.offset + at, 1 << at % 8)
        with Journal.open_writer(path) as writer:
            assert [(damage.after, damage.last) for damage in writer.damage] == [(end(1), end(2))], at
            assert (writer.head, writer.mark) == (end(3), end(3))
            assert (path / "quarantine" / file.name).exists()
            with pytest.raises(DamagedError, match=f"damaged at byte {second.offset}"):
                served(path)
            assert served(path, end(2)) == [3]  # a reader that has passed it is not concerned
            writer.cut_back(writer.damage[0].after)
            assert (writer.head, writer.mark, writer.damage) == (end(1), end(1), [])
            writer.append([frame(2), frame(3)])
        assert served(path) == [1, 2, 3]


def test_damage_in_an_older_segment_is_found_at_start_and_cut_back(tmp_path: Path) -> None:
    with Journal.open_writer(tmp_path, segment_bytes=500) as writer:
        for number in range(1, 12):
            writer.append([frame(number)])
    ref = Journal.open_reader(tmp_path).frames(end(5), end(6))[0]
    flip(tmp_path / ref.segment, ref.offset + 40)
    with pytest.raises(DamagedError):
        served(tmp_path)
    with Journal.open_writer(tmp_path, segment_bytes=500) as writer:
        assert [(damage.segment, damage.after, damage.last) for damage in writer.damage] == [
            (ref.segment, end(5), end(6))
        ]
    with Journal.open_writer(tmp_path, segment_bytes=500) as writer:
        assert len(writer.damage) == 1  # it stays until it is dealt with
        assert writer.head == end(11)
        assert served(tmp_path, end(6)) == [7, 8, 9, 10, 11]
        writer.cut_back(end(5))
        writer.append([frame(number) for number in range(6, 10)])
        assert served(tmp_path) == list(range(1, 10))
    with Journal.open_writer(tmp_path) as writer:
        assert (writer.damage, writer.head) == ([], end(9))


def test_a_missing_segment_is_a_hole_not_a_shorter_journal(tmp_path: Path) -> None:
    with Journal.open_writer(tmp_path, segment_bytes=300) as writer:
        for number in range(1, 7):
            writer.append([frame(number)])
    missing = Journal.open_reader(tmp_path).frames(end(2), end(3))[0].segment
    (tmp_path / missing).unlink()
    with pytest.raises(DamagedError):
        served(tmp_path)
    with Journal.open_writer(tmp_path) as writer:
        (damage,) = writer.damage
        assert damage.after < end(3) <= damage.last
        assert served(tmp_path, damage.last) == list(range(damage.last.commit + 1, 7))


def test_what_lies_before_a_hole_can_still_be_read_in_small_steps(tmp_path: Path) -> None:
    with Journal.open_writer(tmp_path, segment_bytes=1000) as writer:
        for number in range(1, 15):
            writer.append([frame(number)])
    reader = Journal.open_reader(tmp_path)
    bad = reader.frames(end(4), end(5))[0]
    flip(tmp_path / bad.segment, bad.offset + 9)
    reader = Journal.open_reader(tmp_path)
    assert [ref.first.commit for ref in reader.frames(START, reader.head(), rows=3)] == [1, 2, 3]
    with pytest.raises(DamagedError):
        reader.frames(end(3), reader.head(), rows=3)
    with pytest.raises(DamagedError):
        reader.read(bad)


def test_a_torn_group_is_passed_over_although_its_later_frames_survived(tmp_path: Path) -> None:
    with Journal.open_writer(tmp_path) as writer:
        writer.append([frame(1)])
        writer.append([frame(number) for number in range(2, 6)])
    refs = Journal.open_reader(tmp_path).frames(START, end(5))
    file = newest(tmp_path)
    data = bytearray(file.read_bytes())
    data[refs[2].offset : refs[2].offset + refs[2].length] = bytes(refs[2].length)  # a page that never reached the disk
    file.write_bytes(data)
    assert served(tmp_path) == [1, 2]
    with Journal.open_writer(tmp_path) as writer:
        assert (writer.head, writer.damage) == (end(2), [])
        writer.append([frame(3)])
    assert served(tmp_path) == [1, 2, 3]


def test_bytes_of_another_segment_are_not_taken_for_frames(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Journal.open_writer(tmp_path / name) as writer:
            start = newest(tmp_path / name).stat().st_size
            writer.append([frame(1)])
    newest(tmp_path / "two").write_bytes(
        newest(tmp_path / "two").read_bytes()[:start] + newest(tmp_path / "one").read_bytes()[start:]
    )
    assert served(tmp_path / "two") == []


_FULL_DISK = """
import resource, signal, sys
from tailrace.model.change import Position
from tailrace.errors import UnavailableError
from tailrace.journal import Frame, Journal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def frame(number, size): return Frame(Position(number, 1), Position(number, 9), True, 1, b"", bytes(size))
writer = Journal.open_writer(sys.argv[1])
writer.append([frame(1, 1000)])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for attempt in range(3):
    try:
        writer.append([frame(2, 10), frame(3, 200_000)])
    except UnavailableError as error:
        assert "cannot append" in str(error), error
    else:
        raise AssertionError("the disk was not full")
assert writer.head.commit == 1
writer.append([frame(2, 10)])
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.append([frame(3, 200_000)])
"""


def test_a_full_disk_is_an_error_to_retry_and_leaves_the_journal_whole(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _FULL_DISK, str(tmp_path)], check=True)
    reader = Journal.open_reader(tmp_path)
    assert [ref.first.commit for ref in reader.frames(START, reader.head())] == [1, 2, 3]
    assert len(list(tmp_path.glob("*.seg"))) == 2
    with Journal.open_writer(tmp_path) as writer:
        assert (writer.head, writer.damage) == (end(3), [])


def test_an_interrupted_cut_is_finished_by_the_next_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open_writer(tmp_path, segment_bytes=300) as writer:
        for number in range(1, 10):
            writer.append([frame(number)])
        monkeypatch.setenv(VARIABLE, "journal.rolled:raise")
        with pytest.raises(FailpointError):
            writer.cut_back(end(4))
        monkeypatch.delenv(VARIABLE)
        assert served(tmp_path) == [1, 2, 3, 4]
        left = len(list(tmp_path.glob("*.seg")))
        writer.append([frame(7)])
    assert served(tmp_path) == [1, 2, 3, 4, 7]
    with Journal.open_writer(tmp_path) as writer:
        assert (writer.head, writer.damage) == (end(7), [])
    assert served(tmp_path) == [1, 2, 3, 4, 7]
    assert len(list(tmp_path.glob("*.seg"))) < left


def test_a_damaged_cursor_stops_retention(tmp_path: Path) -> None:
    Cursor(tmp_path, "reader").advance(end(3))
    (file,) = (tmp_path / "cursors").iterdir()
    flip(file, 31)
    with Journal.open_writer(tmp_path) as writer, pytest.raises(DamagedError, match="cursor"):
        writer.retain()
    with pytest.raises(DamagedError):
        cursors(tmp_path)


def test_a_frame_removed_after_it_was_planned_is_lost_not_empty(tmp_path: Path) -> None:
    with Journal.open_writer(tmp_path, segment_bytes=300) as writer:
        for number in range(1, 5):
            writer.append([frame(number)])
        reader = Journal.open_reader(tmp_path)
        ref = reader.frames(START, end(1))[0]
        Cursor(tmp_path, "other").advance(end(4))
        writer.retain()
        with pytest.raises(LostError):
            reader.read(ref)
        reader.refresh()
        with pytest.raises(LostError):
            reader.frames(START, end(1))


def test_a_journal_that_this_machine_does_not_see_is_not_called_lost(tmp_path: Path) -> None:
    with Journal.open_writer(tmp_path / "journal") as writer:
        writer.append([frame(1)])
    (ref,) = Journal.open_reader(tmp_path / "journal").frames(START, end(1))
    (tmp_path / "journal").rename(tmp_path / "away")
    with pytest.raises(PreflightError, match="does not see the journal") as caught:
        FrameReader(tmp_path / "journal").read(ref)
    assert f"mount {tmp_path / 'journal'}" in (caught.value.fix or "")
    assert "s3://" in (caught.value.fix or "")


def test_no_one_writes_a_journal_that_is_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    Journal.open_writer(path).close()
    with Journal.removing(path), pytest.raises(OwnedError, match="is written by"):
        Journal.open_writer(path)
    assert not path.exists()
    with Journal.removing(path):
        pass
    Journal.open_writer(path).close()

    def gone_meanwhile(file: int) -> bool:
        monkeypatch.undo()
        with Journal.removing(path):
            pass
        return try_lock(file)

    monkeypatch.setattr(local_storage, "try_lock", gone_meanwhile)
    with pytest.raises(UnavailableError, match="is being removed"):
        Journal.open_writer(path)
    Journal.open_writer(path).close()


def test_a_journal_stays_when_what_goes_with_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal.open_writer(path).close()
    with pytest.raises(LostError), Journal.removing(path):
        raise LostError("not now")
    assert path.exists()
    assert not Journal.is_written(path)
