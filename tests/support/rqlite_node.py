"""A scripted rqlite node: a real SQLite database with rqlite's API that posts its changes as a real node does.

    with RqliteNode("http://127.0.0.1:8099/cdc", service="svc") as node:
        node.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT)")
        node.execute("INSERT INTO t VALUES (1, 'a')")
        node.fail_over(back=3)
        node.settle()

It has the habits that were seen: an index for each request, index 0 for the later statements of one without
`transaction`, no images for the first change after ADD COLUMN, no row ids for rowid 0 and WITHOUT ROWID, tries until
200 or 202. Needs apsw.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import apsw
import urllib3

from tailrace.testing.wait import wait_until

FIRST_INDEX = 3
"""A new cluster has spent the indexes before on itself."""
_DDL = ("ALTER", "CREATE", "DROP")
_TEXTUAL = ("text", "json", "varchar", "nchar", "nvarchar", "clob")


@dataclass(frozen=True)
class NodeEntry:
    """The events of one commit. `index` is 0 for one that shares its request with an earlier commit."""

    index: int
    at: int
    events: list[dict[str, Any]]


@dataclass(frozen=True)
class _Seen:
    op: str
    table: str
    old_id: int | None
    new_id: int | None
    old: tuple[Any, ...] | None
    new: tuple[Any, ...] | None


class RqliteNode:
    """The leader of a cluster of its own. Any thread may call its methods; leaving the `with` block ends it.

    `asked` has the paths of the requests that its API got with a body, `answers` counts what the endpoint answered,
    `dropped` the batches of nothing but index 0, which rqlite drops. `overflowed` is how many transactions its counters
    say it dropped. `tls` makes its API HTTPS.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        service: str | None = None,
        node_id: str = "n1",
        max_batch_size: int = 10,
        max_batch_delay_seconds: float = 0.02,
        backoff_seconds: float = 0.05,
        row_ids_only: bool = False,
        headers: dict[str, str] | None = None,
        pool: urllib3.PoolManager | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.service = service
        self.node_id = node_id
        self.answers: dict[int, int] = {}
        self.dropped = self.overflowed = self.restores = self.snapshot = 0
        self.started = datetime.now(UTC)
        self.asked: list[str] = []
        self._batch = max_batch_size, max_batch_delay_seconds
        self._backoff_seconds = backoff_seconds
        self._row_ids_only = row_ids_only
        self._headers = headers or {}
        self._pool = pool or urllib3.PoolManager(retries=False, timeout=10.0)
        self._lock = threading.RLock()
        self._wakes = threading.Condition(self._lock)
        self._epoch = 0
        self._paused = self._closed = False
        self._index = FIRST_INDEX
        self._log: list[NodeEntry] = []
        self._sent = 0
        self._seen: list[_Seen] = []
        self._columns: dict[str, list[str]] = {}
        self._captures = True
        self._connection = self._open()
        self._api = _Server(self, tls)
        self._threads = [
            threading.Thread(target=self._api.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True),
            threading.Thread(target=self._send_all, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        """The API."""
        return f"{'http' if self._api.tls is None else 'https'}://127.0.0.1:{self._api.server_port}"

    # -- what an application does ---------------------------------------------------------------------------

    def execute(self, *statements: str | Sequence[Any], transaction: bool = False) -> list[dict[str, Any]]:
        """Run statements (SQL, or SQL and its parameters) as one request. A result with `error` changed nothing."""
        with self._lock:
            index, self._index = self._index, self._index + 1
            if transaction:
                self._connection.execute("BEGIN")
            results: list[dict[str, Any]] = []
            for sql, *values in ([one] if isinstance(one, str) else [*one] for one in statements):
                kept = len(self._seen)
                try:
                    self._run(str(sql), values)
                except apsw.Error as error:
                    del self._seen[kept:]
                    results.append({"error": str(error)})
                    if transaction:
                        break
                    continue
                results.append({"rows_affected": self._connection.changes()})
                if not transaction:
                    index = self._commit(index)
            if transaction:
                failed = "error" in results[-1]
                self._connection.execute("ROLLBACK" if failed else "COMMIT")
                if failed:
                    self._seen.clear()
                self._commit(index)
            return results

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a SELECT, as SQLite has them."""
        with self._lock:
            return list(self._connection.execute(sql, values).fetchall())

    # -- what befalls a cluster -----------------------------------------------------------------------------

    def fail_over(self, back: int = 0) -> None:
        """Another node leads: another node id, and the last entries once more, with times of its own."""
        with self._lock:
            self.node_id = f"n{int(self.node_id[1:]) + 1}"
            first = max(0, self._sent - back)
            # A batch in its queue begins with an entry that has an index.
            while first and first < len(self._log) and not self._log[first].index:
                first -= 1
            for at in range(first, len(self._log)):
                entry = self._log[at]
                self._log[at] = NodeEntry(entry.index, entry.at + 7, entry.events)
            self._sent = first
            self._epoch += 1
            self._wakes.notify_all()

    def fail_over_to_restored(self) -> None:
        """Another node leads, which got everything not sent yet with a snapshot: it has no events of that."""
        with self._lock:
            self.take_over_snapshot()
            self.fail_over()

    def fail_over_to_overflowed(self) -> None:
        """Another node leads, whose change capture dropped everything not sent yet when it caught up by the log."""
        with self._lock:
            self.overflowed += len(self._log) - self._sent
            self._sent = len(self._log)
            self.fail_over()

    def take_over_snapshot(self) -> None:
        """The node that leads was away, and got everything not sent yet with a snapshot."""
        with self._lock:
            self._sent = len(self._log)
            self.restores += 1
            self.snapshot = self._index - 1

    def restart(self) -> None:
        """The node is killed and started. What it counted is gone, and it restores its own snapshot if it has one."""
        with self._lock:
            self.restores = 0
            self.started = datetime.now(UTC)

    def rebuild(self) -> None:
        """The cluster is made again: an empty database, indexes from the start."""
        with self._lock:
            self._connection.close()
            self._connection = self._open()
            self._index, self._log, self._sent, self._columns = FIRST_INDEX, [], 0, {}
            self._epoch += 1

    def pause(self) -> None:
        """Send nothing until `resume`; what happens meanwhile is kept."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        with self._lock:
            self._paused = False
            self._wakes.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def pending(self) -> int:
        """How many entries the endpoint has not taken yet."""
        with self._lock:
            return len(self._log) - self._sent

    def settle(self) -> None:
        """Wait until everything is sent."""
        wait_until(lambda: self.pending == 0)

    def close(self) -> None:
        """End it. A repeat changes nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wakes.notify_all()
        self._api.shutdown()
        for thread in self._threads:
            thread.join()
        self._api.server_close()
        self._pool.clear()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- capture --------------------------------------------------------------------------------------------

    def _open(self) -> apsw.Connection:
        connection = apsw.Connection(":memory:")
        connection.preupdate_hook(self._note)
        return connection

    def _note(self, update: apsw.PreUpdate) -> None:
        if not self._captures or update.table_name.startswith("sqlite_"):
            return
        op = update.op
        old = None if op == "INSERT" else update.old
        new = None if op == "DELETE" else update.new
        old_id = None if op == "INSERT" else update.rowid
        new_id = None if op == "DELETE" else update.rowid_new
        self._seen.append(_Seen(op, update.table_name, old_id, new_id, old, new))

    def _run(self, sql: str, values: Sequence[Any]) -> None:
        self._captures = not sql.lstrip().upper().startswith(_DDL)
        self._connection.execute(sql, [bytes(v) if isinstance(v, list) else v for v in values]).fetchall()

    def _commit(self, index: int) -> int:
        """Log what was seen. The index is spent by the first commit with changes."""
        if not self._seen:
            return index
        stale = {table: self._columns.get(table) for table in {seen.table for seen in self._seen}}
        layouts = {table: self._layout(table) for table in stale}
        events = [self._event(seen, stale[seen.table], *layouts[seen.table]) for seen in self._seen]
        self._columns |= {table: names for table, (names, _) in layouts.items()}
        self._seen = []
        self._log.append(NodeEntry(index, int(time.time() * 1000), events))
        self._wakes.notify_all()
        return 0

    def _layout(self, table: str) -> tuple[list[str], bool]:
        names = [row[0] for row in self._connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]
        sql = "SELECT wr FROM pragma_table_list WHERE schema = 'main' AND name = ?"
        rows = self._connection.execute(sql, (table,)).fetchall()
        return names, bool(rows and rows[0][0])

    def _event(self, seen: _Seen, stale: list[str] | None, names: list[str], without_rowid: bool) -> dict[str, Any]:
        event: dict[str, Any] = {"op": seen.op, "table": seen.table}
        if not without_rowid:
            event |= {
                name: rowid for name, rowid in (("new_row_id", seen.new_id), ("old_row_id", seen.old_id)) if rowid
            }
        if self._row_ids_only:
            return event
        # The sender asks for the names on a connection that has not noticed the new columns yet.
        names = stale or names
        for name, side, row in (("before", "old", seen.old), ("after", "new", seen.new)):
            if row is None:
                continue
            if len(row) != len(names):
                event["error"] = f"mismatched column names and {side} CDC row column count"
                return event
            event[name] = {column: as_json(value) for column, value in zip(names, row, strict=True)}
        return event

    # -- sending --------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        size, delay_seconds = self._batch
        while True:
            with self._wakes:
                self._wakes.wait_for(self._has_work)
                if self._closed:
                    return
                if len(self._log) - self._sent < size:
                    self._wakes.wait(delay_seconds)  # for a fuller batch
                if self._closed or not self._has_work():
                    continue
                entries, epoch = self._log[self._sent : self._sent + size], self._epoch
                body = self._body(entries)
                if all(entry.index == 0 for entry in entries):
                    self._sent, self.dropped = self._sent + len(entries), self.dropped + 1
                    continue
            delivered = self._post(body)
            with self._wakes:
                if delivered and epoch == self._epoch:
                    self._sent += len(entries)
                elif not delivered:
                    self._wakes.wait_for(lambda: self._closed, self._backoff_seconds)

    def _has_work(self) -> bool:
        return self._closed or (not self._paused and self._sent < len(self._log))

    def _body(self, entries: Sequence[NodeEntry]) -> bytes:
        payload = [{"index": one.index, "commit_timestamp": one.at, "events": one.events} for one in entries]
        service = {"service_id": self.service} if self.service else {}
        return json.dumps({**service, "node_id": self.node_id, "payload": payload}, separators=(",", ":")).encode()

    def _post(self, body: bytes) -> bool:
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            code = self._pool.request("POST", self.endpoint, body=body, headers=headers, redirect=False).status
        except urllib3.exceptions.HTTPError:
            code = 0
        self.answers[code] = self.answers.get(code, 0) + 1
        return code in (200, 202)

    def status(self) -> dict[str, Any]:
        """The node's own status, as far as a source reads it."""
        length = self.pending
        service = {"service_id": self.service} if self.service else {}
        capture = {"node_id": self.node_id, "is_leader": True, "fifo": {"has_next": length > 0, "length": length}}
        times = {"start_time": self.started.isoformat(), "current_time": datetime.now(UTC).isoformat()}
        store = {"raft": {"last_snapshot_index": self.snapshot}}
        return {"build": {"version": "scripted"}, "cdc": {**capture, **service}, "node": times, "store": store}

    def variables(self) -> dict[str, Any]:
        """The node's counters, as far as a source reads them."""
        return {
            "db": {"dropped_cdc_events": self.overflowed},
            "store": {"num_restores": self.restores, "num_restores_start": 0},
        }

    def query(self, sql: str, values: Sequence[Any]) -> dict[str, Any]:
        """One SELECT, answered as rqlite does."""
        with self._lock:
            try:
                cursor = self._connection.execute(sql, [bytes(v) if isinstance(v, list) else v for v in values])
                columns = _described(cursor)
                rows = cursor.fetchall()
            except apsw.Error as error:
                return {"error": str(error)}
        types = [(declared or "").lower() for _, declared in columns]
        return {"types": types, "values": [[_shown(v, t) for v, t in zip(row, types, strict=True)] for row in rows]}


def _described(cursor: apsw.Cursor) -> Sequence[tuple[str, str | None]]:
    try:
        return cursor.get_description()
    except apsw.ExecutionCompleteError:
        return ()  # no rows


def as_json(value: Any) -> Any:
    """A value of SQLite as rqlite writes it: blobs in base64, floats without a fraction as integers."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and abs(value) < 1e21 and value == int(value):
        return int(Decimal(repr(value)))
    return value


def _shown(value: Any, declared: str) -> Any:
    """A value in the answer of a query, where the declared type has its say."""
    if isinstance(value, bytes) and (not declared or declared.startswith(_TEXTUAL)):
        return value.decode(errors="replace")
    if declared == "boolean" and isinstance(value, int):
        return value > 0
    if declared in ("date", "datetime", "timestamp") and isinstance(value, str):
        return datetime.fromisoformat(value).isoformat() + "Z"
    return as_json(value)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, node: RqliteNode, tls: ssl.SSLContext | None) -> None:
        self.node = node
        self.tls = tls
        super().__init__(("127.0.0.1", 0), _Exchange)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: clients that disconnect, or cannot agree on TLS, see the error themselves."""


class _Exchange(BaseHTTPRequestHandler):
    """One connection of a client: /db/query, /db/execute and /status."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        if self.server.tls is not None:
            self.request = self.server.tls.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        # A layer of TLS is a socket of its own, which the server does not know of.
        with suppress(OSError):
            self.request.close()

    def do_GET(self) -> None:
        if self._is_over():
            return
        path, node = urlsplit(self.path).path, self.server.node
        answers = {"/status": node.status, "/debug/vars": node.variables}
        self._answer(200 if path in answers else 404, answers[path]() if path in answers else {})

    def do_POST(self) -> None:
        if self._is_over():
            return
        parts = urlsplit(self.path)
        self.server.node.asked.append(parts.path)
        options = parse_qs(parts.query, keep_blank_values=True)
        statements = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wrapped = [[one] if isinstance(one, str) else one for one in statements]
        if parts.path == "/db/query":
            self._answer(200, {"results": [self.server.node.query(sql, values) for sql, *values in wrapped]})
        elif parts.path == "/db/execute":
            done = self.server.node.execute(*wrapped, transaction="transaction" in options)
            self._answer(200, {"results": done})
        else:
            self._answer(404, {})

    def _is_over(self) -> bool:
        # Connections outlive the listener; a node that is gone answers no one.
        self.close_connection = self.server.node.is_closed
        return self.close_connection

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Log nothing."""
