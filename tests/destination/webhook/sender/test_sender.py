"""The sender's loop, against a real endpoint, a real queue and a real store."""

from __future__ import annotations

import json
import logging
import re
import resource
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.destination.webhook.backlog import Backlog, merge
from tailrace.destination.webhook.format.cloudevents import CloudEventsFormat
from tailrace.destination.webhook.format.event import EVERY
from tailrace.destination.webhook.option import EventBatchOptions, RetryOptions
from tailrace.destination.webhook.queue import QueueReader, QueueWriter
from tailrace.destination.webhook.sender.leader import Leadership, open_engine
from tailrace.destination.webhook.sender.lock import queue_id
from tailrace.destination.webhook.sender.sender import Sender
from tailrace.destination.webhook.signature import verify
from tailrace.errors import DamagedError, OwnedError
from tailrace.model.change import LAST_ORDINAL, START, Position
from tailrace.state import Owner
from tailrace.testing.endpoint import Reply, WebhookEndpoint, always
from tailrace.testing.wait import wait_until
from tests.support.database import PostgresDatabase
from tests.support.webhook_sending import copied, drain, events, fill, numbered, options, row, sending, status

ELSEWHERE = Owner(4711, "another-host", datetime(2026, 1, 2, tzinfo=UTC))


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    return tmp_path / "queue"


def ids(first: int, count: int) -> list[str]:
    return [str(each) for each in numbered(first, count).column("id").to_pylist()]


def another_node(tmp_path: Path, *, seconds: float = 60) -> Leadership:
    return Leadership(open_engine(str(tmp_path)), "shop", node="other", queue="other", seconds=seconds, owner=ELSEWHERE)


def test_events_are_posted_in_order_and_never_more_than_allowed_at_once(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 25), numbered(26, 2500))
    with WebhookEndpoint() as endpoint:
        drain(options(queue, endpoint.url, tmp_path))
        assert endpoint.ids() == ids(1, 2525)
        sizes = [len(json.loads(request.body)) for request in endpoint.requests]
    assert max(sizes) == 10
    assert len(sizes) < 260
    said = status(queue)
    assert (said["delivered"], said["pending"], said["dropped"], said["error"]) == (2525, 0, 0, None)
    assert said["delivered_to"] == said["head"]


@pytest.mark.parametrize("format_name", ["rqlite", "cloudevents", "debezium"])
def test_requests_are_bounded_by_their_size_and_a_larger_event_goes_alone(
    tmp_path: Path, queue: Path, format_name: str
) -> None:
    rows = [row("public.a", number) for number in range(1, 101)]
    for number, each in enumerate(rows):
        each["event"] = json.dumps({"id": each["id"], "pad": "x" * (9000 if number == 50 else 97 * number % 700)})
    fill(queue, events(rows[:70]), events(rows[70:]))
    with WebhookEndpoint(ids=lambda body: re.findall(r"public\.a:\d+:0", body.decode())) as e:
        drain(options(queue, e.url, tmp_path, max_events=1000, max_bytes=3000, format=format_name, node_id="n" * 60))
        sizes = [len(request.body) for request in e.requests]
        assert e.ids() == [str(each["id"]) for each in rows]
        alone = next(request for request in e.requests if len(request.body) > 3000)
    assert sorted(sizes)[-2] <= 3000
    assert alone.body.count(b"public.a:") == 1
    assert len(sizes) < 30


def test_a_follower_passes_the_frame_without_events_that_a_queue_keeps_when_it_is_emptied(
    tmp_path: Path, queue: Path
) -> None:
    other = another_node(tmp_path)
    assert other.claim()
    other.persist({f"public.{name}": Position(10, 0) for name in "abc"}, START)
    fill(queue, numbered(1, 10))
    reader = QueueReader(queue)
    with WebhookEndpoint() as endpoint, sending(options(queue, endpoint.url, tmp_path)):
        wait_until(lambda: reader.released == reader.head)
        with QueueWriter(queue, segment_bytes=1 << 20, max_bytes=1 << 30) as writer:
            place = writer.give_up()
        wait_until(lambda: status(queue)["delivered_to"] == str(place))
        fill(queue, numbered(11, 3))
        other.release()
        wait_until(lambda: endpoint.ids() == ids(11, 3))
    other.close()


def test_a_follower_gives_up_what_it_copied_of_a_table_that_was_empty_for_the_leader(
    tmp_path: Path, queue: Path
) -> None:
    fill(queue, events(copied("public.late", 50, 3)))
    reader = QueueReader(queue)
    leader = another_node(tmp_path)
    leader.claim()
    # A marker without a row, and then the marker that all tables are level.
    leader.persist({"public.late": START, EVERY: Position(80, 0)}, START)
    with WebhookEndpoint() as endpoint, sending(options(queue, endpoint.url, tmp_path)):
        wait_until(lambda: reader.released == Position(1, 0))
    leader.close()
    assert not endpoint.requests


def test_a_queue_whose_oldest_file_is_damaged_is_not_sent_without_it(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 10))
    fill(queue, numbered(11, 10))
    oldest = min(queue.glob("*.seg"))
    data = bytearray(oldest.read_bytes())
    data[20] ^= 1
    oldest.write_bytes(data)
    with WebhookEndpoint() as endpoint:
        with pytest.raises(DamagedError, match="were not delivered"):
            drain(options(queue, endpoint.url, tmp_path))
        assert not endpoint.requests
    assert "queue purge" in status(queue)["error"]["fix"]


def test_a_full_disk_on_which_nothing_can_be_given_up_is_no_reason_to_send_nothing(
    queue: Path, database: PostgresDatabase
) -> None:
    fill(queue, numbered(1, 100))
    queue_id(queue)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with WebhookEndpoint() as endpoint:
        chosen = options(queue, endpoint.url, database.dsn)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            drain(chosen)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert QueueReader(queue).released == START
        drain(chosen)
        assert endpoint.ids() == ids(1, 100)
    reader = QueueReader(queue)
    assert reader.released == reader.head


def test_what_was_delivered_is_not_sent_again_after_a_restart_and_leaves_the_queue(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 3000))
    with WebhookEndpoint() as endpoint:
        chosen = options(queue, endpoint.url, tmp_path)
        drain(chosen)
        drain(chosen)
        reader = QueueReader(queue)
        assert reader.released == reader.head
        fill(queue, numbered(3001, 5))
        drain(chosen)
        assert endpoint.ids() == ids(1, 3005)


def test_events_that_are_too_few_wait_for_others_but_not_for_long(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 3))
    with WebhookEndpoint() as endpoint:
        chosen = options(queue, endpoint.url, tmp_path, max_events=5, max_delay=60.0)
        with sending(chosen):
            wait_until(lambda: bool(status(queue).get("leader")))
            assert endpoint.requests == []
            fill(queue, numbered(4, 3))
            wait_until(lambda: bool(endpoint.requests))
        assert endpoint.ids() == ids(1, 5)
        with sending(chosen.model_copy(update={"batch": EventBatchOptions(max_events=5, max_delay=0.5)})):
            wait_until(lambda: len(endpoint.requests) == 2)
        assert endpoint.ids() == ids(1, 6)


def test_a_request_that_failed_comes_again_as_it_was_and_signed(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 20))
    with WebhookEndpoint() as endpoint:
        endpoint.script(*(Reply(code) for code in (500, 410, 302, 404)), Reply(cut=True), Reply(500, takes=True))
        drain(options(queue, endpoint.url, tmp_path, secret=["one", "two"], headers={"X-Token": "t"}))
        first = endpoint.requests[0]
        assert {request.body for request in endpoint.requests[:7]} == {first.body}
        assert {request.headers["webhook-id"] for request in endpoint.requests[:7]} == {first.headers["webhook-id"]}
        assert endpoint.requests[7].headers["webhook-id"] != first.headers["webhook-id"]
        assert all(verify(["two"], request.headers, request.body) for request in endpoint.requests)
        assert first.headers["x-token"] == "t"
        assert first.headers["content-type"] == "application/cloudevents-batch+json"
        # The endpoint took the first request and answered with an error.
        assert (endpoint.duplicates(), sorted(set(endpoint.ids()))) == (10, sorted(ids(1, 20)))
    assert (status(queue)["failures"], status(queue)["requests"]) == (6, 2)


def test_an_endpoint_that_asks_for_nonsense_is_asked_again(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 1))
    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(503, {"Retry-After": "Wed, 21 Oct 99999999999 07:28:00 GMT"}))
        drain(options(queue, endpoint.url, tmp_path))
        assert endpoint.ids() == ids(1, 1)


def test_an_endpoint_that_asks_for_a_pause_gets_it(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 1))
    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(429, {"Retry-After": "1"}))
        drain(options(queue, endpoint.url, tmp_path))
        first, second = endpoint.requests
    assert second.at - first.at >= 1


def test_events_are_dropped_only_as_configured_counted_and_named_without_their_content(
    tmp_path: Path, queue: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(queue, numbered(1, 15))
    with WebhookEndpoint() as endpoint, caplog.at_level(logging.WARNING):
        endpoint.script(Reply(400), Reply(400), Reply(400))
        drain(options(queue, endpoint.url, tmp_path, retry=RetryOptions(policy="linear", min=0.001, max=0.01, limit=3)))
        assert endpoint.ids() == ids(11, 5)
    assert (status(queue)["dropped"], status(queue)["delivered"]) == (10, 5)
    with WebhookEndpoint() as endpoint:
        drain(options(queue, endpoint.url, tmp_path))
    assert status(queue)["dropped"] == 10
    assert f"dropped: table public.b at {Position(1, 0)}, event public.b:1:0" in caplog.text
    assert '"ordinal"' not in caplog.text


def test_a_private_target_is_no_reason_to_drop_anything(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 1))
    with WebhookEndpoint() as endpoint:
        chosen = options(
            queue, endpoint.url, tmp_path, retry=RetryOptions(policy="linear", min=0.001, max=0.01, limit=1)
        )
        with sending(chosen.model_copy(update={"allow_private": False})):
            wait_until(lambda: status(queue).get("failures", 0) > 2)
            assert status(queue)["error"]["kind"] == "PreflightError"
        assert endpoint.requests == []
        drain(chosen)
        assert endpoint.ids() == ids(1, 1)
    assert status(queue)["dropped"] == 0


def test_a_marker_says_that_a_copy_was_delivered_and_copied_rows_alone_do_not(tmp_path: Path, queue: Path) -> None:
    rows = copied("public.a", 7, 3)
    with WebhookEndpoint() as endpoint:
        chosen = options(queue, endpoint.url, tmp_path)
        fill(queue, events(rows[:2]))
        drain(chosen)
        node = another_node(tmp_path)
        assert node.watermarks() == {}
        fill(queue, events([*rows[2:], row("public.b", 9)]))
        drain(chosen)
        assert node.watermarks() == {"public.a": Position(7, LAST_ORDINAL), "public.b": Position(9, 0)}
        node.close()
        assert len(endpoint.ids()) == 4


def test_a_new_leader_sends_only_what_no_other_node_delivered(tmp_path: Path, queue: Path) -> None:
    other = another_node(tmp_path)
    assert other.claim()
    other.persist({"public.a": Position(4, 0), "public.b": Position(9, LAST_ORDINAL)}, Position(77, 0))
    other.release()
    rows = [row("public.a", 3), row("public.a", 4), row("public.a", 5), *copied("public.b", 9, 4)]
    fill(queue, events([*rows, row("public.b", 10), *copied("public.c", 2, 1)]))
    with WebhookEndpoint() as endpoint:
        drain(options(queue, endpoint.url, tmp_path))
        assert endpoint.ids() == ["public.a:5:0", "public.b:10:0", "public.c:copy 2:0"]
    assert other.watermarks()["public.b"] == Position(10, 0)
    other.close()


def test_a_follower_sends_nothing_and_drops_what_the_leader_delivered(tmp_path: Path, queue: Path) -> None:
    other = another_node(tmp_path)
    assert other.claim()
    batches = [numbered(first, 3) for first in (1, 4, 7, 10)]
    fill(queue, *batches, events(copied("public.d", 20, 2)), numbered(21, 3))
    reader = QueueReader(queue)
    with WebhookEndpoint() as endpoint:
        with sending(options(queue, endpoint.url, tmp_path)):
            wait_until(lambda: bool(status(queue).get("follows")))
            assert (reader.released, status(queue)["pending"]) == (START, 18)
            other.persist({"public.a": Position(6, 0), "public.b": Position(7, 0), "public.c": Position(8, 0)}, START)
            wait_until(lambda: reader.released == Position(2, 0))
            everything = {f"public.{name}": Position(12, 0) for name in "abc"}
            other.persist({**everything, "public.d": Position(19, 0)}, START)
            wait_until(lambda: reader.released == Position(4, 0))
            other.persist({"public.d": Position(20, LAST_ORDINAL)}, START)
            wait_until(lambda: reader.released == Position(5, 0))
            assert endpoint.requests == []
            other.release()
            wait_until(lambda: endpoint.ids() == ids(21, 3))
        other.close()


def test_a_follower_drops_its_copy_of_a_quiet_table_once_the_leader_is_past_it(tmp_path: Path, queue: Path) -> None:
    fill(
        queue,
        events(copied("public.quiet", 50, 3)),
        events(copied("public.new", 60, 2)),
        events([row("public.busy", 70)]),
    )
    reader = QueueReader(queue)
    leader = another_node(tmp_path)
    leader.claim()
    # The leader copied the quiet table earlier, and has not sent a row of the new one.
    leader.persist({"public.quiet": Position(40, LAST_ORDINAL), "public.busy": Position(80, 0)}, START)
    with WebhookEndpoint() as endpoint, sending(options(queue, endpoint.url, tmp_path)):
        wait_until(lambda: bool(status(queue).get("follows")))
        assert reader.released == START
        leader.persist({EVERY: Position(80, 0)}, START)
        wait_until(lambda: reader.released == Position(1, 0))
        leader.persist({"public.new": Position(75, LAST_ORDINAL)}, START)
        wait_until(lambda: reader.released == Position(3, 0))
    leader.close()
    assert not endpoint.requests


def test_a_leader_whose_lease_was_taken_stops_and_stores_nothing(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 10))
    with WebhookEndpoint() as endpoint:
        chosen = options(queue, endpoint.url, tmp_path, seconds=0.5)
        with sending(chosen):
            wait_until(lambda: bool(endpoint.requests))
            engine = open_engine(str(tmp_path))
            with engine.transaction() as run:
                run(
                    "UPDATE sender_lease SET epoch = epoch + 1, owner_pid = 4711, owner_host = 'b', node = 'b',"
                    " owner_machine = '', lease_until = '2999-01-01T00:00:00+00:00'",
                    {},
                )
            engine.close()
            fill(queue, numbered(11, 10))
            wait_until(lambda: bool(status(queue).get("follows")))
            seen = len(endpoint.requests)
            fill(queue, numbered(21, 10))
            time.sleep(0.3)
            assert len(endpoint.requests) == seen


def test_a_held_request_is_given_up_when_the_sender_has_to_stop_and_sent_by_the_next(
    tmp_path: Path, queue: Path
) -> None:
    fill(queue, numbered(1, 15))
    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(), Reply(500, hold_seconds=3600))
        chosen = options(queue, endpoint.url, tmp_path, timeout=3600.0, retry=RetryOptions(limit=1))
        with sending(chosen):
            wait_until(lambda: len(endpoint.requests) == 2)
        assert status(queue)["dropped"] == 0
        drain(chosen)
        assert endpoint.ids() == ids(1, 15)


def test_what_was_delivered_is_stored_while_the_next_request_waits_for_its_answer(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 15))
    other = another_node(tmp_path)
    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(), Reply(500, hold_seconds=3600))
        with sending(options(queue, endpoint.url, tmp_path, timeout=3600.0, interval=2.0)):
            wait_until(lambda: len(endpoint.requests) == 2)
            wait_until(lambda: max(other.watermarks().values(), default=START) == Position(10, 0))
    other.close()


def test_a_place_within_a_frame_is_known_again(tmp_path: Path, queue: Path) -> None:
    fill(queue, events(copied("public.a", 1, 25)))
    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(), Reply(), Reply(500, hold_seconds=60))
        chosen = options(queue, endpoint.url, tmp_path)
        with sending(chosen):
            wait_until(lambda: len(endpoint.requests) == 3)
        assert status(queue)["delivered_to"] == str(Position(0, 20))
        assert status(queue)["pending"] == 6  # five rows and the marker
        drain(chosen)
        assert (len(endpoint.ids()), endpoint.duplicates()) == (25, 0)


def test_one_process_sends_from_a_queue(tmp_path: Path, queue: Path) -> None:
    with WebhookEndpoint() as endpoint:
        chosen = options(queue, endpoint.url, tmp_path)
        with sending(chosen), pytest.raises(OwnedError, match="another process sends"):
            Sender(chosen, "shop", lambda: False)
        drain(chosen)


def test_a_recreated_queue_is_sent_from_its_start(tmp_path: Path, queue: Path) -> None:
    with WebhookEndpoint() as endpoint:
        chosen = options(queue, endpoint.url, tmp_path)
        fill(queue, numbered(1, 1500), numbered(1501, 1500))
        drain(chosen)
        known = queue_id(queue)
        queue.rename(tmp_path / "old")
        fill(queue, numbered(3001, 5))
        drain(chosen)
        assert queue_id(queue) != known
        assert endpoint.ids() == ids(1, 3005)


def test_a_damaged_queue_is_sent_up_to_the_damage_and_no_further(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 2000), numbered(2001, 1000))
    with WebhookEndpoint() as endpoint:
        chosen = options(queue, endpoint.url, tmp_path, interval=60.0)
        segment = max(queue.glob("*.seg"), key=lambda file: file.stat().st_size)
        stored = bytearray(segment.read_bytes())
        stored[stored.index(b"public.a:2100:0")] ^= 1
        segment.write_bytes(stored)
        for _ in range(2):
            with pytest.raises(DamagedError):
                drain(chosen)
            assert status(queue)["error"]["kind"] == "DamagedError"
        assert endpoint.ids() == ids(1, 2000)


def test_a_status_shows_what_waits_since_when_and_why(tmp_path: Path, queue: Path) -> None:
    fill(queue, numbered(1, 12))
    with WebhookEndpoint() as endpoint:
        endpoint.rule = always(Reply(503))
        with sending(options(queue, endpoint.url, tmp_path, retry=RetryOptions(policy="linear", min=0.3, max=0.3))):
            wait_until(lambda: status(queue).get("attempts", 0) >= 2)
            said = status(queue)
            assert said["leader"]
            assert (said["pending"], said["oldest"], said["epoch"]) == (12, "2026-01-01T00:00:00+00:00", 1)
            assert (
                said["error"]["message"]
                == f"http://localhost:{endpoint.port} answered 503: it cannot accept the request now"
            )


tables = st.sampled_from(["a", "b", "c"])


@st.composite
def histories(draw: st.DrawFn) -> list[list[tuple[str, str]]]:
    kinds = st.sampled_from(["log", "log", "log", "copy", "marker"])
    return draw(st.lists(st.lists(st.tuples(tables, kinds), min_size=1, max_size=7), min_size=1, max_size=6))


@settings(max_examples=60)
@given(
    histories(),
    st.integers(1, 5),
    st.sampled_from([0, 500, 700, 1_000_000]),
    st.dictionaries(tables, st.integers(0, 20).map(lambda commit: Position(commit, 0))),
    st.integers(0, 40),
)
def test_parcels_hold_every_event_after_the_watermarks_once_and_can_be_resumed_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    history: list[list[tuple[str, str]]],
    max_events: int,
    max_bytes: int,
    watermarks: dict[str, Position],
    stop: int,
) -> None:
    folder = tmp_path_factory.mktemp("queue")
    commit, frames = 0, []
    for frame in history:
        rows = []
        for table, kind in frame:
            commit += 1
            rows.append(row(table, commit, copied=kind == "copy", marker=kind == "marker"))
        frames.append(rows)
    fill(folder, *(events(rows) for rows in frames))
    flat = [each for rows in frames for each in rows]
    due = [
        each["id"]
        for each in flat
        if not each["marker"] and Position(each["commit"], 0) > watermarks.get(each["table"], Position(-1, 0))
    ]
    reached: dict[str, Position] = {}
    for each in flat:
        if each["marker"] or not each["copied"]:
            merge(reached, {each["table"]: Position(each["commit"], 0)})

    reader, place, found, marks = QueueReader(folder), START, [], dict[str, Position]()
    backlog = Backlog(reader, place, watermarks, max_events=max_events, max_bytes=max_bytes)
    backlog.fill()
    parcels = 0
    while backlog.is_ready(0.0):
        parcel = backlog.take()
        assert len(parcel.events) <= max_events
        body = CloudEventsFormat().body(parcel.events, service_id="", node_id="") if len(parcel.events) else b""
        assert len(body) <= max_bytes or len(parcel.events) == 1
        assert parcel.place > place
        place = parcel.place
        found += parcel.events.column("id").to_pylist()
        merge(marks, parcel.watermarks)
        parcels += 1
        if parcels == stop:
            backlog = Backlog(reader, place, watermarks, max_events=max_events, max_bytes=max_bytes)
        backlog.fill()
    reader.close()
    assert (found, marks, place) == (due, reached, Position(len(frames), 0))
