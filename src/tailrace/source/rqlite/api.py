"""The part of rqlite's HTTP API that is needed: read queries, and the status of a node's change capture.

Relies on the following. `POST /db/query` takes a list of [SQL, parameter, …] and answers {"results": [{"values": [[…],
…]} or {"error": …}, …]}; `level=linearizable` sees everything that was committed before the request, on every node; a
node that is not the leader forwards the request. `GET /status` shows `cdc` with `service_id` (absent where none is
configured) and `fifo.length`, the batches that were not yet sent to the endpoint and that no watermark covers, and its
own `node_id`. It also shows when the node was started, and the index of its last snapshot, its own or another's. `GET
/debug/vars` has the node's counters since it started, `GET /nodes` the addresses of all nodes.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from typing import Any

import urllib3

from tailrace.errors import ConfigError, PreflightError, UnavailableError

LEVEL = "linearizable"
"""A copy must see every change that was received before it, which `none` and, around an election, `weak` do not."""
TIMEOUT_SECONDS = 30.0
CONNECT_SECONDS = 5.0
SAME_START_MS = 5_000
"""By how much the start of a node may seem to move: it is computed from an age that took some time to arrive."""


class QueryRefusedError(Exception):
    """rqlite understood the request, and SQLite refused its SQL. Callers decide what that means."""


@dataclass(frozen=True)
class Pending:
    """What a node reports of its change capture: its service, and how many batches it still has to send."""

    service: str | None
    batches: int


@dataclass(frozen=True)
class CaptureCounters:
    """What a node counted since it started: changes that it dropped."""

    url: str
    dropped: int


@dataclass(frozen=True)
class NodeHistory:
    """What a node reports of its life: when it was asked and when it was started (ms), how many snapshots it has taken
    over from others and how many changes it has dropped since then, and the index of its last snapshot, its own or
    another's."""

    node: str
    asked: float
    started: float
    snapshots: int
    dropped: int
    snapshot: int

    @property
    def lacks_changes(self) -> bool:
        """Whether its change capture did not get all changes since it was started."""
        return bool(self.snapshots or self.dropped)

    def is_same(self, later: NodeHistory) -> bool:
        """Whether it lacks no more changes than before, and was not started in between."""
        same = (self.snapshots, self.dropped) == (later.snapshots, later.dropped)
        return same and abs(self.started - later.started) < SAME_START_MS


@dataclass(frozen=True)
class ApiTls:
    """PEM files: authorities to trust instead of the system's, and our certificate. Verification is always on."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


SYSTEM = ApiTls()


@dataclass(frozen=True)
class Api:
    """One cluster's API. Frozen and picklable; the password never shows in its repr.

    `others` are further nodes of the cluster, asked in turn when the first does not answer.
    """

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ApiTls = SYSTEM
    others: tuple[str, ...] = ()

    def query(self, sql: str, *parameters: Any) -> list[list[Any]]:
        """The rows of a SELECT. Raises QueryRefusedError, UnavailableError, PreflightError for wrong credentials."""
        return self.query_many([(sql, *parameters)])[0]

    def query_many(self, statements: Sequence[tuple[Any, ...]]) -> list[list[list[Any]]]:
        """The rows of several SELECTs, sent in one request."""
        answer = self._ask("POST", f"/db/query?level={LEVEL}", json.dumps([list(one) for one in statements]).encode())
        results = answer.get("results")
        if not isinstance(results, list) or len(results) != len(statements):
            raise self.unavailable(answer.get("error") or "the answer holds no results")
        for result in results:
            if error := result.get("error"):
                raise QueryRefusedError(error)
        return [result.get("values") or [] for result in results]

    def pending(self) -> Pending | None:
        """What the node reports of its change capture; None if it has none, or does not report it."""
        try:
            status = self._ask("GET", "/status", None)
        except PreflightError:
            return None  # reading tables is the only permission that is needed
        capture = status.get("cdc")
        if not isinstance(capture, dict):
            return None
        return Pending(capture.get("service_id"), int((capture.get("fifo") or {}).get("length", 0)))

    def counters(self) -> list[CaptureCounters]:
        """The counters of the nodes that are configured, and answer, and show them to this user."""
        found: list[CaptureCounters] = []
        for node in self._nodes():
            try:
                variables = node._ask("GET", "/debug/vars", None)
            except (UnavailableError, PreflightError):
                continue
            found.append(CaptureCounters(node.url, _dropped(variables)))
        return found

    def histories(self) -> list[NodeHistory]:
        """The histories of the nodes that are configured, and answer, and show them to this user."""
        found: list[NodeHistory] = []
        for node in self._nodes():
            with suppress(UnavailableError, PreflightError):
                if (history := node.history()) is not None:
                    found.append(history)
        return found

    def history(self) -> NodeHistory | None:
        """The history of the node at `url`; None if it does not report it."""
        status, variables = self._ask_this("GET", "/status", None), self._ask_this("GET", "/debug/vars", None)
        capture, node, store = (status.get(name) or {} for name in ("cdc", "node", "store"))
        try:
            age = datetime.fromisoformat(node["current_time"]) - datetime.fromisoformat(node["start_time"])
            asked = time.time() * 1000
            counts = variables["store"]
            return NodeHistory(
                str(capture["node_id"]),
                asked,
                asked - age.total_seconds() * 1000,
                # A node that was killed restores its own snapshot when it starts.
                max(int(counts["num_restores"]) - int(counts["num_restores_start"]), 0),
                _dropped(variables),
                int(store["raft"]["last_snapshot_index"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def node(self, name: str) -> Api | None:
        """The node with this id, asked where it is configured, or else at the address that the cluster knows it by."""
        for node in self._nodes():
            with suppress(UnavailableError, PreflightError):
                if (history := node.history()) is not None and history.node == name:
                    return node
        known = self._ask("GET", "/nodes", None).get(name)
        address = known.get("api_addr") if isinstance(known, dict) else None
        return replace(self, url=address, others=()) if isinstance(address, str) else None

    def _nodes(self) -> list[Api]:
        return [replace(self, url=url, others=()) for url in (self.url, *self.others)]

    def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        """The answer of the first node that gives one."""
        if not self.others:
            return self._ask_this(method, path, body)
        failure: UnavailableError | None = None
        for node in self._nodes():
            try:
                return node._ask_this(method, path, body)
            except UnavailableError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _ask_this(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.username is not None:
            headers |= urllib3.make_headers(basic_auth=f"{self.username}:{self.password or ''}")
        try:
            response = _pool(self.tls).request(method, self.url + path, body=body, headers=headers, redirect=False)
        except urllib3.exceptions.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status in (401, 403):
            raise PreflightError(
                f"rqlite at {self.url} refuses the credentials ({response.status})",
                fix="set api_auth: {username, password} to a user with the permissions query and status",
            )
        if response.status != 200:
            raise self.unavailable(f"it answered {response.status}")
        try:
            answer = json.loads(response.data)
        except ValueError:
            raise self.unavailable("it answered with something that is not JSON") from None
        if not isinstance(answer, dict):
            raise self.unavailable("it answered with something unexpected")
        return answer

    def _unreachable(self, error: Exception) -> UnavailableError:
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, ssl.SSLCertVerificationError):
                fix = "set api_tls.ca to the authority of the node's certificate, or renew the certificate"
                return self.unavailable(f"its certificate is not accepted: {seen.verify_message}", fix)
            if isinstance(seen, ssl.SSLError):
                why = (seen.reason or type(seen).__name__).replace("_", " ").lower()
                fix = "check that the node serves HTTPS; if it asks for a certificate, set api_tls.cert and api_tls.key"
                return self.unavailable(f"TLS failed: {why}", fix)
            seen = seen.__cause__ or seen.__context__
        return self.unavailable(type(error).__name__)

    def unavailable(self, why: str, fix: str | None = None) -> UnavailableError:
        """The error for a missing or unusable answer."""
        return UnavailableError(
            f"rqlite at {self.url} does not answer: {why}",
            fix=fix or "check that the node runs and the cluster has a leader; nothing is lost meanwhile",
        )


def _dropped(variables: Mapping[str, Any]) -> int:
    """The changes that a node dropped since it started: beyond what its channel holds, or after its last attempt."""
    database, service = (variables.get(name) or {} for name in ("db", "cdc.service"))
    return int(database.get("dropped_cdc_events", 0)) + int(service.get("dropped_failed_to_send", 0))


@cache
def _pool(tls: ApiTls) -> urllib3.PoolManager:
    """The process's connections. No retries here: the caller backs off and retries the whole operation.

    Raises ConfigError for files that cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if tls.cert is not None:
            # Pass an empty passphrase: otherwise OpenSSL prompts for one on a terminal, and there is none.
            context.load_cert_chain(tls.cert, tls.key, password=lambda: b"")
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None)
        raise ConfigError(
            f"the files in source.api_tls cannot be used: {reason or type(error).__name__}",
            fix="give readable PEM files: ca, and cert with its key; the key must have no passphrase",
        ) from None
    timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=TIMEOUT_SECONDS)
    return urllib3.PoolManager(retries=False, timeout=timeout, maxsize=4, ssl_context=context)
