"""The HTTP server of one file: Turso's two paths, limits on everything that a client can send, and a long poll.

POST …/pull-updates   pages that changed since a revision    400 malformed   410 the revision is not kept any more
POST …/v2/pipeline    a batch of SQL statements              400 malformed
both                  401 no or wrong token   403 from a web page   408 too slow   413 too large   503 too many at once
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import apsw
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tailrace.option.value import Secret
from tailrace.sync.hrana import MalformedBatchError
from tailrace.sync.page_selector import decode_selector
from tailrace.sync.protobuf import (
    MalformedMessageError,
    PullHeader,
    PullRequest,
    delimited,
    encode_page,
    page_message_bytes,
)
from tailrace.sync.served_file import ServedFile, UnknownRevisionError
from tailrace.sync.served_tape import ServedTape
from tailrace.system.trace import origin

_log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""How often the server looks for commits of other programs."""
LONGEST_POLL_SECONDS = 60.0
_TAPE_PAUSES = 4
"""How many times as long as one update of the tape took, the server waits before the next."""
_PULL_REQUEST_BYTES = 16 << 20
_BODIES = 4
"""How many of the largest bodies are held in memory at once, however many clients send some."""


@dataclass(frozen=True)
class SyncLimits:
    """What a client may send, and how long it may take."""

    body_bytes: int = 64 << 20
    seconds: float = 60.0
    """For a body to arrive, and for the statements of a push."""
    token: Secret | None = field(default=None, repr=False)


class _RefusedBodyError(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class SyncEndpoint:
    """The application for one served file. `watch` must run while requests are answered."""

    def __init__(self, served: ServedFile, limits: SyncLimits) -> None:
        self._served = served
        self._limits = limits
        self._news = asyncio.Condition()
        self._stopping = False
        # One push at a time runs anyway; those that wait must not take the threads that answer pulls.
        self._pushing = asyncio.Lock()
        self._held_bytes = 0
        self.application = Starlette(
            routes=[Route("/{path:path}", self._answer, methods=["POST"])],
        )

    async def watch(self) -> None:
        """Record what other programs commit, until cancelled. A disk that is full is tried again."""
        is_reported = False
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                has_news = await asyncio.to_thread(self._look)
            except (apsw.BusyError, apsw.FullError, apsw.IOError) as error:
                if not is_reported:
                    _report(error)
                is_reported = True
                continue
            is_reported = False
            if has_news:
                await self._announce()

    async def keep_tape(self, tape: ServedTape) -> None:
        """Bring the tape to each revision, until the server stops."""
        revision, pause = "", 0.0
        while not self._stopping:
            await self._wait_until_after(revision)
            revision, began = self._served.revision, time.monotonic()
            try:
                await asyncio.to_thread(tape.advance)
                pause = _TAPE_PAUSES * (time.monotonic() - began)
            except apsw.BusyError:
                revision = ""  # a program holds one of the files: again
            except apsw.InterruptError:
                return
            # All rows are compared each time, so a large file gets longer pauses rather than a busy machine.
            await asyncio.sleep(max(pause, LOOK_SECONDS))

    async def stop(self) -> None:
        """End all long polls."""
        self._stopping = True
        await self._announce()

    def _look(self) -> bool:
        return self._served.has_news() and self._served.advance()

    async def _announce(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def _answer(self, request: Request) -> Response:
        if not self._is_known(request):
            return PlainTextResponse("no valid token", 401, {"WWW-Authenticate": "Bearer"})
        # Web pages may post to this machine, and browsers always say that it was one.
        if "origin" in request.headers:
            return PlainTextResponse("requests of web pages are not accepted", 403)
        answers: dict[str, tuple[int, Callable[[bytes], Awaitable[Response]]]] = {
            "pull-updates": (min(_PULL_REQUEST_BYTES, self._limits.body_bytes), self._pull),
            "v2/pipeline": (self._limits.body_bytes, self._push),
        }
        path = request.path_params["path"]
        found = next((answer for name, answer in answers.items() if path == name or path.endswith(f"/{name}")), None)
        if found is None:
            return PlainTextResponse("there is no such path", 404)
        limit, answer = found
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.seconds):
                await self._read(request, limit, body)
            return await answer(bytes(body))
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse("the body did not arrive in time", 408)
        except _RefusedBodyError as error:
            return PlainTextResponse(str(error), error.status)
        except (MalformedMessageError, MalformedBatchError) as error:
            return PlainTextResponse(str(error), 400)
        except UnknownRevisionError as error:
            return PlainTextResponse(str(error), 410)
        except Exception as error:  # noqa: BLE001 - what it says may hold values of rows: neither logged nor sent
            _report(error)
            return PlainTextResponse("an unexpected error of the server", 500)
        finally:
            self._held_bytes -= len(body)

    async def _read(self, request: Request, limit: int, body: bytearray) -> None:
        """Read the body, but no more than the limit."""
        length = request.headers.get("content-length", "0")
        too_large = _RefusedBodyError(413, f"the body is larger than {limit} bytes")
        if length.isdigit() and int(length) > limit:
            raise too_large
        async for piece in request.stream():
            body += piece
            self._held_bytes += len(piece)
            if len(body) > limit:
                raise too_large
            if self._held_bytes > _BODIES * self._limits.body_bytes:
                raise _RefusedBodyError(503, "too many large bodies at once: try again")

    def _is_known(self, request: Request) -> bool:
        if self._limits.token is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode(), self._limits.token.reveal().encode()
        )

    async def _push(self, body: bytes) -> Response:
        async with self._pushing:
            # Also decoded one at a time: as objects of Python, JSON takes many times as much memory.
            try:
                request = await asyncio.to_thread(json.loads, body)
            except (ValueError, RecursionError):
                raise MalformedBatchError("the body is not JSON") from None
            answer = await asyncio.to_thread(self._served.push, request)
        await self._announce()
        return Response(await asyncio.to_thread(json.dumps, answer), media_type="application/json")

    async def _pull(self, body: bytes) -> Response:
        request = PullRequest.decode(body)
        if request.encoding or request.stream_kind:
            raise MalformedMessageError("only raw pages are served")
        await asyncio.to_thread(self._look)
        if request.long_poll_ms and request.client_revision and not request.server_revision:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(request.long_poll_ms / 1000, LONGEST_POLL_SECONDS)):
                    await self._wait_until_after(request.client_revision)
        stack = ExitStack()
        try:
            pulled = self._served.pulling(request.client_revision, request.server_revision)
            name, pages, numbers, revision = await asyncio.to_thread(stack.enter_context, pulled)
            if request.selector:
                chosen = await asyncio.to_thread(decode_selector, request.selector, pages)
                numbers = [number for number in numbers if number in chosen]
            header = delimited(PullHeader(name, pages).encode())
            length = len(header) + sum(map(page_message_bytes, numbers))
            return _PagesResponse(
                self._stream(header, revision, numbers),
                headers={"Content-Length": str(length)},
                media_type="application/protobuf",
                stack=stack,
            )
        except BaseException:
            stack.close()
            raise

    async def _wait_until_after(self, revision: str) -> None:
        """Wait for another revision than this one, or for the end of the server."""
        async with self._news:
            await self._news.wait_for(lambda: self._stopping or self._served.revision != revision)

    async def _stream(self, header: bytes, revision: int, numbers: list[int]) -> AsyncIterator[bytes]:
        yield header
        chunks = self._served.read(revision, numbers)
        while chunk := await asyncio.to_thread(next, chunks, None):
            yield b"".join(encode_page(number, data) for number, data in chunk)


class _PagesResponse(StreamingResponse):
    """Keeps its revision until the last page is sent or the client is gone."""

    def __init__(self, *arguments: object, stack: ExitStack, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self._stack = stack

    async def __call__(self, *arguments: object) -> None:
        try:
            await super().__call__(*arguments)  # type: ignore[arg-type]
        finally:
            self._stack.close()


def _report(error: Exception) -> None:
    _log.error("unexpected %s", origin(error))
