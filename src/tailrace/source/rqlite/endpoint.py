"""The HTTP endpoint that rqlite posts to. It answers 200 once the journal holds the events durably, and never before.

    POST path      200 stored, or known already       400 not what rqlite posts     401 bad credentials
                   408 too slow                       413 too large                 415 compressed, or not JSON
                   429 too many a second              503 not now: rqlite keeps it and tries again
    GET /healthz   200, or 503 when a cluster has stopped; it also says which requests rqlite keeps sending
    GET /metrics   for Prometheus, with the endpoint's credentials if it has any

rqlite accepts only 200 and 202 and sends everything else again, so a refusal loses nothing. It also sends again what
was not answered within its `transmit_timeout`. So a body is known by its digest before it is parsed: the same one gets
the answer of the first and is not parsed again. A slow request is then late once, and not for ever.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tailrace.errors import TailraceError, UnavailableError
from tailrace.source.rqlite.attempt import AttemptLog
from tailrace.source.rqlite.cluster_journal import Cluster
from tailrace.source.rqlite.request import NotOursError, PostedRequest, digest_of, parse
from tailrace.system.trace import origin

# The receiver's metrics in Prometheus's text format. Labels name services, never rows.

_MEANINGS = {
    "requests": "Requests that were answered with 200",
    "received": "Events that were stored",
    "duplicates": "Events that were known already",
    "zero_index": "Events that came with index 0",
    "late": "Events with index 0 that came after newer ones",
    "missing": "Events that came without images",
}


class ReceiverMetrics(Collector):
    """Reads the clusters and the answers on every scrape; nothing is counted twice."""

    def __init__(
        self, clusters: Callable[[], Iterable[Cluster]], answers: Mapping[int, int], attempts: AttemptLog
    ) -> None:
        self._clusters = clusters
        self._answers = answers
        self._attempts = attempts
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily("tailrace_rqlite_answers", "Requests by the code they got", labels=["code"])
        for code, count in sorted(self._answers.items()):
            answers.add_metric([str(code)], count)
        yield answers
        clusters = list(self._clusters())
        for name, meaning in _MEANINGS.items():
            counter = CounterMetricFamily(f"tailrace_rqlite_{name}", meaning, labels=["service"])
            for cluster in clusters:
                counter.add_metric([cluster.service], cluster.counts.to_json()[name])
            yield counter
        index = GaugeMetricFamily("tailrace_rqlite_index", "The last Raft index that was stored", labels=["service"])
        size = GaugeMetricFamily("tailrace_rqlite_journal_bytes", "The size of the journal", labels=["service"])
        usage = GaugeMetricFamily(
            "tailrace_rqlite_journal_usage", "The journal's size as a fraction of its limit", labels=["service"]
        )
        stopped = GaugeMetricFamily(
            "tailrace_rqlite_stopped", "1 when an error stopped the cluster", labels=["service"]
        )
        for cluster in clusters:
            level = cluster.level()
            index.add_metric([cluster.service], level.mark.commit)
            size.add_metric([cluster.service], level.bytes)
            usage.add_metric([cluster.service], level.usage)
            stopped.add_metric([cluster.service], cluster.error is not None)
        retrying = GaugeMetricFamily(
            "tailrace_rqlite_retrying", "Attempts of requests that rqlite keeps sending", labels=["service"]
        )
        for one in self._attempts.retrying():
            retrying.add_metric([one["service"] or ""], one["attempts"])
        yield from (index, size, usage, stopped, retrying)


_log = logging.getLogger(__name__)

BODY_SECONDS = 30.0
"""How long a request may take to arrive."""
LARGE_BYTES = 250_000
CLUSTERS = 256
"""How many services one endpoint serves: each costs a journal."""
_RETRY_SECONDS = 5


@dataclass(frozen=True)
class Limits:
    """What the endpoint accepts. `credentials` is user:password; `per_second` None means no limit."""

    max_body: int
    per_second: float | None
    credentials: str | None


class Lane:
    """Writes one cluster's requests to its journal. Those that arrive during a sync share the next one."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._waiting: list[tuple[PostedRequest, asyncio.Future[TailraceError | None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def store(self, request: PostedRequest) -> TailraceError | None:
        """None once the request is durable; an error when it is not stored."""
        future: asyncio.Future[TailraceError | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        return await future

    async def _drain(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            try:
                outcomes = await asyncio.to_thread(self.cluster.commit, [request for request, _ in group])
            except Exception as error:  # noqa: BLE001 - every request gets its answer, and rqlite sends these again
                reason = f"storing failed: {origin(error)}"
                _log.error("cluster %r: %s", self.cluster.service, reason)
                outcomes = [UnavailableError(reason)] * len(group)
            for (_, future), outcome in zip(group, outcomes, strict=True):
                if not future.done():
                    future.set_result(outcome)
        self._task = None


class RateLimit:
    """A limit on requests per second, with bursts of up to one second's worth."""

    def __init__(self, per_second: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._clock = clock
        self._burst = max(1.0, per_second)
        self._left = self._burst
        self._at = clock()

    def allows(self) -> bool:
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class CdcEndpoint:
    """The application. `clusters` holds every cluster known so far; `make` creates the one of a new service."""

    def __init__(self, path: str, limits: Limits, make: Callable[[str], Cluster]) -> None:
        self.answers: Counter[int] = Counter()
        self._limits = limits
        self._make = make
        self._lanes: dict[str, Lane] = {}
        self._rate_limit = RateLimit(limits.per_second) if limits.per_second else None
        self._lines = RateLimit(1.0)
        self._attempts = AttemptLog()
        self._in_flight: dict[str, asyncio.Task[TailraceError | None]] = {}
        self._figures = ReceiverMetrics(lambda: self.clusters, self.answers, self._attempts)
        self.application = Starlette(
            routes=[
                Route(path, self._counted(self._receive), methods=["POST"]),
                Route("/healthz", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
            ]
        )
        # rqlite does not accept a redirect as an answer.
        self.application.router.redirect_slashes = False

    @property
    def clusters(self) -> list[Cluster]:
        return [lane.cluster for lane in self._lanes.values()]

    def add(self, cluster: Cluster) -> Lane:
        """Serve a cluster."""
        return self._lanes.setdefault(cluster.service, Lane(cluster))

    def _counted(
        self, answer: Callable[[HttpRequest], Awaitable[Response]]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        async def counted(http: HttpRequest) -> Response:
            response = await answer(http)
            self.answers[response.status_code] += 1
            return response

        return counted

    async def _receive(self, http: HttpRequest) -> Response:
        if not self._is_known(http):
            return Response(status_code=401, headers={"WWW-Authenticate": 'Basic realm="tailrace"'})
        # Count after checking credentials: unknown clients must not use up rqlite's limit.
        if self._rate_limit is not None and not self._rate_limit.allows():
            return _refuse(429, "too many requests", retry=1)
        # Browsers let any web page post other content types to this machine, without asking.
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return _refuse(415, "only application/json is accepted")
        if http.headers.get("content-encoding", "identity") != "identity":
            return _refuse(415, "compressed bodies are not accepted")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._read(http)
        except (TimeoutError, ClientDisconnect):
            return _refuse(408, "the body did not arrive")
        if body is None:
            reason = f"larger than {self._limits.max_body} bytes; raise max_body, or lower max_batch_size"
            size = f"{http.headers.get('content-length')} bytes"
            self._attempts.came(size)
            self._attempts.answered(size, None, reason)
            return self._turn_down(413, reason)
        return await self._answer(body)

    async def _answer(self, body: bytes) -> Response:
        """The answer to a body. One that is being stored already gets the answer of the first."""
        is_large = len(body) >= LARGE_BYTES
        # In a thread: a large body must not keep other clusters waiting.
        digest = await asyncio.to_thread(digest_of, body) if is_large else digest_of(body)
        self._attempts.came(digest)
        if any(cluster.holds(digest) for cluster in self.clusters):
            return Response(status_code=200)
        task = self._in_flight.get(digest)
        if task is None:
            task = self._in_flight[digest] = asyncio.create_task(self._store(body, digest))
            task.add_done_callback(lambda _: self._in_flight.pop(digest, None))
        try:
            refusal = await asyncio.shield(task)
        except NotOursError as error:
            self._attempts.answered(digest, None, str(error))
            return self._turn_down(400, str(error))
        if refusal is not None:
            return _refuse(503, refusal.message, retry=_RETRY_SECONDS)
        return Response(status_code=200)

    async def _store(self, body: bytes, digest: str) -> TailraceError | None:
        """None once the request is durable. Raises NotOursError."""
        is_large = len(body) >= LARGE_BYTES
        request = await asyncio.to_thread(parse, body, digest) if is_large else parse(body, digest)
        lane = self._lanes.get(request.service)
        if lane is None:
            if len(self._lanes) >= CLUSTERS:
                return UnavailableError(f"{CLUSTERS} services are served already")
            lane = self.add(self._make(request.service))
        refusal = await lane.store(request)
        if refusal is None:
            self._attempts.stored(digest, request.service)
        else:
            self._attempts.answered(digest, request.service, refusal.message)
        return refusal

    def retrying(self) -> list[dict[str, Any]]:
        """The requests that rqlite keeps sending; see `AttemptLog`."""
        return self._attempts.retrying()

    def _turn_down(self, code: int, reason: str) -> Response:
        """A refusal that someone should look into. Not every one is logged: there may be any number."""
        if self._lines.allows():
            _log.warning("a request was refused: %s", reason)
        return _refuse(code, reason)

    async def _read(self, http: HttpRequest) -> bytes | None:
        """The body; None when it is too large. No more than the limit is read."""
        length = http.headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limits.max_body:
            return None
        body = bytearray()
        async for piece in http.stream():
            body += piece
            if len(body) > self._limits.max_body:
                return None
        return bytes(body)

    def _is_known(self, http: HttpRequest) -> bool:
        if self._limits.credentials is None:
            return True
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        try:
            shown = b64decode(given, validate=True) if scheme.lower() == "basic" else b""
        except ValueError:
            shown = b""
        return hmac.compare_digest(shown, self._limits.credentials.encode())

    async def _health(self, http: HttpRequest) -> Response:
        stopped = {one.service: type(one.error).__name__ for one in self.clusters if one.error is not None}
        retrying = self.retrying()
        status = "stopped" if stopped else "retrying" if retrying else "ok"
        # Only a stopped cluster is a failure: a restart of the receiver would make a slow request slower.
        return JSONResponse({"status": status, "stopped": stopped, "retrying": retrying}, 503 if stopped else 200)

    async def _metrics(self, http: HttpRequest) -> Response:
        if not self._is_known(http):
            return Response(status_code=401, headers={"WWW-Authenticate": 'Basic realm="tailrace"'})
        return Response(self._figures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _refuse(code: int, reason: str, *, retry: int | None = None) -> Response:
    return JSONResponse({"error": reason}, code, {"Retry-After": str(retry)} if retry else None)
