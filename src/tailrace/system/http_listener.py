"""Where an HTTP server listens, the certificate it shows there, and how long it waits for a request."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tailrace.errors import ConfigError, UnavailableError

HEAD_SECONDS = 30.0
"""How long the head of a request may take to arrive."""


STALL_SECONDS = 60.0
"""How long a client may take nothing of an answer."""


class HttpConnection(H11Protocol):
    """Closes a connection whose request head is late, or whose answer is not read: otherwise clients that do nothing
    could use up every connection, and whatever an answer holds.

    The server itself limits how long a connection stays idle after an answer.
    """

    _deadline: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._unwatch()
        super().resume_writing()

    def _watch(self, unsent: int) -> None:
        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left < unsent:
                self._watch(left)
            else:
                self.transport.abort()

        self._stall = self.loop.call_later(STALL_SECONDS, look)

    def _unwatch(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        has_begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not has_begun:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._unwatch()
        super().connection_lost(exc)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class HttpServer(uvicorn.Server):
    """A server that leaves signals to its owner."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def listening(address: tuple[str, int], backlog: int, *, option: str) -> Iterator[socket.socket]:
    """A listening socket for the duration of the context. Raises UnavailableError when it cannot be opened.

    `option` is what sets the address, for the message.
    """
    host, port = address
    try:
        family, kind, protocol, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(resolved)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror}", fix=f"stop what listens there, or change {option}"
        ) from error
    with listener:
        yield listener


def secure(
    cert: str, key: str | None, client_ca: str | None, *, options: str = "source.tls.cert, .key, .client_ca"
) -> ssl.SSLContext:
    """TLS 1.2 or later; with `client_ca` only for clients that show a certificate of that authority.

    Raises ConfigError when the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Pass an empty passphrase: otherwise OpenSSL prompts for one on a terminal, and there is none.
        context.load_cert_chain(cert, key, password=lambda: b"")
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"the endpoint's certificate cannot be used: {reason}",
            fix=f"give readable PEM files that belong together, the key without a passphrase: {options}",
        ) from None
    return context
