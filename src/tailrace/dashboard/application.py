"""The routes of the dashboard: its page, the JSON API, health and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tailrace.dashboard.answer import JsonAnswer
from tailrace.dashboard.fix import command
from tailrace.dashboard.guard import BODY_BYTES, SESSION_SECONDS, Access, Guard, Scope
from tailrace.dashboard.openapi import describe
from tailrace.dashboard.page_file import PageFile, list_files
from tailrace.dashboard.pipeline import Snapshot, WatchedPipeline
from tailrace.dashboard.record import error_to_dict
from tailrace.dashboard.table import KINDS
from tailrace.errors import ConfigError, TailraceError, name_file
from tailrace.state.operation import EFFECTS
from tailrace.state.status import PipelineStatus

BODY_SECONDS = 10.0
"""How long a body may take to arrive."""
_MOST_HOURS = 24
_UNHEALTHY = ("failing", "unknown", "stopped")

Answering = Callable[..., Awaitable[Response]]
Metrics = Callable[[Sequence[tuple[str, PipelineStatus | None]]], bytes]
"""The text for Prometheus, from the pipelines' names and status; None where that cannot be read."""


class _Name(Convertor[str]):
    """The name of a table in a path: it may hold any character, slashes and line breaks too."""

    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return quote(value, safe="")


register_url_convertor("name", _Name())


@dataclass
class RefusedError(Exception):
    """A request that cannot be answered as it is asked."""

    status: int
    code: str
    message: str
    fix: str | None = None


class DashboardApplication:
    """The ASGI application of some pipelines, inside of a guard."""

    def __init__(self, pipelines: Sequence[WatchedPipeline], access: Access, metrics: Metrics) -> None:
        self._pipelines: Mapping[str, WatchedPipeline] = {one.name: one for one in pipelines}
        self._access = access
        self._metrics = metrics
        self.files = list_files()
        self._description = JsonAnswer.of(describe())
        api = "/api/v1/pipelines"
        self.routes = [
            Route(api, self._list),
            Route(api + "/{pipeline}", self._show),
            Route(api + "/{pipeline}/tables", self._tables),
            Route(api + "/{pipeline}/requests/{request:int}", self._request),
            Route(api + "/{pipeline}/tables/{table:name}/{action}", self._act, methods=["POST"]),
            Route(api + "/{pipeline}/tables/{table:name}", self._table),
            Route("/healthz", self._health),
            Route("/metrics", self._show_metrics),
            Route("/openapi.json", self._describe),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/logout", self._log_out, methods=["POST"]),
            *(Route(path, self._page(file)) for path, file in self.files.items()),
        ]
        router = Starlette(
            routes=self.routes,
            exception_handlers={
                HTTPException: _on_http,
                RefusedError: _on_refused,
                UnreadableError: _on_error,
                Exception: _on_unexpected,
            },
        )
        router.router.redirect_slashes = False
        self.application = Guard(router, access, self._is_open)

    def _is_open(self, scope: Scope) -> bool:
        """The page itself holds nothing of a pipeline, and whether the server lives is no secret."""
        path = scope["path"]
        return path in self.files or path == "/login" or (path == "/healthz" and not scope["query_string"])

    # -- the API ------------------------------------------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        found = await asyncio.gather(*(one.summary() for one in self._pipelines.values()))
        return respond(request, JsonAnswer.of({"pipelines": found}))

    async def _show(self, request: Request) -> Response:
        hours = _number(request, "hours", 1, _MOST_HOURS)
        return await self._answered(request, lambda pipeline: pipeline.detail(hours))

    async def _tables(self, request: Request) -> Response:
        since = request.query_params.get("since")
        return await self._answered(request, lambda pipeline: pipeline.rows(since))

    async def _table(self, request: Request) -> Response:
        return await self._answered(request, lambda pipeline: pipeline.table(request.path_params["table"]))

    async def _request(self, request: Request) -> Response:
        pipeline = self._pipeline(request)
        number = request.path_params["request"]
        found = await _named(pipeline, pipeline.request(number)) if number < 2**63 else None
        if found is None:
            raise RefusedError(404, "unknown", "there is no request of this number")
        return respond(request, JsonAnswer.of(found))

    async def _answered(
        self, request: Request, answer: Callable[[WatchedPipeline], Awaitable[JsonAnswer | None]]
    ) -> Response:
        pipeline = self._pipeline(request)
        found = await _named(pipeline, answer(pipeline))
        if found is None:
            raise _unknown_table(pipeline)
        return respond(request, found)

    async def _act(self, request: Request) -> Response:
        pipeline, action = self._pipeline(request), request.path_params["action"]
        kind = next((each for each in KINDS if each == action), None)
        if kind is None:
            raise RefusedError(404, "unknown", "there is no such action", f"one of {', '.join(KINDS)}")
        body = await _read_json(request)
        if unknown := sorted(body.keys() - {"letter"}):
            # What is misspelled must not ask for more than was meant.
            raise RefusedError(400, "malformed", f"the body has an unknown key: {unknown[0]}", "only `letter` is known")
        letter = body.get("letter")
        if letter is not None and (kind != "skip" or not isinstance(letter, int) or isinstance(letter, bool)):
            raise RefusedError(400, "malformed", "`letter` is the number of a dead letter, and only for skip")
        table = request.path_params["table"]
        known = (await pipeline.snapshot()).status
        if known is not None and table not in {one.name for one in known.tables}:
            raise _unknown_table(pipeline)
        argument = None if letter is None else str(letter)
        try:
            asked = await asyncio.to_thread(pipeline.ask, kind, table, argument)
        except ConfigError as error:
            raise RefusedError(409, error.code, error.message, name_file(error.fix, pipeline.file)) from error
        except TailraceError as error:
            raise UnreadableError(error, pipeline) from error
        made = asked.requests[0] if asked.requests else None
        value = {
            "request": made.id if made else None,
            "kind": kind,
            "table": table,
            "runner": asked.runner.pid if asked.runner else None,
            "text": f"{table} {EFFECTS[kind]} ({asked.when})" if made else asked.needless,
            "command": command(kind, pipeline.file, table),
        }
        return respond(request, JsonAnswer.of(value), status=202 if made else 200)

    # -- for other programs -------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        name = request.query_params.get("pipeline")
        if name is None:
            return respond(request, JsonAnswer.of({"status": "ok", "sentence": None}))
        if name not in self._pipelines:
            raise self._unknown_pipeline()
        health = (await self._pipelines[name].snapshot()).health
        status = 503 if health.level in _UNHEALTHY else 200
        return respond(request, JsonAnswer.of({"status": health.level, "sentence": health.sentence}), status=status)

    async def _show_metrics(self, request: Request) -> Response:
        found: list[Snapshot] = list(await asyncio.gather(*(one.snapshot() for one in self._pipelines.values())))
        named = list(zip(self._pipelines, (each.status for each in found), strict=True))
        body = await asyncio.to_thread(self._metrics, named)
        return respond(request, JsonAnswer(body), type_="text/plain; version=0.0.4; charset=utf-8")

    async def _describe(self, request: Request) -> Response:
        return respond(request, self._description)

    # -- the page -----------------------------------------------------------------------------------------------

    def _page(self, file: PageFile) -> Answering:
        async def send(request: Request) -> Response:
            headers = {"Cache-Control": "no-cache", "ETag": f'"{file.tag}"', "Vary": "Accept-Encoding"}
            if _has(request, file.tag):
                return Response(status_code=304, headers=headers)
            body = file.body
            if file.compressed is not None and _takes_gzip(request):
                body, headers["Content-Encoding"] = file.compressed, "gzip"
            headers["Content-Type"] = file.type
            return Response(body, headers=headers)

        return send

    async def _log_in(self, request: Request) -> Response:
        token = (await _read_json(request)).get("token")
        if self._access.token is None:
            return respond(request, JsonAnswer.of({"needed": False}))
        if not isinstance(token, str) or not self._access.is_token(token):
            raise RefusedError(401, "refused", "no valid token", "use the token that the dashboard was started with")
        answer = respond(request, JsonAnswer.of({"needed": True}))
        self._set_cookie(request, answer, self._access.make_session(), SESSION_SECONDS)
        return answer

    async def _log_out(self, request: Request) -> Response:
        answer = respond(request, JsonAnswer.of({"needed": self._access.token is not None}))
        if self._access.token is not None:
            self._set_cookie(request, answer, "", 0)
        return answer

    def _set_cookie(self, request: Request, answer: Response, value: str, seconds: int) -> None:
        # With a proxy in between only the browser's Origin tells that its side is encrypted.
        is_secure = request.url.scheme == "https" or request.headers.get("origin", "").startswith("https://")
        answer.set_cookie(
            self._access.cookie, value, max_age=seconds, httponly=True, samesite="strict", secure=is_secure
        )

    def _pipeline(self, request: Request) -> WatchedPipeline:
        found = self._pipelines.get(request.path_params["pipeline"])
        if found is None:
            raise self._unknown_pipeline()
        return found

    def _unknown_pipeline(self) -> RefusedError:
        return RefusedError(404, "unknown", "there is no such pipeline here", f"one of {', '.join(self._pipelines)}")


def _unknown_table(pipeline: WatchedPipeline) -> RefusedError:
    fix = name_file("`tailrace status FILE` lists its tables", pipeline.file)
    return RefusedError(404, "unknown", f"pipeline {pipeline.name} has no such table", fix)


class UnreadableError(Exception):
    """The state of a pipeline cannot be used now."""

    def __init__(self, error: TailraceError, pipeline: WatchedPipeline) -> None:
        super().__init__(error.message)
        self.value = error_to_dict(error, pipeline.file)


async def _named(pipeline: WatchedPipeline, answer: Awaitable[Any]) -> Any:
    """The answer; an error of it with the pipeline's file in its fix."""
    try:
        return await answer
    except TailraceError as error:
        raise UnreadableError(error, pipeline) from error


def respond(request: Request, answer: JsonAnswer, *, status: int = 200, type_: str = "application/json") -> Response:
    """The answer, compressed where the client takes that; 304 where the client has it already."""
    headers = {"Cache-Control": "no-store", "ETag": f'"{answer.tag}"', "Vary": "Accept-Encoding"}
    if status == 200 and request.method == "GET" and _has(request, answer.tag):
        return Response(status_code=304, headers=headers)
    body = answer.body
    if _takes_gzip(request) and (compressed := answer.compressed) is not None:
        body, headers["Content-Encoding"] = compressed, "gzip"
    headers["Content-Type"] = type_
    return Response(body, status, headers)


def _has(request: Request, tag: str) -> bool:
    given = request.headers.get("if-none-match", "")
    return any(each.strip().removeprefix("W/") == f'"{tag}"' for each in given.split(","))


def _takes_gzip(request: Request) -> bool:
    given = request.headers.get("accept-encoding", "").split(",")
    return any(each.partition(";")[0].strip() == "gzip" for each in given)


def _number(request: Request, name: str, default: int, most: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and 1 <= int(given[:9]) <= most):
        raise RefusedError(400, "malformed", f"`{name}` is a number from 1 to {most}")
    return int(given)


async def _read_json(request: Request) -> dict[str, Any]:
    """The body as an object; an empty one is an empty object."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > BODY_BYTES:
                    raise RefusedError(413, "refused", f"the body has more than {BODY_BYTES} bytes")
    except (TimeoutError, ClientDisconnect):
        raise RefusedError(408, "refused", "the body did not arrive") from None
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise RefusedError(400, "malformed", "the body is no JSON") from None
    if not isinstance(value, dict):
        raise RefusedError(400, "malformed", "the body is no JSON object")
    return value


# Errors as answers.


def _error(request: Request, status: int, value: dict[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    answer = respond(request, JsonAnswer.of({"error": value}), status=status)
    answer.headers.update(headers or {})
    return answer


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: "there is nothing here", 405: "this path takes other methods"}
    message = messages.get(error.status_code, error.detail)
    return _error(request, error.status_code, _problem("unknown", message), error.headers)


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return _error(request, error.status, _problem(error.code, error.message, error.fix))


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UnreadableError)
    return _error(request, 503, error.value)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    # Without the exception's text, which may hold anything.
    return _error(request, 500, _problem("unexpected", f"unexpected {type(error).__name__}; the log has more"))


def _problem(code: str, message: str, fix: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "fix": {"text": fix, "commands": []} if fix else None}
