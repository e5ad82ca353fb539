"""Measures the durable queue against the bare disk, in batches and one by one; and the rqlite endpoint over HTTP.

`python -m bench --only queue`. Without Spark, and nothing is sent: it measures how fast events become durable.
"""

from __future__ import annotations

import datetime
import http.client
import json
import os
import socket
import time
from pathlib import Path

import pyarrow as pa

from bench.report import Report
from tailrace.destination import Batch
from tailrace.destination.webhook.format.event import QUEUE_SCHEMA
from tailrace.destination.webhook.queue import QueueReader, QueueWriter
from tailrace.model.change import START
from tailrace.option.value import split_listen
from tailrace.source.rqlite.option import RqliteOptions
from tailrace.source.rqlite.receiver import STATUS, RqliteReceiverOptions
from tailrace.system.child_process import Child
from tailrace.testing.wait import wait_until

EVENTS = 200_000
BATCH_EVENTS = 1000
SINGLE_EVENTS = 2000
POSTED = 50_000
EVENT = '{"op":"UPDATE","table":"orders","new_row_id":%d,"old_row_id":%d,"after":{"id":%d,"note":"' + "x" * 200 + '"}}'


def measure(report: Report, folder: Path, scale: float) -> None:
    """Fill two queues, read one back, and write the same bytes to a plain file with the same number of syncs."""
    events, singles = max(BATCH_EVENTS, int(EVENTS * scale)), max(100, int(SINGLE_EVENTS * scale))
    batches = _fill(folder / "batches", events, BATCH_EVENTS)
    one_by_one = _fill(folder / "single", singles, 1)
    bare = _bare(folder / "bare", events, BATCH_EVENTS)
    bare_single = _bare(folder / "bare-single", singles, 1)
    report.add("queue", "durable events in batches of 1000", events / batches, "events/s", 20_000)
    report.add("queue", "ratio to a bare file with the same syncs", bare / batches)
    report.add("queue", "durable events one by one", singles / one_by_one, "events/s", 500)
    report.add("queue", "ratio to a bare file with the same syncs", bare_single / one_by_one)
    reading = _drain(folder / "batches", events)
    report.add("queue", "events read back", events / reading, "events/s")
    _report_endpoint(report, folder / "endpoint", scale)


def _report_endpoint(report: Report, folder: Path, scale: float) -> None:
    """Measure the endpoint for rqlite, with one client that waits for each answer, as a node does."""
    options = RqliteReceiverOptions.of(
        RqliteOptions.model_validate(
            {"type": "rqlite", "listen": f"127.0.0.1:{_free_port()}", "journal": {"path": str(folder)}}
        )
    )
    child = Child("tailrace.source.rqlite", options.to_json(), folder, STATUS, is_busy=lambda: False)
    host, port = split_listen(options.listen)
    client = http.client.HTTPConnection(host, port, timeout=30)
    try:
        wait_until(lambda: _is_up(host, port), 30)
        for each, count in ((100, max(20, int(POSTED * scale / 100))), (1, max(20, int(SINGLE_EVENTS * scale)))):
            bodies = [_body(number * each + (each == 1) * POSTED * 10, each) for number in range(count)]
            started = time.perf_counter()
            for body in bodies:
                client.request("POST", options.path, body, {"Content-Type": "application/json"})
                answer = client.getresponse()
                answer.read()
                assert answer.status == 200, answer.status
            rate = count * each / (time.perf_counter() - started)
            what = "in requests of 100" if each > 1 else "one by one"
            report.add("queue", f"events taken in over HTTP, {what}", rate, "events/s")
    finally:
        client.close()
        child.stop()


def _body(first: int, count: int) -> bytes:
    """The body that a node posts for `count` inserts, each in its own entry."""
    payload = [
        {
            "index": number + 1,
            "commit_timestamp": 1_794_766_423_540,
            "events": [
                {"op": "INSERT", "table": "orders", "new_row_id": number, "after": {"id": number, "note": "x" * 100}}
            ],
        }
        for number in range(first, first + count)
    ]
    return json.dumps({"node_id": "n1", "payload": payload}).encode()


def _is_up(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _fill(folder: Path, count: int, each: int) -> float:
    batches = [_events(first, min(each, count - first)) for first in range(0, count, each)]
    with QueueWriter(folder, segment_bytes=64_000_000, max_bytes=10_000_000_000) as writer:
        started = time.perf_counter()
        for number, events in enumerate(batches):
            writer.append(Batch("bench/1", number), [events])
        return time.perf_counter() - started


def _bare(path: Path, count: int, each: int) -> float:
    pieces = [b"".join(_texts(first, min(each, count - first))) for first in range(0, count, each)]
    with path.open("wb", buffering=0) as file:
        started = time.perf_counter()
        for piece in pieces:
            file.write(piece)
            os.fdatasync(file.fileno())
        return time.perf_counter() - started


def _drain(folder: Path, count: int) -> float:
    reader, place, seen = QueueReader(folder), START, 0
    started = time.perf_counter()
    while frames := reader.read(place, BATCH_EVENTS):
        place = frames[-1][0]
        seen += sum(len(table) for _, table in frames)
    assert seen == count
    return time.perf_counter() - started


def _texts(first: int, count: int) -> list[bytes]:
    return [(EVENT % (number, number, number)).encode() for number in range(first, first + count)]


def _events(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    columns = [
        ["public.orders"] * count,
        list(numbers),
        [0] * count,
        [False] * count,
        [False] * count,
        [at] * count,
        [f"bench:public.orders:{number:032x}" for number in numbers],
        [text.decode() for text in _texts(first, count)],
    ]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, QUEUE_SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=QUEUE_SCHEMA)
