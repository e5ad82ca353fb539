"""The endpoint as rqlite and operators use it: a real process that serves real HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import urllib3

from tailrace.cli.run import receive
from tailrace.errors import ConfigError, OwnedError, TailraceError, UnavailableError
from tailrace.source.rqlite.cluster_journal import Cluster
from tailrace.source.rqlite.endpoint import CdcEndpoint, Lane, Limits, RateLimit
from tailrace.source.rqlite.receiver import RqliteReceiver, is_receiving
from tailrace.source.rqlite.request import PostedRequest, parse
from tailrace.system import http_listener
from tailrace.testing.certificate import make_authority
from tailrace.testing.wait import wait_until
from tests.support.rqlite_following import make_source
from tests.support.rqlite_posting import Running, body, entry, insert, lines, make_options, recorded, running

RECEIVE = (
    "import sys; from pathlib import Path; from tailrace.cli.run import receive; "
    "receive(Path(sys.argv[1]), as_json=True)"
)
JSON = {"Content-Type": "application/json"}
CREDENTIALS = {"username": "rq", "password": "canary-of-the-endpoint"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A receiver for tests that leave its services alone or use their own."""
    with running(make_options(tmp_path_factory.mktemp("shared") / "journal")) as receiver:
        yield receiver


def test_recorded_requests_go_to_the_journal_of_their_service(shared: Running) -> None:
    for content in recorded():
        assert shared.post(content) == 200
    assert {one["table"] for one in lines(shared.journal, "svc1")} == {"t", "tx", "wr", "tb"}
    assert len(lines(shared.journal)) > 30


def test_other_paths_and_methods_are_not_served(shared: Running) -> None:
    content = body([entry(1, insert(1))], service="paths")
    assert shared.post(content, path="/other") == 404
    assert shared.post(content, path="/cdc/") == 404
    assert shared.get("/cdc").status == 405
    assert shared.post(content, path="/healthz") == 405
    assert not (shared.journal / "paths").exists()


def test_bad_bodies_are_refused_and_counted_and_leave_nothing(shared: Running) -> None:
    assert shared.post(b"canary-of-a-row") == 400
    assert shared.post(b'{"service_id": "bad", "payload": [{"index": 1, "events": ["canary-of-a-row"]}]}') == 400
    assert shared.post(body([], service="..")) == 400
    assert shared.post(b"{}", headers={"Content-Encoding": "gzip"}) == 415
    wait_until(lambda: shared.status()["answers"].get("400", 0) >= 3)
    assert not (shared.journal / "bad").exists()
    assert "canary-of-a-row" not in shared.log.read_text()
    assert 'tailrace_rqlite_answers_total{code="400"}' in shared.get("/metrics").data.decode()


def test_a_body_above_the_bound_is_refused(shared: Running) -> None:
    large = body([entry(1, insert(1, v="x" * 1_000_000))], service="large")
    assert shared.post(large) == 413
    chunks = [large[at : at + 100_000] for at in range(0, len(large), 100_000)]
    answer = shared.pool.request("POST", shared.root + "/cdc", body=iter(chunks), headers=JSON, chunked=True)
    assert answer.status == 413
    assert not (shared.journal / "large").exists()


def test_refusals_do_not_fill_the_log(tmp_path: Path) -> None:
    with running(make_options(tmp_path / "journal")) as receiver:
        began = time.monotonic()
        for _ in range(100):
            assert receiver.post(b"[]") == 400
        host, _, port = receiver.root.partition("//")[2].partition(":")
        with socket.create_connection((host, int(port)), 10) as junk:
            junk.sendall(b"junk\r\n\r\n")
            assert junk.recv(100).startswith(b"HTTP/1.1 400")
        passed = time.monotonic() - began
        logged = receiver.log.read_text()
        assert "Invalid HTTP" not in logged
        assert 1 <= logged.count("was refused") <= 2 + passed


def test_an_idle_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listener, "HEAD_SECONDS", 2.0)
    stop = threading.Event()
    receiver = RqliteReceiver(make_options(tmp_path / "journal"), stop.is_set)
    thread = threading.Thread(target=receiver.run)
    thread.start()
    try:
        wait_until(lambda: receiver.describe(None)["receiving"] is True)
        address = ("127.0.0.1", receiver.port)
        with socket.create_connection(address, 10) as idle, socket.create_connection(address, 10) as slow:
            slow.sendall(b"POST /cdc HTTP/1.1\r\nHost: x\r\n")
            assert (idle.recv(1), slow.recv(1)) == (b"", b"")
        with urllib3.HTTPConnectionPool(*address, maxsize=1, retries=False) as pool:
            assert pool.request("POST", "/cdc", body=body([entry(1, insert(1))]), headers=JSON).status == 200
            threading.Event().wait(2.5)  # longer than a head may take: after an answer there is more time
            assert pool.request("POST", "/cdc", body=body([entry(2, insert(2))]), headers=JSON).status == 200
            assert pool.num_connections == 1
        with socket.create_connection(address, 10) as again:
            again.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += again.recv(1000)
            again.sendall(b"GET /healthz HTTP/1.1\r\n")
            assert again.recv(1) == b""
    finally:
        stop.set()
        thread.join()


def test_an_empty_payload_is_taken(shared: Running) -> None:
    assert shared.post(b'{"service_id": "empty", "node_id": "n", "payload": null}') == 200


def test_a_stopped_cluster_gets_503_while_the_others_go_on(tmp_path: Path) -> None:
    with running(make_options(tmp_path / "journal")) as receiver:
        for service in ("one", "two"):
            assert receiver.post(body([entry(5, insert(1))], service=service)) == 200
        assert receiver.get("/healthz").status == 200
        answer = receiver.answer(body([entry(5, insert(2))], service="one"))
        assert answer.status == 503
        assert "Retry-After" in answer.headers
        assert receiver.post(body([entry(6, insert(2))], service="one")) == 503
        assert receiver.post(body([entry(6, insert(2))], service="two")) == 200
        wait_until(lambda: receiver.status()["services"].get("one", {}).get("error") is not None)
        status = receiver.status()
        assert status["services"]["one"]["error"]["kind"] == "LostError"
        assert status["services"]["two"]["error"] is None
        assert status["error"] is None
        health = receiver.get("/healthz")
        assert (health.status, health.json()["stopped"]) == (503, {"one": "LostError"})
        metrics = receiver.get("/metrics").data.decode()
        assert 'tailrace_rqlite_stopped{service="one"} 1.0' in metrics
        assert 'tailrace_rqlite_received_total{service="two"} 2.0' in metrics
        assert 'tailrace_rqlite_index{service="two"} 6.0' in metrics
        assert receiver.stop() == 0
    with running(make_options(tmp_path / "journal")) as receiver:
        assert receiver.get("/healthz").status == 503
        assert receiver.post(body([entry(7, insert(3))], service="two")) == 200


def test_credentials_are_asked_for_everywhere_but_at_healthz(tmp_path: Path) -> None:
    with running(make_options(tmp_path / "journal", **CREDENTIALS)) as receiver:
        content = body([entry(1, insert(1))])
        right = urllib3.make_headers(basic_auth="rq:canary-of-the-endpoint")
        wrong = [{}, urllib3.make_headers(basic_auth="rq:other"), {"Authorization": "Basic ä"}, {"Authorization": "x"}]
        for headers in wrong:
            encoded = {name: value.encode().decode("latin-1") for name, value in headers.items()}
            assert receiver.post(content, headers=encoded) == 401
            assert receiver.get("/metrics", headers=encoded).status == 401
        assert not (receiver.journal / "rqlite").exists()
        assert receiver.post(content, headers=right) == 200
        assert receiver.get("/metrics", headers=right).status == 200
        assert receiver.get("/healthz").status == 200


def test_a_rate_limit_answers_429_and_rqlite_may_try_again(tmp_path: Path) -> None:
    with running(make_options(tmp_path / "journal", max_requests=2.0)) as receiver:
        began, indexes = time.monotonic(), itertools.count(1)
        while (answer := receiver.answer(body([entry(index := next(indexes), insert(index))]))).status == 200:
            pass
        passed = time.monotonic() - began
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        assert 2 <= index - 1 <= 2 + 2 * passed
        wait_until(lambda: receiver.post(body([entry(index, insert(index))])) == 200)


def test_requests_without_credentials_do_not_count_against_the_rate_limit(tmp_path: Path) -> None:
    options = make_options(tmp_path / "journal", max_requests=0.01, username="rq", password="right")
    with running(options) as receiver:
        content = body([entry(1, insert(1))])
        assert [receiver.post(content) for _ in range(3)] == [401] * 3
        assert receiver.post(content, headers=urllib3.make_headers(basic_auth="rq:right")) == 200


def test_only_json_is_taken_which_no_web_page_can_post_without_asking(shared: Running) -> None:
    content = body([entry(1, insert(1))], service="page")
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert shared.post(content, headers={"Content-Type": kind}) == 415
    assert shared.post(content, headers={"Content-Type": "application/json; charset=utf-8"}) == 200


def test_a_pace_allows_bursts_of_a_second() -> None:
    now = 0.0
    pace = RateLimit(2, clock=lambda: now)
    assert [pace.allows() for _ in range(3)] == [True, True, False]
    now = 0.5
    assert [pace.allows() for _ in range(2)] == [True, False]
    now = 100.0
    assert [pace.allows() for _ in range(3)] == [True, True, False]


def test_mutual_tls_takes_only_clients_of_its_authority(tmp_path: Path) -> None:
    ours, theirs = make_authority(tmp_path / "ours"), make_authority(tmp_path / "theirs")
    options = make_options(
        tmp_path / "journal", cert=str(ours.cert_file), key=str(ours.key_file), client_ca=str(ours.ca_file)
    )
    with running(options) as receiver:
        content = body([entry(1, insert(1))])
        receiver.pool = urllib3.PoolManager(
            ca_certs=str(ours.ca_file), cert_file=str(ours.cert_file), key_file=str(ours.key_file), retries=False
        )
        assert receiver.post(content) == 200
        receiver.pool.clear()
        strangers = [
            urllib3.PoolManager(ca_certs=str(ours.ca_file), retries=False),
            urllib3.PoolManager(
                ca_certs=str(ours.ca_file),
                cert_file=str(theirs.cert_file),
                key_file=str(theirs.key_file),
                retries=False,
            ),
        ]
        for pool in strangers:
            with pytest.raises(urllib3.exceptions.HTTPError):
                pool.request("POST", receiver.root + "/cdc", body=content)
            pool.clear()
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(str(ours.ca_file))
        old.load_cert_chain(str(ours.cert_file), str(ours.key_file))
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        pool = urllib3.PoolManager(ssl_context=old, retries=False)
        with pytest.raises(urllib3.exceptions.HTTPError):
            pool.request("POST", receiver.root + "/cdc", body=content)
        pool.clear()
    assert len(lines(tmp_path / "journal")) == 1


def test_an_unusable_certificate_is_reported_as_such(tmp_path: Path) -> None:
    options = make_options(tmp_path / "journal", cert=str(tmp_path / "no.pem"), key=str(tmp_path / "no.key"))
    with pytest.raises(ConfigError, match="certificate cannot be used"):
        RqliteReceiver(options, lambda: True).run()


def test_a_journal_that_cannot_be_created_is_reported_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="cannot be used") as caught:
        RqliteReceiver(make_options(tmp_path / "file" / "journal"), lambda: True).run()
    assert "journal.path" in (caught.value.fix or "")


def test_only_one_process_receives_into_a_journal(tmp_path: Path) -> None:
    options = make_options(tmp_path / "journal")
    assert not is_receiving(tmp_path / "journal")
    with running(options) as receiver:
        assert is_receiving(receiver.journal)
        with pytest.raises(OwnedError, match="another process receives"):
            RqliteReceiver(options, lambda: True).run()
        taken = make_options(tmp_path / "other", listen=receiver.root.removeprefix("http://"))
        with pytest.raises(UnavailableError, match="cannot listen"):
            RqliteReceiver(taken, lambda: True).run()
    assert not is_receiving(tmp_path / "journal")


def test_concurrent_requests_of_several_clusters_are_all_durable(shared: Running) -> None:
    def send(cluster: int) -> list[int]:
        pool = urllib3.PoolManager(retries=False)
        bodies = [body([entry(index, insert(index))], service=f"c{cluster}") for index in range(1, 41)]
        codes = [pool.request("POST", shared.root + "/cdc", body=one, headers=JSON).status for one in bodies]
        pool.clear()
        return codes

    with ThreadPoolExecutor(4) as threads:
        for codes in threads.map(send, range(4)):
            assert set(codes) == {200}
    for cluster in range(4):
        assert len(lines(shared.journal, f"c{cluster}")) == 40


def test_requests_that_wait_for_a_sync_share_the_next_one(tmp_path: Path) -> None:
    groups: list[int] = []
    syncing = threading.Event()

    class Slow(Cluster):
        def commit(self, requests: Sequence[PostedRequest]) -> list[TailraceError | None]:
            groups.append(len(requests))
            syncing.wait(20)
            return super().commit(requests)

    async def send() -> list[TailraceError | None]:
        lane = Lane(Slow("rqlite", tmp_path, segment_bytes=1_000_000, max_bytes=10**9))
        made = [parse(body([entry(index, insert(index))])) for index in range(1, 21)]
        first = asyncio.create_task(lane.store(made[0]))
        while not groups:
            await asyncio.sleep(0.001)
        rest = [asyncio.create_task(lane.store(one)) for one in made[1:]]
        await asyncio.sleep(0)
        syncing.set()
        outcomes = await asyncio.gather(first, *rest)
        lane.cluster.close()
        return outcomes

    assert asyncio.run(send()) == [None] * 20
    assert groups == [1, 19]
    assert len(lines(tmp_path)) == 20


async def ask(endpoint: CdcEndpoint, method: str, path: str, content: bytes = b"") -> tuple[int, bytes]:
    """The answer of an endpoint in this process."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "root_path": ""}
    await endpoint.application({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)
    return sent[0]["status"], sent[1]["body"]


def test_a_request_that_is_sent_again_before_its_answer_gets_the_answer_of_the_first(tmp_path: Path) -> None:
    parsed: list[int] = []
    storing = threading.Event()

    class Slow(Cluster):
        def commit(self, requests: Sequence[PostedRequest]) -> list[TailraceError | None]:
            parsed.append(len(requests))
            storing.wait(60)
            return super().commit(requests)

    def make(service: str) -> Cluster:
        return Slow(service, tmp_path, segment_bytes=1_000_000, max_bytes=10**9)

    async def send() -> tuple[list[int], dict[str, Any], dict[str, Any]]:
        endpoint = CdcEndpoint("/cdc", Limits(10**9, None, None), make)
        content = body([entry(1, *map(insert, range(5000)))], service="big")
        tries = [asyncio.create_task(ask(endpoint, "POST", "/cdc", content)) for _ in range(4)]
        while not parsed:
            await asyncio.sleep(0.001)
        waiting = json.loads((await ask(endpoint, "GET", "/healthz"))[1])
        storing.set()
        codes = [(await one)[0] for one in tries]
        for again in (content, body([entry(2, insert(-1))], service="big")):
            codes.append((await ask(endpoint, "POST", "/cdc", again))[0])
        after = json.loads((await ask(endpoint, "GET", "/healthz"))[1])
        endpoint.clusters[0].close()
        return codes, waiting, after

    codes, waiting, after = asyncio.run(send())
    assert codes == [200] * 6
    assert parsed == [1, 1]  # the large request once, and the one after it
    assert len(lines(tmp_path, "big")) == 5001
    assert waiting["status"] == "retrying"
    assert waiting["retrying"][0]["attempts"] == 4
    assert "transmit_timeout" in waiting["retrying"][0]["reason"]
    assert after == {"status": "ok", "stopped": {}, "retrying": []}


def test_what_a_new_leader_repeats_is_parsed_once_however_often_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def counted(content: bytes, digest: str | None = None) -> PostedRequest:
        request = parse(content, digest)
        parsed.append(request.node)
        return request

    monkeypatch.setattr("tailrace.source.rqlite.endpoint.parse", counted)

    def make(service: str) -> Cluster:
        return Cluster(service, tmp_path, segment_bytes=1_000_000, max_bytes=10**9)

    async def send() -> list[int]:
        endpoint = CdcEndpoint("/cdc", Limits(10**9, None, None), make)
        events = [entry(1, *map(insert, range(5000)))]
        first, second = (body(events, service="big", node=node) for node in ("n1", "n2"))
        # A leader that was frozen and is back tries on until it learns of the other.
        codes = [(await ask(endpoint, "POST", "/cdc", one))[0] for one in (first, second, second, first, second)]
        endpoint.clusters[0].close()
        return codes

    assert asyncio.run(send()) == [200] * 5
    assert parsed == ["n1", "n2"]
    assert len(lines(tmp_path, "big")) == 5000


def test_a_request_that_rqlite_keeps_sending_shows_in_health_metrics_and_status(tmp_path: Path) -> None:
    options = make_options(tmp_path / "journal", max_body=1000)
    source = make_source(tmp_path, 0)
    with running(options) as receiver:
        for _ in range(3):
            assert receiver.post(body([entry(1, insert(1, v="x" * 2000))])) == 413
        health = receiver.get("/healthz")
        assert health.status == 200  # nothing is lost, and a restart would not help
        assert health.json()["retrying"][0]["attempts"] == 3
        assert b"tailrace_rqlite_retrying" in receiver.get("/metrics").data
        wait_until(lambda: bool(receiver.status().get("retrying")))
        status = source.status()
        assert "rqlite keeps retrying" in (status.error or "")
        assert "max_body" in (status.error or "")


def write_pipeline(folder: Path, source: str) -> Path:
    file = folder / "orders.yaml"
    file.write_text(f"name: orders\nsource: {source}\ndestination: {{type: delta, path: ./lake}}\n")
    return file


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_receiving_alone_needs_no_spark_and_ends_with_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    file = write_pipeline(tmp_path, '{type: rqlite, listen: "127.0.0.1:0"}')
    with subprocess.Popen([sys.executable, "-c", RECEIVE, str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        status = json.loads(process.stdout.readline())
        while not status["receiving"]:
            status = json.loads(process.stdout.readline())
        content = body([entry(4, insert(1))], service="orders")
        answer = urllib3.request("POST", f"http://{status['listen']}/cdc", body=content, headers=JSON)
        assert answer.status == 200
        while not status["services"].get("orders", {}).get("received"):
            status = json.loads(process.stdout.readline())
        assert status["services"]["orders"]["received"] == 1
        process.send_signal(number)
        *_, last = process.stdout
        assert not json.loads(last)["receiving"]
        assert process.wait() == 0
    assert len(lines(tmp_path / ".tailrace" / "orders" / "journal", "orders")) == 1


def test_only_sources_that_are_pushed_to_can_be_received(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is pushed to a source of type sqlite"):
        receive(write_pipeline(tmp_path, "{type: sqlite, path: app.db}"), as_json=False)
