"""Requests that must not be answered, headers that every answer has, and secrets that none has."""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from urllib.parse import quote

import pytest

from tailrace.cli.dashboard import open_dashboard
from tailrace.dashboard.guard import BODY_BYTES, SESSION_SECONDS, Access
from tailrace.dashboard.openapi import describe
from tailrace.dashboard.page_file import list_files
from tailrace.errors import ConfigError, UnavailableError
from tailrace.option.value import Secret
from tailrace.state import StateStore
from tailrace.testing.certificate import make_authority
from tailrace.testing.wait import wait_until
from tests.support.dashboard import ORDERS, PAYMENTS, VALUE, Client, Reply, fill, open_store, serving, write_file

TOKEN = "c4nary-token-of-the-dashboard"
PASSWORD = "c4nary-Pa55"
API = "/api/v1/pipelines"
ACT = f"{API}/shop/tables/{ORDERS}/pause"
JSON = {"Content-Type": "application/json"}
PROXY = "dash.example"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DASHBOARD_TOKEN", TOKEN)
    file = write_file(tmp_path)
    file.write_text(file.read_text().replace("${UNSET}", f"postgresql://shop:{PASSWORD}@db.example/shop"))
    return file


@pytest.fixture
def store(file: Path) -> Iterator[StateStore]:
    with open_store(file) as opened:
        fill(opened)
        yield opened


@pytest.fixture
def client(file: Path, store: StateStore) -> Iterator[Client]:
    with serving([file]) as served:
        yield served


@pytest.fixture
def locked(file: Path, store: StateStore) -> Iterator[Client]:
    """One that needs a token."""
    with serving([file], token_env="DASHBOARD_TOKEN", names=[PROXY]) as served:
        yield served


def post(client: Client, path: str = ACT, headers: dict[str, str] = {}, *, named: str | None = None) -> Reply:
    return client.send("POST", path, b"{}", JSON | headers, named=named)


# Where it listens.


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "db.example"])
def test_an_address_that_others_reach_needs_a_token(file: Path, host: str) -> None:
    with pytest.raises(ConfigError) as caught, open_dashboard([file], f"{host}:0", None):
        pass
    assert "--token-env" in (caught.value.fix or "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.8.8"])
def test_loopback_needs_none(file: Path, host: str) -> None:
    with open_dashboard([file], f"{host}:0", None) as dashboard:
        assert dashboard.url.startswith(f"http://{host}:")


def test_a_token_that_could_be_guessed_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASHBOARD_TOKEN", "secret")
    with (
        pytest.raises(ConfigError, match="16 characters") as caught,
        open_dashboard([file], "127.0.0.1:0", "DASHBOARD_TOKEN"),
    ):
        pass
    assert "secret" not in str(caught.value)


def test_a_token_that_is_not_set_is_an_error_and_not_an_open_door(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DASHBOARD_TOKEN")
    with (
        pytest.raises(ConfigError, match="DASHBOARD_TOKEN is not set"),
        open_dashboard([file], "127.0.0.1:0", "DASHBOARD_TOKEN"),
    ):
        pass


def test_an_address_in_use_is_an_error_before_anything_is_served(file: Path, client: Client) -> None:
    with (
        pytest.raises(UnavailableError, match="Address already in use") as caught,
        open_dashboard([file], f"127.0.0.1:{client.port}", None),
    ):
        pass
    assert "--listen" in (caught.value.fix or "")


def test_two_pipelines_of_one_name_are_refused(tmp_path: Path, file: Path) -> None:
    with (
        pytest.raises(ConfigError, match="two pipelines of the name shop"),
        open_dashboard([file, write_file(tmp_path / "other")], "127.0.0.1:0", None),
    ):
        pass


# Names and origins of requests.


@pytest.mark.parametrize(
    "named",
    [
        "evil.example",
        "evil.example:8470",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "",
        "[::1",
        "127.0.0.1:x@evil.example",
        "a b",
    ],
)
def test_a_foreign_host_is_answered_with_421(client: Client, named: str) -> None:
    for path in ("/", API, "/healthz", "/metrics"):
        reply = client.send("GET", path, named=named)
        assert reply.status in (400, 421), path  # HTTP itself refuses a request without Host
        assert b"shop" not in reply.body


@pytest.mark.parametrize("named", ["127.0.0.1:9", "localhost", "LOCALHOST:8470", "[::1]:8470", "127.0.0.2"])
def test_names_of_this_machine_are_known_at_any_port(client: Client, named: str) -> None:
    assert client.send("GET", "/healthz", named=named).status == 200


def test_with_a_token_addresses_and_given_names_are_known(locked: Client) -> None:
    for named in ("10.0.0.1", PROXY, PROXY.upper() + ":443"):
        assert locked.send("GET", "/healthz", named=named).status == 200
    assert locked.send("GET", "/healthz", named="evil.example").status == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://localhost"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://127.0.0.1:{port}", "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_a_request_of_another_sites_page_is_refused(client: Client, store: StateStore, headers: dict[str, str]) -> None:
    sent = {name: value.format(port=client.port) for name, value in headers.items()}
    assert post(client, headers=sent).status == 403
    assert post(client, "/login", sent).status == 403
    assert store.open_requests() == []


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("Origin", "http://evil.example", "http://127.0.0.1:{port}"),
        ("Sec-Fetch-Site", "cross-site", "same-origin"),
        ("Content-Type", "text/plain", "application/json"),
    ],
)
def test_a_header_that_comes_twice_does_not_hide_the_first(
    client: Client, store: StateStore, name: str, first: str, second: str
) -> None:
    headers = {"Content-Type": "application/json", name: first, name.lower(): second.format(port=client.port)}
    assert client.send("POST", ACT, b"{}", headers).status == 403
    assert store.open_requests() == []


@pytest.mark.parametrize(
    "headers",
    [{}, {"Origin": "http://127.0.0.1:{port}"}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}],
)
def test_the_own_page_and_programs_may_ask(client: Client, headers: dict[str, str]) -> None:
    assert post(client, headers={name: value.format(port=client.port) for name, value in headers.items()}).status == 202


def test_the_page_behind_a_proxy_may_ask(locked: Client) -> None:
    headers = {"Origin": f"https://{PROXY}", "Authorization": f"Bearer {TOKEN}"}
    assert post(locked, headers=headers).status == 202


@pytest.mark.parametrize(
    "kind",
    ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", "", "application/jsonp"],
)
def test_what_a_form_could_send_is_refused(client: Client, store: StateStore, kind: str) -> None:
    for path in (ACT, "/login"):
        assert client.send("POST", path, b"{}", {"Content-Type": kind}).status == 403
    assert store.open_requests() == []


# The token.

PROTECTED = [
    API,
    f"{API}/shop",
    f"{API}/shop/tables",
    f"{API}/shop/tables/{ORDERS}",
    f"{API}/shop/requests/1",
    "/metrics",
    "/openapi.json",
    "/healthz?pipeline=shop",
    "/nothing",
]


@pytest.mark.parametrize("path", PROTECTED)
@pytest.mark.parametrize(
    "given",
    [None, "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xff"],
)
def test_without_the_token_nothing_of_a_pipeline_is_told(locked: Client, path: str, given: str | None) -> None:
    reply = locked.send("GET", path, headers={} if given is None else {"Authorization": given})
    assert (reply.status, reply.error["code"]) == (401, "refused")
    assert reply.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("path", PROTECTED)
def test_with_the_token_everything_is(locked: Client, path: str) -> None:
    assert locked.get(path, Authorization=f"Bearer {TOKEN}").status in (200, 404, 503)
    assert locked.get(path, Authorization=f"bearer  {TOKEN}").status != 401


def test_an_action_needs_the_token(locked: Client, store: StateStore) -> None:
    assert post(locked).status == 401
    assert store.open_requests() == []
    assert post(locked, headers={"Authorization": f"Bearer {TOKEN}"}).status == 202


def test_the_page_and_the_liveness_of_the_server_need_no_token(locked: Client) -> None:
    for path in [*list_files(), "/healthz"]:
        assert locked.get(path).status == 200, path


def test_a_browser_exchanges_the_token_for_a_cookie_that_is_not_the_token(locked: Client) -> None:
    assert locked.post("/login", {"token": "wrong"}).status == 401
    assert locked.post("/login", {"token": None}).status == 401
    assert locked.post("/login", {"token": [TOKEN]}).status == 401
    assert locked.post("/login", {}).status == 401
    reply = locked.post("/login", {"token": TOKEN})
    assert reply.status == 200
    cookie = reply.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={SESSION_SECONDS}"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert TOKEN not in cookie
    session = cookie.partition(";")[0]
    assert locked.get(API, Cookie=f"other=1; {session}").status == 200
    assert post(locked, headers={"Cookie": session}).status == 202
    # A page of another site would have it sent along, were it not for SameSite: it is refused all the same.
    assert post(locked, headers={"Cookie": session, "Origin": "http://evil.example"}).status == 403


@pytest.mark.parametrize("token", ['"\\ud800"', '"\\u0000"', '""', "1", "null", '["x"]'])
def test_a_token_that_is_none_is_refused_as_such(locked: Client, token: str) -> None:
    body = f'{{"token": {token}}}'.encode()
    reply = locked.send("POST", "/login", body, {"Content-Type": "application/json"})
    assert (reply.status, reply.error["code"]) == (401, "refused")


def test_behind_tls_the_cookie_is_only_sent_there(locked: Client) -> None:
    reply = locked.post("/login", {"token": TOKEN}, Origin=f"https://{PROXY}")
    assert "Secure" in reply.headers["set-cookie"]


@pytest.mark.parametrize(
    "change", [lambda c: c[:-1], lambda c: c + "0", lambda c: "9" + c, lambda c: c.partition(".")[0], lambda c: ""]
)
def test_a_cookie_that_was_changed_is_none(locked: Client, change: object) -> None:
    assert callable(change)
    name, _, value = locked.post("/login", {"token": TOKEN}).headers["set-cookie"].partition(";")[0].partition("=")
    assert locked.get(API, Cookie=f"{name}={change(value)}").status == 401


def test_a_session_ends_and_belongs_to_its_token() -> None:
    access, other = (Access("127.0.0.1", token=Secret(token)) for token in (TOKEN, TOKEN + "2"))
    session = access.make_session(now=1000)
    assert access.is_session(session, now=1000 + SESSION_SECONDS - 1)
    assert not access.is_session(session, now=1000 + SESSION_SECONDS)
    assert not other.is_session(session, now=1000)
    assert access.cookie != other.cookie
    assert "c4nary" not in repr(access)


def test_logging_out_removes_the_cookie(locked: Client) -> None:
    session = locked.post("/login", {"token": TOKEN}).headers["set-cookie"].partition(";")[0]
    ended = locked.post("/logout", Cookie=session).headers["set-cookie"]
    assert "Max-Age=0" in ended
    assert ended.startswith(session.partition("=")[0] + '=""')


# Paths, methods, bodies.


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2f..%2fguard.py",
        "/%2e%2e/guard.py",
        "/page/index.html",
        "/.git/config",
        "//etc/passwd",
        "/index.html/",
        "/index.html%00",
        "/api/v1/../../guard.py",
        f"{API}/",
        f"{API}/shop/",
        f"{API}/shop/tables/",
        f"{API}/..%2f..%2fetc%2fpasswd",
        f"{API}/shop/tables/..%2f..%2f..%2fstate.db",
        f"{API}/shop/requests/1x",
        "/static/app.js",
        "/api",
    ],
)
def test_a_path_that_is_not_one_of_ours_is_404(client: Client, path: str) -> None:
    reply = client.get(path)
    assert (reply.status, reply.error["code"]) == (404, "unknown")


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST"])
def test_a_path_takes_only_its_methods(client: Client, method: str) -> None:
    for path in ("/", API, f"{API}/shop", f"{API}/shop/tables", "/healthz", "/metrics", "/openapi.json"):
        assert client.send(method, path, b"{}", JSON).status == 405, path


def test_an_action_is_never_done_by_a_get(client: Client, store: StateStore) -> None:
    assert client.get(ACT).status == 404  # there is no table of the name public.orders/pause
    assert client.send("OPTIONS", ACT).status == 405
    assert client.send("TRACE", ACT).status in (403, 405)
    assert store.open_requests() == []


def test_a_head_has_no_body(client: Client) -> None:
    reply = client.send("HEAD", API)
    assert (reply.status, reply.body) == (200, b"")


def test_a_body_is_limited_whether_it_says_its_length_or_not(client: Client, store: StateStore) -> None:
    large = b'{"x": "' + b"x" * BODY_BYTES + b'"}'
    assert client.send("POST", ACT, large, JSON).status == 413
    connection = HTTPConnection("127.0.0.1", client.port, timeout=60)
    connection.request("POST", ACT, iter([large[:3000], large[3000:]]), JSON, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    assert store.open_requests() == []


@pytest.mark.parametrize("body", [b"{", b"[]", b"1", b"\xff", b"[" * 2000, b'{"letter": ' + b"9" * 4000 + b"}", b"NaN"])
def test_a_body_that_is_no_object_is_refused(client: Client, store: StateStore, body: bytes) -> None:
    assert client.send("POST", ACT, body, JSON).status == 400
    assert store.open_requests() == []


def test_a_body_that_does_not_arrive_is_given_up(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.dashboard.application.BODY_SECONDS", 0.2)
    assert client.send("POST", ACT, b"{", JSON | {"Content-Length": "100"}).status == 408


# Headers.


def test_every_answer_forbids_what_the_page_does_not_need(client: Client) -> None:
    replies = [client.get(path) for path in ("/", API, "/nothing", "/metrics")]
    replies += [client.send("GET", "/", named="evil.example"), post(client), client.send("POST", ACT, b"{}")]
    for reply in replies:
        policy = dict(part.partition(" ")[::2] for part in reply.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {policy[each] for each in ("script-src", "style-src", "connect-src")} == {"'self'"}
        assert {policy[each] for each in ("frame-ancestors", "base-uri", "form-action")} == {"'none'"}
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "server" not in reply.headers
        assert not any(name.startswith("access-control") for name in reply.headers)


def test_answers_of_the_api_are_not_stored_and_files_are_asked_for_again(client: Client) -> None:
    assert client.get(API).headers["cache-control"] == "no-store"
    assert client.send("GET", "/", named="evil.example").headers["cache-control"] == "no-store"
    for path in list_files():
        reply = client.get(path)
        assert reply.headers["cache-control"] == "no-cache"
        assert client.get(path, If_None_Match=reply.headers["etag"]).status == 304
        assert not reply.headers["content-type"].startswith("application/octet-stream")


def test_the_page_loads_nothing_from_another_host_and_has_no_inline_program() -> None:
    files = list_files()
    page = files["/"].body.decode()
    assert not re.search(r"""\s(?:src|href)=["']?(?:https?:)?//""", page)
    assert not re.search(r"<script(?![^>]*\ssrc=)|\son\w+=|\sstyle=|<style", page)
    assert not re.search(r"javascript:", page)


# Secrets.


def test_no_answer_holds_a_password_a_token_or_a_row_value(locked: Client, file: Path, store: StateStore) -> None:
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    paths = [
        path.replace("{pipeline}", "shop").replace("{request}", "1")
        for path, methods in describe()["paths"].items()
        if "get" in methods
    ]
    paths += ["/healthz?pipeline=shop", f"{API}/shop?hours=24", f"{API}/{PASSWORD}x", "/nothing"]
    tables = [table.name for table in store.tables()]
    paths = [path.replace("{table}", quote(table)) for path in paths for table in tables]
    replies = [locked.send("GET", path, headers=bearer) for path in dict.fromkeys(paths)]
    replies += [locked.send("GET", path) for path in dict.fromkeys(paths)]
    replies += [post(locked, f"{API}/shop/tables/{PAYMENTS}/{kind}", bearer) for kind in ("skip", "retry", "resync")]
    replies += [post(locked, "/login"), locked.post("/login", {"token": TOKEN})]
    assert {reply.status for reply in replies} == {200, 202, 401, 404, 503}
    for reply in replies:
        everything = reply.body + repr(dict(reply.headers)).encode()
        for secret in (TOKEN, PASSWORD, VALUE.decode(), VALUE.hex()):
            # What was asked for is not repeated either.
            assert secret.encode() not in everything


def test_an_unexpected_error_does_not_tell_its_text(
    file: Path, store: StateStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError(PASSWORD)

    monkeypatch.setattr("tailrace.dashboard.pipeline.Health.of", fail)
    with caplog.at_level("DEBUG"), serving([file]) as client:
        reply = client.get(API)
        assert (reply.status, reply.error["code"]) == (500, "unexpected")
        assert PASSWORD.encode() not in reply.body
        assert client.get("/healthz").status == 200
    assert PASSWORD not in caplog.text
    assert "RuntimeError in " in caplog.text


# TLS.


def test_with_a_certificate_it_speaks_tls(file: Path, store: StateStore, tmp_path: Path) -> None:
    made = make_authority(tmp_path / "tls")
    with open_dashboard([file], "127.0.0.1:0", "DASHBOARD_TOKEN", (), made.cert_file, made.key_file) as dashboard:
        assert dashboard.url.startswith("https://127.0.0.1:")
        stop, started = threading.Event(), threading.Event()
        thread = threading.Thread(target=dashboard.serve, args=(stop, started.set))
        thread.start()
        try:
            wait_until(started.is_set)
            port = int(dashboard.url.rstrip("/").rpartition(":")[2])
            context = ssl.create_default_context(cafile=str(made.ca_file))
            connection = HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
            body = b'{"token": "%s"}' % TOKEN.encode()
            connection.request("POST", "/login", body, JSON)
            response = connection.getresponse()
            assert response.status == 200
            assert "Secure" in (response.getheader("set-cookie") or "")
            connection.close()
        finally:
            stop.set()
            thread.join()
