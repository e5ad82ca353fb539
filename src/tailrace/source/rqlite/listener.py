"""Where the receiver listens, and the certificate it shows there."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.errors import ConfigError, UnavailableError
from tailrace.source.rqlite.option import split_listen


@contextmanager
def listening(listen: str, backlog: int) -> Iterator[socket.socket]:
    """A listening socket for as long as the context lasts. Raises UnavailableError when it cannot be had."""
    host, port = split_listen(listen)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {listen}: {error.strerror}", fix="stop what listens there, or change source.listen"
        ) from error
    with listener:
        yield listener


def secure(cert: str, key: str | None, client_ca: str | None) -> ssl.SSLContext:
    """TLS 1.2 or later; with `client_ca` only for clients that show a certificate of that authority.

    Raises ConfigError when the files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty passphrase: without one, a locked key would ask for it on a terminal that is not there.
        context.load_cert_chain(cert, key, password=lambda: b"")
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"the endpoint's certificate cannot be used: {reason}",
            fix="give readable PEM files that belong together, the key without a passphrase:"
            " source.tls.cert, .key, .client_ca",
        ) from None
    return context
