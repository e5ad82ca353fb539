"""A proxy before a sync server that keeps what was pushed, in the order of the server's commits, and replays it.

Every client has a path of its own, so that the recorder knows whose request it forwards. Pushes are forwarded one at a
time. Of a push whose answer never came, the marks in the served file tell whether it was committed.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ENTRY = re.compile(r"\w+-\d+-\d+")
_MARKS = "SELECT client_id, pull_gen, change_id FROM turso_sync_last_change_id ORDER BY 1"


class PushRecorder:
    """`on_push` is called for each push at the moments `before`, `sent` and `after`, with the name of its client."""

    def __init__(self, file: Path, target: Callable[[], str], schema: str) -> None:
        self._file, self._target = file, target
        self.on_push: Callable[[str, str], None] = lambda moment, client: None
        self.entries: Counter[str] = Counter()
        self.pushes = self.unanswered = 0
        self._oracle = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._oracle.executescript(schema)
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        self._unknown: list[dict[str, Any]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(self))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def url(self, client: str) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/{client}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._oracle.close()

    def is_idle(self, client: str) -> bool:
        """Whether no request of this client is on its way any more."""
        return not self._open[client]

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What the pushes, replayed in their order, lead to."""
        with self._lock:
            self._settle()
            return self._oracle.execute(sql).fetchall()

    def forward(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        client = path.split("/")[1]
        self._open[client] += 1
        try:
            steps = _read_steps(body) if path.endswith("/v2/pipeline") else []
            if not any(step["stmt"]["sql"].upper().startswith("BEGIN") for step in steps):
                return self._post(path, headers, body)
            self.on_push("before", client)
            with self._lock:
                self._settle()
                self.on_push("sent", client)
                self.pushes += 1
                try:
                    status, answer = self._post(path, headers, body)
                except OSError:
                    self._unknown = steps
                    self.unanswered += 1
                    raise
                if status == 200:
                    self._keep(steps, json.loads(answer)["results"][0]["response"]["result"])
            self.on_push("after", client)
        except (OSError, http.client.HTTPException) as error:
            return 503, str(error).encode()
        else:
            return status, answer
        finally:
            self._open[client] -= 1

    def _post(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        try:
            with closing(http.client.HTTPConnection(urlsplit(self._target()).netloc, timeout=300)) as connection:
                connection.request("POST", path, body, headers)
                answer = connection.getresponse()
                return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise OSError(str(error)) from error

    def _keep(self, steps: list[dict[str, Any]], result: dict[str, Any]) -> None:
        done = [step for step, one in zip(steps, result["step_results"], strict=True) if one is not None]
        if any(step["stmt"]["sql"].upper().startswith("COMMIT") for step in done):
            self._replay(done)
            self._count(steps)

    def _settle(self) -> None:
        """Find out whether the push without an answer was committed. Nothing else was pushed since."""
        if not self._unknown:
            return
        steps, self._unknown = self._unknown, []
        with closing(sqlite3.connect(self._file, timeout=300)) as served:
            held = _marks(served)
        if held == _marks(self._oracle):
            return
        self._replay(steps)
        self._count(steps)
        assert _marks(self._oracle) == held

    def _replay(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            sql = step["stmt"]["sql"]
            if not sql.upper().startswith("ROLLBACK"):
                self._oracle.execute(sql, [_decode(value) for value in step["stmt"].get("args") or []])
        assert not self._oracle.in_transaction

    def _count(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            if re.match(r'INSERT INTO "?entry\b', step["stmt"]["sql"]):
                values = [_decode(value) for value in step["stmt"]["args"]]
                self.entries.update(value for value in values if isinstance(value, str) and ENTRY.fullmatch(value))


def _marks(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
    try:
        return connection.execute(_MARKS).fetchall()
    except sqlite3.OperationalError:
        return []


def _read_steps(body: bytes) -> list[dict[str, Any]]:
    return [step for request in json.loads(body)["requests"] for step in request.get("batch", {}).get("steps", [])]


def _decode(value: dict[str, Any]) -> Any:
    match value["type"]:
        case "null":
            return None
        case "integer":
            return int(value["value"])
        case "blob":
            return base64.b64decode(value["base64"] + "==")
    return value["value"]


def _make_handler(recorder: PushRecorder) -> type[BaseHTTPRequestHandler]:
    class Forward(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            kept = {name: value for name, value in self.headers.items() if name.lower() in ("content-type",)}
            status, answer = recorder.forward(self.path, kept, body)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError:
                self.close_connection = True  # the client was killed

        def log_message(self, *arguments: object) -> None:
            pass

    return Forward


def wait_until_idle(recorder: PushRecorder, client: str) -> None:
    while not recorder.is_idle(client):
        time.sleep(0.01)
