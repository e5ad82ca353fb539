"""What a cluster's journal holds: every event once, in order, whatever is sent again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import DamagedError, LostError, TailraceError, UnavailableError
from tailrace.journal import Cursor
from tailrace.model.change import Position
from tailrace.source.rqlite.cluster_journal import Cluster
from tailrace.source.rqlite.deduplication import DeduplicationWindow
from tailrace.source.rqlite.request import parse
from tailrace.system.failpoint import VARIABLE, FailpointError
from tests.support.rqlite_posting import Entry, body, entry, insert, lines, recorded, update


@contextmanager
def opened(journal: Path, *, max_bytes: int = 100_000_000) -> Iterator[Cluster]:
    cluster = Cluster("rqlite", journal, segment_bytes=1_000_000, max_bytes=max_bytes)
    cluster.open()
    try:
        yield cluster
    finally:
        cluster.close()


def post(cluster: Cluster, *entries: Entry, node: str = "n1") -> TailraceError | None:
    return cluster.commit([parse(body(entries, node=node))])[0]


def later(*entries: Entry) -> list[Entry]:
    """The same entries as another leader sends them."""
    return [{**one, "commit_timestamp": one["commit_timestamp"] + 777} for one in entries]


def ids(journal: Path) -> list[int]:
    return [(one.get("after") or one["before"])["id"] for one in lines(journal)]


A, B, C = entry(4, insert(1), insert(2)), entry(6, insert(3)), entry(9, insert(4))


def test_positions_are_the_index_and_even_ordinals(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        assert post(cluster, A, B) is None
    assert [(one["index"], one["ordinal"], one["at"]) for one in lines(tmp_path)] == [
        (4, 0, 1_794_766_424_567),
        (4, 2, 1_794_766_424_567),
        (6, 0, 1_794_766_424_567),
    ]


def test_a_retry_and_a_failover_are_delivered_once(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        for _ in range(2):
            assert post(cluster, A, B) is None
        assert post(cluster, *later(A, B, C), node="n2") is None
        assert post(cluster, *later(B), node="n3") is None
        assert (cluster.counts.received, cluster.counts.duplicates) == (4, 7)
    assert ids(tmp_path) == [1, 2, 3, 4]


def test_an_event_that_came_without_images_is_known_again_with_them(tmp_path: Path) -> None:
    bare = {"op": "UPDATE", "table": "t", "new_row_id": 1, "old_row_id": 1, "error": "mismatched column names"}
    with opened(tmp_path) as cluster:
        assert post(cluster, A, entry(5, bare)) is None
        assert post(cluster, *later(A, entry(5, update(1, 1, 2)))) is None
        assert cluster.counts.missing == 1
    assert len(lines(tmp_path)) == 3


@pytest.mark.parametrize(
    "again",
    [
        entry(4, insert(1), insert(9)),
        entry(4, insert(1)),
        entry(4, insert(1), insert(2), insert(3)),
        entry(4, insert(1), insert(2, v="other")),
        entry(5, insert(8)),
        entry(2, insert(8)),
        entry(4, insert(1, "another"), insert(2)),
    ],
)
def test_other_events_at_a_known_index_stop_the_cluster_for_good(tmp_path: Path, again: Entry) -> None:
    with opened(tmp_path) as cluster:
        assert post(cluster, A, B, C) is None
        error = post(cluster, again)
        assert isinstance(error, LostError)
        assert f"index {again['index']} " in error.message
        assert "tailrace reset" in (error.fix or "")
        assert isinstance(post(cluster, entry(100, insert(50))), LostError)
    with opened(tmp_path) as cluster:
        assert isinstance(cluster.error, LostError)
        assert isinstance(post(cluster, entry(100, insert(50))), LostError)
    assert ids(tmp_path) == [1, 2, 3, 4]


def test_requests_before_the_one_that_stops_a_cluster_are_stored(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        sent = [body([A]), body([B]), body([entry(4, insert(7))]), body([C])]
        outcomes = cluster.commit([parse(one) for one in sent])
        assert [type(one) for one in outcomes] == [type(None), type(None), LostError, LostError]
    assert ids(tmp_path) == [1, 2, 3]


def test_an_index_older_than_the_window_stops_the_cluster() -> None:
    window = DeduplicationWindow(entries=10)
    for index in range(1, 30):
        window.admit(parse(body([entry(index, insert(index))])))
    assert window.admit(parse(body([entry(25, insert(25))], node="n2"))) == []
    with pytest.raises(LostError, match="older than anything remembered"):
        window.admit(parse(body([entry(3, insert(3))], node="n2")))


def test_a_failover_after_more_events_than_entries_are_remembered_is_no_rebuilt_cluster(tmp_path: Path) -> None:
    large = [entry(4, *map(insert, range(40_000))), entry(5, *map(insert, range(40_000, 80_000))), entry(6, insert(-1))]
    with opened(tmp_path) as cluster:
        assert post(cluster, *large) is None
        assert post(cluster, *later(*large), node="n2") is None
        assert (cluster.counts.received, cluster.counts.duplicates) == (80_001, 80_001)
    with opened(tmp_path) as cluster:
        assert post(cluster, *later(*large), node="n3") is None
        assert isinstance(post(cluster, entry(5, *map(insert, range(40_000, 79_999)), insert(7))), LostError)


def test_a_resend_that_reaches_back_over_the_window_is_compared_with_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeduplicationWindow.__init__, "__kwdefaults__", {"entries": 10})
    sent = [entry(index, insert(index)) for index in range(10, 90, 2)]
    with opened(tmp_path) as cluster:
        for one in sent:
            assert post(cluster, one) is None
        assert post(cluster, *later(*sent), node="n2") is None
        assert (cluster.counts.received, cluster.counts.duplicates) == (40, 40)
        assert post(cluster, entry(13, insert(13)), node="n2") is None  # never came: the leader before dropped it
        assert cluster.counts.received == 41
        error = post(cluster, entry(20, insert(21)), node="n3")
        assert isinstance(error, LostError)
        assert "other events" in error.message


def test_an_index_that_the_leader_before_had_dropped_is_appended_once(tmp_path: Path) -> None:
    dropped, last = entry(5, insert(7), update(1, 1, 2)), entry(11, insert(5))
    with opened(tmp_path) as cluster:
        assert post(cluster, A, B, C) is None
        assert post(cluster, *later(A, dropped, B), node="n2") is None
        assert post(cluster, *later(dropped, B), node="n3") is None
        assert (cluster.counts.received, cluster.counts.late) == (6, 2)
        assert any("dropped" in warning for warning in cluster.warnings())
    with opened(tmp_path) as cluster:
        assert post(cluster, *later(A, dropped, B, C), last, node="n3") is None
        assert cluster.counts.received == 1
        assert isinstance(post(cluster, entry(5, insert(8)), node="n4"), LostError)
    held = lines(tmp_path)
    assert [(one["index"], one["ordinal"], one.get("entry")) for one in held][4:] == [
        (9, 2, 5),
        (9, 4, 5),
        (11, 0, None),
    ]
    # Newer changes may have made their images stale, so the rows have to be asked for.
    assert all("after" not in one and one["sent"]["after"] for one in held[4:6])


def test_many_indexes_that_the_leader_before_had_dropped_are_appended_though_they_fill_whole_requests(
    tmp_path: Path,
) -> None:
    dropped = [entry(index, insert(index)) for index in range(10, 20)]
    end = entry(20, insert(20))
    with opened(tmp_path) as cluster:
        assert post(cluster, A, B, end) is None
        for at in range(0, 10, 2):
            assert post(cluster, *later(*dropped[at : at + 2]), node="n2") is None
        assert (cluster.counts.received, cluster.counts.late) == (14, 10)
    with opened(tmp_path) as cluster:
        assert post(cluster, *later(end), entry(21, insert(21)), node="n2") is None
        # This one was past it before and repeats nothing: it is not the cluster that it was.
        assert isinstance(post(cluster, entry(8, insert(8)), node="n2"), LostError)


def test_entries_with_index_0_inherit_the_one_before_also_across_requests(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        post(cluster, entry(0, insert(1)), entry(4, insert(2)), entry(0, insert(3)))
        post(cluster, entry(0, insert(4)), entry(6, insert(5)))
        assert cluster.counts.zero_index == 3
        assert any("?transaction" in warning for warning in cluster.warnings())
    assert [(one["index"], one["ordinal"]) for one in lines(tmp_path)] == [(0, 2), (4, 0), (4, 2), (4, 4), (6, 0)]
    assert ids(tmp_path) == [1, 2, 3, 4, 5]


def test_entries_with_index_0_are_known_again_however_the_new_leader_batches_them(tmp_path: Path) -> None:
    four, six = entry(4, insert(1)), entry(6, insert(4))
    zeros = [entry(0, insert(2)), entry(0, insert(3))]
    with opened(tmp_path) as cluster:
        post(cluster, four, zeros[0])
        post(cluster, zeros[1], six)
        for again in ([four, *zeros, six], [zeros[1], six], [*zeros, six], [four], [four, zeros[0]]):
            assert post(cluster, *later(*again), node="n2") is None
        assert cluster.counts.received == 4
        post(cluster, *later(four, *zeros, six), entry(7, insert(5)))
    assert ids(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_the_same_change_with_index_0_is_new_when_it_happens_again(tmp_path: Path, node: str) -> None:
    there, back = update(1, "a", "b"), update(1, "b", "a")
    with opened(tmp_path) as cluster:
        post(cluster, entry(4, insert(1)), entry(0, there), entry(0, back))
        post(cluster, entry(0, there), entry(6, insert(2)), node=node)
    assert [one["op"] for one in lines(tmp_path)] == ["INSERT", "UPDATE", "UPDATE", "UPDATE", "INSERT"]


@pytest.mark.parametrize(("node", "count"), [("n1", 6), ("n2", 4)])
def test_only_another_node_repeats_before_a_new_index(tmp_path: Path, node: str, count: int) -> None:
    there, back = entry(0, update(1, "a", "b")), entry(0, update(1, "b", "a"))
    with opened(tmp_path) as cluster:
        post(cluster, entry(4, insert(1)), there, back)
        post(cluster, there, back, entry(6, insert(2)), node=node)
    assert len(lines(tmp_path)) == count


def test_another_node_may_send_new_events_after_those_it_repeats(tmp_path: Path) -> None:
    zeros = [entry(0, insert(row)) for row in (2, 3, 4)]
    with opened(tmp_path) as cluster:
        post(cluster, entry(4, insert(1)), zeros[0], zeros[1])
        post(cluster, *later(zeros[1], zeros[2], entry(6, insert(5))), node="n2")
    assert ids(tmp_path) == [1, 2, 3, 4, 5]


def test_a_request_of_nothing_but_index_0_is_known_when_it_is_tried_again(tmp_path: Path) -> None:
    bare = {"op": "UPDATE", "table": "t", "new_row_id": 1, "old_row_id": 1}
    with opened(tmp_path) as cluster:
        post(cluster, entry(4, insert(1)))
        post(cluster, entry(0, bare))
    with opened(tmp_path) as cluster:
        post(cluster, entry(0, bare))
        post(cluster, *later(entry(0, bare)))
    assert len(lines(tmp_path)) == 3


def test_an_event_with_index_0_that_rqlite_left_out_before_is_appended_once(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        post(cluster, entry(4, insert(1)), entry(6, insert(2)))
        for node in ("n2", "n3"):
            post(cluster, *later(entry(4, insert(1)), entry(0, insert(9)), entry(6, insert(2))), node=node)
        assert cluster.counts.late == 1
        assert len(cluster.warnings()) == 2
        post(cluster, entry(7, insert(3)))
    found = lines(tmp_path)
    assert [(one["index"], one["ordinal"], one.get("zero")) for one in found] == [
        (4, 0, None),
        (6, 0, None),
        (6, 2, [4, 0]),
        (7, 0, None),
    ]
    # Its image of the row may be outdated: the event counts as one without images, and keeps what was sent.
    assert "after" not in found[2]
    assert "newer" in found[2]["error"]
    assert found[2]["sent"] == insert(9)


def test_new_events_with_index_0_do_not_hide_the_known_ones(tmp_path: Path) -> None:
    four, six = entry(4, insert(1)), entry(6, insert(5))
    zeros = [entry(0, insert(row)) for row in (2, 3, 4)]
    for crash in (False, True):
        journal = tmp_path / str(crash)
        with opened(journal) as cluster:
            # The batches with the first and the last of them were dropped.
            post(cluster, four)
            post(cluster, zeros[1], six)
        for node in ("n2", "n3", "n4"):
            with opened(journal) as cluster:
                assert post(cluster, *later(four, *zeros, six), node=node) is None
                assert post(cluster, *later(zeros[2], six), node=node) is None
                if crash:
                    cluster._unsaved = 0
        assert [(one.get("sent") or one)["new_row_id"] for one in lines(journal)] == [1, 3, 5, 2, 4]


def test_a_late_delete_asks_for_its_row_which_may_be_there_again(tmp_path: Path) -> None:
    delete = {"op": "DELETE", "table": "t", "old_row_id": 1, "before": {"id": 1}}
    four, six = entry(4, insert(1)), entry(6, insert(1, v="again"))
    with opened(tmp_path) as cluster:
        post(cluster, four, six)
        post(cluster, *later(four, entry(0, delete), six), node="n2")
        post(cluster, *later(four, entry(0, delete), six), node="n3")
    *_, late = lines(tmp_path)
    assert (late["op"], late["new_row_id"], late["old_row_id"], late["sent"]) == ("UPDATE", 1, 1, delete)
    assert len(lines(tmp_path)) == 3


def test_all_recorded_requests_are_held_once_after_a_resend_of_all_of_them(tmp_path: Path) -> None:
    sent = [one for one in recorded() if b"service_id" not in one]
    with opened(tmp_path) as cluster:
        for content in [*sent, *sent]:
            assert cluster.commit([parse(content)]) == [None]
    held = [
        {key: value for key, value in one.items() if key not in ("index", "ordinal", "at", "zero")}
        for one in lines(tmp_path)
    ]
    once: dict[str, list[dict[str, Any]]] = {}
    for content in sent:
        for one in json.loads(content)["payload"]:
            once.setdefault(f"{one['index'] or len(once)} {one['commit_timestamp']} {one['events']}", one["events"])
    assert held == [event for events in once.values() for event in events]


def test_what_is_known_survives_the_removal_of_its_frames(tmp_path: Path) -> None:
    wide = "x" * 300_000
    with opened(tmp_path) as cluster:
        for index in range(1, 13):
            assert post(cluster, entry(index, insert(index, v=wide))) is None
        Cursor(tmp_path / "rqlite", "reader").advance(Position(11, 1))
        cluster.maintain()
        assert len(list((tmp_path / "rqlite").glob("*.seg"))) < 4
        # A crash: nothing is written at the end.
        cluster._unsaved = 0
    with opened(tmp_path) as cluster:
        assert post(cluster, entry(13, insert(13))) is None
        for index in range(1, 13):
            assert post(cluster, *later(entry(index, insert(index, v=wide)))) is None
        assert cluster.counts.received == 1
        assert isinstance(post(cluster, entry(3, insert(3, v="other"))), LostError)


def test_a_full_journal_refuses_until_its_readers_have_passed(tmp_path: Path) -> None:
    wide = "x" * 400_000
    with opened(tmp_path, max_bytes=2_000_000) as cluster:
        index = 0
        while (error := post(cluster, entry(index + 1, insert(index + 1, v=wide)))) is None:
            index += 1
        assert isinstance(error, UnavailableError)
        assert cluster.error is None
        assert any("full" in warning for warning in cluster.warnings())
        Cursor(tmp_path / "rqlite", "reader").advance(Position(index, 1))
        assert post(cluster, entry(index + 1, insert(index + 1, v=wide))) is None
        cluster.maintain()
        assert cluster.warnings() == []


def test_a_journal_that_is_smaller_than_one_of_its_files_is_emptied_nonetheless(tmp_path: Path) -> None:
    wide = "x" * 400_000
    cluster = Cluster("rqlite", tmp_path, segment_bytes=64_000_000, max_bytes=2_000_000)
    index = 0
    while post(cluster, entry(index + 1, insert(index + 1, v=wide))) is None:
        index += 1
    Cursor(tmp_path / "rqlite", "reader").advance(Position(index, 1))
    assert post(cluster, entry(index + 1, insert(index + 1, v=wide))) is None
    cluster.close()


def test_notes_that_cannot_be_written_do_not_keep_the_journal_from_being_emptied(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        for index in range(1, 13):
            assert post(cluster, entry(index, insert(index, v="x" * 300_000))) is None
        Cursor(tmp_path / "rqlite", "reader").advance(Position(11, 1))
        (tmp_path / "rqlite" / "told").mkdir()
        with pytest.raises(UnavailableError, match="cannot be written"):
            cluster.maintain()
        assert len(list((tmp_path / "rqlite").glob("*.seg"))) < 4


def test_cursors_that_cannot_be_read_concern_their_cluster_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        assert post(cluster, A) is None
        (tmp_path / "rqlite" / "cursors" / "reader.cursor").mkdir(parents=True)
        with pytest.raises(UnavailableError, match="cannot be used"):
            cluster.maintain()


def test_a_stop_that_a_full_disk_kept_from_being_written_is_written_later(tmp_path: Path) -> None:
    obstacle = tmp_path / "rqlite" / "stopped.tmp"
    with opened(tmp_path) as cluster:
        assert post(cluster, A) is None
        obstacle.mkdir()
        assert post(cluster, entry(4, insert(9))) is not None
        with pytest.raises(UnavailableError, match="cannot be written"):
            cluster.maintain()
        assert isinstance(post(cluster, C), LostError)
        obstacle.rmdir()
        cluster.maintain()
    with opened(tmp_path) as cluster:
        assert isinstance(post(cluster, C), LostError)


def test_a_cluster_whose_notes_cannot_be_read_is_tried_again(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        assert post(cluster, A) is None
    (tmp_path / "rqlite" / "stopped").mkdir()
    cluster = Cluster("rqlite", tmp_path, segment_bytes=1_000_000, max_bytes=100_000_000)
    with pytest.raises(UnavailableError, match="cannot be read"):
        cluster.open()
    assert isinstance(post(cluster, B), UnavailableError)
    (tmp_path / "rqlite" / "stopped").rmdir()
    assert post(cluster, B) is None
    cluster.close()


def test_a_failed_append_leaves_nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as cluster:
        post(cluster, A)
        monkeypatch.setenv(VARIABLE, "rqlite.before_append:raise")
        with pytest.raises(FailpointError):
            post(cluster, B)
        monkeypatch.setenv(VARIABLE, "rqlite.appended:raise")
        with pytest.raises(FailpointError):
            post(cluster, C)
        monkeypatch.delenv(VARIABLE)
        # After a failure the window is made from the journal: B was not stored, C was.
        assert post(cluster, C) is None
        assert isinstance(post(cluster, B), LostError)
    assert ids(tmp_path) == [1, 2, 4]


def test_a_journal_that_lacks_acknowledged_events_stops_the_cluster(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        post(cluster, A)
        post(cluster, B)
        cluster.maintain()
    newest = max((tmp_path / "rqlite").glob("*.seg"))
    newest.write_bytes(newest.read_bytes()[:-20])
    with opened(tmp_path) as cluster:
        assert isinstance(cluster.error, DamagedError)
        assert "tailrace reset" in (cluster.error.fix or "")
        assert isinstance(post(cluster, C), DamagedError)


def test_a_restart_does_not_let_a_journal_pass_whose_damaged_file_was_set_aside(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        post(cluster, A)
        cluster._unsaved = 0  # killed before it could take a note
    newest = max((tmp_path / "rqlite").glob("*.seg"))
    newest.write_bytes(bytes(16) + newest.read_bytes()[16:])
    for _ in range(2):
        with opened(tmp_path) as cluster:
            assert isinstance(cluster.error, DamagedError)
            assert isinstance(post(cluster, B), DamagedError)


def test_a_stop_whose_reason_cannot_be_read_is_a_stop(tmp_path: Path) -> None:
    with opened(tmp_path) as cluster:
        post(cluster, A)
    (tmp_path / "rqlite" / "stopped").write_bytes(b"{")
    with opened(tmp_path) as cluster:
        assert isinstance(post(cluster, B), DamagedError)


class Upstream:
    """A cluster's history, and how its nodes send it: each in its own batches, without those of zeros alone."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.index = 3
        self.row = 0
        self.node = 1
        self.sent_ids: set[int] = set()
        self.last: list[Entry] = []
        self._history: list[Entry] = []

    def happen(self, sizes: list[tuple[int, int]], batch: int) -> None:
        """New entries: each with so many events of its own and so many followers with index 0."""
        made: list[Entry] = []
        for own, zeros in sizes:
            self.index += 1 + own % 2
            made.append(entry(self.index, *(self._event() for _ in range(own))))
            made += [entry(0, self._event()) for _ in range(zeros)]
        self._history += made
        self._send(made, batch)

    def fail_over(self, back: int, batch: int) -> None:
        """Another node sends the last entries again, and from here on all the others."""
        self.node += 1
        self._history = later(*self._history)
        starts = [at for at, one in enumerate(self._history) if one["index"]][-back:]
        if starts:
            self._send(self._history[starts[0] :], batch)

    def retry(self) -> None:
        if self.last:
            assert post(self.cluster, *self.last, node=f"n{self.node}") is None

    def _send(self, entries: list[Entry], batch: int) -> None:
        for at in range(0, len(entries), batch):
            sent = entries[at : at + batch]
            if any(one["index"] for one in sent):
                assert post(self.cluster, *sent, node=f"n{self.node}") is None
                self.last = sent
                self.sent_ids |= {event["new_row_id"] for one in sent for event in one["events"]}

    def _event(self) -> dict[str, Any]:
        self.row += 1
        return insert(self.row)


SIZES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=4)
BATCH = st.integers(1, 6)
STEP = st.one_of(
    st.tuples(st.just("happen"), SIZES, BATCH),
    st.tuples(st.just("fail over"), st.integers(1, 8), BATCH),
    st.sampled_from([("retry",), ("restart",), ("crash",), ("tend",)]),
)


@settings(max_examples=100)
@given(st.lists(STEP, max_size=14))
def test_the_journal_holds_every_event_once_in_order(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder)

        def make() -> Cluster:
            return Cluster("rqlite", journal, segment_bytes=1_000_000, max_bytes=10**9)

        upstream = Upstream(make())
        for kind, *given_values in steps:
            if kind == "happen":
                upstream.happen(*given_values)
            elif kind == "fail over":
                upstream.fail_over(*given_values)
            elif kind == "retry":
                upstream.retry()
            elif kind == "tend":
                upstream.cluster.maintain()
            else:
                if kind == "crash":
                    upstream.cluster._unsaved = 0
                upstream.cluster.close()
                upstream.cluster = make()
        upstream.cluster.close()
        if upstream.sent_ids:
            held = lines(journal)
            rows = [(one.get("sent") or one)["new_row_id"] for one in held]
            assert sorted(rows) == sorted(upstream.sent_ids)
            in_time = [one["new_row_id"] for one in held if "sent" not in one]
            assert in_time == sorted(in_time)
