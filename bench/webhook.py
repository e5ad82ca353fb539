"""Measures how long a change takes from its commit in Postgres to a webhook endpoint, and how fast a backlog is sent.

`python -m bench --only webhook`. Needs the extras `embedded` and `webhook`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import psycopg

from bench.report import Report
from tailrace.demo.server import EmbeddedPostgres
from tailrace.testing.endpoint import WebhookEndpoint
from tailrace.testing.wait import wait_until
from tests.support.runner import RunningPipeline, all_ready

BACKLOG = 100_000
UPDATES = 200
PAUSE_SECONDS = 0.1
WAIT_SECONDS = 300.0


def measure(report: Report, folder: Path, scale: float) -> None:
    """Copy a table to the endpoint, then update single rows and time their arrival."""
    rows, updates = max(1000, int(BACKLOG * scale)), max(20, int(UPDATES * scale))
    with (
        EmbeddedPostgres(folder / "webhook" / "postgres") as server,
        server.connect() as connection,
        WebhookEndpoint() as endpoint,
    ):
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, note text, total bigint)")
        connection.execute(f"INSERT INTO orders SELECT n, 'note', n FROM generate_series(1, {rows}) n")
        with _running(folder / "webhook", server.dsn(), endpoint.url):
            _settle(connection, endpoint)
            report.add("webhook", "copied rows delivered, in order", rows / _span(endpoint), "events/s")
            delays = _follow(connection, endpoint, updates)
    report.add("webhook", "commit to endpoint, p50", median(delays), "s", 1.0, "most")
    report.add("webhook", "commit to endpoint, p99", quantiles(delays, n=100)[98], "s")


@contextmanager
def _running(folder: Path, dsn: str, url: str) -> Iterator[None]:
    file = folder / "pipeline.yaml"
    pipeline = {
        "name": "hooked",
        "source": {"type": "postgres", "dsn": dsn},
        "destination": {"type": "webhook", "url": url, "allow_private": True},
        "state": str(folder / "state"),
        "spark": {"master": "local[2]"},
    }
    file.write_text(json.dumps(pipeline))
    with RunningPipeline(file) as run:
        run.wait_until(all_ready, WAIT_SECONDS)
        yield


def _settle(connection: psycopg.Connection, endpoint: WebhookEndpoint) -> None:
    """Wait until the copy and a first change after it have been sent."""
    connection.execute("UPDATE orders SET total = -1 WHERE id = 1")
    wait_until(lambda: _has(endpoint, 1, -1), WAIT_SECONDS)


def _follow(connection: psycopg.Connection, endpoint: WebhookEndpoint, updates: int) -> list[float]:
    delays = []
    for number in range(updates):
        connection.execute("UPDATE orders SET total = %s WHERE id = %s", [-number - 2, number + 2])
        committed = time.monotonic()
        wait_until(lambda number=number: _has(endpoint, number + 2, -number - 2), WAIT_SECONDS)
        delays.append(endpoint.taken[-1].at - committed)
        time.sleep(PAUSE_SECONDS)
    return delays


def _span(endpoint: WebhookEndpoint) -> float:
    return endpoint.taken[-1].at - endpoint.taken[0].at


def _has(endpoint: WebhookEndpoint, key: int, total: int) -> bool:
    last = endpoint.taken[-1:]
    return any(
        event["data"]["after"]["id"] == key and event["data"]["after"]["total"] == total
        for request in last
        for event in json.loads(request.body)
    )
