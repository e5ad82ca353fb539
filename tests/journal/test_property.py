"""Any sequence of appends, notes, crashes, cuts and retention leaves what a plain list would hold."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tailrace.errors import UnavailableError
from tailrace.journal import Cursor, Frame, Journal, JournalPlace, ObjectPlace, object_storage
from tailrace.model.change import START, Position
from tests.support.slatedb_bucket import BucketProcess, serving

_GROUPS = st.lists(st.tuples(st.booleans(), st.integers(0, 300)), min_size=1, max_size=5)
_FATES = st.lists(st.sampled_from(["done", "refused", "refused", "lost"]), min_size=1, max_size=9)


class JournalMachine(RuleBasedStateMachine):
    """`kept` is what must be in the journal, `floor` and `cursor` what retention may have passed."""

    path: JournalPlace

    @initialize(segment_bytes=st.sampled_from([300, 1000, 5000]))
    def begin(self, segment_bytes: int) -> None:
        self.path = self.make_place()
        self.segment_bytes = segment_bytes
        self.writer = Journal.open_writer(self.path, segment_bytes=segment_bytes)
        self.reader = Journal.open_reader(self.path)
        self.cursor = Cursor(self.path, "reader")
        self.kept: list[Frame] = []
        self.mark = START
        self.next = 1

    def teardown(self) -> None:
        if hasattr(self, "path"):
            self.writer.close()
            self.reader.close()
            self.remove_place()

    def make_place(self) -> JournalPlace:
        return Path(tempfile.mkdtemp(prefix="journal-"))

    def remove_place(self) -> None:
        assert isinstance(self.path, Path)
        shutil.rmtree(self.path)

    def stored_bytes(self) -> int:
        assert isinstance(self.path, Path)
        return sum(file.stat().st_size for file in self.path.glob("*.seg"))

    def make(self, group: list[tuple[bool, int]]) -> list[Frame]:
        frames = []
        for complete, length in group:
            place = Position(self.next, 0)
            frames.append(Frame(place, place, complete, 1, str(self.next).encode(), bytes([self.next % 256]) * length))
            self.next += 1
        return frames

    def head(self) -> Position:
        return max((frame.last for frame in self.kept if frame.complete), default=START)

    def finish_at_head(self) -> None:
        head = self.head()
        self.kept = [frame for frame in self.kept if frame.last <= head]

    @rule(group=_GROUPS)
    def append(self, group: list[tuple[bool, int]]) -> None:
        frames = self.make(group)
        self.writer.append(frames)
        self.kept += frames
        self.mark = max(self.mark, self.head())

    @precondition(lambda self: not self.kept or self.kept[-1].complete)
    @rule()
    def note(self) -> None:
        self.mark = Position(self.next, 0)
        self.next += 1
        self.writer.note(self.mark)

    @rule()
    def restart(self) -> None:
        self.writer.close()
        self.reopen()

    def reopen(self) -> None:
        self.writer = Journal.open_writer(self.path, segment_bytes=self.segment_bytes)
        assert self.writer.damage == []
        self.finish_at_head()

    @precondition(lambda self: isinstance(self.path, Path))
    @rule(group=_GROUPS, part=st.floats(0, 1, exclude_max=True), garbage=st.booleans())
    def crash_inside_an_append(self, group: list[tuple[bool, int]], part: float, garbage: bool) -> None:
        assert isinstance(self.path, Path)
        sizes = {file: file.stat().st_size for file in self.path.glob("*.seg")}
        frames = self.make(group)
        self.writer.append(frames)
        self.writer.close()
        file = max(self.path.glob("*.seg"))
        whole = file.read_bytes()
        # In a segment begun by this append everything after the header is the group's.
        before = sizes.get(file) or (len(whole) - sum(104 + (len(f.payload) + 7) // 8 * 8 for f in frames))
        at = before + int(part * (len(whole) - before))
        file.write_bytes(whole[:at] + (b"\xa5" * (len(whole) - at) if garbage else b""))
        survivors, reached = [], before
        for frame in frames:
            reached += 104 + (len(frame.payload) + 7) // 8 * 8
            # Padding holds nothing, so a frame is whole once its payload is, or its text if that is all it has.
            if reached - (-len(frame.payload or frame.meta) % 8) > at if garbage else reached > at:
                break
            survivors.append(frame)
        self.kept += survivors
        self.reopen()
        self.mark = max(self.mark, self.head())

    @rule(back=st.integers(0, 6))
    def cut_back(self, back: int) -> None:
        position = Position(max(self.next - back, 0), 0)
        if position < self.cursor.position:
            return
        self.writer.cut_back(position)
        self.kept = [frame for frame in self.kept if frame.last <= position]
        self.finish_at_head()
        self.mark = max(self.head(), min(position, self.mark))

    @rule(part=st.floats(0, 1))
    def advance_and_retain(self, part: float) -> None:
        complete = [frame.last for frame in self.kept if frame.complete]
        if complete:
            self.cursor.advance(complete[int(part * (len(complete) - 1))])
            self.writer.retain()

    @invariant()
    def the_writer_and_every_reader_agree_with_the_list(self) -> None:
        if not hasattr(self, "path"):
            return
        assert (self.writer.head, self.writer.mark) == (self.head(), self.mark)
        assert self.writer.size() == self.stored_bytes()
        self.reader.refresh()
        fresh = Journal.open_reader(self.path)
        after = self.cursor.position
        expected = [frame for frame in self.kept if after < frame.last <= self.head()]
        for reader in (self.reader, fresh):
            assert (reader.head(), reader.mark()) == (self.head(), self.mark)
            assert [reader.read(ref) for ref in reader.frames(after, reader.head())] == expected
        fresh.close()


JournalMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
TestJournalAgainstAList = JournalMachine.TestCase


class ObjectJournalMachine(JournalMachine):
    """The same in an object store, where an append is there as a whole or not at all."""

    server: BucketProcess

    def make_place(self) -> JournalPlace:
        return ObjectPlace(f"s3://{uuid.uuid4().hex}/journal", self.server.options)

    def remove_place(self) -> None:
        with Journal.removing(self.path):
            pass

    def stored_bytes(self) -> int:
        found = self.server.objects(str(self.path).removeprefix("s3://"))
        return sum(size for name, size in found.items() if name.endswith(".seg"))

    @rule(group=_GROUPS, fates=_FATES, then=st.sampled_from(["restart", "again", "in part"]))
    def append_while_requests_fail(self, group: list[tuple[bool, int]], fates: list[str], then: str) -> None:
        frames = self.make(group)
        if self.fails(fates, lambda: self.writer.append(frames)):
            if then == "restart":
                # What was not reported may be there all the same, but only as a whole.
                self.writer.close()
                self.reopen_with(frames)
                return
            # The upstream sends the same changes again, and the receiver may gather fewer of them.
            frames = frames[: 1 + len(frames) // 2] if then == "in part" else frames
            self.writer.append(frames)
        self.kept += frames
        self.mark = max(self.mark, self.head())

    def reopen_with(self, frames: list[Frame]) -> None:
        before = self.kept
        self.reopen()
        complete = [frame.last for frame in frames if frame.complete]
        if complete and self.writer.head == complete[-1]:
            self.kept = [*before, *frames]
            self.finish_at_head()
            self.mark = max(self.mark, self.head())

    @precondition(lambda self: not self.kept or self.kept[-1].complete)
    @rule(fates=_FATES)
    def note_while_requests_fail(self, fates: list[str]) -> None:
        self.mark = Position(self.next, 0)
        self.next += 1
        if self.fails(fates, lambda: self.writer.note(self.mark)):
            self.writer.note(self.mark)

    @rule(fates=_FATES)
    def restart_while_requests_fail(self, fates: list[str]) -> None:
        self.fails(fates, self.writer.close)
        if self.fails(fates, self.reopen):
            self.reopen()

    @rule(back=st.integers(0, 6), fates=_FATES)
    def cut_back_while_requests_fail(self, back: int, fates: list[str]) -> None:
        position = Position(max(self.next - back, 0), 0)
        if position >= self.cursor.position and self.fails(fates, lambda: self.writer.cut_back(position)):
            self.cut_back(back)
        elif position >= self.cursor.position:
            self.kept = [frame for frame in self.kept if frame.last <= position]
            self.finish_at_head()
            self.mark = max(self.head(), min(position, self.mark))

    @rule(part=st.floats(0, 1), fates=_FATES)
    def advance_and_retain_while_requests_fail(self, part: float, fates: list[str]) -> None:
        complete = [frame.last for frame in self.kept if frame.complete]
        if complete and self.fails(fates, lambda: self.advance_and_retain(part)):
            self.advance_and_retain(part)

    @rule(fates=_FATES)
    def read_while_requests_fail(self, fates: list[str]) -> None:
        def read() -> None:
            self.reader.refresh()
            self.reader.read_all(self.reader.frames(self.cursor.position, self.reader.head()))

        self.fails(fates, read)

    def fails(self, fates: list[str], act: Callable[[], object]) -> bool:
        """Whether it ends with UnavailableError while the next requests have these fates."""
        self.server.plan(*fates)
        try:
            act()
        except UnavailableError:
            return True
        finally:
            self.server.plan()
        return False


def test_a_journal_in_an_object_store_holds_what_a_plain_list_would(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        monkeypatch.setattr(ObjectJournalMachine, "server", server, raising=False)
        monkeypatch.setattr(object_storage, "RETRY_SECONDS", 0.01)
        run_state_machine_as_test(
            ObjectJournalMachine,
            settings=settings(max_examples=20, stateful_step_count=20, suppress_health_check=list(HealthCheck)),
        )
