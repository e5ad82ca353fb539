"""Requests to a real endpoint, over HTTP and TLS, to addresses that are allowed."""

from __future__ import annotations

import base64
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tailrace.destination.webhook.address import WebhookTarget, is_public
from tailrace.destination.webhook.option import WebhookOptions
from tailrace.destination.webhook.transport import ANSWER_BYTES, Answer, HttpTransport, open_transport
from tailrace.errors import ConfigError, PreflightError, UnavailableError
from tailrace.option.value import OptionContext
from tailrace.testing.certificate import Authority, make_authority
from tailrace.testing.endpoint import Reply, WebhookEndpoint
from tailrace.testing.wait import wait_until

CANARY = "c4nary-Pa55"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


def to(url: str, timeout: float = 5.0, *, allow_private: bool = True, **tls: Any) -> WebhookOptions:
    keys = {"url": url, "timeout": timeout, "allow_private": allow_private, "tls": tls}
    nowhere = Path("/nowhere")
    return WebhookOptions.model_validate({"type": "webhook", **keys}, context=OptionContext("shop", nowhere, nowhere))


def post(transport: HttpTransport, body: bytes = b"[]", **headers: str) -> Answer:
    try:
        return transport.post(body, headers)
    finally:
        transport.close()


def test_a_request_brings_its_body_and_headers_over_a_connection_that_is_kept() -> None:
    with WebhookEndpoint() as endpoint:
        transport = HttpTransport(to(endpoint.url + "?a=1"))
        for _ in range(3):
            assert transport.post(b'[{"id":"1"}]', {"Content-Type": "application/json"}) == Answer(200)
        transport.close()
        assert [request.path for request in endpoint.requests] == ["/hook?a=1"] * 3
        first = endpoint.requests[0]
        assert first.headers["host"] == f"localhost:{endpoint.port}"
        assert first.headers["content-type"] == "application/json"
        assert endpoint.duplicates() == 2


def test_a_login_in_the_url_is_sent_as_a_header_and_never_shown() -> None:
    with WebhookEndpoint() as endpoint:
        url = endpoint.url.replace("://", f"://me:{CANARY}%21@")
        transport = HttpTransport(to(url))
        post(transport)
        login = base64.b64encode(f"me:{CANARY}!".encode()).decode()
        assert endpoint.requests[0].headers["authorization"] == f"Basic {login}"
        post(transport, Authorization="Bearer x")
        assert endpoint.requests[1].headers["authorization"] == "Bearer x"
    with pytest.raises(UnavailableError, match="refuses connections") as refused:
        post(transport)
    assert CANARY not in f"{refused.value!r}{refused.value}{transport._target!r}{to(url)!r}"


def test_an_endpoint_that_closed_its_connection_gets_a_new_one() -> None:
    with WebhookEndpoint() as endpoint:
        transport = HttpTransport(to(endpoint.url))
        endpoint.script(Reply(200, {"Connection": "close"}), Reply(cut=True))
        assert transport.post(b"[]", {}).status == 200
        with pytest.raises(UnavailableError, match=r"connection was lost|not HTTP"):
            transport.post(b"[]", {})
        assert transport.post(b"[]", {}).status == 200
        transport.close()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_an_answer_like_any_other(status: int) -> None:
    with WebhookEndpoint() as endpoint, WebhookEndpoint() as other:
        endpoint.script(Reply(status, {"Location": other.url}))
        assert post(HttpTransport(to(endpoint.url))).status == status
        assert other.requests == []


def test_an_answer_says_how_long_to_wait() -> None:
    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(429, {"Retry-After": "17"}))
        assert post(HttpTransport(to(endpoint.url))) == Answer(429, "17")


def test_an_endless_answer_is_read_no_further_than_it_may_go_on() -> None:
    with WebhookEndpoint() as endpoint:
        transport = HttpTransport(to(endpoint.url))
        endpoint.script(Reply(200, body=b"x" * (ANSWER_BYTES * 50)))
        assert transport.post(b"[]", {}).status == 200
        assert transport._connection is None
        assert transport.post(b"[]", {}).status == 200
        transport.close()


@pytest.mark.parametrize("reply", [Reply(hold_seconds=30), Reply(200, drip_seconds=1.0)])
def test_one_deadline_holds_for_the_whole_exchange(reply: Reply) -> None:
    with WebhookEndpoint() as endpoint:
        endpoint.script(reply)
        transport, began = HttpTransport(to(endpoint.url, 2.0)), time.monotonic()
        with pytest.raises(UnavailableError, match="no answer within 2 s"):
            transport.post(b"[]", {})
        assert 1.9 < time.monotonic() - began < 20  # the answer would take longer than that
        assert transport.post(b"[]", {}).status == 200
        transport.close()


def test_an_endpoint_that_takes_connections_and_says_nothing_holds_no_handshake_up(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"https://localhost:{silent.getsockname()[1]}/"
        with pytest.raises(UnavailableError, match="no answer"):
            post(HttpTransport(to(url, 0.5, ca=authority.ca_file)))


def test_an_exchange_can_be_aborted_by_another_thread() -> None:
    import threading

    with WebhookEndpoint() as endpoint:
        endpoint.script(Reply(hold_seconds=30))
        transport = HttpTransport(to(endpoint.url, 30))

        def abort() -> None:
            wait_until(lambda: bool(endpoint.requests))
            transport.abort()

        thread = threading.Thread(target=abort)
        thread.start()
        with pytest.raises(UnavailableError):
            transport.post(b"[]", {})
        thread.join()


def test_tls_needs_a_certificate_that_the_authority_signed_for_this_name(authority: Authority, tmp_path: Path) -> None:
    with WebhookEndpoint(tls=authority) as endpoint:
        assert post(HttpTransport(to(endpoint.url, ca=authority.ca_file))).status == 200
        by_address = endpoint.url.replace("localhost", "127.0.0.1")
        assert post(HttpTransport(to(by_address, ca=authority.ca_file))).status == 200
        with pytest.raises(UnavailableError, match="certificate is not accepted"):
            post(HttpTransport(to(endpoint.url)))
        with pytest.raises(UnavailableError, match=r"certificate is not accepted: .*other"):
            post(HttpTransport(to(endpoint.url, ca=authority.ca_file, server_name="other.example")))
        stranger = make_authority(tmp_path / "stranger")
        with pytest.raises(UnavailableError, match="certificate is not accepted"):
            post(HttpTransport(to(endpoint.url, ca=stranger.ca_file)))
        assert len(endpoint.requests) == 2


def test_an_expired_certificate_is_not_accepted(authority: Authority) -> None:
    with WebhookEndpoint(tls=authority, expired=True) as endpoint:
        with pytest.raises(UnavailableError, match="certificate has expired"):
            post(HttpTransport(to(endpoint.url, ca=authority.ca_file)))
        assert endpoint.requests == []


def test_mutual_tls_needs_our_certificate(authority: Authority) -> None:
    with WebhookEndpoint(tls=authority, mutual=True) as endpoint:
        with pytest.raises(UnavailableError, match=r"TLS failed|connection was lost"):
            post(HttpTransport(to(endpoint.url, ca=authority.ca_file)))
        assert endpoint.requests == []
        files: dict[str, Any] = {
            "ca": authority.ca_file,
            "cert": authority.client_cert_file,
            "key": authority.client_key_file,
        }
        assert post(HttpTransport(to(endpoint.url, **files))).status == 200


def test_plain_http_where_tls_is_wanted_and_the_other_way_round_fail(authority: Authority) -> None:
    with WebhookEndpoint() as plain, WebhookEndpoint(tls=authority) as secure:
        for url in (plain.url.replace("http:", "https:"), secure.url.replace("https:", "http:")):
            with pytest.raises(UnavailableError):
                post(HttpTransport(to(url, 2, ca=authority.ca_file)))
        assert plain.requests == secure.requests == []


def test_tls_files_that_cannot_be_used_are_a_mistake_in_the_file(authority: Authority) -> None:
    with pytest.raises(ConfigError, match=r"destination\.tls"):
        open_transport(to("https://example.com", cert=authority.client_cert_file, key=authority.key_file))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "192.0.2.1",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12:3456::1",
        "fec0::1",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "not an address",
    ],
)
def test_addresses_inside_a_network_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "2130706433", "0x7f.1", "0177.0.0.1", "127.1"])
def test_a_private_target_is_refused_however_it_is_written(host: str) -> None:
    with WebhookEndpoint() as endpoint:
        transport = HttpTransport(to(f"http://{host}:{endpoint.port}/{CANARY}", 2.0, allow_private=False))
        with pytest.raises((PreflightError, UnavailableError)) as refused:
            transport.post(b"[]", {})
        assert CANARY not in str(refused.value)
        assert endpoint.requests == []


def test_the_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: str, *args: Any, **kwargs: Any) -> Any:
        looked_up.append(host)
        return real("127.0.0.1" if host == "hook.example" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with WebhookEndpoint() as endpoint:
        url = f"http://hook.example:{endpoint.port}/"
        with pytest.raises(PreflightError, match=r"hook\.example resolves to 127\.0\.0\.1"):
            post(HttpTransport(to(url, allow_private=False)))
        looked_up.clear()
        assert post(HttpTransport(to(url))).status == 200
        assert endpoint.requests[0].headers["host"] == f"hook.example:{endpoint.port}"
    assert [host for host in looked_up if host == "hook.example"] == ["hook.example"]


def test_the_parts_of_a_url() -> None:
    target = WebhookTarget.of("https://me@[2606:4700::1]:444/a/b?c=d")
    assert (target.host, target.port, target.path) == ("2606:4700::1", 444, "/a/b?c=d")
    assert (target.authority, target.shown) == ("[2606:4700::1]:444", "https://[2606:4700::1]:444")
    assert WebhookTarget.of("http://example.com").path == "/"


def test_stdout_takes_every_body_as_a_line(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    transport = open_transport(to("stdout"))
    assert transport.post(b"[1]", {}).status == 200
    assert transport.post(b"[2]", {}).status == 200
    assert capfdbinary.readouterr().out == b"[1]\n[2]\n"
