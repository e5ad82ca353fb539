"""How a body gets to an endpoint: one method, one class per scheme.

Redirects are never followed. The check of the server's certificate is never switched off. An exchange has one deadline
from the first byte to the last, so an endpoint that answers a byte at a time cannot delay us longer.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from tailrace.destination.webhook.address import WebhookTarget
from tailrace.destination.webhook.option import WebhookOptions, WebhookTlsOptions
from tailrace.errors import ConfigError, UnavailableError

ANSWER_BYTES = 64 << 10
"""How much of an answer is read; an endpoint that sends more is disconnected."""


@dataclass(frozen=True)
class Answer:
    """An endpoint's answer. Its body is not needed and never kept."""

    status: int
    retry_after: str | None = None


class Transport(Protocol):
    """One endpoint. Used by one thread; only `abort` may come from another."""

    def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send one request and wait for its answer, whatever it is.

        Raises UnavailableError when there was none in time, PreflightError when requests to the target are not allowed.
        No message holds a part of the URL after its host, a header or a body.
        """
        ...

    def abort(self) -> None:
        """End the current exchange, if any: `post` raises UnavailableError soon."""
        ...

    def close(self) -> None:
        """Close the connection; the next `post` makes a new one."""
        ...


class HttpTransport:
    """HTTP and HTTPS, over one connection that is kept until one side closes it.

    For each new connection the name is resolved, its addresses are checked, and one that passed is used.
    """

    def __init__(self, options: WebhookOptions) -> None:
        self._target = WebhookTarget.of(options.url.reveal())
        self._timeout = options.timeout
        self._allow_private = options.allow_private
        self._server_name = options.tls.server_name or self._target.host
        self._context = _context(options.tls) if self._target.scheme == "https" else None
        self._connection: HTTPConnection | None = None

    def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        sent = {"Host": self._target.authority, "User-Agent": "tailrace", **headers}
        if self._target.authorization and "authorization" not in {name.lower() for name in headers}:
            sent["Authorization"] = self._target.authorization
        deadline = time.monotonic() + self._timeout
        timer = threading.Timer(self._timeout, self.abort)
        timer.daemon = True
        timer.start()
        try:
            answer = self._exchange(body, sent, deadline)
        except (OSError, HTTPError, http.client.HTTPException, ValueError) as error:
            self.close()
            late = time.monotonic() >= deadline
            raise self._unavailable(f"no answer within {self._timeout:g} s" if late else _reason(error)) from None
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        return answer

    def abort(self) -> None:
        connection = self._connection
        if connection is not None and connection.sock is not None:
            with suppress(OSError):
                # Below the TLS layer: its own shutdown is not made for a second thread.
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _exchange(self, body: bytes, headers: Mapping[str, str], deadline: float) -> Answer:
        connection = self._kept() or self._connect(deadline)
        connection.request("POST", self._target.path, body=body, headers=headers, preload_content=False)
        response = connection.getresponse()
        answer = Answer(response.status, response.headers.get("Retry-After"))
        try:
            rest = response.read(ANSWER_BYTES + 1, decode_content=False)
        except (OSError, HTTPError, http.client.HTTPException):
            # The status is what counts, and it was complete.
            self.close()
        else:
            if len(rest) > ANSWER_BYTES or response.headers.get("Connection", "").lower() == "close":
                self.close()
        return answer

    def _kept(self) -> HTTPConnection | None:
        connection = self._connection
        if connection is not None and connection.is_connected:
            if connection.sock is not None:
                connection.sock.settimeout(self._timeout)
            return connection
        self.close()
        return None

    def _connect(self, deadline: float) -> HTTPConnection:
        addresses = self._target.addresses(allow_private=self._allow_private)
        for number, address in enumerate(addresses, 1):
            connection = self._connection = self._make(address, max(deadline - time.monotonic(), 0.001))
            try:
                connection.connect()
            except (OSError, HTTPError) as error:
                self.close()
                # Of several addresses only one that cannot be reached at all makes way for the next.
                if isinstance(error, ssl.SSLError) or number == len(addresses) or time.monotonic() >= deadline:
                    raise
            else:
                return connection
        raise OSError("no address")

    def _make(self, address: str, timeout: float) -> HTTPConnection:
        if self._context is None:
            return HTTPConnection(address, self._target.port, timeout=timeout)
        return HTTPSConnection(
            address,
            self._target.port,
            timeout=timeout,
            ssl_context=self._context,
            server_hostname=self._server_name,
        )

    def _unavailable(self, why: str) -> UnavailableError:
        return UnavailableError(
            f"{self._target.shown}: {why}",
            fix="check that the endpoint is running; queued events are sent once it answers",
        )


class StdoutTransport:
    """Every body as a line on standard output, for trying things out."""

    def __init__(self, options: WebhookOptions) -> None:
        self._lock = threading.Lock()

    def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        try:
            with self._lock:
                sys.stdout.buffer.write(body + b"\n")
                sys.stdout.buffer.flush()
        except OSError:
            raise UnavailableError("standard output was closed", fix="run it with its output open") from None
        return Answer(200)

    def abort(self) -> None:
        """Nothing: writing does not wait."""

    def close(self) -> None:
        """Nothing: it stays open for others."""


SCHEMES: dict[str, Callable[[WebhookOptions], Transport]] = {
    "http": HttpTransport,
    "https": HttpTransport,
    "stdout": StdoutTransport,
}
"""What serves each scheme of `url`. One more entry is one more scheme."""


def scheme_of(url: str) -> str:
    """The scheme of a URL; `stdout` stands for itself."""
    return url.partition(":")[0].lower()


def open_transport(options: WebhookOptions) -> Transport:
    """The transport for a URL, not yet connected. Raises ConfigError for TLS files that cannot be used."""
    return SCHEMES[scheme_of(options.url.reveal())](options)


def _context(tls: WebhookTlsOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if tls.cert:
            # A key with a passphrase would ask for it on a terminal that no one watches.
            context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the files in destination.tls cannot be used: {getattr(error, 'strerror', None) or type(error).__name__}",
            fix="give PEM files that this process may read: ca, and cert with its key (without a passphrase)",
        ) from None
    return context


def _reason(error: Exception) -> str:
    """Why an exchange failed, in words that quote nothing of the exchange."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {seen.verify_message}"
        if isinstance(seen, ssl.SSLError):
            return f"TLS failed: {(seen.reason or type(seen).__name__).replace('_', ' ').lower()}"
        if isinstance(seen, ConnectionRefusedError):
            return "it refuses connections"
        if isinstance(seen, TimeoutError):
            return "no answer in time"
        seen = seen.__cause__ or seen.__context__
    is_lost = isinstance(error, OSError | HTTPError | http.client.IncompleteRead)
    return "the connection was lost" if is_lost else "its answer is not HTTP"
