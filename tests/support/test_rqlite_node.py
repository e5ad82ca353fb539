"""The scripted node posts what a real one was seen to post."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.rqlite_node import RqliteNode

RECORDED = Path(__file__).parents[1] / "source" / "rqlite" / "recorded"

Body = dict[str, Any]


@contextmanager
def endpoint(answers: list[int]) -> Iterator[tuple[str, list[Body]]]:
    """An address that answers with these codes, the last one for ever, and the bodies that came."""
    bodies: list[Body] = []

    class Exchange(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(answers.pop(0) if len(answers) > 1 else answers[0])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/cdc", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def recorded(name: str, count: int) -> list[Body]:
    lines = (RECORDED / name).read_text().splitlines()
    return [without_times(json.loads(json.loads(line)["body"])) for line in lines[:count]]


def without_times(body: Body) -> Body:
    payload = [
        {name: value for name, value in entry.items() if name != "commit_timestamp"} for entry in body["payload"]
    ]
    return {**body, "payload": payload}


def test_the_same_statements_give_the_same_requests_as_recorded() -> None:
    statements: list[list[Any]] = [
        ["INSERT INTO t VALUES (1, 'a', 1.5, x'00FF', NULL)"],
        ["INSERT INTO t VALUES (2, 'b', 2.0, NULL, NULL), (3, 'c', 3.25, NULL, NULL)"],
        ["UPDATE t SET n = 'A' WHERE id = 1"],
        ["UPDATE t SET id = 10 WHERE id = 1"],
        [
            "INSERT INTO t (id, n, v) VALUES (20, 'x', 1)",
            "UPDATE t SET n = 'y' WHERE id = 20",
            "DELETE FROM t WHERE id = 20",
        ],
        ["INSERT INTO t (id, n, v) VALUES (30, 'x', 1)", "UPDATE t SET n = 'y' WHERE id = 30"],
        ["UPDATE t SET n = 'up' WHERE id = 2"],
        ["REPLACE INTO t (id, n) VALUES (3, 'R')"],
    ]
    with endpoint([503, 200]) as (url, bodies), RqliteNode(url, service="svc1") as node:
        node.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, n TEXT, v REAL, b BLOB, k)")
        for request in statements:
            node.execute(*request, transaction=len(request) == 3)
            node.settle()
        assert [without_times(body) for body in bodies] == recorded("single-node.jsonl", 9)


def test_the_first_change_after_add_column_comes_without_its_row_as_recorded() -> None:
    with endpoint([200]) as (url, bodies), RqliteNode(url, node_id="n4") as node:
        node.execute("CREATE TABLE a0 (id INTEGER PRIMARY KEY, v INTEGER)")
        node.pause()
        node.execute("INSERT INTO a0 VALUES (1, 1)")
        node.execute("ALTER TABLE a0 ADD COLUMN z TEXT")
        node.execute("UPDATE a0 SET v = 5")
        node.resume()
        node.settle()
        for value in (6, 7):
            node.execute(f"UPDATE a0 SET v = {value}")
            node.settle()
        node.execute("ALTER TABLE a0 ADD COLUMN y TEXT")
        node.execute("INSERT INTO a0 (id) VALUES (2)")
        node.settle()
        assert [without_times(body) for body in bodies] == recorded("alter-and-transactions.jsonl", 4)


def test_a_failover_sends_the_last_entries_again_from_another_node() -> None:
    with endpoint([200]) as (url, bodies), RqliteNode(url, max_batch_size=1) as node:
        node.execute("CREATE TABLE t (v)")
        for value in range(3):
            node.execute(f"INSERT INTO t VALUES ({value})")
        node.settle()
        node.fail_over(back=2)
        node.settle()
        assert [(body["node_id"], body["payload"][0]["index"]) for body in bodies] == [
            ("n1", 4),
            ("n1", 5),
            ("n1", 6),
            ("n2", 5),
            ("n2", 6),
        ]
        first, again = bodies[1]["payload"][0], bodies[3]["payload"][0]
        assert first["events"] == again["events"]
        assert first["commit_timestamp"] != again["commit_timestamp"]
