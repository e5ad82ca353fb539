"""An HTTP(S) endpoint on 127.0.0.1 that receives webhooks and gives scripted answers.

with WebhookEndpoint() as endpoint:
    endpoint.script(Reply(500), Reply(429, {"Retry-After": "1"}))   # the next two requests; the others get 200
    endpoint.rule = failing(0.05, seed=1)                           # from then on one in twenty fails
"""

from __future__ import annotations

import json
import random
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:  # that module needs `cryptography`, which only an endpoint with TLS requires
    from tailrace.testing.certificate import Authority


@dataclass(frozen=True)
class ReceivedRequest:
    """A request as it arrived. Header names are in lower case."""

    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)
    at: float


@dataclass(frozen=True)
class Reply:
    """How a request is answered. `takes` says whether the endpoint accepts its events; the sender cannot see that.

    The endpoint waits `hold_seconds` before the answer and `drip_seconds` between its bytes. With `cut` it closes the
    connection without an answer.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    takes: bool | None = None
    hold_seconds: float = 0.0
    drip_seconds: float = 0.0
    cut: bool = False

    @property
    def is_taken(self) -> bool:
        return 200 <= self.status < 300 and not self.cut if self.takes is None else self.takes


ReplyRule = Callable[[ReceivedRequest], Reply]


def always(reply: Reply) -> ReplyRule:
    """The same answer for every request."""
    return lambda request: reply


def failing(rate: float, *, seed: int, status: int = 500, takes: bool = False) -> ReplyRule:
    """Requests fail at random, at this rate; with `takes` only after their events were accepted."""
    chance = random.Random(seed)
    return lambda request: Reply(status, takes=takes) if chance.random() < rate else Reply()


def ids_of_list(body: bytes) -> list[str]:
    """The ids of the events in a JSON list, as in the format `cloudevents`."""
    return [event["id"] for event in json.loads(body)]


class WebhookEndpoint:
    """Serves until the `with` block ends. Each connection has its own thread; requests are recorded in order.

    `tls` makes it HTTPS, with the authority's certificate or an `expired` one; `mutual` requires client certificates.
    Without `port` it uses a free one.
    """

    def __init__(
        self,
        *,
        tls: Authority | None = None,
        expired: bool = False,
        mutual: bool = False,
        port: int = 0,
        ids: Callable[[bytes], list[str]] = ids_of_list,
    ) -> None:
        self.rule: ReplyRule = always(Reply())
        self.requests: list[ReceivedRequest] = []
        self.taken: list[ReceivedRequest] = []
        self._ids = ids
        self._known: list[str] = []
        self._parsed = 0
        self._script: deque[Reply] = deque()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._scheme = "https" if tls else "http"
        self._server = _Server(self, port, _context(tls, expired=expired, mutual=mutual) if tls else None)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The URL to post to, with the host name `localhost`."""
        return f"{self._scheme}://localhost:{self.port}/hook"

    def script(self, *replies: Reply) -> None:
        """Answer the next requests with these replies, in order; afterwards `rule` decides again."""
        with self._lock:
            self._script.extend(replies)

    def ids(self) -> list[str]:
        """The ids of all accepted events, in order, including repeats."""
        with self._lock:
            for request in self.taken[self._parsed :]:
                self._known += self._ids(request.body)
            self._parsed = len(self.taken)
            return list(self._known)

    def duplicates(self) -> int:
        """How many accepted events had been accepted before."""
        return sum(count - 1 for count in Counter(self.ids()).values())

    def start(self) -> Self:
        """Start to serve. Called once."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving and end the wait of every request that is held."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def decide(self, request: ReceivedRequest) -> Reply:
        """Record a request and return the reply to it. Called by the server's threads."""
        with self._lock:
            self.requests.append(request)
            reply = self._script.popleft() if self._script else self.rule(request)
            if reply.is_taken:
                self.taken.append(request)
        return reply

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or until the endpoint stops."""
        self._closing.wait(seconds)

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, endpoint: WebhookEndpoint, port: int, context: ssl.SSLContext | None) -> None:
        self.endpoint = endpoint
        self.context = context
        super().__init__(("127.0.0.1", port), _Exchange)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or fail the TLS handshake: tests do this on purpose."""


class _Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        if self.server.context is not None:
            self.request.settimeout(10)
            self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        # With TLS this is a separate socket, which the server does not close.
        with suppress(OSError):
            self.request.close()

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the sender was killed in the meantime
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        endpoint = self.server.endpoint
        reply = endpoint.decide(ReceivedRequest(self.path, headers, body, time.monotonic()))
        endpoint.wait(reply.hold_seconds)
        if reply.cut:
            self.close_connection = True
            return
        lines = [f"HTTP/1.1 {reply.status} Scripted", f"Content-Length: {len(reply.body)}"]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        answer = "\r\n".join([*lines, "", ""]).encode() + reply.body
        if not reply.drip_seconds:
            self.wfile.write(answer)
            return
        for octet in answer:
            if endpoint.is_closing:
                return
            self.wfile.write(bytes([octet]))
            endpoint.wait(reply.drip_seconds)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name the server uses
        """Log nothing: tests read `requests` instead."""


def _context(tls: Authority, *, expired: bool, mutual: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.expired_file if expired else tls.cert_file, tls.key_file)
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(tls.ca_file)
    return context
