"""The event stream of a batch: begin, relation and commit arrive in order with the changes, and once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.destination.event import event_stream
from tailrace.destination.webhook.format.event import StreamFormat, stream_format_of
from tailrace.destination.webhook.queue import QueueReader
from tailrace.destination.webhook.transaction import encode_events
from tailrace.errors import ConfigError
from tailrace.model.change import START, Changes, Op, Position
from tailrace.model.schema import Column
from tailrace.testing.destination import RowChange, changes_of, delete, insert, moved, read, with_columns
from tailrace.testing.endpoint import WebhookEndpoint
from tests.destination.webhook.test_destination import ITEMS, ORDERS, STAGE, batch, make


def said(event: dict[str, Any]) -> str:
    """An event of the format cloudevents in short: its kind, its table, the id of its row."""
    key = (event["data"].get("key") or {}) if event["type"] != "tailrace.relation" else {}
    words = [event["type"].removeprefix("tailrace."), event.get("subject", "").removeprefix("public."), key.get("id")]
    return " ".join(str(word) for word in words if word not in ("", None))


def arrived(endpoint: WebhookEndpoint) -> list[dict[str, Any]]:
    return [event for request in endpoint.taken for event in json.loads(request.body)]


# Two transactions; the first one changes both tables in turn.
ORDERS_LOG = changes_of(
    ORDERS, RowChange(Op.INSERT, {"id": 1, "note": "a"}, 0), RowChange(Op.INSERT, {"id": 2, "note": "b"}, 4), commit=9
)
ITEMS_LOG = changes_of(ITEMS, RowChange(Op.INSERT, {"id": 7, "note": "c"}, 2), commit=10)
LATER = changes_of(ORDERS, delete(id=2), moved(id=3, note="b"), commit=20)


@pytest.mark.parametrize("max_events", [1, 100])
def test_transactions_and_columns_arrive_in_order_and_once_with_their_changes(tmp_path: Path, max_events: int) -> None:
    with WebhookEndpoint() as endpoint:
        destination = make(tmp_path, endpoint.url, events=True, batch={"max_events": max_events})
        with destination.committer("shop") as committer:
            for _ in range(2):  # a crash between the queue and Spark's log
                with committer.batch(batch(0)):
                    copied = changes_of(ITEMS, read(id=5, note="old"))
                    log = [*LATER, *ITEMS_LOG, *ORDERS_LOG]
                    written = destination.write_events(event_stream(copied, log, [ITEMS]), batch(0))
            committer.drain()
        assert written.changes == 4
        events = arrived(endpoint)
    assert [said(event) for event in events] == [
        "relation items",
        "read items 5",
        "begin",
        "relation orders",
        "insert orders 1",
        "insert items 7",
        "insert orders 2",
        "commit",
        "begin",
        "update orders 3",
        "commit",
    ]
    assert len({event["id"] for event in events}) == len(events)
    begin, end = events[2], events[7]
    assert Position.parse(begin["data"]["position"]) == ORDERS_LOG[0].first
    assert Position.parse(end["data"]["position"]) == ORDERS_LOG[0].last
    assert begin["data"]["txn"] == end["data"]["txn"] == ORDERS_LOG[0].batch.column("txn")[0].as_py()
    assert begin["time"] == events[4]["time"]
    assert events[3]["data"]["key"] == ["id"]
    assert [column["name"] for column in events[3]["data"]["columns"]] == ["id", "note"]


def test_the_end_of_a_copy_is_marked_in_the_queue_as_without_events(tmp_path: Path) -> None:
    with WebhookEndpoint() as endpoint:
        destination = make(tmp_path, endpoint.url, events=True)
        with destination.committer("shop") as committer, committer.batch(batch(0)):
            stream = event_stream(changes_of(ITEMS, read(id=5, note="old")), [], [ITEMS])
            destination.write_events(stream, batch(0))
        reader = QueueReader(destination.queue.path)
        rows = [row for _, table in reader.read(START, 100) for row in table.to_pylist()]
        reader.close()
    assert [(row["table"], row["marker"]) for row in rows] == [("public.items", False), ("public.items", True)]
    assert rows[0]["commit"] == rows[1]["commit"]


def test_copied_rows_that_are_not_wanted_are_not_staged(tmp_path: Path) -> None:
    destination = make(tmp_path, "http://127.0.0.1:1", events=True, copied_rows=False)
    assert destination.write_rows(ITEMS, changes_of(ITEMS, read(id=1, note="a")), STAGE).rows == 0


def texts(form: StreamFormat, log: list[Changes]) -> list[dict[str, Any]]:
    found = encode_events(event_stream((), log), form, "shop")
    rows = pa.Table.from_batches([batch for table in found.values() for batch in table.log])
    ordered = rows.sort_by([("commit", "ascending"), ("ordinal", "ascending")])
    events: list[dict[str, Any]] = json.loads("[" + ",".join(ordered.column("event").to_pylist()) + "]")
    return events


def test_debeziums_envelopes_have_its_transaction_and_table_events_between_them() -> None:
    events = texts(stream_format_of("debezium"), [*ORDERS_LOG, *ITEMS_LOG])
    assert [event.get("status") or event.get("op") or "tableChanges" in event for event in events] == [
        *("BEGIN", True, "c", True, "c", "c", "END")
    ]
    assert events[0]["source"]["txId"] == events[2]["source"]["txId"]
    assert events[1]["tableChanges"][0]["table"]["primaryKeyColumnNames"] == ["id"]


def test_other_columns_are_announced_before_the_first_change_that_has_them() -> None:
    wider = with_columns(ORDERS, Column("size", pa.int64(), number=3))
    log = [*changes_of(ORDERS, insert(id=1, note="a")), *changes_of(wider, insert(id=2, note="b"), commit=5)]
    events = texts(stream_format_of("cloudevents"), log)
    assert [said(event) for event in events] == [
        *("begin", "relation orders", "insert orders 1", "commit"),
        *("begin", "relation orders", "insert orders 2", "commit"),
    ]
    assert [column["name"] for column in events[5]["data"]["columns"]] == ["id", "note", "size"]


def test_the_same_batch_gives_the_same_texts_in_whatever_pieces_it_is_read() -> None:
    form = stream_format_of("cloudevents")
    whole = [*ORDERS_LOG, *ITEMS_LOG, *LATER]
    pieces = [Changes(one.table, one.batch.slice(place, 1)) for one in whole for place in range(len(one))]
    assert texts(form, whole) == texts(form, pieces[::-1])


def test_a_format_that_has_changes_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rqlite has no events but changes"):
        make(tmp_path, "http://127.0.0.1:1", events=True, format="rqlite")
    with pytest.raises(ConfigError, match="has changes only"):
        stream_format_of("rqlite")
