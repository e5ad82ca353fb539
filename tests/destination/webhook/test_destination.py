"""The destination without Spark: what tables write comes out at the endpoint, once, in the order of commits."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.config import pipeline
from tailrace.config.registry import open_destination
from tailrace.destination import Batch, Stage, TableBatch
from tailrace.destination.webhook import destination as module
from tailrace.destination.webhook.destination import WebhookCommitter, WebhookDestination
from tailrace.destination.webhook.format.event import EVERY
from tailrace.destination.webhook.queue import QueueReader
from tailrace.destination.webhook.sender.lock import claim_queue
from tailrace.destination.webhook.sender.status import STATUS
from tailrace.errors import UnavailableError
from tailrace.model.change import Changes, Position
from tailrace.model.schema import Column, TableName, TableSchema
from tailrace.system.child_process import read_status, write_status
from tailrace.testing.destination import changes_of, delete, insert, moved, read, update
from tailrace.testing.endpoint import Reply, WebhookEndpoint, always
from tailrace.testing.wait import wait_until
from tests.support.descriptor import open_below


def table_named(name: str) -> TableSchema:
    columns = (Column("id", pa.int64()), Column("note", pa.string()))
    return TableSchema(TableName("public", name), columns, ("id",), upstream_id=name)


ORDERS, ITEMS = table_named("orders"), table_named("items")


def make(folder: Path, url: str, **more: Any) -> WebhookDestination:
    made = open_destination(
        pipeline.from_dict(
            {
                "name": "shop",
                "source": {"type": "postgres", "dsn": "postgresql://shop@localhost/shop"},
                "destination": {
                    "type": "webhook",
                    "url": url,
                    "allow_private": True,
                    "retry": {"min": "5ms", "max": "20ms"},
                    **more,
                },
                "state": str(folder / "state"),
            }
        )
    )
    assert isinstance(made, WebhookDestination)
    return made


STAGE = Stage(Path("nowhere"), "shop")
"""Names the pipeline. Events are staged next to the queue."""


def on_stage(table: TableSchema, batch: Batch, log: Iterable[Changes] = (), **more: Any) -> TableBatch:
    return TableBatch(table, batch, log, stage=STAGE, **more)


def batch(number: int) -> Batch:
    return Batch("shop/1", number)


def arrived_events(endpoint: WebhookEndpoint) -> list[tuple[str, str, Any]]:
    """Table, kind and key of every event that arrived."""
    return [
        (event["subject"], event["type"].removeprefix("tailrace."), event["data"]["key"]["id"])
        for request in endpoint.taken
        for event in json.loads(request.body)
    ]


def test_a_batch_arrives_once_in_the_order_of_its_commits_whatever_table_wrote_first(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        destination = pickle.loads(pickle.dumps(make(tmp_path, endpoint.url)))
        with destination.committer("shop") as committer:
            for _ in range(2):  # a crash between the queue and Spark's log
                with committer.batch(batch(0)):
                    destination.write_changes(
                        on_stage(ORDERS, batch(0), changes_of(ORDERS, insert(id=1, note="a"), commit=10))
                    )
                    destination.write_changes(
                        on_stage(ITEMS, batch(0), changes_of(ITEMS, insert(id=7, note="b"), delete(id=7), commit=8))
                    )
            committer.drain()
        assert arrived_events(endpoint) == [
            ("public.items", "insert", 7),
            ("public.items", "delete", 7),
            ("public.orders", "insert", 1),
        ]


def test_copied_rows_come_before_the_log_and_a_batch_that_failed_brings_nothing(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        destination = make(tmp_path, endpoint.url)
        with destination.committer("shop") as committer:
            with pytest.raises(UnavailableError, match="a task died"):
                _fail(destination, committer)
            with committer.batch(batch(0)):
                staged = destination.write_rows(
                    ITEMS, changes_of(ITEMS, read(id=1, note="a"), read(id=2, note="b")), STAGE
                )
                assert staged.rows == 2
                destination.write_changes(on_stage(ORDERS, batch(0), changes_of(ORDERS, update(id=5, note="u"))))
                destination.write_changes(
                    on_stage(ITEMS, batch(0), staged=[staged], begins_copy=True, completes_copy=True)
                )
            committer.drain()
        assert arrived_events(endpoint) == [
            ("public.items", "read", 1),
            ("public.items", "read", 2),
            ("public.orders", "update", 5),
        ]


def test_only_what_changes_is_sent_where_copied_rows_are_not_wanted(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        destination = make(tmp_path, endpoint.url, copied_rows=False)
        rows = iter(changes_of(ITEMS, read(id=1, note="a"), read(id=2, note="b")))
        with destination.committer("shop") as committer:
            with committer.batch(batch(0)):
                staged = destination.write_rows(ITEMS, rows, STAGE)
                destination.write_changes(
                    on_stage(ITEMS, batch(0), staged=[staged], begins_copy=True, completes_copy=True)
                )
            with committer.batch(batch(1)):
                destination.write_changes(
                    on_stage(ITEMS, batch(1), changes_of(ITEMS, update(id=2, note="c"), commit=5))
                )
            committer.drain()
        assert arrived_events(endpoint) == [("public.items", "update", 2)]
        assert staged.rows == 0
        assert next(rows, None) is None, "sources note which rows they gave"


def _fail(destination: WebhookDestination, committer: WebhookCommitter) -> None:
    with committer.batch(batch(0)):
        destination.write_changes(on_stage(ORDERS, batch(0), changes_of(ORDERS, insert(id=99, note="lost"))))
        raise UnavailableError("a task died")


def test_a_table_that_failed_before_a_crash_arrives_when_the_batch_comes_again(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        destination = make(tmp_path, endpoint.url)
        for tables in ([ORDERS], [ORDERS, ITEMS], [ORDERS, ITEMS]):
            with destination.committer("shop") as committer:
                with committer.batch(batch(0)):
                    for table in tables:
                        destination.write_changes(on_stage(table, batch(0), changes_of(table, insert(id=1, note="a"))))
                committer.drain()
        assert arrived_events(endpoint) == [("public.orders", "insert", 1), ("public.items", "insert", 1)]


def test_what_failed_attempts_have_staged_goes_with_the_next_one(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        destination = make(tmp_path, endpoint.url)
        staged = destination.queue.path / "staged"
        with destination.committer("shop") as committer:
            for _ in range(3):
                with pytest.raises(UnavailableError, match="a task died"):
                    _fail(destination, committer)
                assert len(list(staged.glob("*.arrow"))) == 1
            with committer.batch(batch(0)):
                pass
            assert not staged.exists()
        assert not endpoint.requests


def test_a_changed_key_is_one_event_also_when_its_halves_come_in_two_chunks(tmp_path: Path) -> None:
    whole = changes_of(ORDERS, delete(id=1), moved(id=2, note="moved"))[0]
    halves = [Changes(ORDERS, whole.batch.slice(0, 1)), Changes(ORDERS, whole.batch.slice(1, 1))]
    with WebhookEndpoint() as endpoint:
        destination = make(tmp_path, endpoint.url)
        with destination.committer("shop") as committer:
            with committer.batch(batch(0)):
                destination.write_changes(on_stage(ORDERS, batch(0), halves))
            committer.drain()
        [event] = json.loads(endpoint.taken[0].body)
        assert (event["type"], event["data"]["old_key"], event["data"]["key"]) == (
            "tailrace.update",
            {"id": 1},
            {"id": 2},
        )


def test_what_waits_is_sent_by_the_next_run(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        endpoint.rule = always(Reply(500))
        destination = make(tmp_path, endpoint.url)
        with destination.committer("shop") as committer, committer.batch(batch(0)):
            destination.write_changes(on_stage(ORDERS, batch(0), changes_of(ORDERS, insert(id=1, note="a"))))
        assert not endpoint.taken
        endpoint.rule = always(Reply())
        with destination.committer("shop") as committer:
            committer.drain()
        assert arrived_events(endpoint) == [("public.orders", "insert", 1)]


@contextmanager
def refused(tmp_path: Path) -> Iterator[tuple[WebhookEndpoint, WebhookDestination, WebhookCommitter]]:
    """An endpoint that takes nothing, and a committer with one event for it."""
    with WebhookEndpoint() as endpoint:
        endpoint.rule = always(Reply(500))
        destination = make(tmp_path, endpoint.url)
        with destination.committer("shop") as committer:
            with committer.batch(batch(0)):
                destination.write_changes(on_stage(ORDERS, batch(0), changes_of(ORDERS, insert(id=1, note="a"))))
            yield endpoint, destination, committer


def test_a_run_to_the_end_says_so_when_the_endpoint_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_SECONDS", 1.0)
    with (
        refused(tmp_path) as (_, _, committer),
        pytest.raises(UnavailableError, match="1 events wait"),
    ):
        committer.drain()


def test_a_run_to_the_end_that_is_asked_to_stop_does_not_wait_for_the_endpoint(tmp_path: Path) -> None:
    with refused(tmp_path) as (endpoint, destination, committer):
        committer.drain(lambda: bool(endpoint.requests))
    reader = QueueReader(destination.queue.path)
    assert reader.count(reader.start) == 1


def test_a_run_to_the_end_leaves_no_file_of_the_queue_open(tmp_path: Path) -> None:
    with refused(tmp_path) as (_, destination, committer):
        before = open_below(destination.queue.path)
        committer.drain(lambda: True)
        assert open_below(destination.queue.path) == before


def test_a_run_to_the_end_ignores_the_status_of_the_sender_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRAIN_SECONDS", 1.0)
    with WebhookEndpoint() as endpoint:
        endpoint.rule = always(Reply(500))
        destination = make(tmp_path, endpoint.url)
        folder = destination.queue.path
        folder.mkdir(parents=True)
        # Another process has the queue, and writes no status of its own.
        with claim_queue(folder), destination.committer("shop") as committer:
            with committer.batch(batch(0)):
                destination.write_changes(on_stage(ORDERS, batch(0), changes_of(ORDERS, insert(id=1, note="a"))))
            write_status(folder, STATUS, {"at": time.time() - 60, "follows": True, "delivered_to": None})
            with pytest.raises(UnavailableError, match="1 events wait"):
                committer.drain()


def test_a_sender_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        destination = make(tmp_path, endpoint.url)
        with destination.committer("shop") as committer:
            child = committer._sender
            assert child._process is not None
            child._process.kill()
            child._process.wait()
            (destination.queue.path / "sender.log").write_text("why it ended")
            with committer.batch(batch(0)):
                destination.write_changes(on_stage(ORDERS, batch(0), changes_of(ORDERS, insert(id=1, note="a"))))
            committer.drain()
        assert arrived_events(endpoint) == [("public.orders", "insert", 1)]
        assert (destination.queue.path / "sender.log.1").read_text() == "why it ended"


def test_a_sender_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    destination = make(tmp_path, "stdout")
    log = destination.queue.path / "sender.log"
    log.mkdir(parents=True)
    (log.parent / "sender.log.1").touch()
    with pytest.raises(UnavailableError, match="cannot be started"):
        destination.start_sender("shop")
    log.rmdir()
    destination.start_sender("shop").stop()


def test_all_tables_are_reported_level_only_after_they_were_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEVEL_SECONDS", 0.2)
    with WebhookEndpoint() as endpoint:
        destination = make(tmp_path, endpoint.url)
        with destination.committer("shop") as committer:
            committer.settled(Position(5, 0))
            committer.settled(None)
            committer.settled(Position(7, 0))
            with committer.batch(batch(0)):
                pass
            reader = QueueReader(destination.queue.path)
            number = 1

            def says() -> list[tuple[str, int]]:
                nonlocal number
                with committer.batch(batch(number)):
                    number += 1
                frames = reader.read(reader.start, 100)
                return [(row["table"], row["commit"]) for _, table in frames for row in table.to_pylist()]

            wait_until(lambda: bool(says()))
            assert says() == [(EVERY, 7)]


def test_what_was_dropped_is_counted_through_a_restart_of_the_sender(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(400), Reply(400))
        destination = make(tmp_path, endpoint.url, retry={"min": "5ms", "max": "20ms", "limit": 2})
        folder = destination.queue.path
        with destination.committer("shop") as committer:
            with committer.batch(batch(0)):
                destination.write_changes(on_stage(ORDERS, batch(0), changes_of(ORDERS, insert(id=1, note="a"))))
            committer.drain()
        first = read_status(folder, STATUS)
        assert first["dropped"] == 1
        with destination.committer("shop"):
            wait_until(lambda: read_status(folder, STATUS).get("pid") not in (None, first["pid"]))
            assert read_status(folder, STATUS)["dropped"] == 1


def test_deliveries_that_fail_show_until_one_succeeds(tmp_path: Path) -> None:
    with refused(tmp_path) as (endpoint, destination, committer):
        wait_until(lambda: committer.delivery().failures > 1)
        failing = committer.delivery()
        assert (failing.pending, failing.delivered) == (1, 0)
        assert "500" in (failing.error or "")
        assert destination.open_queue("shop").status().failures
        endpoint.rule = always(Reply())
        wait_until(lambda: committer.delivery().pending == 0)
        assert (committer.delivery().failures, committer.delivery().error) == (0, None)
        assert destination.open_queue("shop").status().failures == 0
