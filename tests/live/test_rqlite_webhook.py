"""What real nodes posted, taken in by the source and posted again by the destination in the same format."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import urllib3
import yaml

from tailrace.testing.endpoint import WebhookEndpoint
from tailrace.testing.wait import wait_until
from tests.support.rqlite_following import free_port
from tests.support.runner import RunningPipeline, all_ready

RECORDED = Path(__file__).parents[1] / "source" / "rqlite" / "recorded"

SCHEMA = """
CREATE TABLE t (id INTEGER PRIMARY KEY, n TEXT, v REAL, b BLOB, k TEXT);
CREATE TABLE tx (k TEXT PRIMARY KEY, v INTEGER, bigi INTEGER, z TEXT);
CREATE TABLE wr (k TEXT PRIMARY KEY, v INTEGER) WITHOUT ROWID;
CREATE TABLE tb (a BOOLEAN, d DATETIME, j JSON);
CREATE TABLE a0 (id INTEGER PRIMARY KEY, v INTEGER, z TEXT);
CREATE TABLE a1 (id INTEGER PRIMARY KEY, v INTEGER, z TEXT);
CREATE TABLE a2 (id INTEGER PRIMARY KEY, v INTEGER, z TEXT);
CREATE TABLE qq (id INTEGER PRIMARY KEY, v INTEGER);
"""


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text().splitlines()]


def entries(bodies: list[bytes]) -> list[dict[str, Any]]:
    return [entry for body in bodies for entry in json.loads(body)["payload"]]


def normalised(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries as they have to come out: one for each index, each once, index 0 as part of the entry before it, and
    nothing for events that rqlite sent without their row."""
    events: list[tuple[int, int, dict[str, Any]]] = []
    index, seen = 0, set[int]()
    for entry in found:
        if entry["index"] in seen:
            continue
        if entry["index"]:
            index = entry["index"]
            seen.add(index)
        events += [(index, entry["commit_timestamp"], event) for event in entry["events"] if "error" not in event]
    return [
        {"index": place[0], "commit_timestamp": place[1], "events": [event for _, _, event in group]}
        for place, group in groupby(events, lambda each: each[:2])
    ]


@pytest.mark.parametrize("name", ["single-node", "alter-and-transactions"])
def test_what_a_real_node_posted_comes_out_as_it_came_in(name: str, tmp_path: Path) -> None:
    requests = recorded(name)
    first = json.loads(requests[0]["body"])
    port = free_port()
    (tmp_path / "schema.sql").write_text(SCHEMA)
    with WebhookEndpoint(ids=lambda body: []) as endpoint:
        file = tmp_path / "pipeline.yaml"
        pipeline = {
            "name": "through",
            "source": {
                "type": "rqlite",
                "listen": f"127.0.0.1:{port}",
                "schema": "schema.sql",
                "rowids": True,
                "missing_images": "pass",
            },
            "destination": {
                "type": "webhook",
                "url": endpoint.url,
                "format": "rqlite",
                "allow_private": True,
                "timeout": "60s",  # a request that is given up comes twice
                "service_id": first.get("service_id", ""),
                "node_id": first["node_id"],
                "batch": {"max_events": 10, "max_delay": "50ms"},
            },
            "state": "state",
            "spark": {"master": "local[2]"},
        }
        file.write_text(yaml.safe_dump(pipeline))
        bodies = [request["body"].encode() for request in requests]
        expected = normalised(entries(bodies))
        with RunningPipeline(file) as run, urllib3.PoolManager(retries=False, timeout=20) as pool:

            def is_up() -> bool:
                try:
                    return pool.request("GET", f"http://127.0.0.1:{port}/healthz").status == 200
                except urllib3.exceptions.HTTPError:
                    return False

            wait_until(is_up)
            for request, body in zip(requests, bodies, strict=True):
                headers = {"Content-Type": request["headers"]["Content-Type"]}
                answer = pool.request("POST", f"http://127.0.0.1:{port}/cdc", body=body, headers=headers)
                assert answer.status == 200
            count = sum(len(entry["events"]) for entry in expected)

            def arrived() -> int:
                found = entries([request.body for request in list(endpoint.taken)])
                return sum(len(entry["events"]) for entry in found)

            wait_until(lambda: arrived() >= count)
            run.wait_until(all_ready)
            run.terminate()
            assert run.wait() == 0
        posted = [request.body for request in endpoint.taken]
    assert merged(entries(posted)) == expected
    # To the byte, where a request held one entry that came through as it was.
    everything = b"".join(posted)
    start = b'"payload":['
    whole = [body for body in bodies if len(entries([body])) == 1 and entries([body])[0] in expected]
    assert len(whole) > 5
    for body in whole:
        assert body[body.index(start) + len(start) : -2] in everything
        assert any(one.startswith(body[: body.index(start)]) for one in posted)


def merged(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries that were cut by the end of a request, in one piece again."""
    return [
        {
            "index": place[0],
            "commit_timestamp": place[1],
            "events": [event for each in group for event in each["events"]],
        }
        for place, group in groupby(found, lambda entry: (entry["index"], entry["commit_timestamp"]))
    ]
