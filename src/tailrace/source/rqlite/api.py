"""rqlite's HTTP API, as far as it is needed: reading queries, and what a node says of its own change capture.

What is relied on: `POST /db/query` takes a list of [SQL, parameter, …] and answers {"results": [{"values": [[…], …]} or
{"error": …}, …]}; `level=linearizable` sees everything that was committed before the question, whichever node is asked;
a node that is not the leader passes the question on. `GET /status` shows `cdc` with `service_id` (absent where none is
configured) and `fifo.length`, the batches that the endpoint has not yet been given and that no watermark has covered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import urllib3

from tailrace.errors import PreflightError, UnavailableError

LEVEL = "linearizable"
"""A copy must see every change that was received before it, which `none` and, around an election, `weak` do not."""
TIMEOUT_SECONDS = 30.0
CONNECT_SECONDS = 5.0


class QueryRefusedError(Exception):
    """rqlite understood the request, and SQLite refused its SQL. Callers make of it what it means to them."""


@dataclass(frozen=True)
class Pending:
    """What a node says of its change capture: whose events these are, and how many batches are still to be sent."""

    service: str | None
    batches: int


@dataclass(frozen=True)
class Api:
    """One cluster's API. Frozen and picklable; the password never shows in its repr."""

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def query(self, sql: str, *parameters: Any) -> list[list[Any]]:
        """The rows of a SELECT. Raises QueryRefusedError, UnavailableError, PreflightError for wrong credentials."""
        return self.query_many([(sql, *parameters)])[0]

    def query_many(self, statements: Sequence[tuple[Any, ...]]) -> list[list[list[Any]]]:
        """The rows of several SELECTs, asked at once."""
        answer = self._ask("POST", f"/db/query?level={LEVEL}", json.dumps([list(one) for one in statements]).encode())
        results = answer.get("results")
        if not isinstance(results, list) or len(results) != len(statements):
            raise self._unavailable(answer.get("error") or "the answer holds no results")
        for result in results:
            if error := result.get("error"):
                raise QueryRefusedError(error)
        return [result.get("values") or [] for result in results]

    def pending(self) -> Pending | None:
        """What the node says of its change capture; None where it has none, or does not tell."""
        try:
            status = self._ask("GET", "/status", None)
        except PreflightError:
            return None  # the user may read tables, which is all that is needed
        capture = status.get("cdc")
        if not isinstance(capture, dict):
            return None
        return Pending(capture.get("service_id"), int((capture.get("fifo") or {}).get("length", 0)))

    def version(self) -> str:
        """The node's release, for people."""
        status = self._ask("GET", "/status", None)
        return str((status.get("build") or {}).get("version", "unknown"))

    def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.username is not None:
            headers |= urllib3.make_headers(basic_auth=f"{self.username}:{self.password or ''}")
        try:
            response = _pool().request(method, self.url + path, body=body, headers=headers, redirect=False)
        except urllib3.exceptions.HTTPError as error:
            raise self._unavailable(type(error).__name__) from None
        if response.status in (401, 403):
            raise PreflightError(
                f"rqlite at {self.url} refuses the credentials ({response.status})",
                fix="set api_auth: {username, password} to a user with the permissions query and status",
            )
        if response.status != 200:
            raise self._unavailable(f"it answered {response.status}")
        try:
            answer = json.loads(response.data)
        except ValueError:
            raise self._unavailable("it answered with something that is not JSON") from None
        if not isinstance(answer, dict):
            raise self._unavailable("it answered with something unexpected")
        return answer

    def _unavailable(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"rqlite at {self.url} does not answer: {why}",
            fix="see that the node runs and has a leader; nothing is lost meanwhile",
        )


@cache
def _pool() -> urllib3.PoolManager:
    """The process's connections. Nothing is tried again here: whoever asks backs off as a whole."""
    timeout = urllib3.Timeout(connect=CONNECT_SECONDS, read=TIMEOUT_SECONDS)
    return urllib3.PoolManager(retries=False, timeout=timeout, maxsize=4)
