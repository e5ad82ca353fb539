"""Which requests the dashboard answers at all, before any of it looks at them.

    421   a Host header that is not ours: another name leads here (DNS rebinding)
    403   a request that a page of another origin makes, or one that a form could send
    401   no or a wrong token, where there is one
    413   a body that is too large      408   one that does not arrive

Pure ASGI, so that what it wraps never sees a request that it refuses.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any

from tailrace.dashboard.answer import encode
from tailrace.option.value import Secret, is_loopback
from tailrace.system.trace import origin

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_BYTES = 4096
"""The largest body of a request; the largest that is needed has some 100."""
SESSION_SECONDS = 12 * 3600
"""How long a browser stays logged in."""

_log = logging.getLogger(__name__)

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "manifest-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


@dataclass(frozen=True)
class Access:
    """From where the dashboard may be used, and with what.

    `host` is what it listens on, `names` under which further names it is reached, such as that of a proxy. `token` is
    None where only this machine can connect.
    """

    host: str
    names: frozenset[str] = frozenset()
    token: Secret | None = field(default=None, repr=False)

    def is_ours(self, name: str) -> bool:
        """Whether a Host header, without its port, names this server.

        An address cannot be made to lead here by someone else's name server, so with a token every address is ours.
        """
        name = name.rstrip(".")
        if name in self.names or name == self.host.lower() or is_loopback(name):
            return True
        return self.token is not None and _is_address(name)

    # The cookie says until when it holds, and proves that it was made by someone who knows the token. So it survives a
    # restart, ends with the token, and does not tell it.

    @property
    def cookie(self) -> str:
        """The name of the cookie: two dashboards on one machine have two, as a browser keeps them for all ports."""
        return f"tailrace-{self._sign('name')[:12]}"

    def make_session(self, now: float | None = None) -> str:
        until = f"{(time.time() if now is None else now) + SESSION_SECONDS:.0f}"
        return f"{until}.{self._sign(until)}"

    def is_session(self, value: str, now: float | None = None) -> bool:
        until, _, proof = value.partition(".")
        is_signed = hmac.compare_digest(proof.encode(), self._sign(until).encode())
        is_number = until.isascii() and until.isdigit() and len(until) < 20
        return is_signed and is_number and int(until) > (time.time() if now is None else now)

    def is_token(self, value: str) -> bool:
        return self.token is not None and hmac.compare_digest(_bytes(value), _bytes(self.token.reveal()))

    def _sign(self, text: str) -> str:
        assert self.token is not None
        return hmac.digest(self.token.reveal().encode(), f"tailrace dashboard {text}".encode(), "sha256").hex()


_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d+)?", re.IGNORECASE)


def host_name(text: str) -> str | None:
    """The name or address in `host` or `host:port`, in lower case; None where it is neither."""
    found = _HOST.fullmatch(text)
    return (found[1] or found[2]).lower() if found else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bytes(text: str) -> bytes:
    # JSON may hold half of a character.
    return text.encode("utf-8", "surrogatepass")


class Guard:
    """Wraps an application. `is_open` tells which paths need no token."""

    def __init__(self, application: Application, access: Access, is_open: Callable[[Scope], bool]) -> None:
        self._application = application
        self._access = access
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(send, *refusal)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(each for each in _HEADERS if each[0] not in known)]
            await send(message)

        try:
            await self._application(scope, receive, send_with_headers)
        except Exception as error:  # noqa: BLE001 - it is answered already; the server would log its text
            _log.error("a request failed with %s", origin(error))

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, message and fix of a request that is not answered."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == "host"]
        name = host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not self._access.is_ours(name):
            fix = "use the address that the dashboard printed, or start it with --host NAME for a proxy's name"
            return 421, "this server is not known under that name", fix
        # Of a header that comes more than once every value counts: joined, they are none of those that are let in.
        values: dict[str, str] = {}
        for each, value in headers:
            values[each] = f"{values[each]}, {value}" if each in values else value
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            if not self._is_same_origin(values, hosts[0]):
                return 403, "requests of other sites are not accepted", "use the dashboard's own page, or a program"
            kind = values.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return 403, "only application/json is accepted", "send Content-Type: application/json"
        if self._access.token is not None and not self._is_open(scope) and not self._is_known(headers):
            fix = "send Authorization: Bearer TOKEN, or open the page with #token=TOKEN at the end of its address"
            return 401, "no valid token", fix
        return None

    def _is_same_origin(self, headers: dict[str, str], host: str) -> bool:
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        if origin is None:
            return True  # no browser: they say where a request comes from
        own = origin.partition("://")[2].lower()
        # A proxy may give its own name for us in Host and leave the browser's in Origin.
        return own == host.lower() or host_name(own) in self._access.names

    def _is_known(self, headers: list[tuple[str, str]]) -> bool:
        for name, value in headers:
            if name == "authorization":
                scheme, _, given = value.partition(" ")
                if scheme.lower() == "bearer" and self._access.is_token(given.strip()):
                    return True
            if name == "cookie" and self._has_session(value):
                return True
        return False

    def _has_session(self, header: str) -> bool:
        try:
            found = SimpleCookie(header).get(self._access.cookie)
        except CookieError:
            return False
        return found is not None and self._access.is_session(found.value)


async def _refuse(send: Send, status: int, message: str, fix: str) -> None:
    error = {"code": "refused", "message": message, "fix": {"text": fix, "commands": []}}
    body = encode({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        *_HEADERS,
    ]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="tailrace"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
