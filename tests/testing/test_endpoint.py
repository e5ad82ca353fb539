"""The endpoint takes what arrives, and nothing else."""

from __future__ import annotations

import socket

from tailrace.testing.endpoint import WebhookEndpoint


def test_a_request_that_breaks_off_within_its_body_does_not_count() -> None:
    with WebhookEndpoint() as endpoint, socket.create_connection(("127.0.0.1", endpoint.port)) as client:
        client.sendall(b"POST /hook HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n[{")
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
        assert endpoint.requests == []
